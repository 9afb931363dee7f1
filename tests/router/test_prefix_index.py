"""The router's picture of a worker's blocks: right after every snapshot, empty after every loss."""

from kvferry.v1.registry_pb2 import BlockChanges, Capabilities
from router.prefix_index import PrefixIndex, PromptBlocks
from scheduling.block_hash import SCHEME, BlockHashes

NAMES = [bytes([i]) * 16 for i in range(9)]


def changes(sequence, *, added=(), removed=(), is_snapshot=False):
    return BlockChanges(
        sequence=sequence, is_snapshot=is_snapshot, added=b"".join(added), removed=b"".join(removed)
    )


def index_of(*names):
    index = PrefixIndex(8)
    assert index.take(changes(0, added=names, is_snapshot=True))
    return index


def test_changes_follow_a_snapshot():
    index = index_of(*NAMES[:3])
    assert index.take(changes(1, added=[NAMES[3]], removed=[NAMES[1]]))
    assert [index.num_leading([name]) for name in NAMES[:4]] == [1, 0, 1, 1]


def test_only_leading_blocks_count():
    index = index_of(NAMES[0], NAMES[1], NAMES[3])
    assert index.num_leading(NAMES[:4]) == 2
    assert index.num_leading(NAMES[3:]) == 1
    assert index.num_leading([]) == 0


def test_a_gap_is_noticed_once_and_nothing_is_believed_until_the_snapshot():
    index = index_of(*NAMES[:3])
    assert not index.take(changes(2, added=[NAMES[4]]))
    assert len(index) == 0
    assert index.take(changes(3, added=[NAMES[5]]))
    assert len(index) == 0
    assert index.take(changes(4, added=[NAMES[6]], is_snapshot=True))
    assert index.take(changes(5, added=[NAMES[7]]))
    assert index.num_leading([NAMES[6], NAMES[7], NAMES[5]]) == 2


def test_what_comes_twice_is_a_loss_too():
    index = index_of(NAMES[0])
    assert index.take(changes(1))
    assert not index.take(changes(1))


def test_a_worker_cannot_fill_the_routers_memory():
    index = index_of(*NAMES[:8])
    assert not index.take(changes(1, added=[NAMES[8]]))
    assert len(index) == 0


def test_before_its_first_snapshot_a_worker_holds_nothing():
    index = PrefixIndex(8)
    assert index.take(changes(5, added=[NAMES[0]]))
    assert len(index) == 0


def test_a_prompts_blocks_are_named_as_the_workers_name_them():
    prompt = PromptBlocks(range(10), "salt")
    worker = Capabilities(model_digest="m", block_size=4, hash_scheme=SCHEME)
    assert prompt.hashes(worker) == BlockHashes("m", "salt", 4).of(range(10))
    assert prompt.num_tokens == 10
    other = Capabilities(model_digest="m", block_size=4, hash_scheme="another")
    assert prompt.hashes(other) == []
