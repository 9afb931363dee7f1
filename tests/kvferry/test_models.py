"""Where models are found, and the fingerprints that tell them apart."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry import models
from kvferry.config import DEMO_MODEL
from kvferry.models import ModelNotFound, model_digest, resolve, tokenizer_digest

TENSORS = {
    "embed": np.arange(6000, dtype=np.float32).reshape(60, 100),
    "norm": np.ones(7, dtype=np.float16),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def changed(**tensors):
    return {name: tensors.get(name, value.copy()) for name, value in TENSORS.items()}


def test_the_same_files_elsewhere_have_the_same_fingerprints(model, tmp_path):
    other = tmp_path / "other"
    model_digests = model_digest(model), tokenizer_digest(model)
    model.rename(other)
    assert (model_digest(other), tokenizer_digest(other)) == model_digests


@pytest.mark.parametrize("at", [0, -1, len(TENSORS["embed"].tobytes()) // 2])
def test_a_changed_byte_at_either_end_or_in_the_middle_of_a_tensor_shows(model, at):
    before = model_digest(model)
    values = bytearray(TENSORS["embed"].tobytes())
    values[at] ^= 1
    embed = np.frombuffer(values, dtype=np.float32).reshape(60, 100)
    save_file(changed(embed=embed), model / "model.safetensors")
    assert model_digest(model) != before


def test_a_small_tensor_shows_whole(model):
    before = model_digest(model)
    norm = TENSORS["norm"].copy()
    norm[4] = 2
    save_file(changed(norm=norm), model / "model.safetensors")
    assert model_digest(model) != before


def test_shapes_files_and_configuration_show(model):
    digests = {model_digest(model)}
    save_file(changed(embed=TENSORS["embed"].reshape(100, 60)), model / "model.safetensors")
    digests.add(model_digest(model))
    (model / "model.safetensors").rename(model / "model-00001.safetensors")
    digests.add(model_digest(model))
    save_file({"more": TENSORS["norm"]}, model / "model-00002.safetensors")
    digests.add(model_digest(model))
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    digests.add(model_digest(model))
    assert len(digests) == 5


def test_the_tokenizer_has_a_fingerprint_of_its_own(model):
    before = model_digest(model), tokenizer_digest(model)
    (model / "tokenizer.json").write_text('{"version": "2"}')
    assert model_digest(model) == before[0]
    assert tokenizer_digest(model) != before[1]


@pytest.mark.parametrize("content", [b"", b"not a model at all", (2**60).to_bytes(8, "little")])
def test_a_broken_weights_file_is_named(model, content):
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        model_digest(model)


def test_only_what_a_fingerprint_needs_is_read_of_a_large_tensor(model):
    # 1 TiB of zeros, none of which is on the disk.
    header = json.dumps({"big": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)
    assert len(model_digest(model)) == 64


def test_a_folder_is_the_model_in_it(model, monkeypatch):
    assert resolve(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve("model") == model


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_says_what_it_lacks(model, missing):
    (model / missing).unlink()
    with pytest.raises(ModelNotFound, match=f"no .*{missing.split('.')[1]}"):
        resolve(str(model))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        tokenizer_digest(model)


def test_the_demo_model_is_in_the_cache_or_the_error_says_how_to_get_it(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFound, match="kvferry model pull"):
        resolve(DEMO_MODEL)
    models.demo_model_dir().parent.mkdir(parents=True)
    model.rename(models.demo_model_dir())
    assert resolve(DEMO_MODEL) == tmp_path / "cache" / "models" / DEMO_MODEL


@pytest.mark.parametrize("model", ["/no/such/folder", "./no", "~/no-such-folder-at-all", "a/b/c"])
def test_a_path_that_is_not_there_is_no_hub_id(model):
    with pytest.raises(ModelNotFound, match="no such directory"):
        resolve(model)


@pytest.mark.parametrize("model", ["org/model", "not an id"])
def test_a_hub_that_cannot_help_is_one_clear_line(model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=f"^'{model}' is no directory.*no hub id") as caught:
        resolve(model)
    assert "\n" not in str(caught.value)
