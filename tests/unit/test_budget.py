"""The token budget against the engine's rules, stated a second time independently, and against worked-out numbers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.model.profile import parse_profiles
from specrig.tokens.budget import Limits, check, check_repetition, longest_prompt, repetitions
from specrig.tokens.limits import for_profile, method_numbers


def served(p: int, n: int, c: int, k: int | None, r: int) -> int | None:
    """Tokens that an engine would generate for one request, None for an error; written from the rules alone."""
    pool = c if k is None else k
    if p + r >= c or p + r + n > c:
        return None
    if p >= min(c, pool) - 6:
        return None
    return min(n, min(c, pool) - 2 - p)


SIZES = st.one_of(st.integers(1, 300), st.integers(32_700, 32_800))


@given(SIZES, SIZES, SIZES, st.none() | SIZES, st.integers(0, 40))
@example(32_761, 5, 32_768, None, 0)
@example(32_762, 4, 32_768, None, 0)
def test_one_request_as_the_engine_treats_it(p: int, n: int, c: int, k: int | None, r: int) -> None:
    limits = Limits(context_length=c, kv_tokens=k, reserved_tokens=r)
    budget = check(p, n, limits)
    generated = served(p, n, c, k, r)
    assert budget.effective_new_tokens == (generated or 0)
    assert budget.outcome == ("rejected" if generated is None else "ok" if generated == n else "clipped")
    assert budget.fits == (generated == n and (k is None or p + n <= k))
    assert budget.fits == (not budget.problems)


@given(SIZES, SIZES, st.none() | SIZES, st.integers(0, 40), st.integers(0, 20), st.integers(1, 5), st.integers(1, 9))
def test_the_longest_prompt_is_the_last_that_fits(
    n: int, c: int, k: int | None, r: int, headroom: int, load: int, page: int
) -> None:
    limits = Limits(context_length=c, kv_tokens=k, reserved_tokens=r, block=3, page_size=page)
    longest = longest_prompt(n, limits, load, headroom)
    if longest > 0:
        assert check(longest, n, limits, load, headroom).fits
        assert not check(longest + 1, n, limits, load, headroom).fits
    else:
        assert not check(1, n, limits, load, headroom).fits


@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 40), st.integers(1, 40), st.integers(1, 40))
def test_headroom_is_as_good_as_a_longer_prompt(
    p: int, n: int, c: int, k: int, r: int, headroom: int, load: int
) -> None:
    limits = Limits(context_length=c, kv_tokens=k, reserved_tokens=r, block=16)
    assert check(p, n, limits, load, headroom).fits == check(p + headroom, n, limits, load).fits


@given(SIZES, SIZES, SIZES, st.none() | SIZES, st.integers(0, 40), st.integers(1, 9))
def test_every_problem_is_one_line_with_numbers(p: int, n: int, c: int, k: int | None, r: int, load: int) -> None:
    budget = check(p, n, Limits(context_length=c, kv_tokens=k, reserved_tokens=r, block=16, max_running=4), load)
    for problem in budget.problems:
        assert "\n" not in problem
        assert any(ch.isdigit() for ch in problem)


def test_the_window_of_32768() -> None:
    limits = Limits(context_length=32_768)
    assert check(32_761, 5, limits).fits
    assert not check(32_762, 1, limits).fits
    assert check(31_742, 1_024, limits).fits  # 32,766
    over = check(31_743, 1_024, limits)
    assert (over.outcome, over.effective_new_tokens) == ("clipped", 1_023)
    assert over.problems == (
        "prompt 31,743 + 1,024 to generate = 32,767 is over 32,766 (context length 32,768 - 2): clipped silently to "
        "1,023 new tokens",
    )


def test_a_tree_of_15_nodes_holds_16_back() -> None:
    reserved, block = method_numbers("ddtree", 15)
    assert (reserved, block) == (16, 16)
    limits = Limits(context_length=32_768, reserved_tokens=reserved, block=block)
    assert check(32_752 - 1_024, 1_024, limits).fits
    refused = check(32_753 - 1_024, 1_024, limits)
    assert refused.outcome == "rejected"
    assert refused.problems == (
        "prompt 31,729 + 1,024 to generate + 16 reserved for drafts = 32,769 is 1 over the context length "
        "32,768: rejected",
    )


def test_a_chain_and_no_speculation_hold_nothing_back() -> None:
    assert method_numbers("dflash", None) == (0, 16)
    assert method_numbers("autoregressive", None) == (0, 0)
    with pytest.raises(UsageError, match="needs a budget"):
        method_numbers("ddtree", None)
    with pytest.raises(UsageError, match="nosuch"):
        method_numbers("nosuch", None)


def test_a_small_pool_is_named() -> None:
    limits = Limits(context_length=32_768, kv_tokens=20_000)
    clipped = check(19_500, 1_000, limits)
    assert clipped.effective_new_tokens == 20_000 - 2 - 19_500
    assert "is over 19,998 (KV capacity 20,000 - 2): clipped silently to 498 new tokens" in clipped.problems[0]
    assert "is over the longest input 19,993 (KV capacity 20,000 - 7): rejected" in check(19_994, 1, limits).problems[0]


def test_concurrency_against_the_pool() -> None:
    limits = Limits(context_length=32_768, kv_tokens=208_448, block=16)
    # 8 x (25,000 + 1,024 + 2 x 16) = 208,448
    assert check(25_000, 1_024, limits, 8).fits
    assert check(25_001, 1_024, limits, 8).problems == (
        "8 at once x (prompt 25,001 + 1,024 to generate + 2 x 16 draft block) = 208,456 is over the KV capacity of "
        "208,448 tokens: at most 7 at once",
    )


def test_pages_round_up() -> None:
    paged = Limits(context_length=1_000, kv_tokens=640, page_size=64)
    # 100 + 28 = 128 = 2 pages each: five requests fill ten pages
    assert check(100, 28, paged, 5).fits
    assert "in pages of 64) = 960 is over the KV capacity of 640" in check(100, 29, paged, 5).problems[0]


def test_running_limit_and_truncation() -> None:
    limits = Limits(context_length=1_000, max_running=4)
    assert check(10, 10, limits, 4).fits
    assert check(10, 10, limits, 5).problems == (
        "5 at once is over the 4 requests the server runs at once; the rest waits",
    )
    assert longest_prompt(10, limits, 5) == -1
    cutting = check(10, 10, Limits(context_length=1_000, auto_truncate=True))
    assert not cutting.fits
    assert "--allow-auto-truncate" in cutting.problems[0]


@pytest.mark.parametrize(("p", "n", "load", "headroom"), [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)])
def test_no_such_request(p: int, n: int, load: int, headroom: int) -> None:
    with pytest.raises(ValueError, match="start at 1"):
        check(p, n, Limits(context_length=100), load, headroom)


INCIDENT = [(25_000, 324, 24_948), (30_000, 389, 29_953), (100_000, 1_298, 99_946)]


@pytest.mark.parametrize(("asked", "count", "tokens"), INCIDENT)
@pytest.mark.parametrize("window", [32_768, 131_072])
def test_the_incident_as_it_was_worked_out(asked: int, count: int, tokens: int, window: int) -> None:
    assert repetitions(asked, 77) == count
    row = check_repetition(asked, 77, tokens, Limits(context_length=window), question_tokens=30, max_new_tokens=256)
    assert (row.repetitions, row.claimed_tokens, row.right_length) == (count, tokens, True)
    assert row.total_tokens == tokens + 286
    assert row.fits == (asked == 25_000 or asked == 30_000 or window == 131_072)


@pytest.mark.parametrize(
    ("asked", "window", "real", "total", "fits_window"),
    [
        (25_000, 32_768, 32_724, 33_010, False),
        (25_000, 131_072, 32_724, 33_010, True),
        (30_000, 131_072, 39_289, 39_575, True),
        (100_000, 131_072, 131_098, 131_384, False),
    ],
)
def test_the_incident_as_it_really_was(asked: int, window: int, real: int, total: int, fits_window: bool) -> None:
    count = repetitions(asked, 77)
    assert count * 101 == real
    row = check_repetition(asked, 77, real, Limits(context_length=window), question_tokens=30, max_new_tokens=256)
    assert row.total_tokens == total
    assert not row.right_length
    assert not row.fits
    assert row.budget.fits == fits_window
    assert row.problems[0] == (
        f"the prompt is not the length asked for: {count:,} repetitions are {real:,} tokens, {asked:,} were asked "
        "(101 tokens a repetition, 77 claimed)"
    )
    assert bool(row.problems[1:]) != fits_window


def test_less_than_one_repetition() -> None:
    with pytest.raises(ValueError, match="expected at least one repetition of 77"):
        repetitions(76, 77)


def test_limits_of_a_profile() -> None:
    found = parse_profiles(
        {
            "a": {"model": "M", "method": "ddtree", "budget": 31, "context_length": 131_072},
            "b": {"model": "M"},
        }
    )
    own = for_profile(found["a"], kv_tokens=500_000)
    assert own is not None
    assert (own.context_length, own.kv_tokens, own.reserved_tokens, own.block) == (131_072, 500_000, 32, 16)
    assert for_profile(found["b"]) is None
    given = for_profile(found["b"], context_length=4_096)
    assert given is not None
    assert given.context_length == 4_096
