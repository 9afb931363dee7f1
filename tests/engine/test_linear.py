"""A packed linear layer computes what the plain one does, whatever its shape, and takes its place."""

import random

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engine.kernels import load_kernels
from engine.linear import MANY_ROWS, PackedLinear, swap_linears

# Of the largest partial sum: float32 adds up roundings, bfloat16 rounds once at the end.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    assert load_kernels()


def random_linear(num_inputs, num_outputs, dtype, *, bias=True, seed=0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(num_inputs, num_outputs, bias=bias).to(dtype).requires_grad_(False)


def assert_computes(packed: PackedLinear, linear: torch.nn.Linear, x: torch.Tensor) -> None:
    exact = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        exact += linear.bias.double()
    out = packed(x)
    assert out.shape == exact.shape
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[x.dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(40))
def test_any_shape_equals_float64(dtype, seed):
    rng = random.Random(seed)
    num_rows, num_inputs, num_outputs = rng.randint(1, 64), rng.randint(1, 600), rng.randint(1, 200)
    linear = random_linear(num_inputs, num_outputs, dtype, bias=seed % 2 == 0, seed=seed)
    assert_computes(PackedLinear(linear), linear, torch.randn(num_rows, num_inputs).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_of_rows_up_to_many(dtype):
    linear = random_linear(70, 33, dtype)
    packed = PackedLinear(linear)
    for num_rows in [*range(1, 33), 257]:
        assert_computes(packed, linear, torch.randn(num_rows, 70).to(dtype))


def test_more_rows_than_fit_the_cache():
    linear = random_linear(1024, 40, torch.bfloat16)
    assert_computes(PackedLinear(linear), linear, torch.randn(700, 1024).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_inputs_of_any_layout(dtype):
    linear = random_linear(48, 50, dtype)
    packed = PackedLinear(linear)
    x = torch.randn(3, 96, 5).to(dtype)
    for view in (x.transpose(1, 2)[..., :48], x[:, 40:88, 0], x[0, :48, 2], x[:, :48].movedim(1, -1)[:, :0]):
        assert_computes(packed, linear, view)


@pytest.mark.parametrize("num_rows", [1, 8, 100])
def test_threads_change_nothing(num_rows):
    packed = PackedLinear(random_linear(512, 1030, torch.bfloat16))
    x = torch.randn(num_rows, 512).to(torch.bfloat16)
    alone = packed(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(packed(x), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value):
    packed = PackedLinear(random_linear(32, 40, torch.bfloat16))
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[1, 5] = value
    finite = packed(x).isfinite()
    assert finite[0].all()
    assert not finite[1].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_weight_can_be_read_back(dtype):
    linear = random_linear(37, 71, dtype)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)


def test_a_kept_weight_serves_many_rows():
    linear = random_linear(64, 64, torch.bfloat16)
    packed = PackedLinear(linear, keep_weight=True)
    x = torch.randn(MANY_ROWS, 64).to(torch.bfloat16)
    assert torch.equal(packed(x), functional.linear(x, linear.weight, linear.bias))
    assert not packed.takes_kept_weight(x[1:])
    assert_computes(packed, linear, x[1:])


def test_what_was_packed_for_another_shape_is_refused():
    packed = PackedLinear(random_linear(64, 64, torch.bfloat16))
    for x in (
        torch.randn(2, 66).to(torch.bfloat16),
        torch.randn(2, 64),
        torch.randn(2, 64).to(torch.float16),
    ):
        with pytest.raises(RuntimeError, match="pack"):
            packed(x)


def test_the_operator_is_known_to_the_compiler():
    packed = PackedLinear(random_linear(64, 40, torch.bfloat16))
    arguments = (torch.randn(2, 3, 64).to(torch.bfloat16), packed.packed, packed.bias, 40)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kvferry.packed_linear.default, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_tied_head_is_swapped_and_the_embedding_stays(config_of, dtype):
    config = config_of("llama")
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    embedding, wanted = model.model.embed_tokens.weight.clone(), model(input_ids=tokens).logits
    assert swap_linears(model) == 3 * 7 + 1
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    got = model(input_ids=tokens).logits
    assert (got - wanted).norm() <= 4 * TOLERANCE[dtype] * wanted.norm()


def test_swapping_twice_and_sharing_pack_once():
    shared = random_linear(16, 16, torch.bfloat16)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(shared, torch.nn.ReLU()))
    assert swap_linears(model) == 1
    assert model[0] is model[1][0]
    assert swap_linears(model) == 0


def test_other_layers_stay():
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Special(8, 8), torch.nn.Linear(8, 8).half(), torch.nn.Linear(8, 8).double())
    kinds = [type(module) for module in model]
    assert swap_linears(model) == 0
    assert [type(module) for module in model] == kinds
