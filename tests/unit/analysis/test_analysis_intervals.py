"""Intervals and verdicts against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.analysis.intervals import (
    bootstrap_t,
    crossed_interval,
    estimate,
    t_interval,
    verdict,
    welch_interval,
)

# two-sided Student quantiles from printed tables
T_975_2, T_95_2, T_975_3 = 4.30265, 2.91999, 3.18245


def test_t_interval_of_three_values() -> None:
    # 1, 2, 3: mean 2, s = 1, half width 4.30265 / sqrt(3) = 2.48414
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 2.48414, abs=1e-4), pytest.approx(2 + 2.48414, abs=1e-4))


def test_one_value_has_no_interval() -> None:
    assert t_interval([0.3]) is None
    assert bootstrap_t([[0.1], [0.2]]) is None
    assert estimate([]) is None
    assert estimate([[], []]) is None


def test_estimate_over_launch_means() -> None:
    # launch means 0.1, 0.2, 0.3 whatever the number of prompts: mean 0.2, s 0.1, half = 4.30265 * 0.1 / sqrt(3)
    item = estimate([[0.0, 0.2], [0.2, 0.2, 0.2], [0.3]])
    assert item is not None
    half = T_975_2 * 0.1 / math.sqrt(3)
    assert item.geometric_mean == pytest.approx(math.exp(0.2))
    assert item.low == pytest.approx(math.exp(0.2 - half), rel=1e-5)
    assert item.high == pytest.approx(math.exp(0.2 + half), rel=1e-5)
    assert item.low_90 == pytest.approx(math.exp(0.2 - T_95_2 * 0.1 / math.sqrt(3)), rel=1e-5)
    assert (item.launches, item.pairs, item.unit, item.verdict) == (3, 6, "launches", "undecided")


def test_one_launch_is_over_prompts_and_gives_no_verdict() -> None:
    # four prompts 0.5, 0.7, 0.9, 1.1: mean 0.8, s = sqrt(0.2/3) = 0.258199
    item = estimate([[0.5, 0.7, 0.9, 1.1]])
    assert item is not None
    assert item.low == pytest.approx(math.exp(0.8 - T_975_3 * 0.258199 / 2), rel=1e-5)
    assert (item.unit, item.verdict, item.new_prompts_low) == ("prompts", None, None)
    assert item.note == "1 launch an arm: a verdict needs 3"


def test_two_launches_have_an_interval_and_no_verdict() -> None:
    item = estimate([[1.0, 1.0], [1.0, 1.0]])
    assert item is not None
    assert (item.low, item.high, item.verdict) == (pytest.approx(math.e), pytest.approx(math.e), None)
    assert item.note == "2 launches an arm: a verdict needs 3"


@pytest.mark.parametrize(
    ("low", "high", "low_90", "high_90", "said"),
    [
        (1.021, 1.5, 1.03, 1.4, "faster"),
        (1.02, 1.5, 1.03, 1.4, "undecided"),  # not above the margin
        (0.5, 0.980, 0.6, 0.97, "slower"),  # 1 / 1.02 = 0.98039
        (0.5, 0.981, 0.6, 0.97, "undecided"),
        (0.975, 1.025, 0.981, 1.019, "equivalent"),  # the 90 % interval decides
        (0.975, 1.025, 0.980, 1.019, "undecided"),
        (0.9, 1.2, 0.95, 1.1, "undecided"),
    ],
)
def test_verdict_at_its_limits(low: float, high: float, low_90: float, high_90: float, said: str) -> None:
    assert verdict(low, high, low_90, high_90, 0.02) == said


def test_a_wider_margin_makes_faster_undecided() -> None:
    assert verdict(1.04, 1.06, 1.042, 1.058, 0.02) == "faster"
    assert verdict(1.04, 1.06, 1.042, 1.058, 0.05) == "undecided"
    assert verdict(1.04, 1.06, 1.042, 1.058, 0.10) == "equivalent"


def test_crossed_interval_by_hand() -> None:
    # launches 0.0, 0.2 and prompts a 0.0, b 0.2: s^2 = 0.02 each, variance 0.01 + 0.01, df = 0.02^2 / (2 * 0.01^2) = 2
    low, high = crossed_interval([[-0.1, 0.1], [0.1, 0.3]], [["a", "b"], ["a", "b"]])
    half = T_975_2 * math.sqrt(0.02)
    assert (low, high) == (pytest.approx(0.1 - half, abs=1e-5), pytest.approx(0.1 + half, abs=1e-5))


def test_welch_interval_by_hand() -> None:
    # equal variances 1 and n = 3 a side: variance 2/3, df = 4, t(4) = 2.77645
    low, high = welch_interval([2.0, 3.0, 4.0], [0.0, 1.0, 2.0])
    half = 2.77645 * math.sqrt(2 / 3)
    assert (low, high) == (pytest.approx(2 - half, abs=1e-4), pytest.approx(2 + half, abs=1e-4))


def test_a_hopeless_interval_does_not_overflow() -> None:
    item = estimate([[0.0], [5000.0]], bootstrap=False)
    assert item is not None
    assert math.isfinite(item.high or 0.0)


groups = st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=6), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_swapping_the_arms_inverts_everything(values: list[list[float]]) -> None:
    a, b = estimate(values, bootstrap=False), estimate([[-v for v in g] for g in values], bootstrap=False)
    assert a is not None
    assert b is not None
    assert a.geometric_mean * b.geometric_mean == pytest.approx(1)
    assert (a.low or 0) * (b.high or 0) == pytest.approx(1, rel=1e-6)
    opposite = {"faster": "slower", "slower": "faster"}
    assert b.verdict == opposite.get(str(a.verdict), a.verdict)


@settings(max_examples=40, deadline=None)
@given(groups, st.floats(-1, 1))
def test_a_common_factor_shifts_the_interval(values: list[list[float]], shift: float) -> None:
    a, b = estimate(values, bootstrap=False), estimate([[v + shift for v in g] for g in values], bootstrap=False)
    assert a is not None
    assert b is not None
    assert b.geometric_mean == pytest.approx(a.geometric_mean * math.exp(shift))
    assert b.low == pytest.approx((a.low or 0) * math.exp(shift), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=5), min_size=3, max_size=5))
def test_bootstrap_holds_its_estimate_and_is_repeatable(values: list[list[float]]) -> None:
    ends = bootstrap_t(values, draws=400)
    if ends is not None:
        assert ends == bootstrap_t(values, draws=400)
        assert ends[0] <= ends[1]
