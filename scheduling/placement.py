"""Which prefill worker and which decode worker serve a request.

The caller counts a request in the snapshots from the moment it dispatches it, so a burst spreads before
the first load report comes back.

A prompt's beginning may be cached on some workers. On the prefill side a worker's score is the tokens that it
would compute before the prompt's first output token: those that are pending, and the prompt's own without the
cached ones (as Mooncake estimates TTFT: Qin et al., FAST'25, algorithm 1). So imbalance is bounded: a worker
gets a prompt only while it is behind the least loaded one by no more tokens than the cache saves, which is
less than the prompt; then the prompt is computed elsewhere too, and is cached there from then on. On the
decode side a cached beginning saves transfer and memory but no step, so it counts for little: a prompt that
is there in whole counts as one request less.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillSnapshot:
    """A prefill worker's load, dispatched requests included.

    group: workers of the same group may share a request; see `compatibility.group`.
    num_pending_tokens: prompt tokens still to compute.
    num_requests: requests that it has.
    num_blocks: size of its cache.
    num_cached_tokens: of the prompt to be placed, which it would not have to compute.
    """

    worker_id: str
    group: Hashable
    num_pending_tokens: int
    num_requests: int
    num_blocks: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeSnapshot:
    """A decode worker's load, dispatched requests included; fields as in `PrefillSnapshot`.

    num_free_blocks: held by no request. num_held_blocks: leading blocks of the prompt to be placed that it
    has, so that they need neither room nor transfer.
    """

    worker_id: str
    group: Hashable
    num_requests: int
    num_free_blocks: int
    num_blocks: int
    num_held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes.

    num_prompt_tokens: what it adds, less what is cached, to a prefill worker's pending tokens.
    num_prompt_blocks: blocks of its prompt.
    num_max_blocks: blocks at the end of its longest possible output.
    """

    num_prompt_tokens: int
    num_prompt_blocks: int
    num_max_blocks: int

    @property
    def num_first_blocks(self) -> int:
        """At least what a decode worker reserves: the prompt and its first growth."""
        return min(self.num_prompt_blocks + 1, self.num_max_blocks)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of a request."""

    prefill_id: str
    decode_id: str


class Placement:
    """Ranks the pairs for a request: least to do for it first, equals in turn."""

    def __init__(self) -> None:
        self._turn = 0
        # The turn in which each worker last came first; the one that has waited longest wins a tie.
        self._last_turns: dict[str, int] = {}

    def rank(
        self, prefills: Sequence[PrefillSnapshot], decodes: Sequence[DecodeSnapshot], need: Need
    ) -> list[Pair]:
        """The pairs to try, best first, one for each decode worker that can serve the request.

        Decode workers with room now come first, then those with fewest requests for their size, then
        those with most free blocks. Each is paired with the first of `rank_prefills` of its group. Workers
        of different groups, and those whose whole cache is too small, are left out.
        """
        best_prefills: dict[Hashable, PrefillSnapshot] = {}
        for prefill in self.rank_prefills(prefills, need):
            best_prefills.setdefault(prefill.group, prefill)
        pairs = [
            Pair(best_prefills[decode.group].worker_id, decode.worker_id)
            for decode in sorted(decodes, key=self._decode_order(need))
            if decode.group in best_prefills and decode.num_blocks >= need.num_max_blocks
        ]
        if pairs:
            self._turn += 1
            self._last_turns |= {pairs[0].prefill_id: self._turn, pairs[0].decode_id: self._turn}
        return pairs

    def rank_prefills(self, prefills: Iterable[PrefillSnapshot], need: Need) -> list[PrefillSnapshot]:
        """Those that can hold the prompt: fewest tokens to its first token first, then fewest requests."""

        def order(prefill: PrefillSnapshot) -> tuple[int, int, int, str]:
            return (
                prefill.num_pending_tokens + need.num_prompt_tokens - prefill.num_cached_tokens,
                prefill.num_requests,
                self._last_turns.get(prefill.worker_id, 0),
                prefill.worker_id,
            )

        return sorted((p for p in prefills if p.num_blocks >= need.num_prompt_blocks), key=order)

    def _decode_order(self, need: Need) -> Callable[[DecodeSnapshot], tuple[bool, float, int, int, str]]:
        def order(decode: DecodeSnapshot) -> tuple[bool, float, int, int, str]:
            held_share = decode.num_held_blocks / need.num_prompt_blocks
            return (
                decode.num_free_blocks < need.num_first_blocks - decode.num_held_blocks,
                (decode.num_requests - held_share) / decode.num_blocks,
                -decode.num_free_blocks,
                self._last_turns.get(decode.worker_id, 0),
                decode.worker_id,
            )

        return order


def fits_never(prefills: Iterable[PrefillSnapshot], decodes: Iterable[DecodeSnapshot], need: Need) -> bool:
    """Whether there are compatible pairs and not one of them could hold the request even when idle.

    False where no pair is compatible: that is a lack of workers, which may pass.
    """
    decodes = list(decodes)
    pairs = [(prefill, decode) for prefill in prefills for decode in decodes if prefill.group == decode.group]
    return bool(pairs) and not any(
        prefill.num_blocks >= need.num_prompt_blocks and decode.num_blocks >= need.num_max_blocks
        for prefill, decode in pairs
    )
