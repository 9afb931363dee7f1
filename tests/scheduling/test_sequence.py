"""The numbers that both schedulers and loops derive from a sequence."""

import pytest

from scheduling.sequence import Scheduled, Sequence, blocks_for


def test_derived_numbers():
    sequence = Sequence("a", [1, 2, 3, 4, 5], num_prompt_tokens=3, priority=0, arrived_s=0.0, num_computed=4)
    assert sequence.num_output_tokens == 2
    assert sequence.remaining == 1
    assert sequence.block_table == []


def test_equality_is_identity():
    first, second = (Sequence("a", [1], 1, 0, 0.0) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2
    assert first.block_table is not second.block_table


def test_rank_is_priority_then_age_then_id():
    sequences = [
        Sequence(*args) for args in [("c", [1], 1, 0, 1.0), ("b", [1], 1, 0, 1.0), ("d", [1], 1, 0, 0.5)]
    ]
    high = Sequence("z", [1], 1, 5, 9.0)
    assert [s.request_id for s in sorted([*sequences, high], key=lambda s: s.rank)] == ["z", "d", "b", "c"]
    assert [s.request_id for s in sorted([*sequences, high], key=lambda s: s.age)] == ["d", "b", "c", "z"]


def test_sampling_is_due_only_at_the_last_token():
    sequence = Sequence("a", [1, 2, 3], 3, 0, 0.0)
    assert not Scheduled(sequence, 0, 2).is_last
    assert Scheduled(sequence, 2, 3).is_last


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for(num_tokens, num_blocks):
    assert blocks_for(num_tokens, 16) == num_blocks
