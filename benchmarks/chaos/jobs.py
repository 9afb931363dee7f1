"""The mixed load: what is asked, over which API, and who gives up on it; all from a seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["grpc", "http-stream", "http-whole"]

_APIS: tuple[Api, ...] = ("grpc", "grpc", "http-stream", "http-whole")
_SENTENCE = "the river runs past a mill and under two bridges where children fish for trout"
_WORDS = tuple(_SENTENCE.split())
_STOPS = ("the", " in", "er")
_SHARED_BEGINNING = " ".join([_SENTENCE] * 6)


@dataclass(frozen=True, slots=True)
class Job:
    """One request. sampling: fields of `SamplingParams`, which the HTTP API takes too.

    timeout_s: the client's deadline. cancel_after: output tokens after which a client of a stream leaves.
    """

    number: int
    api: Api
    question: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    cancel_after: int | None = None


def make_jobs(seed: int, num_jobs: int, max_tokens: int) -> list[Job]:
    """`num_jobs` requests, each of at most `max_tokens`."""
    rng = random.Random(f"jobs {seed}")
    return [_job(rng, number, max_tokens) for number in range(num_jobs)]


def _job(rng: random.Random, number: int, max_tokens: int) -> Job:
    api = rng.choice(_APIS)
    sampling: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, max_tokens // 4, max_tokens // 2, max_tokens)),
        "temperature": rng.choice((0.0, 0.0, 0.8)),
        "seed": rng.randrange(2**32),
        "ignore_eos": True,
        # They show which tokens came, over HTTP too.
        "logprobs": True,
    }
    if rng.random() < 0.2:
        sampling["stop"] = [rng.choice(_STOPS)]
    if rng.random() < 0.2:
        sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        sampling["top_logprobs"] = 3
    words = rng.choices(_WORDS, k=rng.choice((3, 10, 60, 200)))
    question = f"{number}: {' '.join(words)}"
    if rng.random() < 0.3:
        question = f"{_SHARED_BEGINNING} {question}"
    given_up = rng.random()
    timeout_s = rng.uniform(0.02, 1.0) if api == "grpc" and given_up < 0.08 else None
    cancels = timeout_s is None and api != "http-whole" and given_up > 0.92
    cancel_after = rng.randrange(1, max_tokens // 2) if cancels else None
    return Job(number, api, question, sampling, timeout_s, cancel_after)
