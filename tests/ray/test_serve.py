"""The main job with nothing in place of the real thing: Ray actors, gRPC, HTTP, the demo model."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from kvferry.client import ChatMessage, Client, KvferryError, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def ask(served) -> str:
    with (
        Client(served.grpc) as client,
        client.generate([ChatMessage("user", QUESTION)], GREEDY) as generation,
    ):
        return generation.wait().text


def test_a_question_is_answered_by_two_workers(served):
    with Client(served.grpc) as client:
        result = client.generate([ChatMessage("user", QUESTION)], GREEDY).wait()
    assert "Paris" in result.text
    where = {moment.name: moment.worker_id for moment in result.moments}
    assert (where["first_token"], where["decode_started"]) == ("prefill-0", "decode-0")


def test_the_openai_client_gets_the_same_streamed_and_not(served):
    client = openai.OpenAI(base_url=f"{served.http}/v1", api_key="unused", max_retries=0)
    fields = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = whole.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text == ask(served)
    # How much of the prompt was reused is the one thing that may differ.
    details = {"prompt_tokens_details"}
    assert chunks[-1].usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**fields | {"temperature": 9})
    with pytest.raises(openai.NotFoundError, match="model"):
        client.chat.completions.create(**fields | {"model": "other"})


def test_the_examples_in_the_readme_run(served):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        for written, real in [("127.0.0.1:50051", served.grpc), ("http://127.0.0.1:8000", served.http)]:
            example = example.replace(written, real)
        done = subprocess.run(
            [sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


def test_status_names_the_workers(served):
    done = subprocess.run(
        [Path(sys.executable).with_name("kvferry"), "status", "--address", served.grpc],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert {"prefill-0", "decode-0"} <= set(done.stdout.split())
    assert done.stdout.count("ready") == 2


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
def test_a_killed_worker_is_restarted_and_serves_as_another(served, worker_id):
    before = ask(served)
    with Client(served.grpc) as client:
        epoch = next(w.epoch for w in client.list_workers().workers if w.worker_id == worker_id)
        os.kill(served.pid_of(worker_id), signal.SIGKILL)
        give_up_s = time.monotonic() + 120
        while True:
            workers = {w.worker_id: w.epoch for w in client.list_workers().workers}
            if workers.get(worker_id, epoch) != epoch:
                break
            assert time.monotonic() < give_up_s, served.command.output
            time.sleep(0.2)
    assert ask(served) == before


def test_a_client_that_leaves_leaves_nothing_behind(served):
    with Client(served.grpc) as client:
        with client.generate("Once upon a time", SamplingParams(max_tokens=2000, ignore_eos=True)) as running:
            next(running)
        give_up_s = time.monotonic() + 5
        while any(w.num_free_blocks != w.num_blocks for w in client.list_workers().workers):
            assert time.monotonic() < give_up_s, client.list_workers()
            time.sleep(0.05)


def test_ctrl_c_ends_every_process(run_command):
    command = run_command("serve", "--grpc-port", "0", "--http-port", "0")
    address = command.wait_for(r"ready: gRPC at (\S+),").group(1)
    with Client(address) as client:
        running = client.generate("Once upon a time", SamplingParams(max_tokens=4000, ignore_eos=True))
        next(running)
        assert len(command.processes()) > 3
        assert command.interrupt() == 0, command.output
        with pytest.raises(KvferryError):
            running.wait()
    assert command.processes() == {}


def test_the_demo_answers_and_ends(run_command):
    command = run_command("demo")
    assert command.process.wait(timeout=300) == 0, command.output
    assert "Paris" in command.output
    for moment in ("received", "prefill_started", "first_token", "transfer_ended", "decode_started"):
        assert moment in command.output
    assert command.processes() == {}
