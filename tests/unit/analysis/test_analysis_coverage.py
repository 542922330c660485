"""Do the intervals cover, and how often is a method called different from itself? Seeded simulations."""

from __future__ import annotations

import math

import numpy as np

from specrig.analysis.intervals import bootstrap_t, crossed_interval, estimate, t_interval

TRUE = math.log(3.2)
PROMPTS = 16


def draw(
    rng: np.random.Generator, launches: int, launch_sd: float, prompt_sd: float, noise_sd: float, true: float = TRUE
) -> list[list[float]]:
    """Log ratios: a launch effect of each arm, a prompt effect common to the launches, a residual."""
    prompts = rng.normal(0, prompt_sd, PROMPTS)
    level = rng.normal(0, launch_sd * math.sqrt(2), launches)
    return [list(true + level[i] + prompts + rng.normal(0, noise_sd, PROMPTS)) for i in range(launches)]


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_the_interval_over_launches_covers_95_percent() -> None:
    rng = np.random.default_rng(11)
    for launches in (2, 3, 5):
        hits = []
        for _ in range(1500):
            item = estimate(draw(rng, launches, 0.01, 0.0, 0.02), bootstrap=False)
            assert item is not None
            hits.append((item.low or 0) <= 3.2 <= (item.high or 0))
        # three standard errors of 1,500 draws at 95 % are 1.7 points
        assert 0.933 <= share(hits) <= 0.967, launches


def test_a_method_against_itself_is_rarely_called_different() -> None:
    rng = np.random.default_rng(12)
    said = []
    for _ in range(1500):
        item = estimate(draw(rng, 3, 0.01, 0.0, 0.02, true=0.0), bootstrap=False)
        assert item is not None
        said.append(item.verdict in ("faster", "slower"))
    assert share(said) <= 0.01


def test_prompts_alone_would_cry_wolf() -> None:
    """Why one launch gives no verdict: over its prompts, half of all A-against-A intervals miss 1."""
    rng = np.random.default_rng(13)
    missed = []
    for _ in range(1000):
        ends = t_interval(draw(rng, 1, 0.01, 0.0, 0.02, true=0.0)[0])
        assert ends is not None
        missed.append(not ends[0] <= 0 <= ends[1])
    assert share(missed) > 0.3


def test_equivalence_is_found_when_launches_agree() -> None:
    rng = np.random.default_rng(14)
    said = []
    for _ in range(300):
        item = estimate(draw(rng, 5, 0.003, 0.0, 0.01, true=0.0), bootstrap=False)
        assert item is not None
        said.append(item.verdict == "equivalent")
    assert share(said) > 0.95


def test_the_new_prompts_interval_covers_new_prompts() -> None:
    rng = np.random.default_rng(15)
    names = [[str(i) for i in range(PROMPTS)]] * 3
    wide, narrow = [], []
    for _ in range(1000):
        table = draw(rng, 3, 0.01, 0.3, 0.02)
        ends, fixed = crossed_interval(table, names), t_interval([sum(r) / len(r) for r in table])
        assert ends is not None
        assert fixed is not None
        wide.append(ends[0] <= TRUE <= ends[1])
        narrow.append(fixed[0] <= TRUE <= fixed[1])
    assert share(wide) >= 0.93
    assert share(narrow) < 0.7  # it speaks of these prompts, and says so


def test_the_bootstrap_t_covers_near_its_level() -> None:
    rng = np.random.default_rng(16)
    hits = []
    for i in range(400):
        ends = bootstrap_t(draw(rng, 6, 0.01, 0.0, 0.02), draws=399, seed=i)
        assert ends is not None
        hits.append(ends[0] <= TRUE <= ends[1])
    assert 0.90 <= share(hits) <= 0.99


def test_the_width_that_a_plan_promises() -> None:
    """SD(log) 0.3 and 16 prompts within one launch give about +-17 %: t(15) = 2.131, 2.131 * 0.3 / 4 = 0.160."""
    rng = np.random.default_rng(17)
    halves = []
    for _ in range(500):
        ends = t_interval(list(rng.normal(0, 0.3, 16)))
        assert ends is not None
        halves.append((ends[1] - ends[0]) / 2)
    assert abs(math.exp(float(np.mean(halves))) - 1.17) < 0.01
