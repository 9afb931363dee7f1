"""What an answer should have been: worked out for the fake engine, or kept from an unharmed run."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.chaos.clients import Answer
from benchmarks.chaos.jobs import Job
from engine.fake import Role, expected_output
from kvferry.results import ChatMessage
from router.tokenizer import Tokenizer

# What a client may be told under faults. `Cancelled` is not among them: nobody but the client cancels.
_HONEST = {"Unavailable", "Overloaded"}


class Oracle(Protocol):
    """Judges tokens and text, also of an answer that was broken off."""

    def faults(self, job: Job, answer: Answer) -> list[str]:
        """What is wrong with it."""
        ...


def judge(job: Job, answer: Answer, oracle: Oracle) -> list[str]:
    """All that is wrong with an answer: nothing, or a sentence for each."""
    found = oracle.faults(job, answer)
    if not answer.error:
        if answer.num_claimed != len(answer.tokens):
            found.append(f"usage says {answer.num_claimed} tokens, {len(answer.tokens)} came")
    elif answer.error == "left":
        pass
    elif answer.error == "DeadlineExceeded":
        if job.timeout_s is None:
            found.append(f"a deadline that nobody gave: {answer.message}")
    elif answer.error not in _HONEST or not answer.message:
        found.append(f"{answer.error}: {answer.message}")
    return [f"request {job.number} ({job.api}): {fault}" for fault in found]


class FakeOracle:
    """The fake engine's tokens follow from those before and from the role that chose: prefill chooses the
    first, and one more in each recovery."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def faults(self, job: Job, answer: Answer) -> list[str]:
        """See `Oracle`."""
        token_ids = self._tokenizer.encode_chat([ChatMessage("user", job.question)])
        output: list[int] = []
        for at, token in enumerate(answer.tokens):
            known = answer.token_ids[at] if answer.token_ids else None
            chosen = self._follows(token_ids, token, known, is_first=at == 0)
            if chosen is None:
                return [f"token {at} does not follow from those before it"]
            token_ids.append(chosen)
            output.append(chosen)
        return self._faults_of_text(job, answer, output)

    def _follows(
        self, token_ids: list[int], token: bytes, known: int | None, *, is_first: bool
    ) -> int | None:
        roles: tuple[Role, ...] = ("prefill",) if is_first else ("decode", "prefill")
        for role in roles:
            [candidate] = expected_output(token_ids, 1, self._vocab_size, first_role=role)
            if known == candidate or (known is None and self._tokenizer.token_bytes(candidate) == token):
                return candidate
        return None

    def _faults_of_text(self, job: Job, answer: Answer, output: Sequence[int]) -> list[str]:
        shown = [i for i in output if not self._tokenizer.is_special(i)]
        text = b"".join(map(self._tokenizer.token_bytes, shown)).decode("utf-8", "replace")
        stops = [at for stop in job.sampling.get("stop", ()) if (at := text.find(stop)) >= 0]
        if answer.error:
            return [] if text.startswith(answer.text) else ["the text is not that of its tokens"]
        if answer.text != (text[: min(stops)] if stops else text):
            return ["the text is not that of its tokens, up to the first stop string"]
        if not stops and len(output) != job.sampling["max_tokens"]:
            return [f"{len(output)} tokens instead of {job.sampling['max_tokens']}"]
        return []


class UnharmedOracle:
    """The same request's answer before anything was harmed. For float32, where no near tie flips."""

    def __init__(self, unharmed: Mapping[int, Answer]) -> None:
        self._unharmed = unharmed

    def faults(self, job: Job, answer: Answer) -> list[str]:
        """See `Oracle`."""
        right = self._unharmed[job.number]
        num = len(answer.tokens)
        if answer.tokens != right.tokens[:num]:
            first = next(i for i, token in enumerate(answer.tokens) if token != right.tokens[i : i + 1][0])
            return [f"token {first} is not that of the unharmed run"]
        if answer.error:
            return [] if right.text.startswith(answer.text) else ["the text is not that of the unharmed run"]
        if (answer.text, num, answer.finish_reason) != (right.text, len(right.tokens), right.finish_reason):
            return ["text, length or finish reason are not those of the unharmed run"]
        return []
