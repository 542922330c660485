"""The token budget: whether a prompt and its answer fit a server, by SGLang's own rules.

P prompt tokens after the chat template, N tokens to generate, C context length, K capacity of the KV pool in tokens,
R draft tokens the engine reserves. docs/budget.md states the rules; `check` is a pure function of them.
"""

from __future__ import annotations

import msgspec

INPUT_MARGIN = 6
"""SGLang's `max_req_input_len` is min(C, K) less this; a prompt has to stay below it."""

CLIP_MARGIN = 2
"""SGLang silently clips N to min(C, K) less this less P."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server can take. None means unknown, and no rule that needs it is applied.

    Attributes:
        context_length: C, the effective window in tokens.
        kv_tokens: K, tokens the KV pool holds (`max_total_num_tokens`).
        reserved_tokens: R, draft tokens held back from the window: a matter of method and engine.
        block: tokens of one draft block, kept free twice per running request.
        max_running: requests the server runs at once, as effective.
        page_size: tokens of one KV page.
        auto_truncate: the server runs with --allow-auto-truncate.
        source: where the numbers come from, for people.
    """

    context_length: int
    kv_tokens: int | None = None
    reserved_tokens: int = 0
    block: int = 0
    max_running: int | None = None
    page_size: int = 1
    auto_truncate: bool = False
    source: str = "given"

    @property
    def room(self) -> int:
        """min(C, K), C where K is unknown."""
        return self.context_length if self.kv_tokens is None else min(self.context_length, self.kv_tokens)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one shape.

    Attributes:
        fits: no problem was found.
        problems: one line each, with the numbers.
        outcome: what a server would do with one such request: ok, rejected (an error) or clipped (short, no error).
        effective_new_tokens: tokens that would be generated: N, fewer when clipped, 0 when rejected.
        longest_prompt: the largest P that fits with this N, headroom and concurrency; -1 = none.
    """

    prompt_tokens: int
    max_new_tokens: int
    concurrency: int | None
    headroom: int
    limits: Limits
    fits: bool
    problems: tuple[str, ...]
    outcome: str
    effective_new_tokens: int
    longest_prompt: int


def check(
    prompt_tokens: int, max_new_tokens: int, limits: Limits, concurrency: int | None = 1, headroom: int = 0
) -> Budget:
    """Return whether `concurrency` requests of this shape fit, every rule that fails named with its numbers.

    Fits = P + R < C, P + R + N <= C, P <= min(C, K) - 7 and P + N <= min(C, K) - 2, the headroom added to every left
    side; n * (P + N + 2 * block), each request rounded up to pages, <= K; n <= the requests that run at once; and the
    server does not truncate by itself.

    Args:
        prompt_tokens: P, after the chat template, at least 1.
        max_new_tokens: N, at least 1.
        limits: what the server can take.
        concurrency: n, requests in flight; None (an open loop without a bound) checks one.
        headroom: tokens to keep free on top.
    """
    p, n, c, r, h = prompt_tokens, max_new_tokens, limits.context_length, limits.reserved_tokens, headroom
    if p < 1 or n < 1 or h < 0 or (concurrency is not None and concurrency < 1):
        raise ValueError("prompt_tokens, max_new_tokens and concurrency start at 1, headroom at 0")
    rejected, clipped = _problems(p, n, limits, h)
    problems = [*rejected, *clipped, *_load_problems(p, n, limits, concurrency or 1, h)]
    if limits.auto_truncate:
        problems.append("the server runs with --allow-auto-truncate and would cut a prompt silently; start it without")
    refuses = p + r >= c or p + r + n > c or p >= limits.room - INPUT_MARGIN
    effective = 0 if refuses else min(n, limits.room - CLIP_MARGIN - p)
    return Budget(
        prompt_tokens=p,
        max_new_tokens=n,
        concurrency=concurrency,
        headroom=h,
        limits=limits,
        fits=not problems,
        problems=tuple(problems),
        outcome="rejected" if refuses else "clipped" if effective < n else "ok",
        effective_new_tokens=effective,
        longest_prompt=longest_prompt(n, limits, concurrency, h),
    )


def longest_prompt(max_new_tokens: int, limits: Limits, concurrency: int | None = 1, headroom: int = 0) -> int:
    """Return the largest P that `check` lets pass, or -1 where no prompt does."""
    n, c, r = max_new_tokens, limits.context_length, limits.reserved_tokens
    load = concurrency or 1
    if limits.auto_truncate or (limits.max_running is not None and load > limits.max_running):
        return -1
    room = limits.room
    bounds = [c - r - 1, c - r - n, room - INPUT_MARGIN - 1, room - CLIP_MARGIN - n]
    if limits.kv_tokens is not None:
        pages = limits.kv_tokens // (load * limits.page_size)
        bounds.append(pages * limits.page_size - n - 2 * limits.block)
    longest = min(bounds) - headroom
    return longest if longest >= 1 else -1


def _problems(p: int, n: int, limits: Limits, h: int) -> tuple[list[str], list[str]]:
    """Return the lines of the rules a server rejects by, and of the one it clips by.

    A rule that only says again what another line says of the same limit is left out; whether there is any line at all
    is not changed by that.
    """
    c, r, room = limits.context_length, limits.reserved_tokens, limits.room
    more = (f" + {r:,} reserved for drafts" if r else "") + (f" + {h:,} headroom" if h else "")
    rejected: list[str] = []
    clipped: list[str] = []
    if p + r + h >= c:
        rejected.append(f"prompt {_sum(p, more, p + r + h)} is not below the context length {c:,}: {_what(h)}rejected")
    elif p + r + n + h > c:
        total = p + r + n + h
        rejected.append(
            f"prompt {_sum(p, f' + {n:,} to generate{more}', total)} is {total - c:,} over the context length {c:,}: "
            f"{_what(h)}rejected"
        )
    extra = f" + {h:,} headroom" if h else ""
    if p + h > room - INPUT_MARGIN - 1 and (room < c or not rejected):
        rejected.append(
            f"prompt {_sum(p, extra, p + h)} is over the longest input {room - INPUT_MARGIN - 1:,} "
            f"({_room(limits)} - {INPUT_MARGIN + 1}): {_what(h)}rejected"
        )
    if p + n + h > room - CLIP_MARGIN and not rejected:
        left = max(room - CLIP_MARGIN - p - h, 0)
        clipped.append(
            f"prompt {_sum(p, f' + {n:,} to generate{extra}', p + n + h)} is over {room - CLIP_MARGIN:,} "
            f"({_room(limits)} - {CLIP_MARGIN}): {_what(h)}clipped silently to {left:,} new tokens"
        )
    return rejected, clipped


def _load_problems(p: int, n: int, limits: Limits, load: int, h: int) -> list[str]:
    problems = []
    if limits.kv_tokens is not None:
        each = p + n + 2 * limits.block + h
        paged = -(-each // limits.page_size) * limits.page_size
        if load * paged > limits.kv_tokens:
            drafts = f" + 2 x {limits.block:,} draft block" if limits.block else ""
            pages = f", in pages of {limits.page_size:,}" if limits.page_size > 1 else ""
            room = f" + {h:,} headroom" if h else ""
            problems.append(
                f"{load:,} at once x (prompt {p:,} + {n:,} to generate{drafts}{room}{pages}) = {load * paged:,} is over"
                f" the KV capacity of {limits.kv_tokens:,} tokens: at most {limits.kv_tokens // paged:,} at once"
            )
    if limits.max_running is not None and load > limits.max_running:
        problems.append(
            f"{load:,} at once is over the {limits.max_running:,} requests the server runs at once; the rest waits"
        )
    return problems


def _sum(p: int, more: str, total: int) -> str:
    return f"{p:,}{more} = {total:,}" if more else f"{p:,}"


def _what(headroom: int) -> str:
    return "without the headroom " if headroom else ""


def _room(limits: Limits) -> str:
    if limits.kv_tokens is not None and limits.kv_tokens < limits.context_length:
        return f"KV capacity {limits.kv_tokens:,}"
    return f"context length {limits.context_length:,}"


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """One length built by tiling a phrase on the strength of a claimed cost per repetition, as the incident did.

    Attributes:
        repetitions: floor(asked / claimed).
        claimed_tokens: repetitions * claimed.
        measured_tokens: what the tokenizer really makes of that many repetitions; None where no tokenizer was asked.
        right_length: the real text misses the asked length by less than one claimed repetition.
        total_tokens: real prompt (claimed, where not measured) + question + generated.
        problems: one line each; the budget's own and the wrong length.
    """

    asked: int
    claimed_per_repetition: int
    repetitions: int
    claimed_tokens: int
    measured_tokens: int | None
    question_tokens: int
    total_tokens: int
    right_length: bool
    fits: bool
    problems: tuple[str, ...]
    budget: Budget


def repetitions(asked: int, claimed: int) -> int:
    """Return how many repetitions of a phrase of `claimed` tokens are taken for `asked` tokens."""
    if claimed < 1 or asked < claimed:
        raise ValueError(f"asked {asked} tokens; expected at least one repetition of {claimed}")
    return asked // claimed


def check_repetition(
    asked: int,
    claimed: int,
    measured_tokens: int | None,
    limits: Limits,
    *,
    question_tokens: int,
    max_new_tokens: int,
    concurrency: int | None = 1,
    headroom: int = 0,
) -> Repetition:
    """Return what a claimed cost per repetition leads to, checked against the real count and the server's limits.

    Args:
        asked: the prompt length wanted.
        claimed: tokens that one repetition is believed to cost.
        measured_tokens: real tokens of floor(asked / claimed) repetitions, None = not measured.
        limits: what the server can take.
        question_tokens: tokens of the question and of the chat template around it.
        max_new_tokens: tokens to generate.
        concurrency: requests in flight.
        headroom: tokens to keep free.
    """
    count = repetitions(asked, claimed)
    real = count * claimed if measured_tokens is None else measured_tokens
    right = abs(asked - real) < claimed
    problems: list[str] = []
    if not right:
        problems.append(
            f"the prompt is not the length asked for: {count:,} repetitions are {real:,} tokens, {asked:,} were asked "
            f"({real / count:.4g} tokens a repetition, {claimed:,} claimed)"
        )
    budget = check(real + question_tokens, max_new_tokens, limits, concurrency, headroom)
    return Repetition(
        asked=asked,
        claimed_per_repetition=claimed,
        repetitions=count,
        claimed_tokens=count * claimed,
        measured_tokens=measured_tokens,
        question_tokens=question_tokens,
        total_tokens=real + question_tokens + max_new_tokens,
        right_length=right,
        fits=budget.fits and right,
        problems=(*problems, *budget.problems),
        budget=budget,
    )
