"""How many prompt tokens one step may compute, as memory allows."""

# The smallest step worth trying: the activations of 16 tokens are small beside the weights, so where
# these do not fit, a still smaller step does not help.
MIN_STEP_TOKENS = 16

# Good steps before a larger one is tried. While memory stays short each try costs one failed step: at
# 32 that is 3 % of the steps, and a limit cut from 512 to 16 is whole again after 160.
NUM_STEPS_BEFORE_GROWTH = 32


class StepLimit:
    """A number of tokens that halves when a step runs out of memory and doubles after a run of good ones."""

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_step_tokens must be at least 1, not {max_tokens}")
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._step_tokens = 0
        self._failed = False
        self._num_good_steps = 0

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens comes next; the one before it was good unless `shrink` was called."""
        if self._step_tokens and not self._failed:
            self._num_good_steps += 1
        if self._num_good_steps >= NUM_STEPS_BEFORE_GROWTH:
            self.tokens = min(2 * self.tokens, self._max_tokens)
            self._num_good_steps = 0
        self._step_tokens = num_tokens
        self._failed = False

    def shrink(self) -> bool:
        """The step ran out of memory: allows half of what it tried. False where that is too little.

        Halves the step, not the limit, so that the next step is smaller even where this one was far
        below its limit.
        """
        self._failed = True
        self._num_good_steps = 0
        num_tokens = min(self._step_tokens, self.tokens)
        if num_tokens <= MIN_STEP_TOKENS:
            return False
        self.tokens = max(num_tokens // 2, MIN_STEP_TOKENS)
        return True
