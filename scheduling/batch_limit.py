"""How many sequences one step may decode, so that it takes no longer than it should."""


class BatchLimit:
    """Grows by one after a full batch that was quick enough, and halves after one that was not.

    Additive increase, multiplicative decrease, as TCP finds a path's rate (Chiu and Jain, 1989): the step
    time is steered to the target from below, whatever the model, the device and the contexts cost.
    """

    def __init__(self, max_size: int, target_s: float | None) -> None:
        """max_size: never more rows than that. target_s: of a step; None keeps the limit at `max_size`."""
        if max_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_size}")
        if target_s is not None and target_s <= 0:
            raise ValueError(f"step_target_s must be above 0, not {target_s}")
        # At the top: the first step that is too slow halves what it ran, so few are lost by that.
        self.size = max_size
        self._max_size = max_size
        self._target_s = target_s

    @property
    def adapts(self) -> bool:
        """Whether the size follows the time of steps."""
        return self._target_s is not None

    def observe(self, num_rows: int, step_s: float) -> None:
        """A step of so many decode rows and nothing else took `step_s`.

        Halves the batch that ran, not the limit, so that the next is smaller even where this one was far
        below it; and only a full one lets it grow: others say nothing of what a larger one takes.
        """
        if self._target_s is None or num_rows == 0:
            return
        if step_s > self._target_s:
            self.size = max(1, min(self.size, num_rows) // 2)
        elif num_rows >= self.size:
            self.size = min(self.size + 1, self._max_size)
