"""A fused layer computes exactly what the layer's own modules do; what is not of that form is left alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import NAME, PagedStep, compute_logits, register
from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.cpu_attention import CpuAttention
from engine.cpu_model import use_kernels
from engine.engine import Chunk
from engine.kernels import load_kernels
from engine.layer import FusedLayer, FusedLayers, fused_layer
from engine.torch_attention import TorchAttention
from kvferry.sampling import SamplingParams

BF16, CPU = torch.bfloat16, torch.device("cpu")
FUSED = ["llama", "llama-yarn", "qwen2", "mistral"]


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    register()
    assert load_kernels()


def model_of(config, with_kernels=True):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation=NAME)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.eval().requires_grad_(False)
    if with_kernels:
        use_kernels(model)
    return model


def layers_of(model):
    return list(model.model.layers)


def chunks_of(lengths):
    tables = iter(torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist())
    return [
        Chunk(
            [(7 * i + end) % 97 for i in range(end)],
            end - count,
            end,
            [next(tables) for _ in range(-(-end // 4))],
            end,
            SamplingParams(),
        )
        for end, count in lengths
    ]


@torch.inference_mode()
def run(model, lengths, backend):
    attention = layers_of(model)[0]
    attention = getattr(attention, "original", attention).self_attn
    config = model.config
    shape = BlockShape(config.num_hidden_layers, 4, config.num_key_value_heads, attention.head_dim, BF16)
    cache = KVCache(shape, 40, CPU)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(4)))
    batch = Batch.pack(chunks_of(lengths), 4, CPU)
    step = PagedStep(cache, backend, batch)
    return compute_logits(model, batch, step), cache.blocks, step.layers


@pytest.mark.parametrize("lengths", [[(1, 1)], [(9, 9)], [(30, 30), (21, 1), (5, 3), (17, 1)]], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_whole_layers_compute_exactly_what_their_modules_do(config_of, family, lengths):
    model = model_of(config_of(family))
    layers = layers_of(model)
    assert all(type(layer) is FusedLayer for layer in layers)
    logits, blocks, attended = run(model, lengths, CpuAttention())
    model.model.layers = torch.nn.ModuleList([layer.original for layer in layers])
    wanted, wanted_blocks, _ = run(model, lengths, CpuAttention())
    assert torch.equal(logits, wanted)
    assert torch.equal(blocks, wanted_blocks)
    assert attended == [0, 1, 2]


@torch.inference_mode()
def test_every_part_of_a_layer_matters(config_of):
    """Or the comparison above compares nothing."""
    model = model_of(config_of("qwen2"))
    lengths = [(12, 12), (9, 1)]
    wanted, _, _ = run(model, lengths, CpuAttention())
    layer = layers_of(model)[1]
    for tensors in (layer._weights, layer._biases):
        for tensor in tensors:
            if tensor is None:
                continue
            kept = tensor.clone()
            tensor.zero_()
            assert not torch.equal(run(model, lengths, CpuAttention())[0], wanted)
            tensor.copy_(kept)
    assert torch.equal(run(model, lengths, CpuAttention())[0], wanted)


def test_with_other_attention_the_layers_own_modules_compute(config_of):
    model = model_of(config_of("llama"))
    lengths = [(9, 9), (14, 1)]
    logits, _, attended = run(model, lengths, TorchAttention())
    wanted, _, _ = run(model, lengths, CpuAttention())
    assert attended == [0, 1, 2]
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_layers_of_another_form_stay(config_of, family):
    assert not any(type(layer) is FusedLayer for layer in layers_of(model_of(config_of(family))))


def test_a_layer_that_does_more_stays(config_of):
    layer = layers_of(model_of(config_of("llama")))[1].original
    assert fused_layer(layer) is not None
    forward = type(layer).forward

    class Scaled(type(layer)):
        def forward(self, hidden_states, **others):
            return forward(self, hidden_states, **others) * 1.01

    class Pair(type(layer)):
        def forward(self, hidden_states, **others):
            return forward(self, hidden_states, **others), None

    for kind in (Scaled, Pair):
        layer.__class__ = kind
        assert fused_layer(layer) is None


def test_a_slice_of_all_layers_is_the_list_itself():
    layers = FusedLayers([torch.nn.Identity() for _ in range(3)])
    assert layers[:3] is layers
    assert layers[:] is layers
    assert len(layers[:2]) == 2
    assert layers[-1] is list(layers)[2]
