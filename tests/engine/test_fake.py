import json
import time

import pytest

from engine.engine import Chunk, OutOfMemory, SampledToken
from engine.fake import FakeEngine, expected_output
from kvferry.config import EngineConfig
from kvferry.sampling import SamplingParams

PROMPT = [5, 7, 2, 9, 4, 1]
GREEDY = SamplingParams(temperature=0)


def engine(role="prefill", **options):
    return FakeEngine(role, **{"num_blocks": 16, "block_size": 2, **options})


def ids(results):
    return [result and result.token_id for result in results]


def prefill(an_engine, prompt, table, sizes=None, sampling=GREEDY):
    """Computes a prompt in chunks of `sizes` and returns the sampled token."""
    start = 0
    result = None
    for size in sizes or [len(prompt)]:
        end = start + size
        last = sampling if end == len(prompt) else None
        (result,) = an_engine.step([Chunk(prompt, start, end, table, len(prompt), last)])
        assert (result is None) == (last is None)
        start = end
    return result.token_id


def decode(an_engine, tokens, num_prompt, num, table, sampling=GREEDY):
    """Appends `num` tokens to `tokens`, whose last has no KV yet."""
    for _ in range(num):
        chunk = Chunk(tokens, len(tokens) - 1, len(tokens), table, num_prompt, sampling)
        tokens.append(an_engine.step([chunk])[0].token_id)
    return tokens[num_prompt:]


def hand_over(source, target, from_blocks, to_blocks):
    for there, here in zip(from_blocks, to_blocks, strict=True):
        target.cache.write_block(here, source.cache.read_block(there))


def test_answers_are_those_worked_out_by_hand():
    # 11 + (5 + 0 + 1) * 1 + (7 + 3 + 1) * 2
    assert prefill(engine(), [5, 7], [3]) == 39
    # 23 + the same
    decoder = engine("decode")
    assert prefill(decoder, [5, 7], [3]) == 51
    # 23 + 6 + 22 + (51 + 6 + 1) * 3
    assert decode(decoder, [5, 7, 51], 2, 1, [3, 0]) == [51, 225]
    assert expected_output([5, 7], 2, 1000, first_role="decode") == [51, 225]
    # Modulo the vocabulary.
    assert prefill(engine(vocab_size=10), [5, 7], [3]) == 9


def test_keys_and_values_in_the_blocks_are_token_and_position():
    an_engine = engine()
    prefill(an_engine, [5, 7, 2], [4, 1])
    assert an_engine.cache.keys(0)[[4, 1]].tolist() == [
        [[[5.0] * 4], [[7.0] * 4]],
        [[[2.0] * 4], [[0.0] * 4]],
    ]
    assert an_engine.cache.values(0)[[4, 1]].tolist() == [
        [[[0.0] * 4], [[1.0] * 4]],
        [[[2.0] * 4], [[0.0] * 4]],
    ]


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2], [3, 3], [1] * 6])
def test_chunks_give_what_the_whole_gives(sizes):
    assert prefill(engine(), PROMPT, [9, 0, 4], sizes) == expected_output(PROMPT, 1, 1000)[0]


def test_a_handoff_continues_on_the_bytes_it_brought():
    source, target = engine("prefill"), engine("decode")
    first = prefill(source, PROMPT, [9, 0, 4])
    hand_over(source, target, [9, 0, 4], [1, 2, 3])
    output = decode(target, [*PROMPT, first], len(PROMPT), 7, [1, 2, 3, 5, 6, 7, 8])
    assert output == expected_output(PROMPT, 8, 1000)
    assert output != expected_output(PROMPT, 8, 1000, first_role="decode")


def test_recomputing_after_a_preemption_changes_nothing():
    source, target = engine("prefill"), engine("decode")
    first = prefill(source, PROMPT, [9, 0, 4])
    hand_over(source, target, [9, 0, 4], [1, 2, 3])
    tokens = [*PROMPT, first]
    decode(target, tokens, len(PROMPT), 3, [1, 2, 3, 5, 6])
    # Blocks lost; everything but the last token again, in another place, with the next token sampled.
    table = [10, 11, 12, 13, 14, 15]
    chunks = [
        Chunk(tokens, 0, 4, table, len(PROMPT), None),
        Chunk(tokens, 4, len(tokens), table, len(PROMPT), GREEDY),
    ]
    for chunk in chunks:
        (result,) = target.step([chunk])
    tokens.append(result.token_id)
    decode(target, tokens, len(PROMPT), 1, table)
    assert tokens[len(PROMPT) :] == expected_output(PROMPT, 6, 1000)


def test_a_mixed_batch_gives_what_each_gives_alone():
    an_engine = engine("decode", num_blocks=32)
    one, two, three = [5, 7, 2], [9, 9, 9, 9, 9], [1, 2, 3, 4]
    first = prefill(an_engine, one, [0, 1])
    results = an_engine.step(
        [
            Chunk([*one, first], 3, 4, [0, 1], 3, GREEDY),
            Chunk(three, 0, 2, [10, 11], 4, None),
            Chunk(two, 0, 5, [5, 3, 4], 5, GREEDY),
        ]
    )
    expected = [expected_output(tokens, 2, 1000, "decode") for tokens in (one, two)]
    assert ids(results) == [expected[0][1], None, expected[1][0]]
    assert an_engine.step([]) == []


@pytest.mark.parametrize("bit", range(0, 64 * 8, 7))
def test_a_flipped_bit_in_a_block_changes_the_answer(bit):
    an_engine = engine()
    prefill(an_engine, PROMPT, [9, 0, 4], [4, 2])
    data = bytearray(an_engine.cache.read_block(0))
    assert len(data) == 64
    data[bit // 8] ^= 1 << bit % 8
    an_engine.cache.write_block(0, bytes(data))
    chunk = Chunk(PROMPT, 5, 6, [9, 0, 4], 6, GREEDY)
    assert ids(an_engine.step([chunk])) != [expected_output(PROMPT, 1, 1000)[0]]


@pytest.mark.parametrize("table", [[0, 9, 4], [9, 9, 4], [9, 12, 4], [9, 13, 4]], ids=str)
def test_misplaced_missing_or_foreign_blocks_change_the_answer(table):
    an_engine = engine()
    prefill(an_engine, PROMPT, [9, 0, 4])
    prefill(an_engine, [5, 7, 2, 8], [14, 13])
    chunk = Chunk(PROMPT, 5, 6, table, 6, GREEDY)
    assert ids(an_engine.step([chunk])) != [expected_output(PROMPT, 1, 1000)[0]]


def test_a_step_beyond_the_memory_does_nothing_and_a_smaller_one_goes_on():
    an_engine = engine(max_tokens_per_step=4)
    before = an_engine.cache.blocks.clone()
    with pytest.raises(OutOfMemory, match="6 tokens"):
        prefill(an_engine, PROMPT, [9, 0, 4])
    two = [Chunk(PROMPT, 0, 3, table, 6, None) for table in ([0, 1], [2, 3])]
    with pytest.raises(OutOfMemory):
        an_engine.step(two)
    assert an_engine.cache.blocks.equal(before)
    assert prefill(an_engine, PROMPT, [9, 0, 4], [4, 2]) == expected_output(PROMPT, 1, 1000)[0]


def test_end_tokens_wait_for_min_tokens():
    ends = frozenset(expected_output([5, 7], 1, 1000))
    an_engine = engine(eos_token_ids=ends)
    assert an_engine.info.eos_token_ids == ends == {39}

    def first(**fields):
        return prefill(an_engine, [5, 7], [0], sampling=SamplingParams(temperature=0, **fields))

    assert first() == 39
    assert first(min_tokens=1) == 40
    assert first(min_tokens=1, stop_token_ids=[40, 42]) == 41
    assert first(min_tokens=1, ignore_eos=True) == 39


def test_the_expected_output_ends_with_the_first_end_token():
    whole = expected_output(PROMPT, 10, 1000)
    assert expected_output(PROMPT, 10, 1000, end_ids={whole[4]}) == whole[:5]
    late = expected_output(PROMPT, 10, 1000, end_ids={whole[4]}, min_tokens=5)
    assert late[:5] == [*whole[:4], whole[4] + 1]
    decoder = engine("decode", eos_token_ids=frozenset({whole[4]}))
    first = prefill(engine(), PROMPT, [0, 1, 2])
    prefill(decoder, PROMPT, list(range(16)))
    sampling = SamplingParams(temperature=0, min_tokens=5)
    assert decode(decoder, [*PROMPT, first], 6, 5, list(range(16)), sampling)[:5] == late[:5]


def test_logprobs_come_where_they_are_asked_for():
    an_engine = engine()
    chunk = Chunk([5, 7], 0, 2, [0], 2, SamplingParams(temperature=0, logprobs=True, top_logprobs=2))
    assert an_engine.step([chunk]) == [SampledToken(39, -1.0, ((39, -1.0), (40, -2.0)))]
    plain = Chunk([5, 7], 0, 2, [0], 2, GREEDY)
    assert an_engine.step([plain]) == [SampledToken(39)]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(PROMPT, 0, 6, [0, 1], 6, GREEDY),
        Chunk(PROMPT, 3, 3, [0, 1, 2], 6, None),
        Chunk(PROMPT, 0, 7, [0, 1, 2, 3], 6, None),
        Chunk(PROMPT, 0, 4, [0, 1], 6, GREEDY),
    ],
)
def test_a_chunk_that_breaks_the_rules_is_refused(chunk):
    with pytest.raises(ValueError, match=r"chunk|blocks"):
        engine().step([chunk])


def test_a_step_takes_the_time_it_is_told_to():
    slow = engine(step_time_s=0.02, token_time_s=0.01)
    begin = time.monotonic()
    prefill(slow, [5, 7], [0])
    assert time.monotonic() - begin >= 0.04


def test_the_fake_of_a_model_has_its_vocabulary_and_ends(tmp_path):
    settings = {"vocab_size": 300, "eos_token_id": [3, 4], "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": settings}))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = EngineConfig(kind="fake", block_size=8)
    an_engine = FakeEngine.from_config(config, "decode", tmp_path)
    info = an_engine.info
    assert (info.vocab_size, info.eos_token_ids, info.max_context_tokens) == (300, {3, 4}, 77)
    assert (an_engine.cache.num_blocks, an_engine.cache.shape.block_size) == (1024, 8)
    assert prefill(an_engine, [5, 7], [3]) == 51
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    other = FakeEngine.from_config(config, "prefill", tmp_path).info
    assert other.model_digest == info.model_digest
    assert other.tokenizer_digest != info.tokenizer_digest


def test_the_fakes_cache_has_the_size_it_is_given():
    def num_blocks(**fields):
        return FakeEngine.from_config(EngineConfig(**fields), "decode", None).cache.num_blocks

    assert num_blocks(num_blocks=5) == 5
    # 16 tokens of 32 bytes.
    assert num_blocks(kv_cache_bytes=2047) == 3
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        num_blocks(kv_cache_bytes=511)
    with pytest.raises(ValueError, match="kv_cache_share"):
        num_blocks(kv_cache_share=0.5)
