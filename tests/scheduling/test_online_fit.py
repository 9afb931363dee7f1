"""A fitted cost predicts what it has seen, is never absurd, and follows a change."""

import random

import pytest

from scheduling.online_fit import OnlineFit


def steps(num, coefficients, seed=0, noise=0.0):
    source = random.Random(seed)
    for _ in range(num):
        rows = source.randint(1, 64)
        features = (1, rows, rows * source.randint(16, 2048))
        seconds = sum(c * f for c, f in zip(coefficients, features, strict=True))
        yield features, seconds * (1 + noise * source.uniform(-1, 1))


def fitted(observations):
    fit = OnlineFit(3)
    for features, seconds in observations:
        fit.observe(features, seconds)
    return fit


def test_the_coefficients_are_found():
    true = (0.01, 0.0005, 2e-7)
    fit = fitted(steps(300, true))
    assert fit.coefficients == pytest.approx(true, rel=0.02)
    assert fit.error < 0.05
    assert fit.num_observations == 300


def test_noise_of_ten_percent_biases_nothing_and_is_told():
    true = (0.01, 0.0005, 2e-7)
    fit = fitted(steps(2000, true, noise=0.1))
    features = (1, 30, 30_000)
    assert fit.predict(features) == pytest.approx(0.01 + 0.015 + 0.006, rel=0.02)
    assert 0.03 < fit.error < 0.08


def test_one_observation_gives_a_sane_model():
    fit = fitted([((1, 8, 800), 0.02)])
    assert fit.predict((1, 8, 800)) == pytest.approx(0.02, rel=0.01)
    assert 0.02 < fit.predict((1, 16, 1600)) < 0.04
    assert all(each >= 0 for each in fit.coefficients)


def test_before_any_observation_nothing_is_predicted():
    assert OnlineFit(3).predict((1, 8, 800)) == 0


def test_no_coefficient_is_ever_negative():
    # A worker on which long contexts are, by chance, the quicker ones.
    fit = fitted(((1, 4, context), 0.02 - context * 1e-6) for context in range(1000, 4000, 10))
    assert min(fit.coefficients) >= 0
    assert fit.predict((1, 4, 2500)) == pytest.approx(0.0175, rel=0.1)


def test_a_lasting_change_is_followed():
    fit = fitted([*steps(500, (0.01, 0.0005, 2e-7)), *steps(4000, (0.03, 0.0015, 6e-7), seed=1)])
    assert fit.predict((1, 30, 30_000)) == pytest.approx(3 * 0.031, rel=0.1)


def test_a_stopped_process_hardly_shows():
    true = (0.01, 0.0005, 2e-7)
    observations = list(steps(500, true))
    observations[400] = (observations[400][0], 60.0)
    assert fitted(observations).predict((1, 30, 30_000)) == pytest.approx(0.031, rel=0.03)


def test_what_was_learnt_is_kept_while_all_steps_are_alike():
    observations = [*steps(500, (0.01, 0.0005, 2e-7)), *[((1, 1, 100), 0.01052)] * 5000]
    assert fitted(observations).predict((1, 60, 60_000)) == pytest.approx(0.052, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_time_that_is_none_is_passed_by(seconds):
    fit = fitted([((1, 1, 1), seconds)])
    assert fit.num_observations == 0
