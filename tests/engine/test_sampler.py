"""The sampler against a plain reference: float64, one row at a time, everything sorted."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.choice import KernelChoice, TorchChoice, invert
from engine.engine import Chunk
from engine.kernels import load_kernels
from engine.random_numbers import scramble, uniform
from engine.sampler import Sampler
from engine.truncation import weigh
from kvferry.sampling import SamplingParams

EOS = frozenset({2, 7})
# The share of a row's mass by which rounding may move a boundary.
ROUNDING = 2e-5


class Choosing:
    """Which of the two ways the tests go through."""

    kernel = False

    @classmethod
    def sampler(cls, vocab_size, eos=EOS):
        return Sampler(vocab_size, eos, KernelChoice() if cls.kernel else TorchChoice(vocab_size))


@pytest.fixture(autouse=True, scope="module", params=["torch", "kernel"])
def _choosing(request):
    torch.set_num_threads(1)
    Choosing.kernel = request.param == "kernel"
    if Choosing.kernel and not load_kernels():
        pytest.skip("no C++ compiler")


def chunk(sampling, output=(), prompt=(1, 2, 3)):
    tokens = [*prompt, *output]
    return Chunk(tokens, len(tokens) - 1, len(tokens), [0], len(prompt), sampling)


def params(**fields):
    return SamplingParams(**{"seed": 1, **fields})


def random_logits(num_rows, vocab_size, seed=0, scale=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype)


def sample_ids(logits, chunks, eos=EOS, vocab_size=None):
    return [s.token_id for s in Choosing.sampler(vocab_size or logits.shape[1], eos).sample(logits, chunks)]


class Reference:
    """One row: the logits after step 2, and the distribution after step 4 of the sampler's docstring."""

    def __init__(self, logits, a_chunk, eos=EOS):
        p = a_chunk.sampling
        values = logits.double().numpy().copy()
        output = a_chunk.tokens[a_chunk.num_prompt_tokens :]
        for token, bias in p.logit_bias.items():
            values[token] += bias
        for token in set(a_chunk.tokens):
            values[token] *= p.repetition_penalty if values[token] < 0 else 1 / p.repetition_penalty
        for token, count in Counter(output).items():
            values[token] -= p.presence_penalty + count * p.frequency_penalty
        if len(output) < p.min_tokens:
            for token in set(p.stop_token_ids) | (set() if p.ignore_eos else eos):
                values[token] = -np.inf
        self.values = values
        self.params = p

    def probabilities(self):
        """The distribution, and whether a cut lies so near a boundary that rounding may move it."""
        p = self.params
        mass = np.exp((self.values - self.values.max()) / p.temperature)
        order = np.lexsort((np.arange(mass.size), -self.values))
        num = min(p.top_k or mass.size, mass.size)
        is_close = num < mass.size and 0 < self.values[order[num - 1]] - self.values[order[num]] < 1e-5
        running = np.cumsum(mass[order[:num]]) / mass[order[:num]].sum()
        if p.top_p < 1:
            num = int((running < p.top_p).sum()) + 1
            is_close |= bool(np.abs(running - p.top_p).min() < ROUNDING)
        kept = order[:num]
        if p.min_p:
            is_close |= bool((np.abs(mass[kept] / p.min_p - 1) < 1e-4).any()) and p.min_p < 1
            kept = kept[mass[kept] >= p.min_p * (1 - 1e-9)]
        result = np.zeros_like(mass)
        result[kept] = mass[kept]
        return result / result.sum(), is_close

    def check(self, token, position):
        """Whether `token` is the right one, allowing for rounding at the boundaries."""
        if self.params.temperature == 0:
            best = self.values.max()
            assert self.values[token] >= best - 1e-5
            # Exact wherever float32 can tell the values apart, and of equal ones the lowest id.
            if np.sort(self.values)[-2] < best - 1e-5:
                assert token == int(np.argmax(self.values))
            return
        probabilities, is_close = self.probabilities()
        if is_close:
            return
        assert probabilities[token] > 0
        above = np.cumsum(probabilities)
        drawn = uniform(self.params.seed, position)
        assert above[token] - probabilities[token] - ROUNDING <= drawn <= above[token] + ROUNDING


def assert_matches_reference(logits, chunks):
    for row, token in enumerate(sample_ids(logits, chunks)):
        Reference(logits[row].float(), chunks[row]).check(token, chunks[row].end)


OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.3},
    {"temperature": 1},
    {"temperature": 2},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 900},
    {"top_k": 5000},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.02},
    {"min_p": 1},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.001},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"logit_bias": {3: 5, 400: -100}},
    {"min_tokens": 50},
    {"min_tokens": 50, "stop_token_ids": [5, 6], "ignore_eos": True},
]


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_each_option_alone_does_what_the_reference_does(fields, scale):
    logits = random_logits(40, 3001, seed=len(str(fields)), scale=scale)
    chunks = [chunk(params(**{**fields, "seed": row}), output=[5, 9, 9, row]) for row in range(40)]
    assert_matches_reference(logits, chunks)


@st.composite
def sampling_params(draw, vocab_size):
    tokens = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.01, 0.5, 1, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 10, 70, 200, 10**6])),
        top_p=draw(st.sampled_from([1, 1, 0.001, 0.3, 0.9, 0.99])),
        min_p=draw(st.sampled_from([0, 0, 0.01, 0.5, 1])),
        repetition_penalty=draw(st.sampled_from([1, 1, 0.5, 1.3])),
        presence_penalty=draw(st.sampled_from([0, 0, -2, 0.7])),
        frequency_penalty=draw(st.sampled_from([0, 0, -2, 0.7])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(st.lists(tokens, max_size=2)),
        min_tokens=draw(st.sampled_from([0, 0, 2, 9])),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def batches(draw):
    vocab_size = draw(st.sampled_from([9, 128, 1000, 2500]))
    num_rows = draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    logits = random_logits(num_rows, vocab_size, draw(st.integers(0, 1000)), scale, dtype)
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    chunks = [
        chunk(draw(sampling_params(vocab_size)), output=draw(tokens), prompt=[*draw(tokens), 1])
        for _ in range(num_rows)
    ]
    return logits, chunks


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_mixed_options_in_one_batch_do_what_the_reference_does(batch):
    assert_matches_reference(*batch)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_a_row_draws_the_same_token_alone_and_among_others(batch):
    logits, chunks = batch
    together = sample_ids(logits, chunks)
    alone = [sample_ids(logits[i : i + 1], chunks[i : i + 1])[0] for i in range(len(chunks))]
    backwards = sample_ids(logits.flip(0), chunks[::-1])[::-1]
    # Rounding might differ, but would have to meet a boundary within a millionth of the mass.
    assert together == alone == backwards


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"logit_bias": {4: 2}}],
    ids=str,
)
def test_over_many_positions_tokens_come_as_often_as_they_should(fields):
    num_draws = 4000
    logits = random_logits(1, 12, seed=5, scale=1.0)
    a_chunk = chunk(params(**fields))
    expected, _ = Reference(logits[0], a_chunk).probabilities()
    chunks = [
        Chunk([1] * end, end - 1, end, [0], end, params(**fields, seed=99)) for end in range(1, num_draws + 1)
    ]
    counts = np.zeros(12)
    for start in range(0, num_draws, 500):
        ids = sample_ids(logits.expand(500, -1), chunks[start : start + 500])
        counts += np.bincount(ids, minlength=12)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - num_draws * expected)[possible] ** 2 / (num_draws * expected[possible])).sum()
    freedom = max(possible.sum() - 1, 1)
    # Five standard deviations above the mean of a chi-square variable.
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_over_many_seeds_tokens_come_as_often_as_they_should():
    chunks = [chunk(params(seed=seed)) for seed in range(4000)]
    counts = np.bincount(sample_ids(torch.zeros(4000, 8), chunks), minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 7 + 5 * math.sqrt(14)


def test_random_numbers_are_splitmix64():
    step = 0x9E3779B97F4A7C15
    # The first outputs of its author's own program for the seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [scramble((1234567 + n * step) % 2**64) for n in (1, 2, 3)] == published
    # And for the seed 0. A change of this function changes every seeded result of every user.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [uniform(0, p) for p in range(3)] == [(number >> 11) / 2**53 for number in published]
    # No seed is another one moved along.
    assert uniform(step, 0) != uniform(0, 1)
    assert all(0 <= uniform(seed, p) < 1 for seed in (0, 1, 2**64 - 1) for p in (0, 1, 2**31))


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 50_000)
    first = sample_ids(logits, [chunk(params(seed=5), output=[9, 9])])
    assert first == sample_ids(logits, [chunk(params(seed=5), prompt=[4, 4, 4, 4, 4])])
    assert first != sample_ids(logits, [chunk(params(seed=6), output=[9, 9])])
    assert first != sample_ids(logits, [chunk(params(seed=5), output=[9, 9, 9])])


def test_greedy_takes_the_lowest_of_equal_ids_and_needs_no_seed():
    logits = torch.zeros(3, 1000)
    logits[0, [999, 500, 130]] = 1
    logits[1, 0] = -1
    chunks = [chunk(SamplingParams(temperature=0))] * 3
    assert sample_ids(logits, chunks) == [130, 1, 0]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}], ids=str)
def test_the_narrowest_truncation_is_greedy(fields):
    logits = random_logits(20, 500, dtype=torch.bfloat16)
    logits[:, [400, 300]] = 50
    chunks = [chunk(params(**fields, seed=seed)) for seed in range(20)]
    expected = 300
    if "temperature" in fields:
        # Equal logits stay equally likely at any temperature.
        assert set(sample_ids(logits, chunks)) == {300, 400}
    else:
        assert sample_ids(logits, chunks) == [expected] * 20


def tokens_drawn(logits, **fields):
    chunks = [chunk(params(**fields, seed=seed)) for seed in range(300)]
    return set(sample_ids(logits[None].expand(300, -1), chunks))


def test_top_k_keeps_exactly_k_and_of_equal_tokens_the_lowest_ids():
    logits = torch.full((3000,), -1.0)
    logits[2000] = 1
    logits[[700, 2500, 90, 1500]] = 0
    assert tokens_drawn(logits, top_k=3) == {2000, 90, 700}
    # More equal ones than candidates are looked at.
    assert tokens_drawn(torch.zeros(9000), top_k=3) == {0, 1, 2}
    assert tokens_drawn(torch.zeros(9000), top_k=100, top_p=0.02) == {0, 1}


def test_top_p_is_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert tokens_drawn(logits, top_p=0.39) == {1}
    assert tokens_drawn(logits, top_p=0.41) == {1, 2}
    assert tokens_drawn(logits, top_p=0.69) == {1, 2}
    assert tokens_drawn(logits, top_p=0.89) == {1, 2, 3}
    # Of what top_k left: 4/7 and 3/7.
    assert tokens_drawn(logits, top_k=2, top_p=0.56) == {1}
    assert tokens_drawn(logits, top_k=2, top_p=0.58) == {1, 2}


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert tokens_drawn(logits, min_p=0.51) == {1, 2}
    assert tokens_drawn(logits, min_p=0.49) == {1, 2, 3}
    assert tokens_drawn(torch.tensor([3.0, 1.0, 3.0]), min_p=1) == {0, 2}


def test_penalties_change_the_tokens_they_are_for_and_no_others():
    logits = torch.tensor([1.0, 0.9, 0.8, -1.0, -1.0, -1.0, -1.0, -1.0])

    def best(output=(), prompt=(5,), **fields):
        return sample_ids(
            logits[None], [chunk(params(temperature=0, **fields), output, prompt)], frozenset()
        )[0]

    assert best() == 0
    assert best(prompt=[0], repetition_penalty=1.2) == 1
    assert best(prompt=[0], output=[1], repetition_penalty=1.3) == 2
    assert best(prompt=[0], presence_penalty=2) == 0
    assert best(output=[0], presence_penalty=0.15) == 1
    assert best(output=[0, 0], presence_penalty=0.05) == 0
    assert best(output=[0, 0], frequency_penalty=0.06) == 1
    # A negative logit is multiplied: further from being chosen.
    assert best(prompt=[0, 1, 2, 3], repetition_penalty=10, logit_bias={0: -9, 1: -9, 2: -9}) == 4
    assert best(prompt=[0], repetition_penalty=1e-300) == 0


def test_the_most_extreme_penalty_leaves_a_distribution():
    logits = torch.tensor([1.0, 2.0, 1.5, -1.0])
    chunks = [chunk(params(repetition_penalty=1e-300, seed=i), prompt=[0, 2]) for i in range(50)]
    assert set(sample_ids(logits.expand(50, -1), chunks)) == {0, 2}


def test_logit_bias_forces_and_forbids():
    logits = random_logits(1, 2000)
    best = int(logits.argmax())
    forced = params(temperature=1, logit_bias={1234: 100})
    assert sample_ids(logits, [chunk(forced)]) == [1234]
    forbidden = params(temperature=0, logit_bias={best: -100, 10**6: 100})
    logits_without = logits.clone()
    logits_without[0, best] = -1000
    assert sample_ids(logits, [chunk(forbidden)]) == [int(logits_without.argmax())]


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_end_token_comes_before_min_tokens(temperature):
    logits = torch.zeros(1, 10)
    logits[0, [2, 7, 5]] = torch.tensor([60.0, 50.0, 40.0])

    def token(num_output, **fields):
        fields = {"temperature": temperature, "min_tokens": 3, **fields}
        return sample_ids(logits, [chunk(params(**fields), output=[0] * num_output)])[0]

    assert [token(n) for n in range(5)] == [5, 5, 5, 2, 2]
    assert token(0, stop_token_ids=[5]) not in {2, 7, 5}
    assert token(0, ignore_eos=True) == 2
    assert token(0, ignore_eos=True, stop_token_ids=[2, 10**6]) == 7


def test_a_row_of_nothing_but_end_tokens_still_yields_one():
    everything = params(min_tokens=5, stop_token_ids=[0, 1])
    assert sample_ids(torch.zeros(1, 2), [chunk(everything)], frozenset({0}))[0] in {0, 1}


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(4, 3000, dtype=torch.bfloat16)
    expected = torch.log_softmax(logits.double(), -1)
    fields = {"logprobs": True, "logit_bias": {17: 100}, "temperature": 0.5, "repetition_penalty": 2}
    chunks = [
        chunk(params(**fields, top_logprobs=20)),
        chunk(params(temperature=0)),
        chunk(params(**fields, top_logprobs=0)),
        chunk(params(temperature=0, logprobs=True, top_logprobs=3)),
    ]
    forced, without, plain, greedy = Choosing.sampler(3000).sample(logits, chunks)
    assert (without.logprob, without.top_logprobs, plain.top_logprobs) == (None, (), ())
    assert forced.token_id == plain.token_id == 17
    assert forced.logprob == pytest.approx(expected[0, 17].item(), abs=1e-4)
    assert plain.logprob == pytest.approx(expected[2, 17].item(), abs=1e-4)
    assert greedy.top_logprobs[0] == (greedy.token_id, greedy.logprob)
    for row, sampled, num in ((0, forced, 20), (3, greedy, 3)):
        # bfloat16 makes many equal logits: these go by id.
        order = np.lexsort((np.arange(3000), -logits[row].double().numpy()))[:num]
        assert [i for i, _ in sampled.top_logprobs] == order.tolist()
        values = [value for _, value in sampled.top_logprobs]
        assert values == pytest.approx(expected[row, order].tolist(), abs=1e-4)


def test_more_alternatives_than_tokens_yield_all_tokens():
    asked = params(temperature=0, logprobs=True, top_logprobs=20)
    (sampled,) = Choosing.sampler(3).sample(torch.tensor([[1.0, 3.0, 2.0]]), [chunk(asked)])
    assert [i for i, _ in sampled.top_logprobs] == [1, 2, 0]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 3}], ids=str)
def test_rows_of_padding_beyond_the_vocabulary_are_never_chosen(fields):
    logits = torch.full((50, 140), 100.0)
    logits[:, :130] = 0
    chunks = [chunk(params(**fields, seed=seed)) for seed in range(50)]
    assert max(sample_ids(logits, chunks, vocab_size=130)) < 130


def test_it_works_inside_and_outside_of_inference_mode():
    sampler = Choosing.sampler(300)
    chunks = [chunk(params(top_k=2, logit_bias={5: 1}, logprobs=True, top_logprobs=2))]
    with torch.inference_mode():
        logits = random_logits(1, 300)
        first = sampler.sample(logits, chunks)
    assert sampler.sample(random_logits(1, 300).requires_grad_(), chunks) == first
    assert sampler.sample(logits, chunks) == first


def test_the_logits_are_not_changed():
    logits = random_logits(3, 128)
    before = logits.clone()
    penalised = params(logit_bias={1: 5}, repetition_penalty=2, top_k=3, min_tokens=9)
    sample_ids(logits, [chunk(penalised)] * 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_are_an_error_and_not_a_token(broken, temperature):
    logits = torch.zeros(3, 300)
    logits[1, 250] = broken
    chunks = [chunk(params(temperature=t)) for t in (1 - temperature, temperature, 0)]
    with pytest.raises(FloatingPointError, match="row 1"):
        sample_ids(logits, chunks)
    logits[1] = -math.inf
    with pytest.raises(FloatingPointError, match="row 1"):
        sample_ids(logits, chunks)


def test_a_token_that_the_model_forbids_is_never_drawn():
    logits = torch.zeros(200, 300)
    logits[:, 1:299] = -math.inf
    chunks = [chunk(params(seed=seed, temperature=2)) for seed in range(200)]
    assert set(sample_ids(logits, chunks)) == {0, 299}


def test_no_rounding_reaches_a_token_without_weight():
    weights = random_logits(2, 1024, scale=1.0).exp()
    weights[:, :200] = 0
    weights[:, 700:] = 0
    # The ends of what a random number can be; 1 is where rounding may put it.
    assert invert(weights, torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [200, 699]
    logits = torch.tensor([[0.0, -math.inf, -200.0, torch.finfo(torch.float32).min, -1.0]])
    assert (weigh(logits, torch.ones(1, dtype=torch.float64)) > 0).tolist() == [[True, *[False] * 3, True]]


def test_a_missing_seed_is_an_error_and_no_hidden_randomness():
    with pytest.raises(ValueError, match="seed"):
        sample_ids(torch.zeros(1, 5), [chunk(SamplingParams())])
    assert sample_ids(torch.zeros(0, 5), []) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_what_a_cpu_draws():
    logits = random_logits(len(OPTIONS), 3001, scale=2.0)
    chunks = [chunk(params(**{"seed": i, **fields}), output=[5]) for i, fields in enumerate(OPTIONS)]
    alone = Sampler(3001, EOS).sample(logits.cuda(), chunks)
    assert [sampled.token_id for sampled in alone] == sample_ids(logits, chunks)
