"""Load spreads over every shape of pools, and no request goes where it cannot run."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.placement import DecodeSnapshot, Need, Pair, Placement, PrefillSnapshot, fits_never

BLOCK_SIZE = 16
NEED = Need(num_prompt_tokens=32, num_prompt_blocks=2, num_max_blocks=4)


def prefill(worker_id, *, group="g", tokens=0, requests=0, blocks=1000, cached=0):
    return PrefillSnapshot(worker_id, group, tokens, requests, blocks, cached)


def decode(worker_id, *, group="g", requests=0, free=1000, blocks=1000, held=0):
    return DecodeSnapshot(worker_id, group, requests, free, blocks, held)


def need_of(num_prompt_tokens, max_tokens=16):
    return Need(
        num_prompt_tokens,
        -(-num_prompt_tokens // BLOCK_SIZE),
        -(-(num_prompt_tokens + max_tokens) // BLOCK_SIZE),
    )


class Cluster:
    """Pools whose snapshots count each request when it is dispatched, as the router's do."""

    def __init__(self, num_prefills, num_decodes):
        self.placement = Placement()
        self.prefills = {f"p{i}": prefill(f"p{i}") for i in range(num_prefills)}
        self.decodes = {f"d{i}": decode(f"d{i}") for i in range(num_decodes)}

    def dispatch(self, need):
        pair = self.placement.rank([*self.prefills.values()], [*self.decodes.values()], need)[0]
        p, d = self.prefills[pair.prefill_id], self.decodes[pair.decode_id]
        self.prefills[p.worker_id] = replace(
            p,
            num_pending_tokens=p.num_pending_tokens + need.num_prompt_tokens,
            num_requests=p.num_requests + 1,
        )
        self.decodes[d.worker_id] = replace(
            d, num_requests=d.num_requests + 1, num_free_blocks=d.num_free_blocks - need.num_first_blocks
        )
        return pair


def spread(values):
    return max(values) - min(values)


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(1, 2), (2, 1), (2, 2), (3, 2), (4, 5)])
@settings(max_examples=40, deadline=None)
@given(prompts=st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_a_burst_spreads(num_prefills, num_decodes, prompts):
    cluster = Cluster(num_prefills, num_decodes)
    for num_tokens in prompts:
        cluster.dispatch(need_of(num_tokens))
    # Each goes to the least loaded, so no two workers are further apart than the last request.
    assert spread([p.num_pending_tokens for p in cluster.prefills.values()]) <= max(prompts)
    assert spread([d.num_requests for d in cluster.decodes.values()]) <= 1


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=60),
    shape=st.sampled_from([(1, 2), (2, 1), (2, 2)]),
)
def test_dispatch_never_widens_the_gap_while_requests_come_and_go(events, shape):
    cluster = Cluster(*shape)
    for num_tokens, ends in events:
        before = [p.num_pending_tokens for p in cluster.prefills.values()]
        pair = cluster.dispatch(need_of(num_tokens))
        assert cluster.prefills[pair.prefill_id].num_pending_tokens == min(before) + num_tokens
        if ends:
            done = cluster.prefills[pair.prefill_id]
            cluster.prefills[done.worker_id] = replace(done, num_pending_tokens=0, num_requests=0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_equals_take_turns(num_workers):
    placement = Placement()
    prefills = [prefill(f"p{i}") for i in range(num_workers)]
    decodes = [decode(f"d{i}") for i in range(num_workers)]
    firsts = [placement.rank(prefills, decodes, NEED)[0] for _ in range(5 * num_workers)]
    assert Counter(pair.prefill_id for pair in firsts) == {p.worker_id: 5 for p in prefills}
    assert Counter(pair.decode_id for pair in firsts) == {d.worker_id: 5 for d in decodes}
    for first in range(0, len(firsts), num_workers):
        assert len({pair.decode_id for pair in firsts[first : first + num_workers]}) == num_workers


def test_equals_take_turns_where_only_some_are_equal():
    placement = Placement()
    decodes = [decode("d0"), decode("d1", requests=3), decode("d2")]
    firsts = [placement.rank([prefill("p")], decodes, NEED)[0].decode_id for _ in range(6)]
    assert Counter(firsts) == {"d0": 3, "d2": 3}


def test_prefill_is_chosen_by_pending_tokens_then_requests():
    placement = Placement()
    prefills = [
        prefill("few-requests", tokens=500, requests=1),
        prefill("least", tokens=100, requests=5),
        prefill("least-and-fewer", tokens=100, requests=4),
    ]
    for _ in range(3):
        assert placement.rank(prefills, [decode("d")], NEED) == [Pair("least-and-fewer", "d")]


def test_decode_is_ranked_by_room_then_requests_for_its_size_then_free_blocks():
    decodes = [
        decode("full", requests=0, free=2),
        decode("busy", requests=8, free=900),
        decode("small", requests=3, free=90, blocks=100),
        decode("big", requests=3, free=90, blocks=1000),
        decode("big-and-emptier", requests=3, free=91, blocks=1000),
    ]
    for _ in range(2):
        pairs = Placement().rank([prefill("p")], decodes, NEED)
        assert [pair.decode_id for pair in pairs] == ["big-and-emptier", "big", "busy", "small", "full"]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "first"),
    [(32, 100, 3), (33, 1, 3), (31, 1, 2)],
)
def test_room_is_the_prompt_and_its_first_growth(num_prompt_tokens, max_tokens, first):
    need = need_of(num_prompt_tokens, max_tokens)
    assert need.num_first_blocks == first
    decodes = [decode("lacks", free=first - 1), decode("has", free=first, requests=9)]
    assert Placement().rank([prefill("p")], decodes, need)[0].decode_id == "has"


class CachingCluster(Cluster):
    """Workers that keep every prefix that they have computed, as long as the test runs."""

    def __init__(self, num_prefills, num_decodes):
        super().__init__(num_prefills, num_decodes)
        self.has = set()

    def dispatch_family(self, family, num_shared, num_own):
        need = need_of(num_shared + num_own)
        for worker_id, p in self.prefills.items():
            cached = num_shared if (worker_id, family) in self.has else 0
            self.prefills[worker_id] = replace(p, num_cached_tokens=cached)
        for worker_id, d in self.decodes.items():
            held = num_shared // BLOCK_SIZE if (worker_id, family) in self.has else 0
            self.decodes[worker_id] = replace(d, num_held_blocks=held)
        cached = {p.worker_id: p.num_cached_tokens for p in self.prefills.values()}
        pair = self.dispatch(need)
        p = self.prefills[pair.prefill_id]
        computed = p.num_pending_tokens - cached[pair.prefill_id]
        self.prefills[p.worker_id] = replace(p, num_pending_tokens=computed)
        self.has |= {(pair.prefill_id, family), (pair.decode_id, family)}
        return pair


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(2, 2), (3, 2), (4, 5)])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 160, 800]), st.integers(1, 60)), max_size=40)
)
def test_cached_prefixes_never_unbalance_by_more_than_a_prompt(num_prefills, num_decodes, requests):
    cluster = CachingCluster(num_prefills, num_decodes)
    for family, num_shared, num_own in requests:
        cluster.dispatch_family((family, num_shared), num_shared, num_own)
        assert spread([p.num_pending_tokens for p in cluster.prefills.values()]) <= 860
        assert spread([d.num_requests for d in cluster.decodes.values()]) <= 2


def test_a_prefix_that_everybody_has_is_computed_by_everybody():
    cluster = CachingCluster(4, 4)
    pairs = [cluster.dispatch_family("system prompt", 640, 40) for _ in range(400)]
    for counts in (Counter(p.prefill_id for p in pairs), Counter(p.decode_id for p in pairs)):
        assert len(counts) == 4
        assert min(counts.values()) > 0.7 * 100


def test_a_cached_prefix_wins_while_it_saves_more_than_the_wait_costs():
    prefills = [prefill("has", tokens=100, cached=64, requests=1), prefill("idle", tokens=36)]
    need = need_of(100)
    ranked = Placement().rank_prefills(prefills, need)
    assert [p.worker_id for p in ranked] == ["idle", "has"]  # Equal in tokens; fewer requests decide.
    closer = [replace(prefills[0], num_pending_tokens=99), prefills[1]]
    assert Placement().rank_prefills(closer, need)[0].worker_id == "has"
    further = [replace(prefills[0], num_pending_tokens=101), prefills[1]]
    assert Placement().rank_prefills(further, need)[0].worker_id == "idle"


def test_on_decode_a_held_prompt_counts_as_one_request_less():
    need = need_of(64, 16)
    idle = decode("idle", requests=3)
    for requests, held, first in [(3, 1, "has"), (4, 3, "idle"), (4, 4, "has"), (5, 4, "idle")]:
        has = decode("has", requests=requests, held=held, free=1001)
        assert Placement().rank([prefill("p")], [idle, has], need)[0].decode_id == first, (requests, held)


def test_what_a_decode_worker_holds_needs_no_room():
    need = need_of(64, 16)
    decodes = [decode("lacks", free=4, requests=0), decode("has", free=2, held=3, requests=9)]
    assert Placement().rank([prefill("p")], decodes, need)[0].decode_id == "has"


def test_equals_take_turns_where_all_have_the_prefix():
    placement = Placement()
    prefills = [prefill(f"p{i}", cached=16) for i in range(3)]
    decodes = [decode(f"d{i}", held=1) for i in range(3)]
    firsts = [placement.rank(prefills, decodes, NEED)[0] for _ in range(9)]
    assert set(Counter(pair.prefill_id for pair in firsts).values()) == {3}
    assert set(Counter(pair.decode_id for pair in firsts).values()) == {3}


GROUPS = st.sampled_from("gh")
PREFILLS = st.lists(st.builds(prefill, st.just(""), group=GROUPS, blocks=st.integers(1, 6)), max_size=4)
DECODES = st.lists(
    st.builds(
        decode,
        st.just(""),
        group=GROUPS,
        free=st.integers(0, 6),
        blocks=st.integers(1, 6),
        requests=st.integers(0, 3),
    ),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(PREFILLS, DECODES)
def test_only_pairs_that_fit_and_each_decode_worker_that_can_serve_once(prefills, decodes):
    prefills = [replace(p, worker_id=f"p{i}") for i, p in enumerate(prefills)]
    decodes = [replace(d, worker_id=f"d{i}") for i, d in enumerate(decodes)]
    pairs = Placement().rank(prefills, decodes, NEED)
    able = {
        (p.worker_id, d.worker_id)
        for p in prefills
        for d in decodes
        if p.group == d.group
        and p.num_blocks >= NEED.num_prompt_blocks
        and d.num_blocks >= NEED.num_max_blocks
    }
    assert {(pair.prefill_id, pair.decode_id) for pair in pairs} <= able
    assert sorted(pair.decode_id for pair in pairs) == sorted({decode_id for _, decode_id in able})
    compatible = any(p.group == d.group for p in prefills for d in decodes)
    assert fits_never(prefills, decodes, NEED) == (compatible and not able)


def test_too_large_for_ever_is_not_the_same_as_nobody_there():
    assert fits_never([prefill("p", blocks=1)], [decode("d")], NEED)
    assert fits_never([prefill("p")], [decode("d", blocks=3)], NEED)
    assert not fits_never([prefill("p")], [decode("d", free=0, blocks=4)], NEED)
    assert not fits_never([], [decode("d", blocks=1)], NEED)
    assert not fits_never([prefill("p", blocks=1)], [], NEED)
    assert not fits_never([prefill("p", group="x", blocks=1)], [decode("d")], NEED)


def test_incompatible_pools_give_no_pair():
    assert Placement().rank([prefill("p", group="x")], [decode("d", group="y")], NEED) == []
