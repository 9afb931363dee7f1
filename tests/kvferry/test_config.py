"""A deployment's description: what is wrong with it is said in words that lead to the fix."""

from pathlib import Path

import pytest

from kvferry import config
from kvferry.config import ConfigError, DeploymentConfig

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy").glob("*.yaml"))


def write(folder, text):
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: x", ["modle: unknown key", "'model'"]),
        ("router: {http_prot: 1}", ["router.http_prot: unknown key", "'http_port'"]),
        ("decode: {engine: {dtpye: float32}}", ["decode.engine.dtpye: unknown key", "'dtype'"]),
        ("prefill: {resources: {num_cpu: 1}}", ["prefill.resources.num_cpu: unknown key", "'num_cpus'"]),
        ("prefill: {max_batch_size: 1}", ["prefill.max_batch_size: unknown key"]),
        ("prefill: {count: two}", ["prefill.count: ", "'two'"]),
        ("prefill: {count: 0}", ["prefill.count: ", "got 0"]),
        ("router: {http_port: 70000}", ["router.http_port: ", "70000"]),
        ("prefill: {resources: {custom: {a: 0}}}", ["prefill.resources.custom.a: "]),
        ("decode: {engine: {dtype: int8}}", ["decode.engine.dtype: ", "bfloat16", "'int8'"]),
        ("decode: {engine: {num_blocks: 1, kv_cache_bytes: 9}}", ["decode.engine: ", "num_blocks and kv_"]),
        ("decode: 3", ["decode: "]),
        ("- a", ["top level: "]),
        ("a: [", ["deployment.yaml: "]),
    ],
)
def test_an_error_names_the_file_the_key_and_what_would_do(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text))
    for word in ["deployment.yaml", *words]:
        assert word in str(caught.value)


def test_every_error_is_told_not_only_the_first(tmp_path):
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, "modle: x\nrouter: {http_port: -1}"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_not_there_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        config.load(tmp_path / "none.yaml")


def test_an_empty_file_is_the_default(tmp_path):
    assert config.load(write(tmp_path, "")) == DeploymentConfig()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path):
    deployment = config.load(path)
    assert deployment.prefill.count >= 1
    assert deployment.decode.count >= 1


def test_clients_call_the_model_by_its_folder_unless_it_is_named():
    assert DeploymentConfig(model="/models/tiny").model_name == "tiny"
    assert DeploymentConfig(model="org/tiny").model_name == "tiny"
    assert DeploymentConfig(model="org/tiny", served_name="t").model_name == "t"
