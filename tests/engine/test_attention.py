"""The attention backends against float64 on random batches, and what the attention function refuses."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from engine.attention import attention_function, choose_backend
from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.cpu_attention import CpuAttention
from engine.cuda_attention import CudaAttention
from engine.engine import Chunk
from engine.kernels import load_kernels
from engine.refusal import UnsupportedModel
from engine.torch_attention import TorchAttention

# Rounding of the inputs' dtype, of weights and of the output: values are standard normal.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """A step of several sequences over a cache full of noise."""

    cache: KVCache
    batch: Batch
    chunks: list[Chunk]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_case(seed, dtype, head_dim, num_kv_heads=2, group=3, block_size=16, lengths=None) -> Case:
    """lengths: (tokens in the cache after the step, tokens of the step) of each sequence."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    if lengths is None:
        ends = [rng.choice([1, 2, rng.randint(1, 600)]) for _ in range(rng.randint(1, 5))]
        lengths = [(end, rng.choice([1, end, rng.randint(1, min(end, 250))])) for end in ends]
    needed = [-(-end // block_size) for end, _ in lengths]
    shape = BlockShape(2, block_size, num_kv_heads, head_dim, dtype)
    cache = KVCache(shape, sum(needed) + 2, torch.device("cpu"))
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=generator))
    free = rng.sample(range(cache.num_blocks), cache.num_blocks)
    chunks = [
        Chunk(range(end), end - count, end, [free.pop() for _ in range(num)], end, None)
        for (end, count), num in zip(lengths, needed, strict=True)
    ]
    batch = Batch.pack(chunks, block_size, torch.device("cpu"))
    num_tokens = batch.token_ids.shape[1]

    def random_heads(num_heads):
        # Strided like a model's: [1, num_heads, num_tokens, head_dim] over [tokens, heads, dim].
        heads = torch.randn(1, num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        return heads.transpose(1, 2)

    query = random_heads(num_kv_heads * group)
    return Case(cache, batch, chunks, query, random_heads(num_kv_heads), random_heads(num_kv_heads))


def attend(backend, case: Case, window=0, softcap=0.0, layer=1):
    scale = case.query.shape[-1] ** -0.5
    return backend.attend(
        case.query,
        case.key,
        case.value,
        case.cache.keys(layer),
        case.cache.values(layer),
        case.batch,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def expected(case: Case, window=0, softcap=0.0, layer=1):
    """By definition, token by token, in float64, from the cache that the backend has written."""
    outs, row = [], 0
    size = case.cache.shape.block_size
    for chunk in case.chunks:
        places = [(chunk.block_table[t // size], t % size) for t in range(chunk.end)]
        blocks, slots = (torch.tensor(column) for column in zip(*places, strict=True))
        keys, values = (
            part[blocks, slots].double() for part in (case.cache.keys(layer), case.cache.values(layer))
        )
        for t in range(chunk.start, chunk.end):
            seen = slice(max(0, t - window + 1) if window else 0, t + 1)
            query = case.query[0, :, row].double().unflatten(0, (keys.shape[1], -1))
            scores = torch.einsum("hgd,thd->hgt", query, keys[seen]) / math.sqrt(query.shape[-1])
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            outs.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[seen]).flatten(0, 1))
            row += 1
    return torch.stack(outs)[None]


@pytest.fixture(params=["cpu", "torch"])
def backend(request):
    if request.param == "torch":
        return TorchAttention()
    assert load_kernels(), "no C++ compiler here?"
    return CpuAttention()


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_head_size_and_dtype_agrees_with_float64(backend, dtype, head_dim):
    case = make_case(head_dim, dtype, head_dim, block_size=16)
    out = attend(backend, case)
    assert out.dtype == dtype
    assert (out.double() - expected(case)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (5, 2.0), (100, 0.0), (0, 2.0)])
@pytest.mark.parametrize("seed", range(4))
def test_windows_and_softcaps_agree_with_float64(backend, seed, window, softcap):
    dtype = [torch.float32, torch.bfloat16][seed % 2]
    case = make_case(seed, dtype, 64, block_size=[1, 3, 16, 64][seed])
    out = attend(backend, case, window, softcap)
    assert (out.double() - expected(case, window, softcap)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (4, 1), (1, 7), (3, 3), (2, 8), (1, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_grouping_of_heads_agrees_with_float64(backend, dtype, num_kv_heads, group):
    case = make_case(group, dtype, 32, num_kv_heads, group)
    assert (attend(backend, case).double() - expected(case)).abs().max() < TOLERANCE[dtype]


def documented_varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k,
    block_table,
):
    """What torch documents of `varlen_attn`, which runs on CUDA only; causal as FlashAttention is."""
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, cu_seq_k, seqused_k))
    assert enable_gqa
    left, right = window_size
    assert right == 0
    outs = []
    for row, length in enumerate(seqused_k.tolist()):
        queries = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        if block_table is None:
            assert cu_seq_k[row] + length <= cu_seq_k[row + 1]
            keys, values = (part[cu_seq_k[row] :][:length] for part in (key, value))
        else:
            assert block_table.dtype == torch.int32
            assert key.shape[1] % 256 == 0
            keys, values = (part[block_table[row]].flatten(0, 1)[:length] for part in (key, value))
        assert len(queries) <= max_q
        assert length <= max_k
        last = torch.arange(length - len(queries), length)[:, None]
        seen = torch.arange(length) <= last
        if left >= 0:
            seen &= torch.arange(length) >= last - left
        groups = queries.unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qhgd,thd->hgqt", groups, keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hgqt,thd->qhgd", weights, values).flatten(1, 2))
    return torch.cat(outs)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [0, 1, 70])
def test_flash_attention_gets_what_it_is_documented_to_take(monkeypatch, window, block_size):
    """The real one is in `tests/gpu`."""
    monkeypatch.setattr("engine.cuda_attention.varlen_attn", documented_varlen_attn)
    case = make_case(5, torch.float32, 64, block_size=block_size, lengths=[(300, 1), (256, 256), (90, 7)])
    out = attend(CudaAttention(case.cache.shape), case, window)
    assert (out.double() - expected(case, window)).abs().max() < 1e-5


def test_only_the_steps_slots_are_written(backend):
    case = make_case(1, torch.float32, 64, lengths=[(20, 3), (5, 5), (33, 1)])
    before = case.cache.blocks.clone()
    attend(backend, case)
    written, row = [], 0
    for chunk in case.chunks:
        for t in range(chunk.start, chunk.end):
            block, slot = chunk.block_table[t // 16], t % 16
            assert torch.equal(case.cache.blocks[block, 1, 0, slot], case.key[0, :, row])
            assert torch.equal(case.cache.blocks[block, 1, 1, slot], case.value[0, :, row])
            before[block, 1, :, slot] = case.cache.blocks[block, 1, :, slot]
            written.append((block, slot))
            row += 1
    assert len(set(written)) == 9
    assert torch.equal(case.cache.blocks, before)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_keys_shared_out_to_several_threads_give_the_same(num_threads):
    load_kernels()
    case = make_case(7, torch.float32, 64, 3, 3, lengths=[(1500, 1), (70, 1), (300, 40)])
    torch.set_num_threads(num_threads)
    try:
        out = attend(CpuAttention(), case, window=1400)
    finally:
        torch.set_num_threads(1)
    assert (out.double() - expected(case, window=1400)).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_very_large_scores_do_not_overflow(backend, seed):
    case = make_case(seed, torch.float32, 64)
    case.query.mul_(1e4)
    out = attend(backend, case)
    assert torch.isfinite(out).all()
    assert (out.double() - expected(case)).abs().max() < 1e-3


def test_a_block_outside_the_cache_is_refused_by_the_kernel():
    load_kernels()
    case = make_case(1, torch.float32, 64, lengths=[(20, 1)])
    for name, value in (("tables", 99), ("slots", -1), ("lengths", 1000)):
        bad = make_case(1, torch.float32, 64, lengths=[(20, 1)])
        getattr(bad.batch, name).fill_(value)
        before = bad.cache.blocks.clone()
        with pytest.raises(RuntimeError, match=r"outside the cache|longer than its block table"):
            attend(CpuAttention(), bad)
        assert torch.equal(bad.cache.blocks, before)
    attend(CpuAttention(), case)


def test_a_chunk_that_its_blocks_do_not_cover_is_refused():
    with pytest.raises(ValueError, match="do not fit 1 blocks"):
        Batch.pack([Chunk(range(20), 0, 17, [0], 20, None)], 16, torch.device("cpu"))


class Layer(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"kv_step": None}, "keyword arguments"),
    ],
)
def test_what_attention_would_ignore_is_refused(argument, reason):
    heads = torch.zeros(1, 2, 3, 8)
    arguments = {"kv_step": object(), **argument}
    with pytest.raises(UnsupportedModel, match=reason):
        attention_function(Layer(), heads, heads, heads, None, **arguments)


def test_a_mask_of_the_models_own_is_refused():
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedModel, match="mask"):
        attention_function(Layer(), heads, heads, heads, torch.zeros(1, 1, 3, 3), kv_step=object())


def test_head_sizes_the_kernel_lacks_go_to_plain_torch_and_say_so(caplog):
    shape = BlockShape(2, 16, 2, 20, torch.float32)
    assert choose_backend(shape, torch.device("cpu"), softcap=False).name == "torch"
    assert "not 20" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "reason"),
    [
        (torch.float32, 64, False, "float32"),
        (torch.bfloat16, 260, False, "head size"),
        (torch.bfloat16, 64, True, "softcap"),
    ],
)
def test_what_flash_attention_lacks_is_known_beforehand(dtype, head_dim, softcap, reason):
    why = CudaAttention.why_not(BlockShape(2, 16, 2, head_dim, dtype), softcap)
    assert why is not None
    assert reason in why
