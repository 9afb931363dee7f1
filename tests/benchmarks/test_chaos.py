"""The tools of the chaos benchmark: a link that can be harmed, a schedule that repeats, a strict judge."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from benchmarks.chaos.clients import Answer
from benchmarks.chaos.faults import make_faults
from benchmarks.chaos.footprint import Footprint, growth
from benchmarks.chaos.jobs import Job, make_jobs
from benchmarks.chaos.link import Link
from benchmarks.chaos.oracle import FakeOracle, UnharmedOracle, judge
from engine.fake import expected_output
from kvferry.results import ChatMessage
from router.tokenizer import Tokenizer

VOCAB_SIZE = 400


@pytest.fixture
async def linked():
    """A link to a server that sends everything back, and what opens a connection over it."""

    writers = []

    async def echo(reader, writer):
        writers.append(writer)
        with suppress(ConnectionError):
            while piece := await reader.read(4096):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link()
    host, port = (await link.listen()).split(":")
    link.point_to(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def connect():
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield link, connect
    await link.close()
    server.close()
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def echoed(connection, data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), 20)


async def test_a_link_carries_bytes_both_ways(linked):
    _, connect = linked
    assert await echoed(await connect(), b"there and back" * 5000) == b"there and back" * 5000


async def test_a_cut_breaks_what_is_open_and_lets_new_connections_through(linked):
    link, connect = linked
    connection = await connect()
    await echoed(connection, b"before")
    link.cut()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await echoed(connection, b"after")
    assert await echoed(await connect(), b"anew") == b"anew"


async def test_a_stalled_link_keeps_the_connection_and_loses_nothing(linked):
    link, connect = linked
    connection = await connect()
    await echoed(connection, b"before")
    link.stall()
    waiting = asyncio.create_task(echoed(connection, b"meanwhile"))
    assert not (await asyncio.wait([waiting], timeout=0.3))[0]
    link.heal()
    assert await waiting == b"meanwhile"


async def test_a_slow_link_is_no_faster_than_its_pace(linked):
    link, connect = linked
    connection = await connect()
    await echoed(connection, b"before")
    link.slow(100_000)
    began_s = asyncio.get_running_loop().time()
    await echoed(connection, bytes(20_000))
    # 0.2 s there and 0.2 s back, of which all but the last piece overlap.
    assert asyncio.get_running_loop().time() - began_s >= 0.2


def test_a_seed_repeats_and_another_differs():
    workers, links = ["prefill-0", "decode-0"], ["router>decode-0"]
    assert make_faults(3, 1, 30, workers, links) == make_faults(3, 1, 30, workers, links)
    assert make_faults(3, 1, 30, workers, links) != make_faults(4, 1, 30, workers, links)
    assert make_jobs(3, 20, 64) == make_jobs(3, 20, 64) != make_jobs(4, 20, 64)


JOB = Job(1, "grpc", "a question", {"max_tokens": 6})


@pytest.fixture
def tokenizer(byte_level_dir):
    return Tokenizer.load(byte_level_dir)


@pytest.fixture
def right(tokenizer) -> Answer:
    prompt = tokenizer.encode_chat([ChatMessage("user", JOB.question)])
    token_ids = expected_output(prompt, 6, VOCAB_SIZE)
    tokens = [tokenizer.token_bytes(i) for i in token_ids]
    text = b"".join(tokenizer.token_bytes(i) for i in token_ids if not tokenizer.is_special(i))
    return Answer(text.decode("utf-8", "replace"), tokens, token_ids, 6, "length")


def test_a_right_answer_passes_and_one_token_amiss_does_not(tokenizer, right):
    oracle = FakeOracle(tokenizer, VOCAB_SIZE)
    unharmed = UnharmedOracle({JOB.number: right})
    for judging in (oracle, unharmed):
        assert judge(JOB, right, judging) == []
        lost = replace(right, tokens=right.tokens[:2] + right.tokens[3:], token_ids=[], num_claimed=5)
        doubled = replace(right, tokens=[*right.tokens[:3], *right.tokens[2:]], token_ids=[], num_claimed=7)
        short = replace(right, tokens=right.tokens[:3], token_ids=[], num_claimed=3)
        for wrong in (lost, doubled, short, replace(right, text=right.text + "!")):
            assert judge(JOB, wrong, judging)


@pytest.mark.parametrize(
    ("error", "message", "is_honest"),
    [
        ("Unavailable", "decode-0 was lost", True),
        ("Unavailable", "", False),
        ("DeadlineExceeded", "in stage QUEUED", False),
        ("ServerError", "INTERNAL: oops", False),
        ("Cancelled", "cancelled", False),
        ("Hang", "no end", False),
    ],
)
def test_only_an_honest_error_passes(tokenizer, error, message, is_honest):
    answer = Answer(error=error, message=message)
    assert (judge(JOB, answer, FakeOracle(tokenizer, VOCAB_SIZE)) == []) is is_honest


def test_growth_is_told_of_the_same_process_only():
    was = {"decode-0": Footprint(1, 10**8, 50, 30)}
    assert growth(was, {"decode-0": Footprint(1, 10**8, 50, 30)}) == []
    assert growth(was, {"decode-0": Footprint(2, 10**9, 500, 300)}) == []
    assert len(growth(was, {"decode-0": Footprint(1, 10**9, 500, 300)})) == 3
