"""What a trace file says is what is simulated, and a bad one is named by its line."""

import json

import pytest

from simulator import traces
from simulator.traces import TraceError, TraceRequest


def test_mooncake_lines_are_sorted_and_their_blocks_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 0, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = traces.load(path)
    assert (first.at_s, first.num_prompt_tokens, first.num_output_tokens) == (1.0, 1030, 1)
    ours, theirs = (each.hashes(256).of(range(1030)) for each in (first, second))
    assert len(ours) == 4
    assert ours == theirs
    assert len(set(ours)) == 4
    assert len(first.hashes(256).of(range(600))) == 2


def test_a_csv_file_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0.5,10,20\n")
    assert traces.load(path) == [TraceRequest(0.5, 10, 20)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("trace.csv", "arrival,prompt,output\n0,1,1\n1,0,1\n", "request 2.*num_prompt_tokens"),
        ("trace.csv", "arrival,prompt\n0,1\n", "request 1.*output"),
        ("trace.csv", "arrival,prompt,output\nnan,1,1\n", "request 1.*arrival"),
        ("trace.jsonl", "{", "request 1"),
        ("trace.jsonl", "", "no request"),
        ("trace.txt", "", "ends in"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        traces.load(path)


def test_blocks_that_do_not_divide_the_traces_are_refused():
    with pytest.raises(TraceError, match="do not divide"):
        TraceRequest(0.0, 600, 1, (1, 2)).hashes(24)
