import time

from hypothesis import example, given
from hypothesis import strategies as st

from router.stop_strings import StopStrings

TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(stops, text, may_stop):
    """Character by character: what is shown, and whether it stopped. may_stop: one entry a character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and may_stop[end - 1]:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(STOPS, st.lists(st.tuples(TEXTS, st.booleans()), max_size=6))
@example(["aba"], [("ab", False), ("a", False), ("ba", True)])
def test_stops_where_a_naive_search_stops_however_the_text_is_cut(stops, pushes):
    text = "".join(piece for piece, _ in pushes)
    may_stop = [may for piece, may in pushes for _ in piece]
    expected, stopped = naive(stops, text, may_stop)
    watcher, shown, found = StopStrings(stops), "", False
    for piece, may in pushes:
        new, found = watcher.push(piece, may)
        shown += new
        # Nothing is shown that a stop string would have to take back.
        assert expected.startswith(shown)
        if found:
            break
    assert found == stopped
    assert shown + watcher.flush() == expected


@given(STOPS, TEXTS)
def test_holds_back_no_more_than_could_become_a_stop_string(stops, text):
    watcher = StopStrings(stops)
    shown, stopped = watcher.push(text)
    if not stopped:
        held = text.removeprefix(shown)
        assert held == watcher.flush()
        assert not held or any(stop.startswith(held) for stop in stops)


def test_of_two_stops_that_end_together_the_longer_is_left_out():
    assert StopStrings(["END", "THE END"]).push("this is THE END.") == ("this is ", True)


def test_without_stops_text_passes_through():
    assert StopStrings([]).push("anything") == ("anything", False)


def test_hostile_text_costs_no_more_than_its_length():
    watcher = StopStrings(["a" * 255 + "b"] * 4)
    started_s = time.monotonic()
    shown = "".join(watcher.push("a")[0] for _ in range(50_000))
    assert len(shown) == 50_000 - 255
    assert time.monotonic() - started_s < 30
