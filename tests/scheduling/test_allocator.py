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
            self.num_free(), held[RESERVED], held[RUNNING], self.TOTAL
        )
        assert self.allocator.num_free == self.num_free()
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
        with pytest.raises(ConservationError, match="block 3 is held by the free list and b"):
            allocator.check()

    def test_a_lost_block(self, allocator):
        allocator._free.remove(5)
        with pytest.raises(ConservationError, match="block 5 is lost"):
            allocator.check()

    def test_a_block_that_is_not_there(self, allocator):
        allocator._free.append(6)
        with pytest.raises(ConservationError, match="block 6 of the free list does not exist"):
            allocator.check()

    def test_a_wrong_count(self, allocator):
        allocator._num_held[RESERVED] = 3
        with pytest.raises(ConservationError, match="2 blocks are reserved, 3 are counted"):
            allocator.check()
