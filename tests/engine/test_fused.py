"""What is fused computes the same as transformers' modules; what is not the same is left alone."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine import cpu_model, fused
from engine.fused import FusedRMSNorm, FusedSwiGLU, fused_norm, fused_rotary, fused_swiglu
from engine.kernels import load_kernels
from engine.linear import PackedLinear

BF16 = torch.bfloat16
FAMILIES = ["llama", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    assert load_kernels()


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return module.to(BF16).eval().requires_grad_(False)


@pytest.mark.parametrize("size", [1, 7, 16, 48, 576])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, Qwen3RMSNorm])
def test_norms_of_every_form(kind, size):
    norm = randomised(kind(size))
    norm.weight.data += 0.5
    replacement = fused_norm(norm)
    assert replacement is not None
    x = torch.randn(2, 9, 3, size).to(BF16)
    for view in (x, x.transpose(1, 2), x[:, :, 1]):
        got, wanted = replacement(view), norm(view)
        assert (got == wanted).float().mean() > 0.9  # sums in another order tip a rounding, rarely
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0)


def test_a_norm_that_computes_something_else_stays():
    class ClampedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states).clamp(-0.1, 0.1)

    class GatedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states, gate=None):
            return super().forward(hidden_states if gate is None else hidden_states * gate)

    class MisplacedEpsilonRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            x = hidden_states.float()
            return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)).to(
                BF16
            )

    for kind in (ClampedRMSNorm, GatedRMSNorm, MisplacedEpsilonRMSNorm, torch.nn.LayerNorm):
        assert fused_norm(randomised(kind(32))) is None, kind
    assert fused_norm(LlamaRMSNorm(32)) is None  # float32


def mlp(config_of, family="llama", kind=LlamaMLP, **changes) -> torch.nn.Module:
    config = config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return randomised(kind(config))


def test_a_feed_forward_layer_with_silu(config_of):
    layer = mlp(config_of, hidden_size=80, intermediate_size=130)
    replacement = fused_swiglu(layer)
    assert replacement is not None
    for num_rows in (1, 5, 40):
        x = torch.randn(1, num_rows, 80).to(BF16)
        exact = layer.float()(x.float())
        plain = layer.to(BF16)(x).float()
        error, plain_error = (replacement(x).float() - exact).norm(), (plain - exact).norm()
        assert error <= 1.2 * plain_error + 1e-6


def test_extreme_activations_neither_overflow_nor_vanish(config_of):
    layer = mlp(config_of, hidden_size=32, intermediate_size=32)
    for linear in (layer.gate_proj, layer.up_proj, layer.down_proj):
        linear.weight.data = torch.eye(32, dtype=BF16)
    replacement = fused_swiglu(layer)
    x = torch.tensor([0, 1, -1, 80, -80, 90, -90, 200, -200, 1e4, -1e4, 1e18, -1e18], dtype=BF16)
    x = functional.pad(x, (0, 19))[None]
    torch.testing.assert_close(replacement(x), layer(x), rtol=2**-7, atol=1e-30)
    assert replacement(torch.full((1, 32), torch.nan, dtype=BF16)).isnan().all()


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("gemma2", Gemma2MLP, {}),
        ("llama", LlamaMLP, {"mlp_bias": True}),
        ("llama", LlamaMLP, {"hidden_act": "relu"}),
    ],
)
def test_other_feed_forward_layers_stay(config_of, family, kind, changes):
    assert fused_swiglu(mlp(config_of, family, kind, **changes)) is None


def test_a_limit_on_activations_is_noticed(config_of):
    class LimitedMLP(LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))

    assert fused_swiglu(mlp(config_of, kind=LimitedMLP)) is None


@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 128])
def test_rotary_is_the_same_bit_for_bit(head_dim):
    query = torch.randn(1, 7, 5, head_dim).to(BF16).transpose(1, 2)
    key = torch.randn(1, 7, 2, head_dim).to(BF16).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 7, head_dim).to(BF16)
    for got, wanted in zip(
        torch.ops.kvferry.rotary.default(query, key, cos, sin),
        apply_rotary_pos_emb(query, key, cos, sin),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_arguments_that_the_kernel_does_not_take_go_to_the_original():
    rotate = fused_rotary(apply_rotary_pos_emb)
    query, key = torch.randn(2, 2, 3, 4, 8)
    cos, sin = torch.randn(2, 2, 4, 8)
    for dtype in (torch.float32, BF16):
        arguments = [x.to(dtype) for x in (query, key, cos, sin)]
        for got, wanted in zip(rotate(*arguments), apply_rotary_pos_emb(*arguments), strict=True):
            assert torch.equal(got, wanted)
    named = [x[:1].to(BF16) for x in (query.transpose(1, 2), key.transpose(1, 2), cos, sin)]
    got = rotate(*named, unsqueeze_dim=2)
    assert torch.equal(got[0], apply_rotary_pos_emb(*named, unsqueeze_dim=2)[0])


def test_another_models_rotary_stays(monkeypatch):
    def interleaved(q, k, cos, sin):
        return q * cos.unsqueeze(1), k * cos.unsqueeze(1)

    monkeypatch.setitem(LlamaAttention.forward.__wrapped__.__globals__, "apply_rotary_pos_emb", interleaved)
    assert fused.forward_with_fused_rotary(LlamaAttention) is None


def load(config_of, family: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_compute_the_same(config_of, family):
    exact = load(config_of, family, torch.float32)
    model, plain = load(config_of, family, BF16), load(config_of, family, BF16)
    # The one that both are roundings of.
    exact.load_state_dict({name: value.float() for name, value in plain.state_dict().items()})
    cpu_model.use_kernels(model)
    kinds = {type(module) for module in model.modules()}
    assert {PackedLinear, FusedRMSNorm} <= kinds
    assert (FusedSwiGLU in kinds) == (not family.startswith("gemma"))
    rotary = torch.ops.kvferry.rotary.default
    tokens = torch.randint(97, (1, 30))
    with torch.inference_mode(), torch.profiler.profile() as profile:
        wanted, got, true = (m(input_ids=tokens).logits.float() for m in (plain, model, exact))
    assert sum(event.count for event in profile.key_averages() if event.key == rotary.name()) == 3
    assert (got - true).norm() <= 1.2 * (wanted - true).norm()


def test_a_second_call_changes_nothing_and_others_are_not_touched(config_of):
    forward = LlamaAttention.forward
    model = load(config_of, "llama", BF16)
    cpu_model.use_kernels(model)
    before = list(model.modules())
    cpu_model.use_kernels(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert LlamaAttention.forward is forward
    other = load(config_of, "llama", BF16)
    assert "forward" not in vars(other.model.layers[0].self_attn)


def test_without_kernels_a_model_stays(config_of, monkeypatch):
    monkeypatch.setattr(cpu_model, "load_kernels", lambda: False)
    model = load(config_of, "llama", BF16)
    before = list(model.modules())
    cpu_model.use_kernels(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
