"""What two workers must agree on before a block goes from one to the other."""

from collections.abc import Hashable, Mapping

# Names as in the Capabilities message. The size of the cache is not among them: it bounds a request,
# not a pair.
FIELDS = (
    "model",
    "model_digest",
    "tokenizer_digest",
    "dtype",
    "block_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "kv_layout",
    "tensor_parallel_size",
    "hash_scheme",
    "codec",
    "protocol_version",
)


def mismatches(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The fields that differ, such as "block_size: 16 here, 32 there"; empty where the two fit together.

    Both hold every one of FIELDS (KeyError otherwise) and may hold more.
    """
    return [
        f"{name}: {ours[name]} here, {theirs[name]} there" for name in FIELDS if ours[name] != theirs[name]
    ]


def group(capabilities: Mapping[str, object]) -> Hashable:
    """The same for workers that fit together, and different for those that do not."""
    return tuple(capabilities[name] for name in FIELDS)
