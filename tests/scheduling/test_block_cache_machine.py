"""Sharing under random requests: what is shared is the right content, and the right block is evicted.

A sequence is a path of letters, one a block, and a block's content is the path up to it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.allocator import BlockAllocator, BlockState

RESERVED, RUNNING = BlockState.RESERVED, BlockState.RUNNING
PATHS = st.text("xy", min_size=1, max_size=6)


def named(path, num_blocks):
    return [path[: i + 1].encode() for i in range(num_blocks)]


class Owner:
    def __init__(self, state, path, table, num_final):
        self.state, self.path, self.table, self.num_final = state, path, table, num_final


class SharingMachine(RuleBasedStateMachine):
    """`content` is what each block holds: a path, or None while its owner may still write it."""

    TOTAL = 12

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(self.TOTAL)
        self.allocator.cache.watch(self.changed)
        self.owners: dict[str, Owner] = {}
        self.content: dict[int, str | None] = dict.fromkeys(range(self.TOTAL))
        self.last_used: dict[str, int] = {}
        self.here: dict[bytes, int] = {}
        self.now = 0
        self.num_requests = 0

    def changed(self, name, is_here):
        if is_here:
            assert name not in self.here
            self.here[name] = self.allocator.cache.match([name])[0]
            return
        # It goes because a block is needed, and is the one that was used longest ago.
        unheld = {path for path, block in self.here.items() if not self.holders(block)}
        oldest = min(unheld, key=lambda path: (self.last_used[path.decode()], -len(path)))
        assert name == oldest
        # No later block of the same sequence is left without it.
        assert not any(path.startswith(name) and path != name for path in unheld)
        del self.here[name]

    def holders(self, block):
        return [name for name, owner in self.owners.items() if block in owner.table]

    @rule(path=PATHS, num_more=st.integers(0, 3), state=st.sampled_from(BlockState), name_last=st.booleans())
    def allocate(self, path, num_more, state, name_last):
        owner = f"r{self.num_requests}"
        hashes = named(path, len(path) if name_last else len(path) - 1)
        num_blocks = len(path) + num_more
        expected = next((i for i, name in enumerate(hashes) if name not in self.here), len(hashes))
        shared = [self.here[name] for name in hashes[:expected]]
        num_needed = num_blocks - sum(bool(self.holders(block)) for block in shared)
        before = (self.allocator.counts, list(self.allocator.cache.hashes))
        num_available = self.allocator.num_available
        assert self.allocator.num_needed(num_blocks, hashes) == num_needed
        # The model holds the shared ones first, so that their eviction would be noticed.
        self.owners[owner] = Owner(state, path, shared, expected)
        table = self.allocator.allocate(owner, num_blocks, state, hashes)
        if num_needed > num_available:
            assert table is None
            del self.owners[owner]
            assert (self.allocator.counts, list(self.allocator.cache.hashes)) == before
            return
        self.num_requests += 1
        assert self.allocator.num_available == num_available - num_needed
        assert self.allocator.num_shared(owner) == expected
        assert table[:expected] == shared
        assert [self.content[block] for block in shared] == [path[: i + 1] for i in range(expected)]
        for block in table[expected:]:
            assert block not in self.here.values()
            assert not self.holders(block)
            self.content[block] = None
        self.owners[owner].table = table

    @precondition(lambda self: any(o.state is RESERVED for o in self.owners.values()))
    @rule(data=st.data())
    def commit(self, data):
        reserved = [name for name, o in self.owners.items() if o.state is RESERVED]
        name = data.draw(st.sampled_from(reserved))
        self.allocator.commit(name)
        self.owners[name].state = RUNNING

    @precondition(lambda self: any(o.state is RUNNING for o in self.owners.values()))
    @rule(data=st.data(), num_more=st.integers(1, 4), tail=PATHS)
    def compute(self, data, num_more, tail):
        """Some more of the owner's blocks become full; its output is a path of its own."""
        running = [name for name, o in self.owners.items() if o.state is RUNNING]
        name = data.draw(st.sampled_from(running))
        owner = self.owners[name]
        owner.path += tail * (len(owner.path) < len(owner.table))
        num_final = min(owner.num_final + num_more, len(owner.table), len(owner.path))
        for index in range(owner.num_final, num_final):
            assert self.holders(owner.table[index]) == [name]
            self.content[owner.table[index]] = owner.path[: index + 1]
        owner.num_final = num_final
        self.allocator.publish(name, named(owner.path, num_final))

    @precondition(lambda self: any(o.state is RUNNING for o in self.owners.values()))
    @rule(data=st.data())
    def grow(self, data):
        running = [name for name, o in self.owners.items() if o.state is RUNNING]
        name = data.draw(st.sampled_from(running))
        blocks = self.allocator.allocate(name, 1, RUNNING)
        if blocks is not None:
            assert not self.holders(blocks[0])
            self.content[blocks[0]] = None
            self.owners[name].table += blocks

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners.pop(name)
        self.now += 1
        for end in range(1, owner.num_final + 1):
            self.last_used[owner.path[:end]] = self.now
        assert self.allocator.free(name) == len(owner.table)
        # What it computed can be found again.
        assert len(self.allocator.cache.match(named(owner.path, owner.num_final))) == owner.num_final

    @invariant()
    def every_name_leads_to_its_content(self):
        assert set(self.allocator.cache.hashes) == set(self.here)
        for name, block in self.here.items():
            assert self.allocator.cache.match([name]) == [block]
            assert self.content[block] == name.decode()

    @invariant()
    def conserved(self):
        self.allocator.check()
        held = {state: set() for state in BlockState}
        for owner in self.owners.values():
            held[owner.state] |= set(owner.table)
        counts = self.allocator.counts
        assert counts.running == len(held[RUNNING])
        assert counts.reserved == len(held[RESERVED] - held[RUNNING])
        assert counts.cached == len(set(self.here.values()) - held[RUNNING] - held[RESERVED])
        assert counts.free + counts.cached + counts.reserved + counts.running == counts.total == self.TOTAL
        assert counts.available == self.allocator.num_available

    def teardown(self):
        for name in self.owners:
            self.allocator.free(name)
        counts = self.allocator.counts
        assert counts.free + counts.cached == counts.total


SharingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharing = SharingMachine.TestCase
