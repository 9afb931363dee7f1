"""Workers that could corrupt each other's KV are never put together, and the field at fault is named."""

import pytest

from kvferry.v1 import registry_pb2
from scheduling.compatibility import FIELDS, group, mismatches

OURS = {
    "model": "m",
    "model_digest": "d1",
    "tokenizer_digest": "t1",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "kv_layout": "block,layer,kv,token,head,dim",
    "tensor_parallel_size": 1,
    "hash_scheme": "none",
    "codec": "raw",
    "protocol_version": 1,
    "num_blocks": 100,
}


def test_every_capability_but_the_size_of_the_cache_is_compared():
    assert {field.name for field in registry_pb2.Capabilities.DESCRIPTOR.fields} == {*FIELDS, "num_blocks"}


def test_equal_capabilities_fit_whatever_the_size_of_the_cache():
    theirs = OURS | {"num_blocks": 7}
    assert mismatches(OURS, theirs) == []
    assert group(OURS) == group(theirs)


@pytest.mark.parametrize("name", FIELDS)
def test_each_difference_is_named_and_parts_the_groups(name):
    theirs = OURS | {name: "other"}
    assert mismatches(OURS, theirs) == [f"{name}: {OURS[name]} here, other there"]
    assert group(OURS) != group(theirs)


def test_all_differences_are_told():
    assert mismatches(OURS, OURS | {"block_size": 32, "dtype": "float32"}) == [
        "dtype: bfloat16 here, float32 there",
        "block_size: 16 here, 32 there",
    ]


def test_a_group_can_be_a_key():
    assert {group(OURS): 1}[group(dict(OURS))] == 1


def test_a_missing_capability_is_no_agreement():
    incomplete = {name: value for name, value in OURS.items() if name != "codec"}
    with pytest.raises(KeyError, match="codec"):
        mismatches(incomplete, incomplete)
