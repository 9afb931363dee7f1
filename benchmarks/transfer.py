"""How fast KV blocks move between two processes, and how much of it a request has to wait for.

    python -m benchmarks.transfer [--quick] [--json]

Two processes with one core each move blocks of the demo model's shape over gRPC, through shared memory and
over a plain TCP socket, and one of them copies the same blocks within its own memory. The four take turns, so
that whatever else the machine does hits all alike; figures are medians over the rounds. Then a prefill worker
and a decode worker hand requests over, and the exposed share tells how long decode waits after prefill has
computed its last token, as a share of the prefill.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.processes import Remote, cores
from benchmarks.transfer_ends import DEMO_SHAPE, TINY_SHAPE, ReceiverEnd, SenderEnd
from benchmarks.transfer_workers import Handoff, RouterStandIn, WorkerHost, engine_name
from engine.cache import BlockShape

# 4,096 tokens, 94 MB, out of a cache that no processor cache holds.
NUM_BLOCKS = 256
CACHE_BLOCKS = 512
PROMPT_TOKENS = (512, 1024, 2048, 4096)
PATHS = ("grpc", "shm", "socket", "copy")
# Until all of the sender's memory has been read once: the system maps it page by page.
NUM_WARM_UP_ROUNDS = 4


class Ends:
    """A sender and a receiver in processes of their own."""

    def __init__(self, shape: BlockShape) -> None:
        first, second = cores()
        self._sender = Remote(first, SenderEnd, shape, CACHE_BLOCKS)
        self._receiver = Remote(second, ReceiverEnd, shape, CACHE_BLOCKS)
        self._address, self._port = self._receiver.call("start")
        self._random = random.Random(1)

    def move(self, path: str) -> tuple[float, float, float]:
        """Moves blocks once: wall seconds, then CPU seconds of the sender and of the receiver."""
        sources, blocks = (self._random.sample(range(CACHE_BLOCKS), NUM_BLOCKS) for _ in range(2))
        if path == "copy":
            cost = self._receiver.call("copy", sources, blocks)
            return cost.wall_s, 0.0, cost.cpu_s
        if path == "socket":
            self._receiver.start("read_from_socket", blocks)
            cost = self._sender.call("write_to_socket", self._port, sources)
            return cost.wall_s, cost.cpu_s, self._receiver.result().cpu_s
        lease, start_cpu_s = self._receiver.call("reserve", blocks)
        cost = self._sender.call("push", self._address, lease, sources, path == "shm")
        return cost.wall_s, cost.cpu_s, self._receiver.call("cpu_s") - start_cpu_s

    def close(self) -> None:
        """Ends both processes."""
        self._sender.close()
        self._receiver.close()


def measure(
    shape: BlockShape, paths: Iterable[str], num_rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Medians of `Ends.move` for each path, in turns, after rounds that are not counted."""
    ends = Ends(shape)
    costs: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    try:
        for number in range(NUM_WARM_UP_ROUNDS + num_rounds):
            for path in paths:
                cost = ends.move(path)
                if number >= NUM_WARM_UP_ROUNDS:
                    costs[path].append(cost)
    finally:
        ends.close()
    return {path: _medians(rounds) for path, rounds in costs.items()}


def _medians(rounds: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    wall_s, sender_s, receiver_s = zip(*rounds, strict=True)
    return statistics.median(wall_s), statistics.median(sender_s), statistics.median(receiver_s)


def measure_speed(num_rounds: int) -> dict[str, Any]:
    """The speed of each path, its share of the plain one, CPU seconds a GB, and the cost of a message."""
    medians = measure(DEMO_SHAPE, PATHS, num_rounds)
    num_gb = NUM_BLOCKS * DEMO_SHAPE.num_bytes / 1e9
    speed = {path: num_gb / medians[path][0] for path in PATHS}
    tiny = measure(TINY_SHAPE, ("grpc", "shm"), num_rounds)
    return {
        **{f"{path}_gb_s": speed[path] for path in PATHS},
        "grpc_over_socket": speed["grpc"] / speed["socket"],
        "shm_over_copy": speed["shm"] / speed["copy"],
        "cpu_s_per_gb": {
            path: {"sender": sender / num_gb, "receiver": receiver / num_gb}
            for path, (_, sender, receiver) in medians.items()
        },
        "us_per_block": {path: medians[path][0] / NUM_BLOCKS * 1e6 for path in PATHS},
        "us_per_tiny_block": {path: tiny[path][0] / NUM_BLOCKS * 1e6 for path in tiny},
        "block_bytes": DEMO_SHAPE.num_bytes,
    }


async def measure_handoffs(is_shared: bool, num_rounds: int) -> dict[int, list[Handoff]]:
    """Requests through a prefill and a decode worker, by the length of their prompts, in turns."""
    router = RouterStandIn()
    address = await router.start()
    hosts = [
        Remote(core, WorkerHost, role, is_shared)
        for core, role in zip(cores(), ("prefill", "decode"), strict=True)
    ]
    handoffs: dict[int, list[Handoff]] = defaultdict(list)
    try:
        for host in hosts:
            host.start("start", address)
        prefill, decode = [await asyncio.to_thread(host.result) for host in hosts]
        await router.wait_for_workers()
        # The first request finds a process that has computed nothing yet.
        for number, num_tokens in enumerate(PROMPT_TOKENS[:1] + PROMPT_TOKENS * num_rounds):
            await router.run(prefill, decode, f"{num_tokens}-{number}", num_tokens)
            prefill_steps, decode_steps = [await asyncio.to_thread(h.call, "take_steps") for h in hosts]
            computed_s = prefill_steps[-1][1]
            if number:
                handoffs[num_tokens].append(
                    Handoff(computed_s - prefill_steps[0][0], decode_steps[0][0] - computed_s)
                )
    finally:
        for host in hosts:
            host.close()
        await router.stop()
    return handoffs


def exposed(handoffs: dict[int, list[Handoff]]) -> dict[str, dict[str, float]]:
    """Medians by prompt length: the exposed share, and the times behind it in milliseconds."""
    by_length: dict[str, dict[str, float]] = defaultdict(dict)
    for num_tokens, rounds in handoffs.items():
        by_length["share"][str(num_tokens)] = statistics.median(h.exposed_s / h.prefill_s for h in rounds)
        by_length["exposed_ms"][str(num_tokens)] = 1000 * statistics.median(h.exposed_s for h in rounds)
        by_length["prefill_ms"][str(num_tokens)] = 1000 * statistics.median(h.prefill_s for h in rounds)
    return by_length


def run(is_quick: bool) -> dict[str, Any]:
    """All of it."""
    results = measure_speed(num_rounds=8 if is_quick else 40)
    num_rounds = 1 if is_quick else 10
    over_grpc = exposed(asyncio.run(measure_handoffs(False, num_rounds)))
    over_shm = exposed(asyncio.run(measure_handoffs(True, num_rounds)))
    return results | {
        "exposed_share": over_grpc["share"],
        "exposed_share_shm": over_shm["share"],
        "exposed_ms": over_grpc["exposed_ms"],
        "exposed_ms_shm": over_shm["exposed_ms"],
        "prefill_ms": over_grpc["prefill_ms"],
        "engine": engine_name(),
        # Others' work on the machine: the figures are to be trusted where it is about the two cores' own.
        "load_average": os.getloadavg()[0],
    }


def table(results: dict[str, Any]) -> str:
    """The results for reading."""
    lines = ["path     GB/s   of the plain way   CPU s a GB, sender + receiver"]
    shares = {"grpc": results["grpc_over_socket"], "shm": results["shm_over_copy"]}
    for path in PATHS:
        share = (
            f"{shares[path]:6.0%} of {'socket' if path == 'grpc' else 'copy':<6}" if path in shares else ""
        )
        cpu = "{sender:6.2f} +{receiver:5.2f}".format(**results["cpu_s_per_gb"][path])
        lines.append(f"{path:<7}{results[f'{path}_gb_s']:6.2f}   {share:<18}{cpu}")
    lines.append("")
    lines.append("prompt   prefill, ms   exposed over gRPC, ms   share   through shared memory, ms   share")
    for length, prefill_ms in results["prefill_ms"].items():
        lines.append(
            f"{length:>6}{prefill_ms:14.0f}{results['exposed_ms'][length]:24.1f}"
            f"{results['exposed_share'][length]:8.1%}{results['exposed_ms_shm'][length]:28.1f}"
            f"{results['exposed_share_shm'][length]:8.1%}"
        )
    lines.append(f"engine: {results['engine']}; load average {results['load_average']:.1f}")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    results = run(arguments.quick)
    print(json.dumps(results, indent=2) if arguments.json else table(results))  # noqa: T201


if __name__ == "__main__":
    main()
