"""Loading: what is refused, and that it is refused by name and with the reason."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import probe
from engine.attention import NAME
from engine.model import choose_device, load_model
from engine.refusal import UnsupportedModel
from engine.torch_attention import TorchAttention
from engine.torch_engine import TorchEngine
from kvferry.config import EngineConfig

CONFIG = EngineConfig(device="cpu", num_blocks=8, num_threads=1)
SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_theta": 10000.0, "factor": 2.0}


def write_config(folder, kind, **fields):
    """A folder with a configuration only: what is refused by it must be refused before weights are read."""
    config = getattr(transformers, kind)(**{**SMALL, **fields})
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("MambaConfig", {}, "recurrent layers"),
        ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "recurrent layers"),
        ("JambaConfig", {}, "recurrent layers"),
        ("FalconH1Config", {}, "recurrent layers"),
        ("RecurrentGemmaConfig", {}, "recurrent layers"),
        ("Qwen3NextConfig", {}, "recurrent layers"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("T5Config", {}, "encoder-decoder"),
        ("BartConfig", {}, "encoder-decoder"),
        ("Gemma3Config", {}, "multimodal"),
        ("DistilBertConfig", {}, "no causal language model"),
        ("DeepseekV3Config", {}, "latent attention"),
        ("BloomConfig", {}, "attention interface"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", **ROPE}},
            "rotary embedding is of type dynamic",
        ),
        (
            "Gemma3TextConfig",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "dynamic", **ROPE},
                },
            },
            "rotary embedding is of type dynamic",
        ),
        (
            "Qwen2Config",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layers of type chunked_attention",
        ),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_its_weights_are_read(
    tmp_path, kind, fields, reason
):
    folder = write_config(tmp_path, kind, **fields)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(CONFIG, folder)


def test_a_refusal_names_the_model(tmp_path, save_model, config_of):
    folder = save_model(config_of("llama"), tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", **ROPE}
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM cannot be served"):
        load_model(CONFIG, folder)


def test_attention_sinks_are_refused_when_the_model_is_tried(tmp_path, save_model):
    config = transformers.GptOssConfig(
        **SMALL,
        intermediate_size=16,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"],
    )
    with pytest.raises(UnsupportedModel, match=r"GptOssForCausalLM cannot be served: .* needs s_aux"):
        TorchEngine.load(CONFIG, save_model(config, tmp_path))


@pytest.fixture
def llama(tmp_path, save_model, config_of):
    """A model to break, loaded."""
    return load_model(CONFIG, save_model(config_of("llama"), tmp_path)).model


def try_out(model):
    shape, _ = probe.measure(model, block_size=4)
    probe.check(model, TorchAttention(), shape)


def test_the_model_that_is_broken_below_is_fine_before(llama):
    try_out(llama)


def test_a_layer_that_bypasses_our_attention_is_refused(llama):
    other = LlamaConfig(**llama.config.to_diff_dict())
    other._attn_implementation = "eager"
    llama.model.layers[1].self_attn.config = other
    with pytest.raises(UnsupportedModel, match=r"of its 3 layers \[0, 2\]"):
        try_out(llama)


def test_state_that_is_not_in_the_kv_cache_is_refused(llama):
    """A convolution over neighbouring tokens, as in hybrid models."""

    class Mixing(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, hidden):
            return self.mlp(hidden) + hidden.roll(1, dims=1)

    llama.model.layers[0].mlp = Mixing(llama.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match="its logits differ"):
        try_out(llama)


def test_positions_that_depend_on_the_batch_are_refused(llama):
    rotary = llama.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids * x.shape[1])
    with pytest.raises(UnsupportedModel, match="its logits differ"):
        try_out(llama)


def test_attention_that_we_compute_differently_is_refused(llama):
    """Here as if we had ignored the layer's own scale."""

    class Scaled(TorchAttention):
        def attend(self, *arguments, scale, **others):
            return super().attend(*arguments, scale=2 * scale, **others)

    shape, _ = probe.measure(llama, block_size=4)
    with pytest.raises(UnsupportedModel, match="packed with another sequence its logits differ"):
        probe.check(llama, Scaled(), shape)


def test_a_window_that_attention_is_not_told_of_is_refused(tmp_path, save_model, config_of):
    model = load_model(CONFIG, save_model(config_of("mistral"), tmp_path)).model
    try_out(model)
    model.config.layer_types = ["full_attention"] * 3
    with pytest.raises(UnsupportedModel, match="sliding window"):
        probe.measure(model, block_size=4)


def test_layers_of_different_shapes_are_refused(llama):
    attention = llama.model.layers[2].self_attn
    attention.k_proj = torch.nn.Linear(48, 24, bias=False)
    attention.v_proj = torch.nn.Linear(48, 24, bias=False)
    with pytest.raises(UnsupportedModel, match="differ in their number or size of key heads"):
        probe.measure(llama, block_size=4)


def test_after_its_trial_a_model_uses_our_attention(llama):
    try_out(llama)
    assert llama.config._attn_implementation == NAME


def test_missing_weights_are_refused(tmp_path, save_model, config_of):
    folder = save_model(config_of("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .*layers\.1\.self_attn\.k_proj"):
        load_model(CONFIG, folder)


def test_pickled_weights_are_never_read(tmp_path, save_model, config_of):
    folder = save_model(config_of("llama"), tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load_model(CONFIG, folder)


def test_code_that_comes_with_a_model_does_not_run_unasked(tmp_path, save_model, config_of):
    folder = save_model(config_of("llama"), tmp_path)
    (folder / "other.py").write_text("raise SystemExit('ran')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "other",
        "auto_map": {"AutoConfig": "other.C", "AutoModelForCausalLM": "other.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="trust_remote_code"):
        load_model(CONFIG, folder)


@pytest.mark.parametrize(
    ("stated", "expected"), [(5, {5}), ([5, 7], {5, 7}), (None, set()), ([], set())], ids=str
)
def test_end_tokens_come_from_the_generation_settings(tmp_path, save_model, config_of, stated, expected):
    folder = save_model(config_of("llama"), tmp_path, eos_token_id=stated)
    assert load_model(CONFIG, folder).info.eos_token_ids == expected


def test_end_tokens_come_from_the_configuration_where_nothing_else_says(tmp_path, save_model, config_of):
    config = config_of("llama")
    config.eos_token_id = 9
    folder = save_model(config, tmp_path)
    (folder / "generation_config.json").unlink()
    assert load_model(CONFIG, folder).info.eos_token_ids == {9}


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for_and_by_default_the_files(tmp_path, config_of, dtype):
    AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.float16).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = load_model(CONFIG.model_copy(update={"dtype": dtype}), tmp_path).model
    assert model.dtype == getattr(torch, "float16" if dtype == "auto" else dtype)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_that_is_not_there_is_an_error_and_not_a_slow_start():
    assert choose_device(EngineConfig()).type == "cpu"
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device(EngineConfig(device="cuda"))
