"""A block's name depends on all that its content depends on, and on nothing else."""

import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.block_hash import HASH_BYTES, MAX_SALT_CHARS, BlockHashes

TOKENS = list(range(100, 111))


def hashes(tokens=TOKENS, *, model="model", salt="", block_size=4):
    return list(BlockHashes(model, salt, block_size).of(tokens))


def test_the_definition_byte_by_byte():
    root = blake2b(b"\5\0\0\0\0\0\0\0model\2\0\0\0\0\0\0\0ab", digest_size=16).digest()
    block = b"".join(token.to_bytes(4, "little") for token in TOKENS[:4])
    first = blake2b(root + block, digest_size=16).digest()
    block = b"".join(token.to_bytes(4, "little") for token in TOKENS[4:8])
    second = blake2b(first + block, digest_size=16).digest()
    assert hashes(salt="ab") == [first, second]
    assert len(first) == HASH_BYTES


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_only_full_blocks_have_a_name(num_tokens, num_blocks):
    assert len(hashes(TOKENS[:num_tokens])) == num_blocks


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_it_does_not_matter_in_how_many_pieces_the_tokens_come(tokens, data):
    growing = BlockHashes("model", "salt", 3)
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        assert growing.of(tokens[:end]) == hashes(tokens[:end], salt="salt", block_size=3)
    assert growing.of(tokens) == hashes(tokens, salt="salt", block_size=3)


@given(st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_block_and_all_after_it(index, token):
    changed = [*TOKENS[:index], token, *TOKENS[index + 1 :]]
    if token == TOKENS[index]:
        return
    same = [a == b for a, b in zip(hashes(), hashes(changed), strict=True)]
    assert same == [block < index // 4 for block in range(2)]


def test_the_same_tokens_later_in_a_sequence_are_another_block():
    assert len(set(hashes([7] * 40))) == 10


def test_model_tenant_and_block_size_are_in_every_name():
    variants = [
        hashes(),
        hashes(model="model2"),
        hashes(salt="a"),
        hashes(salt="b"),
        hashes(model="modela", salt=""),
        hashes(model="", salt="model"),
        hashes(block_size=2),
    ]
    names = [name for variant in variants for name in variant]
    assert len(set(names)) == len(names)


def test_a_long_salt_and_any_text_have_a_name():
    assert hashes(salt="ü🙂" * (MAX_SALT_CHARS // 2)) != hashes(salt="ü🙂")


def test_another_process_gives_the_same_names():
    """Python's own hash would not: it is seeded anew in each process."""
    code = (
        "from scheduling.block_hash import BlockHashes;"
        f"print(*(h.hex() for h in BlockHashes('m', 's', 4).of({TOKENS})))"
    )
    root = Path(__file__).parents[2]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == " ".join(h.hex() for h in hashes(model="m", salt="s")) + "\n"
