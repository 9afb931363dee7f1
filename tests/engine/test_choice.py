"""The kernel that chooses tokens against the same in torch, at the sizes of real vocabularies."""

import pytest
import torch

from engine.choice import KernelChoice, TorchChoice
from engine.kernels import load_kernels
from kvferry.sampling import SamplingParams

VOCAB_SIZES = [1, 127, 128, 129, 49152, 151936]


@pytest.fixture(scope="module")
def kernel():
    torch.set_num_threads(1)
    if not load_kernels():
        pytest.skip("no C++ compiler")
    return KernelChoice()


def both(kernel, rows, params):
    positions = list(range(100, 100 + len(rows)))
    vocab_size = rows[0].shape[0]
    return kernel.choose(rows, params, positions), TorchChoice(vocab_size).choose(rows, params, positions)


def mixed(num_rows):
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 3000, "top_p": 0.95},
        {"min_p": 0.05},
        {"temperature": 2, "top_k": 20, "top_p": 0.5, "min_p": 0.01},
    ]
    return [SamplingParams.model_validate({**kinds[i % len(kinds)], "seed": i}) for i in range(num_rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_both_choose_the_same_tokens(kernel, vocab_size, scale, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    rows = list((scale * torch.randn(28, vocab_size, generator=generator)).to(dtype))
    chosen, wanted = both(kernel, rows, mixed(len(rows)))
    # Sums in another order may move a boundary onto the random number, once in a great while.
    assert sum(a != b for a, b in zip(chosen, wanted, strict=True)) <= 1


def test_rows_of_different_types_share_a_batch(kernel):
    rows = [row.to(dtype) for row in torch.randn(4, 500) for dtype in (torch.float32, torch.bfloat16)]
    chosen, wanted = both(kernel, rows, mixed(len(rows)))
    assert chosen == wanted


def test_threads_change_nothing(kernel):
    rows = list(torch.randn(9, 5000))
    alone = kernel.choose(rows, mixed(9), range(9))
    torch.set_num_threads(2)
    try:
        assert kernel.choose(rows, mixed(9), range(9)) == alone
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("place", [0, 130, 999])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_yields_nothing_and_the_others_their_tokens(kernel, broken, place):
    rows = list(torch.randn(7, 1000))
    rows[3][place] = broken
    rows[4][:] = -torch.inf
    chosen, wanted = both(kernel, rows, mixed(7))
    assert chosen == wanted
    assert [token is None for token in chosen] == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-4, 2.0])
def test_any_temperature_has_a_distribution(kernel, temperature):
    params = [SamplingParams(temperature=temperature, seed=seed, top_p=0.9) for seed in range(50)]
    rows = list(torch.randn(50, 300))
    chosen, wanted = both(kernel, rows, params)
    assert chosen == wanted


def test_what_is_no_row_of_logits_is_refused(kernel):
    choose = torch.ops.kvferry.choose.default
    table = torch.zeros(1, 5, dtype=torch.float64)
    for row in (torch.zeros(0), torch.zeros(2, 3), torch.zeros(8)[::2], torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            choose([row], table)
    with pytest.raises(RuntimeError):
        choose([torch.zeros(3)], torch.zeros(2, 5, dtype=torch.float64))
