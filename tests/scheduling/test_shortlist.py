"""The short list holds the least loaded, whatever has changed."""

from hypothesis import given
from hypothesis import strategies as st

from scheduling.shortlist import MAX_SHORTLIST, Shortlist

NAMES = [f"worker-{i}" for i in range(3 * MAX_SHORTLIST)]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5)), max_size=200))
def test_it_is_the_least_loaded_and_of_equals_the_longest_unchanged(changes):
    shortlist = Shortlist(dict.fromkeys(NAMES, 0.0))
    order = {name: (0, number) for number, name in enumerate(NAMES)}
    for number, (name, load) in enumerate(changes, len(NAMES)):
        shortlist.put(name, load)
        order[name] = load, number
        assert shortlist.best() == sorted(NAMES, key=order.__getitem__)[:MAX_SHORTLIST]


def test_a_small_pool_is_whole():
    assert Shortlist({"a": 2.0, "b": 1.0}).best() == ["b", "a"]
