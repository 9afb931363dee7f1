"""Random numbers without state: one for each (seed, position), the same wherever it is drawn.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) walks
a counter in steps of an odd constant and scrambles it, so its n-th output is a plain function of n.
"""

_MASK = 2**64 - 1
# 2**64 over the golden ratio, made odd: the step that the authors chose.
_STEP = 0x9E3779B97F4A7C15


def scramble(counter: int) -> int:
    """SplitMix64's finaliser: a bijection of the 64-bit integers in which every bit depends on all."""
    counter = ((counter ^ (counter >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    counter = ((counter ^ (counter >> 27)) * 0x94D049BB133111EB) & _MASK
    return counter ^ (counter >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for one position of the sequence that `seed` names.

    The seed is scrambled first, so that neighbouring seeds start far apart.
    """
    state = (scramble(seed) + (position + 1) * _STEP) & _MASK
    return float(scramble(state) >> 11) * 2.0**-53
