"""Requests to simulate: from Mooncake's JSON lines, from a CSV file, or drawn at random."""

import csv
import json
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduling.block_hash import BlockHashes

# Tokens of prompt that one of Mooncake's block ids stands for.
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace that cannot be used; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids`: of `tokens_per_id` prompt tokens each; equal ids mean equal beginnings."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int] = ()
    tokens_per_id: int = MOONCAKE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.at_s < float("inf"):
            raise TraceError(f"the arrival must be 0 or later, not {self.at_s}")

    def hashes(self, block_size: int) -> BlockHashes | None:
        """Names of its blocks that are equal where the trace's are; None where it has none."""
        return TraceHashes(self, block_size) if self.block_ids else None


class TraceHashes(BlockHashes):
    """The blocks of a prompt that has ids instead of text. Only whole blocks of one id are shared."""

    def __init__(self, request: TraceRequest, block_size: int) -> None:
        per_id, rest = divmod(request.tokens_per_id, block_size)
        if rest or not per_id:
            raise TraceError(
                f"blocks of {block_size} tokens do not divide the trace's of {request.tokens_per_id}"
            )
        num_full = min(request.num_prompt_tokens // block_size, len(request.block_ids) * per_id)
        self._names = [
            struct.pack("<QI", request.block_ids[i // per_id], i % per_id) for i in range(num_full)
        ]
        self._size = block_size

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """One name for each full block of the prompt; what is generated is shared with nobody."""
        num_full = len(tokens) // self._size
        return self._names if num_full >= len(self._names) else self._names[:num_full]


def load(path: Path) -> list[TraceRequest]:
    """By the file's ending: `.jsonl` is Mooncake's form, `.csv` has arrival (s), prompt and output tokens.

    Raises TraceError.
    """
    readers = {".jsonl": _mooncake, ".csv": _csv}
    if path.suffix not in readers:
        raise TraceError(f"{path}: a trace ends in {' or '.join(readers)}")
    requests: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests.extend(readers[path.suffix](lines))
    except OSError as error:
        raise TraceError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: request {len(requests) + 1}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: no request is in it")
    return sorted(requests, key=lambda request: request.at_s)


def poisson(
    rate: float, num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seed: int = 0
) -> Iterator[TraceRequest]:
    """Arrivals at random, `rate` a second; lengths exponential with these means, cut at eight times them."""
    generator = random.Random(seed)
    at_s = 0.0

    def length(mean: int) -> int:
        return max(1, min(8 * mean, round(generator.expovariate(1 / mean))))

    for _ in range(num_requests):
        at_s += generator.expovariate(rate)
        yield TraceRequest(at_s, length(num_prompt_tokens), length(num_output_tokens))


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests, their arrivals stretched or squeezed so that `rate` come a second in the mean."""
    span_s = requests[-1].at_s - requests[0].at_s
    factor = (len(requests) - 1) / rate / span_s if span_s else 0.0
    return [
        TraceRequest(
            (each.at_s - requests[0].at_s) * factor,
            each.num_prompt_tokens,
            each.num_output_tokens,
            each.block_ids,
            each.tokens_per_id,
        )
        for each in requests
    ]


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        values = json.loads(line)
        yield TraceRequest(
            values["timestamp"] / 1000,
            values["input_length"],
            max(1, values["output_length"]),
            values.get("hash_ids", ()),
        )


def _csv(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        yield TraceRequest(float(row["arrival"]), int(row["prompt"]), int(row["output"]))
