"""Finds stop strings in text that arrives in pieces, and lets out all that cannot belong to one."""

from collections.abc import Sequence


class StopStrings:
    """Watches one output for its stop strings.

    The match that is complete first counts; of several complete at the same character, the longest. How
    the text is cut into pieces makes no difference. Each character costs amortised constant time a stop
    string (Knuth, Morris and Pratt, "Fast Pattern Matching in Strings", 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        # For each stop string, how many of its characters the text so far ends with.
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns the text that is safe to show and whether a stop string was reached; then that text ends
        before it, and nothing may be pushed afterwards. With may_stop=False a stop string that is
        complete within this piece is text like any other.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            num_complete = self._advance(text[end - 1])
            if num_complete and may_stop:
                self._held = ""
                return text[: end - num_complete], True
        num_safe = len(text) - max(self._matched)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def flush(self) -> str:
        """The held text, once nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Takes one character; returns the length of the longest stop string it completes, else 0."""
        longest = 0
        for row, (stop, borders) in enumerate(self._stops):
            matched = self._matched[row]
            while matched and stop[matched] != char:
                matched = borders[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                longest = max(longest, matched)
                matched = borders[matched]
            self._matched[row] = matched
        return longest


def _borders(stop: str) -> list[int]:
    """At n: the length of the longest proper prefix of stop[:n] that stop[:n] also ends with."""
    borders = [0] * (len(stop) + 1)
    border = 0
    for n in range(1, len(stop)):
        while border and stop[n] != stop[border]:
            border = borders[border]
        if stop[n] == stop[border]:
            border += 1
        borders[n + 1] = border
    return borders
