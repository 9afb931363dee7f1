"""Every reader comes to know what is here, whatever happens while it is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling import block_feed
from scheduling.block_cache import BlockCache
from scheduling.block_feed import BlockFeeds

NUM_BLOCKS = 6
NAMES = [bytes([i]) * 16 for i in range(20)]


def names(packed):
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


class Reader:
    """What a router does with the messages."""

    def __init__(self):
        self.held = set()
        self.next_sequence = 0

    def take(self, changes):
        if changes is None:
            return False
        assert changes.sequence == self.next_sequence
        self.next_sequence += 1
        if changes.is_snapshot:
            self.held.clear()
        self.held -= set(names(changes.removed))
        self.held |= set(names(changes.added))
        return True


class Worker:
    def __init__(self):
        self.cache = BlockCache()
        self.feeds = BlockFeeds(self.cache, NUM_BLOCKS)
        self.next_block = 0

    def add(self, name):
        self.cache.name(self.next_block, name)
        if self.cache.is_named(self.next_block):
            self.cache.let_go(self.next_block)
            self.next_block += 1

    def evict(self):
        if self.cache.num_unheld:
            self.cache.evict()


def test_a_new_reader_gets_a_snapshot_and_then_the_changes():
    worker, reader = Worker(), Reader()
    worker.add(NAMES[0])
    first = worker.feeds.take("r")
    assert (first.sequence, first.is_snapshot, first.added, first.removed) == (0, True, NAMES[0], b"")
    assert worker.feeds.take("r") is None
    worker.add(NAMES[1])
    worker.evict()
    second = worker.feeds.take("r")
    assert (second.sequence, second.is_snapshot) == (1, False)
    assert (second.added, second.removed) == (NAMES[1], NAMES[0])
    reader.take(first)
    reader.take(second)
    assert reader.held == {NAMES[1]}


def test_an_empty_cache_is_a_snapshot_too():
    changes = Worker().feeds.take("r")
    assert (changes.is_snapshot, changes.added, changes.removed) == (True, b"", b"")


def test_a_reader_that_comes_back_starts_anew():
    worker = Worker()
    worker.feeds.take("r")
    worker.feeds.close("r")
    worker.add(NAMES[0])
    changes = worker.feeds.take("r")
    assert (changes.sequence, changes.is_snapshot, changes.added) == (0, True, NAMES[0])


def test_who_reads_nothing_takes_no_memory_beyond_its_bound_and_is_told_anew():
    worker, reader = Worker(), Reader()
    reader.take(worker.feeds.take("r"))
    for name in NAMES * 3:
        worker.add(name)
        worker.evict()
        assert len(worker.feeds._feeds["r"].pending) <= 2 * NUM_BLOCKS
    worker.add(NAMES[4])
    changes = worker.feeds.take("r")
    assert changes.is_snapshot
    reader.take(changes)
    assert reader.held == {NAMES[4]}


@pytest.fixture
def small_messages(monkeypatch):
    monkeypatch.setattr(block_feed, "MAX_CHANGES", 2)


@pytest.mark.usefixtures("small_messages")
def test_a_long_snapshot_comes_in_pieces():
    worker, reader = Worker(), Reader()
    for name in NAMES[:5]:
        worker.add(name)
    pieces = [worker.feeds.take("r") for _ in range(4)]
    assert [len(names(p.added)) if p else None for p in pieces] == [2, 2, 1, None]
    assert [p.is_snapshot for p in pieces[:3]] == [True, False, False]
    for piece in pieces:
        reader.take(piece)
    assert reader.held == set(NAMES[:5])


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["evict", "take", "take other", "resend", "rejoin"]), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(1, 3))
def test_all_readers_end_up_with_what_is_here(actions, max_changes):
    worker = Worker()
    readers = {"r": Reader(), "other": Reader()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_feed, "MAX_CHANGES", max_changes)
        for action, name in actions:
            if action == "add":
                worker.add(name)
            elif action == "evict":
                worker.evict()
            elif action == "resend":
                worker.feeds.resend("r")
            elif action == "rejoin":
                worker.feeds.close("r")
                readers["r"] = Reader()
            else:
                reader = "other" if action == "take other" else "r"
                readers[reader].take(worker.feeds.take(reader))
        for name, reader in readers.items():
            while reader.take(worker.feeds.take(name)):
                pass
            assert reader.held == set(worker.cache.hashes)
