"""The engine as workers use it. That its tokens are right is in `test_families.py`."""

import random
import threading

import pytest
import torch

from engine.engine import Chunk, OutOfMemory
from engine.loading import load_engine
from engine.torch_engine import TorchEngine
from kvferry.config import EngineConfig
from kvferry.models import demo_model_dir
from kvferry.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine(model_folder):
    config = EngineConfig(device="cpu", block_size=4, num_blocks=32, num_threads=1)
    return TorchEngine.load(config, model_folder("llama"))


def chunk(tokens, table, start=0, sampling=GREEDY):
    return Chunk(tokens, start, len(tokens), table, len(tokens), sampling)


def test_it_is_what_load_engine_makes(model_folder, engine):
    config = EngineConfig(device="cpu", num_blocks=3, block_size=8, num_threads=1)
    other = load_engine(config, model_folder("llama"), "prefill")
    assert other.info == engine.info
    assert other.info.vocab_size == 97
    assert other.info.max_context_tokens == 1024
    assert tuple(other.cache.blocks.shape) == (3, 3, 2, 8, 2, 8)


def test_results_stand_in_the_order_of_the_chunks(engine):
    long, short = list(range(1, 20)), [5, 6, 7]
    alone = [
        engine.step([chunk(long, [0, 1, 2, 3, 4])])[0],
        engine.step([chunk(short, [9])])[0],
    ]
    middle = chunk(list(range(30, 38)), [5, 6], sampling=None)
    assert engine.step([chunk(long, [0, 1, 2, 3, 4]), middle, chunk(short, [9])]) == [
        alone[0],
        None,
        alone[1],
    ]


def test_a_step_without_anything_to_sample_only_fills_the_cache(engine):
    engine.cache.blocks.zero_()
    assert engine.step([chunk([1, 2, 3, 4, 5], [3, 8], sampling=None)]) == [None]
    used = engine.cache.blocks.abs().sum(dim=(1, 2, 4, 5)) > 0
    assert used[3].all()
    assert used[8].tolist() == [True, False, False, False]
    assert used.sum() == 5


def test_an_empty_step_is_no_work(engine):
    assert engine.step([]) == []


def test_a_sequence_goes_on_from_another_engines_blocks(model_folder, engine):
    """The handoff: block bytes copied into other places of another cache."""
    config = EngineConfig(device="cpu", block_size=4, num_blocks=16, num_threads=1)
    other = TorchEngine.load(config, model_folder("llama"))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    [first] = engine.step([chunk(tokens, [7, 2, 11])])
    for here, there in ((7, 1), (2, 15), (11, 0)):
        other.cache.write_block(there, engine.cache.read_block(here))
    tokens = [*tokens, first.token_id]
    wanted = engine.step([chunk(tokens, [7, 2, 11], start=9)])
    assert other.step([chunk(tokens, [1, 15, 0], start=9)]) == wanted


def test_it_steps_in_a_thread_of_its_own(engine):
    """A worker's loop runs in another thread than the one that loaded the model."""
    tokens, results = [1, 2, 3], []
    wanted = engine.step([chunk(tokens, [0])])

    def run():
        results.append(engine.step([chunk(tokens, [0])]))
        results.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results == [wanted, 1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_for_a_step_is_told_as_such(engine, monkeypatch, error):
    def fail(**arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_model", fail)
        with pytest.raises(OutOfMemory):
            engine.step([chunk([1, 2], [0])])
    assert engine.step([chunk([1, 2], [0])])[0] is not None


def test_a_real_failure_to_allocate_is_told_as_such(engine, monkeypatch):
    def allocate(**arguments):
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(engine, "_model", allocate)
    with pytest.raises(OutOfMemory, match="2\\^60|1152921504606846976|allocate"):
        engine.step([chunk([1, 2], [0])])


def test_other_faults_stay_what_they_are(engine, monkeypatch):
    def fail(**arguments):
        raise RuntimeError("a fault")

    monkeypatch.setattr(engine, "_model", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        engine.step([chunk([1, 2], [0])])


def test_the_trial_at_start_up_leaves_the_cache_untouched(model_folder):
    config = EngineConfig(device="cpu", block_size=4, num_blocks=8, num_threads=1)
    assert not TorchEngine.load(config, model_folder("llama")).cache.blocks.any()


@pytest.mark.slow
@pytest.mark.skipif(not demo_model_dir().is_dir(), reason="the demo model is not here: kvferry model pull")
def test_the_demo_model_in_bfloat16_differs_from_transformers_only_at_near_ties():
    """Both sides round to 8 bits, in other places: where the top two are closer, either is right."""
    from transformers import AutoModelForCausalLM

    config = EngineConfig(device="cpu", num_blocks=64, num_threads=1)
    engine = TorchEngine.load(config, demo_model_dir())
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.bfloat16)
    assert engine.cache.shape.dtype == torch.bfloat16
    rng, near_ties, compared = random.Random(1), 0, 0
    for length, chunk_size in ((5, 5), (33, 16), (90, 40)):
        tokens = [rng.randrange(1000, 40000) for _ in range(length)]
        table = rng.sample(range(64), 16)
        end = 0
        while len(tokens) < length + 12:
            start, end = end, min(len(tokens), end + chunk_size)
            last = end == len(tokens)
            sampling = GREEDY if last else None
            [token] = engine.step([Chunk(tokens, start, end, table, length, sampling)])
            if token is None:
                continue
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float()
            margin = (logits.max() - logits[token.token_id]).item()
            assert margin <= 0.04 * logits.abs().max().item()
            near_ties += margin > 0
            compared += 1
            tokens.append(int(logits.argmax()))
    assert compared == 36
    assert near_ties <= 6
