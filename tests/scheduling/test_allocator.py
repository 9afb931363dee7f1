"""No block is ever lost, in two hands, or counted wrongly."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.allocator import BlockAllocator, BlockCounts, BlockState, ConservationError

RESERVED, RUNNING = BlockState.RESERVED, BlockState.RUNNING
OWNERS = st.sampled_from("abcdef")


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that keeps each owner's blocks in a set."""

    TOTAL = 11

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(self.TOTAL)
        self.model: dict[str, tuple[BlockState, set[int]]] = {}

    def num_free(self):
        return self.TOTAL - sum(len(blocks) for _, blocks in self.model.values())

    @rule(owner=OWNERS, num_blocks=st.integers(0, 6), state=st.sampled_from(BlockState))
    def allocate(self, owner, num_blocks, state):
        if owner in self.model and self.model[owner][0] is not state:
            with pytest.raises(ValueError, match=f"{owner} holds"):
                self.allocator.allocate(owner, num_blocks, state)
            return
        blocks = self.allocator.allocate(owner, num_blocks, state)
        if num_blocks > self.num_free():
            assert blocks is None
            return
        assert len(set(blocks)) == len(blocks) == num_blocks
        assert all(0 <= block < self.TOTAL for block in blocks)
        assert not any(held & set(blocks) for _, held in self.model.values())
        self.model.setdefault(owner, (state, set()))[1].update(blocks)

    @rule(owner=OWNERS)
    def commit(self, owner):
        if owner in self.model and self.model[owner][0] is RESERVED:
            self.allocator.commit(owner)
            self.model[owner] = (RUNNING, self.model[owner][1])
        else:
            with pytest.raises(KeyError, match=owner):
                self.allocator.commit(owner)

    @rule(owner=OWNERS)
    def free(self, owner):
        assert self.allocator.free(owner) == len(self.model.pop(owner, (None, set()))[1])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reuse_is_lifo(self, data):
        owner = data.draw(st.sampled_from(sorted(self.model)))
        _, blocks = self.model.pop(owner)
        self.allocator.free(owner)
        again = self.allocator.allocate(owner, len(blocks), RUNNING)
        assert set(again) == blocks
        self.model[owner] = (RUNNING, blocks)

    @invariant()
    def conserved(self):
        self.allocator.check()
        held = {s: sum(len(b) for state, b in self.model.values() if state is s) for s in BlockState}
        assert self.allocator.counts == BlockCounts(
            self.num_free(), 0, held[RESERVED], held[RUNNING], self.TOTAL
        )
        assert self.allocator.num_available == self.num_free()
        assert self.allocator.holdings() == {o: (s, len(b)) for o, (s, b) in self.model.items()}
        assert self.allocator.num_owners == len(self.model)
        assert all(self.allocator.holds(owner) == (owner in self.model) for owner in "abcdef")


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocatorConserves = AllocatorMachine.TestCase


def test_blocks_come_in_order_and_the_last_freed_come_back_first():
    allocator = BlockAllocator(6)
    assert allocator.allocate("a", 2, RUNNING) == [0, 1]
    assert allocator.allocate("b", 3, RESERVED) == [2, 3, 4]
    allocator.free("a")
    allocator.free("b")
    assert allocator.allocate("c", 4, RUNNING) == [2, 3, 4, 0]


def test_allocation_is_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate("a", 3, RUNNING)
    before = allocator.counts
    assert allocator.allocate("b", 2, RUNNING) is None
    assert allocator.counts == before
    assert not allocator.holds("b")


def test_the_list_returned_is_the_callers_own():
    allocator = BlockAllocator(4)
    allocator.allocate("a", 2, RUNNING).clear()
    allocator.check()
    assert allocator.free("a") == 2


def test_no_blocks_can_be_held_and_committed():
    allocator = BlockAllocator(1)
    assert allocator.allocate("a", 0, RESERVED) == []
    allocator.commit("a")
    assert allocator.holdings() == {"a": (RUNNING, 0)}


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_a_cache_has_blocks(num_blocks):
    with pytest.raises(ValueError, match="num_blocks"):
        BlockAllocator(num_blocks)


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="-1"):
        BlockAllocator(4).allocate("a", -1, RUNNING)


def compute(allocator, owner, *names, state=RUNNING):
    """Allocates a block a name, shares what is here and publishes the rest."""
    table = allocator.allocate(owner, len(names), state, names)
    allocator.publish(owner, names)
    return table


class TestSharing:
    def test_a_finished_owners_blocks_stay_until_they_are_needed(self):
        allocator = BlockAllocator(4)
        table = compute(allocator, "a", b"1", b"2")
        allocator.free("a")
        assert allocator.counts == BlockCounts(free=2, cached=2, reserved=0, running=0, total=4)
        assert allocator.allocate("b", 3, RESERVED, [b"1", b"2"]) == [*table, 2]
        assert allocator.num_shared("b") == 2
        assert allocator.counts == BlockCounts(free=1, cached=0, reserved=3, running=0, total=4)

    def test_a_running_owners_final_blocks_are_shared_and_count_once(self):
        allocator = BlockAllocator(4)
        table = compute(allocator, "a", b"1", b"2")
        assert allocator.allocate("b", 3, RESERVED, [b"1", b"2"])[:2] == table
        assert allocator.counts == BlockCounts(free=1, cached=0, reserved=1, running=2, total=4)
        allocator.free("a")
        assert allocator.counts == BlockCounts(free=1, cached=0, reserved=3, running=0, total=4)

    def test_only_leading_blocks_are_shared(self):
        allocator = BlockAllocator(6)
        compute(allocator, "a", b"1", b"2", b"3")
        assert allocator.allocate("b", 3, RUNNING, [b"0", b"2", b"3"]) == [3, 4, 5]
        assert allocator.num_shared("b") == 0

    def test_the_least_recently_used_goes_first_and_later_blocks_before_earlier_ones(self):
        allocator = BlockAllocator(4)
        compute(allocator, "a", b"1", b"2")
        compute(allocator, "b", b"x", b"y")
        allocator.free("a")
        allocator.free("b")
        gone = []
        allocator.cache.watch(lambda name, is_here: gone.append((name, is_here)))
        allocator.allocate("c", 4, RUNNING)
        assert gone == [(b"2", False), (b"1", False), (b"y", False), (b"x", False)]
        assert allocator.cache.num_evictions == 4

    def test_using_a_block_again_makes_it_the_last_to_go(self):
        allocator = BlockAllocator(3)
        for owner, name in [("a", b"1"), ("b", b"2"), ("a2", b"1")]:
            compute(allocator, owner, name)
            allocator.free(owner)
        allocator.allocate("c", 2, RUNNING)
        assert list(allocator.cache.hashes) == [b"1"]

    def test_a_content_computed_twice_is_kept_from_its_last_use(self):
        allocator = BlockAllocator(4)
        for owner in ("a", "b"):  # Both start before either is done.
            allocator.allocate(owner, 1, RUNNING)
        for owner in ("a", "b"):
            allocator.publish(owner, [b"1"])
        compute(allocator, "c", b"2")
        for owner in ("a", "c", "b"):
            allocator.free(owner)
        assert allocator.counts == BlockCounts(free=2, cached=2, reserved=0, running=0, total=4)
        allocator.allocate("d", 3, RUNNING)
        assert list(allocator.cache.hashes) == [b"1"]

    def test_a_copy_takes_over_where_the_first_was_evicted(self):
        allocator = BlockAllocator(2)
        for owner in ("a", "b"):
            allocator.allocate(owner, 1, RUNNING)
        for owner in ("a", "b"):
            allocator.publish(owner, [b"1"])
        allocator.free("a")
        allocator.allocate("c", 1, RUNNING)
        assert not list(allocator.cache.hashes)
        allocator.free("b")
        assert allocator.cache.match([b"1"]) == [1]

    def test_what_a_newcomer_shares_is_not_evicted_for_its_other_blocks(self):
        allocator = BlockAllocator(3)
        compute(allocator, "a", b"1")
        compute(allocator, "b", b"2", b"3")
        allocator.free("a")  # The next to go.
        allocator.free("b")
        assert allocator.allocate("c", 3, RUNNING, [b"1"]) == [0, 2, 1]
        assert allocator.cache.match([b"1"]) == [0]

    def test_blocks_that_are_still_to_be_filled_are_not_published(self):
        allocator = BlockAllocator(2)
        allocator.allocate("a", 1, RESERVED)
        with pytest.raises(ValueError, match="a holds reserved blocks"):
            allocator.publish("a", [b"1"])
        allocator.free("a")
        assert allocator.counts.cached == 0

    @pytest.mark.parametrize(
        ("num_blocks", "hashes", "message"),
        [(1, [b"1", b"2"], "asks for 1 blocks and names 2"), (1, [b"1"], "asks to share")],
    )
    def test_what_cannot_be_shared_is_refused(self, num_blocks, hashes, message):
        allocator = BlockAllocator(4)
        allocator.allocate("a", 1, RUNNING)
        with pytest.raises(ValueError, match=message):
            allocator.allocate("a", num_blocks, RUNNING, hashes)


class TestCheckNamesTheCulprits:
    """Faults are planted, since the public methods make none."""

    @pytest.fixture
    def allocator(self):
        allocator = BlockAllocator(6)
        allocator.allocate("a", 2, RUNNING)
        allocator.allocate("b", 2, RESERVED)
        return allocator

    def test_a_block_with_two_owners(self, allocator):
        allocator._holdings["b"].blocks[0] = 1
        with pytest.raises(ConservationError, match="block 1 is held by a and b; block 2 is lost"):
            allocator.check()

    def test_a_held_block_that_is_free(self, allocator):
        allocator._free.append(3)
        with pytest.raises(ConservationError, match="block 3 is held by b and the free list"):
            allocator.check()

    def test_a_lost_block(self, allocator):
        allocator._free.remove(5)
        with pytest.raises(ConservationError, match="block 5 is lost"):
            allocator.check()

    def test_a_block_that_is_not_there(self, allocator):
        allocator._free.append(6)
        with pytest.raises(ConservationError, match="block 6 of the free list does not exist"):
            allocator.check()

    def test_two_blocks_with_one_hash(self, allocator):
        allocator.publish("a", [b"1", b"2"])
        allocator.cache._hash_of[1] = b"1"
        with pytest.raises(ConservationError, match="block 1 has the hash of block 0"):
            allocator.check()

    def test_a_cached_block_without_a_hash(self, allocator):
        allocator._free.remove(5)
        allocator.cache._unheld[5] = None
        with pytest.raises(ConservationError, match="block 5 is cached without a hash"):
            allocator.check()

    def test_a_held_block_that_can_be_evicted(self, allocator):
        allocator.publish("a", [b"1"])
        allocator.cache._unheld[0] = None
        with pytest.raises(ConservationError, match="block 0 is held by a and the cache"):
            allocator.check()

    def test_a_wrong_number_of_owners(self, allocator):
        allocator._num_owners[RUNNING][0] = 2
        with pytest.raises(ConservationError, match="block 0 has 1 owners, 2 are counted"):
            allocator.check()

    def test_a_wrong_count(self, allocator):
        allocator._num_held[RESERVED] = 3
        with pytest.raises(ConservationError, match="2 blocks are reserved, 3 are counted"):
            allocator.check()
