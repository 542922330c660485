"""The token budget against the engine's rules, stated a second time independently, and against worked-out numbers."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.model.profile import parse_profiles
from specrig.tokens.budget import Limits, check, check_repetition, longest_prompt, repetitions
from specrig.tokens.limits import for_profile, method_numbers


class Engine:
    """What a server does with requests, one step after the other: refuse, cut short, queue; no formula of the budget.

    Pages are counted one by one, tokens are generated one by one.
    """

    def __init__(self, limits: Limits) -> None:
        self.window = limits.context_length
        self.hold = limits.reserved_tokens or 0
        self.pool = limits.kv_tokens
        self.page = limits.page_size or 1
        self.cap = limits.new_tokens_limit
        self.strict = limits.total_below
        self.limits = limits
        slots = self.window if self.pool is None else min(self.window, self.pool)
        self.slots = slots if limits.max_input is None else limits.max_input + 6

    def pages(self, tokens: int) -> int:
        count = 0
        while tokens > 0:
            count, tokens = count + 1, tokens - self.page
        return count

    def tokenizer_process(self, prompt: int, asked: int) -> bool:
        """Whether the request gets past the HTTP server."""
        held = prompt + self.hold
        if held >= self.window:
            return False
        free = self.window - held - asked
        return free > 0 if self.strict else free >= 0

    def generate(self, prompt: int, asked: int) -> int | None:
        """Tokens of one request on an empty server; None for an error."""
        if not self.tokenizer_process(prompt, asked) or not prompt < self.slots - 6:
            return None
        made = 0
        held = self.pages(prompt) * self.page
        budget = asked if self.cap is None else min(asked, self.cap)
        while made < budget:
            if prompt + made + 1 > self.slots - 2:  # the last slots of a row stay free
                break
            if self.pool is not None and held + made + 1 + self.page >= self.pool:
                break
            made += 1
        return made

    def at_once(self, prompt: int, asked: int, count: int, shared: int) -> int:
        """How many of so many such requests run side by side."""
        running = 0
        ranks = [None if self.pool is None else self.pool for _ in range(self.limits.replicas)]
        holds_prefix = [False] * self.limits.replicas
        drafts = 2 * (self.limits.block or 0)
        prefix = self.pages(shared - shared % self.page) * self.page if self.limits.prefix_cache else 0
        for number in range(count):
            rank = number % self.limits.replicas
            room = ranks[rank]
            if room is not None:
                need = self.pages(prompt + asked + drafts) * self.page - (prefix if holds_prefix[rank] else 0)
                if need > room:
                    continue
                ranks[rank] = room - need
                holds_prefix[rank] = True
            running += 1
        most = self.limits.max_running
        return running if most is None else min(running, most)


SIZES = st.one_of(st.integers(1, 300), st.integers(32_700, 32_800))
ROOMS = st.one_of(st.integers(70, 300), st.integers(32_700, 32_800))
LIMITS = st.builds(
    Limits,
    context_length=ROOMS,
    kv_tokens=st.none() | ROOMS,
    reserved_tokens=st.none() | st.integers(0, 40),
    block=st.none() | st.integers(0, 16),
    max_running=st.none() | st.integers(1, 9),
    page_size=st.none() | st.sampled_from([1, 2, 16, 64]),
    max_input=st.none() | st.integers(1, 300),
    new_tokens_limit=st.none() | st.integers(1, 300),
    total_below=st.booleans(),
    prefix_cache=st.none() | st.booleans(),
    replicas=st.integers(1, 3),
    auto_truncate=st.none() | st.just(False),
)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, Limits]:
    """A prompt, an answer and limits, often within a token or two of one of the bounds."""
    limits = draw(LIMITS)
    window, pool = limits.context_length, limits.kv_tokens or limits.context_length
    n = draw(SIZES)
    hold = limits.reserved_tokens or 0
    edges = [window - n, window - hold - n, window, pool - n, pool, limits.room, limits.room - n]
    p = draw(st.one_of(SIZES, st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 80, edge + 2))))
    return max(p, 1), n, limits


@settings(max_examples=400, deadline=None)
@given(shapes())
@example((32_761, 5, Limits(context_length=32_768)))
@example((32_762, 4, Limits(context_length=32_768)))
@example((80, 32, Limits(context_length=128, reserved_tokens=16)))
@example((80, 32, Limits(context_length=128, reserved_tokens=16, total_below=True)))
def test_one_request_as_the_engine_treats_it(shape: tuple[int, int, Limits]) -> None:
    p, n, limits = shape
    budget = check(p, n, limits)
    generated = Engine(limits).generate(p, n)
    assert budget.effective_new_tokens == (generated or 0)
    assert budget.outcome == ("rejected" if generated is None else "ok" if generated == n else "clipped")
    assert budget.fits == (generated == n and Engine(limits).at_once(p, n, 1, 0) == 1)
    assert budget.fits == (not budget.problems)


@settings(max_examples=400, deadline=None)
@given(shapes(), st.integers(1, 12), st.integers(0, 300))
def test_many_requests_as_the_engine_queues_them(shape: tuple[int, int, Limits], load: int, common: int) -> None:
    p, n, limits = shape
    shared = min(common, p)
    budget = check(p, n, limits, load, shared_tokens=shared)
    engine = Engine(limits)
    assert budget.fits == (engine.generate(p, n) == n and engine.at_once(p, n, load, shared) == load)


@settings(deadline=None)
@given(shapes(), st.integers(1, 12), st.integers(0, 20))
def test_the_longest_prompt_is_the_last_that_fits(shape: tuple[int, int, Limits], load: int, headroom: int) -> None:
    _, n, limits = shape
    longest = longest_prompt(n, limits, load, headroom)
    if longest > 0:
        assert check(longest, n, limits, load, headroom).fits
        assert not check(longest + 1, n, limits, load, headroom).fits
    else:
        assert longest == -1
        assert not check(1, n, limits, load, headroom).fits


@settings(deadline=None)
@given(shapes(), st.integers(0, 40), st.integers(1, 12))
def test_headroom_is_as_good_as_a_longer_prompt(shape: tuple[int, int, Limits], headroom: int, load: int) -> None:
    p, n, limits = shape
    assert check(p, n, limits, load, headroom).fits == check(p + headroom, n, limits, load).fits


def re_sum(text: str, page: int = 1) -> int:
    """Work a sum of a message out again: `25,000 + 1,024 to generate + 2 x 16 draft block`."""
    total, sign = 0, 1
    for part in re.split(r" (?=[+-] )", text):
        if part[0] in "+-":
            sign, part = (1 if part[0] == "+" else -1), part[2:]
        factors = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", part)]
        total += sign * math.prod(factors)
    return -(-total // page) * page


N = r"\d{1,3}(?:,\d{3})*"
END = (
    rf"(?:(?:rejected|clipped silently to (?P<left>{N}) new tokens)(?:, also without the headroom)?"
    r"|the server would take it, without that headroom)"
)
NAMED = rf"(?:context length {N}|KV capacity {N}|the server's max_req_input_len {N} \+ 6)"
LINES = (
    rf"prompt (?P<sum>.+?)(?: = (?P<total>{N}))? is not below the context length (?P<least>{N}): {END}",
    rf"prompt (?P<sum>.+?) = (?P<total>{N}) is (?P<by>{N}) over the context length (?P<most>{N}): {END}",
    rf"prompt (?P<sum>.+?) = (?P<total>{N}) is (?P<by>{N}) over (?P<most>{N}) \((?P<of>{NAMED} - 1)\): {END}",
    rf"prompt (?P<sum>.+?)(?: = (?P<total>{N}))? is over the longest input (?P<most>{N}) "
    rf"\((?P<of>{NAMED} - 7)\): {END}",
    rf"prompt (?P<sum>.+?) = (?P<total>{N}) is over (?P<most>{N}) \((?P<of>{NAMED} - 2)\): {END}",
    rf"prompt (?P<prompt>.+?)(?: = (?P<whole>{N}))? in pages of (?P<page>{N}) is (?P<paged>{N}), \+ (?P<new>{N}) to "
    rf"generate = (?P<total>{N}) is over (?P<most>{N}) \((?P<of>{NAMED} - {N} - 1)\): {END}",
    rf"(?P<sum>{N}) to generate is over SGLANG_MAX_NEW_TOKENS_LIMIT (?P<most>{N}) of the server: {END}",
    rf"(?:(?P<all>{N}) at once / (?P<ranks>{N}) replicas = )?(?P<load>{N}) at once x \(prompt (?P<sum>[^()]+?)"
    rf"(?:, in pages of (?P<page>{N}))?\)(?P<shared> - {N} x {N} of the shared prefix)? = (?P<total>{N}) is over the "
    rf"KV capacity of (?P<most>{N}) tokens: at most (?P<runs>{N}) at once",
    rf"(?P<sum>{N}) at once is over the (?P<most>{N}) requests the server runs at once; the rest waits",
)


def whole(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", ""))


@settings(max_examples=500, deadline=None)
@given(shapes(), st.integers(1, 12), st.integers(0, 40), st.integers(0, 300))
def test_every_problem_is_a_sum_that_is_right(
    shape: tuple[int, int, Limits], load: int, headroom: int, common: int
) -> None:
    p, n, limits = shape
    budget = check(p, n, limits, load, headroom, shared_tokens=min(common, p))
    for problem in budget.problems:
        found = [match for line in LINES if (match := re.fullmatch(line, problem))]
        assert len(found) == 1, problem
        said = found[0].groupdict()
        total, page = whole(said.get("total")), whole(said.get("page")) or 1
        if "paged" in said:
            assert re_sum(said["prompt"]) == (whole(said["whole"]) or p) == p + headroom
            assert re_sum(said["prompt"], page) == whole(said["paged"])
            assert re_sum(f"{said['paged']} + {said['new']}") == total
        elif "load" in said:
            each = re_sum(said["sum"], page)
            less = re_sum(said["shared"][3:].removesuffix(" of the shared prefix")) if said["shared"] else 0
            assert each * (whole(said["load"]) or 0) - less == total
            if said["all"] is not None:
                assert -(-load // (whole(said["ranks"]) or 0)) == whole(said["load"])
                assert whole(said["all"]) == load
            runs = whole(said["runs"]) or 0
            assert runs < load
            per = runs // limits.replicas
            shared = budget.shared_tokens
            assert per * each - max(per - 1, 0) * shared <= (whole(said["most"]) or 0)
            assert (per + 1) * each - per * shared > (whole(said["most"]) or 0)
        else:
            assert total in (None, re_sum(said["sum"]))
            total = re_sum(said["sum"])
        assert total is not None
        most = whole(said.get("most"))
        if most is None:
            assert total >= (whole(said["least"]) or 0)
        else:
            assert total > most
            assert said.get("by") is None or total - most == whole(said["by"])
        if said.get("of"):
            assert re_sum(re.sub(r"[^\d,+ -]|(?<=\D),", "", said["of"]).strip()) == most
        if said.get("left") is not None:
            assert whole(said["left"]) == budget.effective_new_tokens
        if "left" in said:  # the line says what becomes of the request
            end = {"rejected": "rejected", "clipped": "clipped silently to", "ok": "the server would take it, without"}
            assert problem.split(": ")[1].startswith(end[budget.outcome])


def test_what_is_not_known_is_said_and_no_rule_needs_it() -> None:
    dark = Limits(
        context_length=1_000, reserved_tokens=None, block=None, page_size=None, auto_truncate=None, source="server"
    )
    budget = check(900, 98, dark, 50)
    assert budget.fits
    assert budget.unknown == (
        "KV capacity",
        "tokens reserved for drafts",
        "draft block",
        "requests the server runs at once",
        "page size",
        "whether prompts are cut silently",
    )
    assert not check(900, 101, dark).fits  # whatever is reserved, the window is too short
    assert check(5, 5, Limits(context_length=100, kv_tokens=100, max_running=4)).unknown == ()


def test_the_last_token_of_the_window_by_version() -> None:
    new = Limits(context_length=32_768, reserved_tokens=16)
    old = Limits(context_length=32_768, reserved_tokens=16, total_below=True)
    assert check(31_728, 1_024, new).fits  # 32,768
    assert check(31_728, 1_024, old).problems == (
        "prompt 31,728 + 1,024 to generate + 16 reserved for drafts = 32,768 is 1 over 32,767 (context length 32,768 - "
        "1): rejected",
    )
    assert check(31_727, 1_024, old).fits
    assert (longest_prompt(1_024, new), longest_prompt(1_024, old)) == (31_728, 31_727)


def test_a_prompt_takes_whole_pages_and_one_stays_free() -> None:
    limits = Limits(context_length=4_096, kv_tokens=1_024, page_size=64)
    # 500 tokens are 8 pages = 512; 512 + 447 = 1,024 - 64 - 1
    assert check(500, 447, limits).fits
    clipped = check(500, 450, limits)
    assert (clipped.outcome, clipped.effective_new_tokens) == ("clipped", 447)
    assert clipped.problems == (
        "prompt 500 in pages of 64 is 512, + 450 to generate = 962 is over 959 (KV capacity 1,024 - 64 - 1): clipped "
        "silently to 447 new tokens",
    )


def test_the_cap_of_the_environment() -> None:
    capped = check(100, 600, Limits(context_length=4_096, new_tokens_limit=512))
    assert (capped.outcome, capped.effective_new_tokens, capped.longest_prompt) == ("clipped", 512, -1)
    assert capped.problems == (
        "600 to generate is over SGLANG_MAX_NEW_TOKENS_LIMIT 512 of the server: clipped silently to 512 new tokens",
    )
    assert check(100, 512, Limits(context_length=4_096, new_tokens_limit=512)).fits


def test_a_shared_prefix_is_held_once_where_the_server_caches_prefixes() -> None:
    caching = Limits(context_length=32_768, kv_tokens=100_000, max_running=16, prefix_cache=True)
    without = msgspec.structs.replace(caching, prefix_cache=False)
    assert not check(25_000, 1_000, without, 8, shared_tokens=18_750).fits
    # 18,750 + 8 x (6,250 + 1,000) = 76,750
    assert check(25_000, 1_000, caching, 8, shared_tokens=18_750).fits
    assert check(25_000, 1_000, caching, 12, shared_tokens=18_750).problems == (
        "12 at once x (prompt 25,000 + 1,000 to generate) - 11 x 18,750 of the shared prefix = 105,750 is over the KV "
        "capacity of 100,000 tokens: at most 11 at once",
    )
    paged = msgspec.structs.replace(caching, kv_tokens=704, page_size=64)
    # 100 common tokens are one whole page: 2 x 384 - 64 = 704
    assert check(300, 84, paged, 2, shared_tokens=100).fits
    assert check(300, 84, paged, 2, shared_tokens=100).shared_tokens == 64
    assert not check(300, 84, msgspec.structs.replace(paged, kv_tokens=703), 2, shared_tokens=100).fits
    with pytest.raises(ValueError, match="expected a part of the prompt's 10"):
        check(10, 1, caching, shared_tokens=11)


def test_the_servers_own_limit_on_a_prompt_counts() -> None:
    # a pool that is smaller for this model than max_total_num_tokens says, as with sliding windows
    limits = Limits(context_length=32_768, kv_tokens=50_000, max_input=19_994)
    assert check(19_993, 5, limits).fits
    assert check(19_994, 1, limits).problems == (
        "prompt 19,994 is over the longest input 19,993 (the server's max_req_input_len 19,994 + 6 - 7): rejected",
    )


def test_only_the_headroom_does_not_fit() -> None:
    limits = Limits(context_length=32_768)
    (short,) = check(31_700, 1_024, limits, headroom=43).problems
    assert short == (
        "prompt 31,700 + 1,024 to generate + 43 headroom = 32,767 is over 32,766 (context length 32,768 - 2): the "
        "server would take it, without that headroom"
    )
    (both,) = check(31_743, 1_024, limits, headroom=1).problems
    assert both.endswith("clipped silently to 1,023 new tokens, also without the headroom")


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
