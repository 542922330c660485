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
    """What a server can take. None means unknown: a rule that needs it is applied only as far as it holds anyway.

    Attributes:
        context_length: C, the effective window in tokens.
        kv_tokens: K, tokens the KV pool holds (`max_total_num_tokens`).
        reserved_tokens: R, draft tokens held back from the window: a matter of method and engine.
        block: tokens of one draft block, kept free twice per running request.
        max_running: requests the server runs at once, as effective.
        page_size: tokens of one KV page.
        max_input: the server's own `max_req_input_len`; where it is known, min(C, K) is not reckoned but taken from it.
        new_tokens_limit: SGLANG_MAX_NEW_TOKENS_LIMIT of the server's environment; None where not known or not set.
        total_below: P + R + N has to stay below C, as before SGLang 0.5.11; from then on it may equal C.
        prefix_cache: prompts that begin alike share that part of the pool.
        replicas: servers behind the address that share the requests, each with a pool of K (`dp_size`).
        auto_truncate: the server runs with --allow-auto-truncate.
        source: where the numbers come from, for people.
    """

    context_length: int
    kv_tokens: int | None = None
    reserved_tokens: int | None = 0
    block: int | None = 0
    max_running: int | None = None
    page_size: int | None = 1
    max_input: int | None = None
    new_tokens_limit: int | None = None
    total_below: bool = False
    prefix_cache: bool | None = None
    replicas: int = 1
    auto_truncate: bool | None = False
    source: str = "given"

    @property
    def room(self) -> int:
        """min(C, K), or what the server's own limit on a prompt says it is; C where K is unknown."""
        if self.max_input is not None:
            return self.max_input + INPUT_MARGIN
        return self.context_length if self.kv_tokens is None else min(self.context_length, self.kv_tokens)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not known, in words."""
        names = {
            "kv_tokens": "KV capacity",
            "reserved_tokens": "tokens reserved for drafts",
            "block": "draft block",
            "max_running": "requests the server runs at once",
            "page_size": "page size",
            "auto_truncate": "whether prompts are cut silently",
        }
        return tuple(words for name, words in names.items() if getattr(self, name) is None)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one shape.

    Attributes:
        shared_tokens: leading tokens of the prompt that the pool holds once for all requests.
        fits: no problem was found.
        problems: one line each, with the sum.
        unknown: what is not known of the server, in words; rules that need it were not applied.
        outcome: what a server would do with one such request: ok, rejected (an error) or clipped (short, no error).
        effective_new_tokens: tokens that would be generated: N, fewer when clipped, 0 when rejected.
        longest_prompt: the largest P that fits with this N, headroom and concurrency; -1 = none.
    """

    prompt_tokens: int
    max_new_tokens: int
    concurrency: int | None
    headroom: int
    shared_tokens: int
    limits: Limits
    fits: bool
    problems: tuple[str, ...]
    unknown: tuple[str, ...]
    outcome: str
    effective_new_tokens: int
    longest_prompt: int


def check(
    prompt_tokens: int,
    max_new_tokens: int,
    limits: Limits,
    concurrency: int | None = 1,
    headroom: int = 0,
    *,
    shared_tokens: int = 0,
) -> Budget:
    """Return whether `concurrency` requests of this shape fit, every rule that fails named with its sum.

    Fits = P + R < C, P + R + N <= C (< C before SGLang 0.5.11), P <= min(C, K) - 7, P + N <= min(C, K) - 2, P in whole
    pages + N + a page < K, the headroom added to every left side; N at most the server's cap; n * (P + N + 2 * block),
    each request rounded up to pages and a shared prefix counted once, <= K; n <= the requests that run at once; and the
    server does not truncate by itself.

    Args:
        prompt_tokens: P, after the chat template, at least 1.
        max_new_tokens: N, at least 1.
        limits: what the server can take.
        concurrency: n, requests in flight; None (an open loop without a bound) checks one.
        headroom: tokens to keep free on top.
        shared_tokens: leading tokens that all these prompts have in common; only whole pages of them are shared, and
            only where the server is known to have its prefix cache on.
    """
    p, n, h = prompt_tokens, max_new_tokens, headroom
    if p < 1 or n < 1 or h < 0 or (concurrency is not None and concurrency < 1):
        raise ValueError("prompt_tokens, max_new_tokens and concurrency start at 1, headroom at 0")
    if not 0 <= shared_tokens <= p:
        raise ValueError(f"shared_tokens {shared_tokens}; expected a part of the prompt's {p}")
    page = limits.page_size or 1
    shared = shared_tokens // page * page if limits.prefix_cache else 0
    rejected, clipped = _problems(p, n, limits, h)
    problems = [*rejected, *clipped, *_load_problems(p, n, limits, concurrency or 1, h, shared)]
    if limits.auto_truncate:
        problems.append("the server runs with --allow-auto-truncate and would cut a prompt silently; start it without")
    left = _left(p, n, limits)
    return Budget(
        prompt_tokens=p,
        max_new_tokens=n,
        concurrency=concurrency,
        headroom=h,
        shared_tokens=shared,
        limits=limits,
        fits=not problems,
        problems=tuple(problems),
        unknown=limits.unknown,
        outcome="rejected" if left is None else "clipped" if left < n else "ok",
        effective_new_tokens=left or 0,
        longest_prompt=longest_prompt(n, limits, concurrency, h),
    )


def _left(p: int, n: int, limits: Limits) -> int | None:
    """Return the tokens that the server would generate for one such request, None where it refuses it."""
    c, r, room = limits.context_length, limits.reserved_tokens or 0, limits.room
    if p + r >= c or p + r + n > c - limits.total_below or p >= room - INPUT_MARGIN:
        return None
    bounds = [n, room - CLIP_MARGIN - p]
    if limits.new_tokens_limit is not None:
        bounds.append(limits.new_tokens_limit)
    if limits.kv_tokens is not None:
        bounds.append(_pool(limits) - _paged(p, limits))
    return max(min(bounds), 0)


def longest_prompt(max_new_tokens: int, limits: Limits, concurrency: int | None = 1, headroom: int = 0) -> int:
    """Return the largest P that `check` lets pass without a shared prefix, or -1 where no prompt does."""
    n, c, r = max_new_tokens, limits.context_length, limits.reserved_tokens or 0
    load = concurrency or 1
    if (
        limits.auto_truncate
        or (limits.max_running is not None and load > limits.max_running)
        or (limits.new_tokens_limit is not None and n > limits.new_tokens_limit)
    ):
        return -1
    room = limits.room
    bounds = [c - r - 1, c - r - n - limits.total_below, room - INPUT_MARGIN - 1, room - CLIP_MARGIN - n]
    if limits.kv_tokens is not None:
        page = limits.page_size or 1
        bounds.append((_pool(limits) - n) // page * page)
        here = -(-load // limits.replicas)
        bounds.append(limits.kv_tokens // (here * page) * page - n - 2 * (limits.block or 0))
    longest = min(bounds) - headroom
    return longest if longest >= 1 else -1


def _paged(tokens: int, limits: Limits) -> int:
    """Tokens rounded up to whole pages."""
    page = limits.page_size or 1
    return -(-tokens // page) * page


def _pool(limits: Limits) -> int:
    """What one prompt, in whole pages, and its answer may take of the empty pool: K less a page less 1."""
    return (limits.kv_tokens or 0) - (limits.page_size or 1) - 1


def _problems(p: int, n: int, limits: Limits, h: int) -> tuple[list[str], list[str]]:
    """Return the lines of the rules a server rejects by, and of those it shortens the answer by.

    A rule that only says again what another line says of the same limit is left out; whether there is any line at all
    is not changed by that.
    """
    c, r, room = limits.context_length, limits.reserved_tokens or 0, limits.room
    more = (f" + {r:,} reserved for drafts" if r else "") + (f" + {h:,} headroom" if h else "")
    extra = f" + {h:,} headroom" if h else ""
    end = _end(p, n, limits, h)
    rejected: list[str] = []
    most = c - limits.total_below
    if p + r + h >= c:
        rejected.append(f"prompt {_sum(p, more, p + r + h)} is not below the context length {c:,}: {end}")
    elif p + r + n + h > most:
        total = p + r + n + h
        against = f"{most:,} (context length {c:,} - 1)" if limits.total_below else f"the context length {c:,}"
        rejected.append(
            f"prompt {_sum(p, f' + {n:,} to generate{more}', total)} is {total - most:,} over {against}: {end}"
        )
    longest = room - INPUT_MARGIN - 1
    if p + h > longest and (room < c or not rejected):
        rejected.append(
            f"prompt {_sum(p, extra, p + h)} is over the longest input {longest:,} "
            f"({_room(limits)} - {INPUT_MARGIN + 1}): {end}"
        )
    return rejected, [] if rejected else _clip_problems(p, n, limits, h, end)


def _clip_problems(p: int, n: int, limits: Limits, h: int, end: str) -> list[str]:
    """Return the line of the limit that shortens the answer most, and the one of the server's cap on answers."""
    extra = f" + {h:,} headroom" if h else ""
    problems = []
    bound = limits.room - CLIP_MARGIN
    page, paged = limits.page_size or 1, _paged(p + h, limits)
    pool = _pool(limits)
    if limits.kv_tokens is not None and pool - paged < min(n, bound - p - h):
        problems.append(
            f"prompt {_sum(p, extra, p + h)} in pages of {page:,} is {paged:,}, + {n:,} to generate = {paged + n:,} is "
            f"over {pool:,} (KV capacity {limits.kv_tokens:,} - {page:,} - 1): {end}"
        )
    elif p + n + h > bound:
        problems.append(
            f"prompt {_sum(p, f' + {n:,} to generate{extra}', p + n + h)} is over {bound:,} "
            f"({_room(limits)} - {CLIP_MARGIN}): {end}"
        )
    cap = limits.new_tokens_limit
    if cap is not None and n > cap:
        problems.append(f"{n:,} to generate is over SGLANG_MAX_NEW_TOKENS_LIMIT {cap:,} of the server: {end}")
    return problems


def _load_problems(p: int, n: int, limits: Limits, load: int, h: int, shared: int) -> list[str]:
    problems = []
    if limits.kv_tokens is not None:
        block, page = limits.block or 0, limits.page_size or 1
        each = _paged(p + n + 2 * block + h, limits)
        here = -(-load // limits.replicas)
        total = here * each - (here - 1) * shared
        if total > limits.kv_tokens:
            drafts = f" + 2 x {block:,} draft block" if block else ""
            room = f" + {h:,} headroom" if h else ""
            pages = f", in pages of {page:,}" if page > 1 else ""
            once = f" - {here - 1:,} x {shared:,} of the shared prefix" if shared and here > 1 else ""
            split = f"{load:,} at once / {limits.replicas:,} replicas = " if limits.replicas > 1 else ""
            most = max((limits.kv_tokens - shared) // max(each - shared, 1), 0) * limits.replicas
            problems.append(
                f"{split}{here:,} at once x (prompt {p:,} + {n:,} to generate{drafts}{room}{pages}){once} = {total:,} "
                f"is over the KV capacity of {limits.kv_tokens:,} tokens: at most {most:,} at once"
            )
    if limits.max_running is not None and load > limits.max_running:
        problems.append(
            f"{load:,} at once is over the {limits.max_running:,} requests the server runs at once; the rest waits"
        )
    return problems


def _sum(p: int, more: str, total: int) -> str:
    return f"{p:,}{more} = {total:,}" if more else f"{p:,}"


def _end(p: int, n: int, limits: Limits, headroom: int) -> str:
    """What becomes of the request itself, which does not have the headroom that was asked for on top."""
    left = _left(p, n, limits)
    if left == n:
        return "the server would take it, without that headroom"
    what = "rejected" if left is None else f"clipped silently to {left:,} new tokens"
    return f"{what}, also without the headroom" if headroom else what


def _room(limits: Limits) -> str:
    room = limits.room
    if room == limits.kv_tokens and room != limits.context_length:
        return f"KV capacity {room:,}"
    if room == limits.context_length:
        return f"context length {room:,}"
    return f"the server's max_req_input_len {limits.max_input:,} + {INPUT_MARGIN}"


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
