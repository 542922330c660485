"""The rules of a valid cell, each a row: rule, whether it held (null = not known), what was seen, what was expected.

A cell that breaks one is invalid and never averaged in; a rule that the records cannot answer is listed as unknown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from specrig.engine.limits import STEPPING, speculation
from specrig.load.metrics import median
from specrig.load.stream import Lag
from specrig.load.windows import Steady, Stream, peak
from specrig.model.cell import Cell
from specrig.model.record import Check, Request

MAX_POST_EOS_SHARE = 0.25
CACHE_TOLERANCE_TOKENS = 64
CACHE_TOLERANCE_SHARE = 0.01
MIN_RUNNING_SHARE = 0.5
MAX_LAG_MEAN_MS = 5.0
MIN_LAG_S = 0.2
MAX_CLIENT_CPU = 0.95
IDENTITY = (
    "model_path", "served_model_name", "tokenizer_path", "context_length", "tp_size", "dp_size", "pp_size",
    "base_gpu_id", "gpu_id_step", "quantization", "kv_cache_dtype", "dtype", "random_seed", "max_running_requests",
    "disable_radix_cache", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens",
    "speculative_num_steps", "speculative_dflash_block_size", "speculative_ddtree_budget",
    "speculative_dflash_tree_budget", "speculative_dflash_tree_width", "incremental_streaming_output", "version",
)  # fmt: skip
"""What of a server's own report must be the same before and after a cell."""


def identity(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of a server's report that make it the same server."""
    return {} if info is None else {name: info[name] for name in IDENTITY if info.get(name) is not None}


def method_of(info: Mapping[str, Any] | None) -> str | None:
    """The method label that a server's own report amounts to; null where it does not say.

    Args:
        info: ``/server_info``.

    Returns:
        ``autoregressive``, ``dflash``, ``ddtree-b15``, or the algorithm's name in lower case.
    """
    if info is None or "speculative_algorithm" not in info:
        return None
    spec = speculation(dict(info))
    if spec.algorithm is None:
        return "autoregressive"
    if spec.budget is not None or spec.algorithm == "DDTREE":
        return f"ddtree-b{spec.budget}" if spec.budget is not None else "ddtree"
    return spec.algorithm.lower()


def acceptance_bound(method: str | None, info: Mapping[str, Any] | None) -> int | None:
    """The most tokens that one verify step can yield, bonus included; null where the server does not tell.

    A chain yields at most its draft tokens, a tree at most its depth + 1, which is its draft block.
    """
    if info is None or method is None or method == "autoregressive":
        return None
    spec = speculation(dict(info))
    if spec.algorithm in STEPPING and spec.steps is not None:
        return spec.steps + 1  # whatever its branching, a step of the draft adds one level
    chain = spec.budget is None and not method.startswith("ddtree")
    return (spec.draft_tokens or spec.block_size) if chain else spec.block_size


def asked_for(cell: Cell, info: Mapping[str, Any] | None) -> Check:
    """Whether the server reports what the cell is defined on: model, tp, context length, method."""
    if info is None:
        return Check(rule="server is the one asked for", ok=None)
    wanted: dict[str, Any] = {"served_model_name": cell.model}
    seen: dict[str, Any] = {"served_model_name": info.get("served_model_name")}
    for name, value in (("tp_size", cell.tp), ("context_length", cell.context_length)):
        if value is not None and info.get(name) is not None:
            wanted[name], seen[name] = value, info[name]
    found = method_of(info)
    if cell.method is not None and found is not None:
        # dialects spell a method in many ways: the budget is compared where the server states one
        same = (found == "autoregressive") == (cell.method == "autoregressive")
        if same and "-b" in found and "-b" in cell.method:
            same = found.rpartition("-b")[2] == cell.method.rpartition("-b")[2]
        wanted["method"], seen["method"] = cell.method, cell.method if same else found
    if seen["served_model_name"] is None:
        del wanted["served_model_name"], seen["served_model_name"]
    bad = sorted(name for name in wanted if wanted[name] != seen[name])
    return Check(
        rule="server is the one asked for",
        ok=not bad,
        seen={name: seen[name] for name in bad or wanted},
        expected={name: wanted[name] for name in bad or wanted},
    )


def same_server(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Check:
    """Whether the server reported the same configuration before and after the cell."""
    if before is None or after is None:
        return Check(rule="same server before and after", ok=None)
    one, two = identity(before), identity(after)
    bad = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
    return Check(
        rule="same server before and after",
        ok=not bad,
        seen={name: two.get(name) for name in bad} or None,
        expected={name: one.get(name) for name in bad} or None,
    )


def failures(records: Sequence[Request], planned: int) -> Check:
    """Whether every request that was planned was made and succeeded; with the first failure's own words."""
    failed = [record for record in records if not record.ok]
    if failed:
        words = failed[0].server_message or failed[0].error or "unknown"
        text = f"{len(failed)} of {planned} failed ({failed[0].error}: {words})"
        return Check(rule="every request succeeded", ok=False, seen=text, expected="none")
    return Check(rule="every request succeeded", ok=len(records) == planned, seen=len(records), expected=planned)


def record_checks(cell: Cell, records: Sequence[Request], method: str | None, bound: int | None) -> list[Check]:
    """The rules that the successful requests' own figures answer.

    Args:
        cell: what was asked for.
        records: the successful requests.
        method: the label of what ran, where known.
        bound: the acceptance bound, where known.

    Returns:
        One row a rule.
    """
    rows: list[Check] = []
    if cell.stop == "length":
        rows.append(_all_equal("finish reason is length", [r.finish_reason for r in records], "length"))
        rows.append(_pairs("output tokens as asked", [(r.output_tokens, r.output_tokens_asked) for r in records]))
    counted = [r for r in records if r.token_source in ("tokenizer", "unknown")]
    by = "the tokenizer" if any(r.token_source == "tokenizer" for r in counted) else "nobody"
    rows.append(
        Check(
            rule="token count is the server's",
            ok=not counted,
            seen=f"{len(counted)} counted by {by}: the server sent no usage" if counted else None,
            expected="the server's count" if counted else None,
        )
    )
    rows.append(_pairs("prompt tokens as asked", [(r.prompt_tokens, r.prompt_tokens_asked) for r in records]))
    rows.append(
        _pairs(
            "output ids match the token count",
            [(len(r.output_ids) if r.output_ids else None, r.output_tokens) for r in records],
        )
    )
    rows.append(_speculation(method, records))
    taus = [1 + r.correct_drafts / r.verify_steps for r in records if r.verify_steps and r.correct_drafts is not None]
    if taus and bound is not None:
        rows.append(
            Check(
                rule="acceptance length within its bound",
                ok=max(taus) <= bound + 1e-9,
                seen=round(max(taus), 3),
                expected=bound,
            )
        )
    rows.append(_post_eos(cell, records))
    if cell.cache in ("flush", "unique"):
        rows.append(_cold(records))
    return rows


def _all_equal(rule: str, seen: Sequence[Any], expected: Any) -> Check:
    bad = [value for value in seen if value != expected]
    return Check(rule=rule, ok=not bad, seen=bad[0] if bad else expected, expected=expected)


def _pairs(rule: str, pairs: Sequence[tuple[int | None, int | None]]) -> Check:
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return Check(rule=rule, ok=None)
    bad = [(a, b) for a, b in known if a != b]
    return Check(rule=rule, ok=not bad, seen=bad[0][0] if bad else None, expected=bad[0][1] if bad else None)


def _speculation(method: str | None, records: Sequence[Request]) -> Check:
    steps = [r.verify_steps for r in records]
    if method == "autoregressive":
        on = any(value for value in steps)
        return Check(
            rule="no speculation in the baseline",
            ok=not on,
            seen="verify steps" if on else None,
            expected="none" if on else None,
        )
    if method is None:
        return Check(rule="speculation was on", ok=None)
    off = sum(1 for value in steps if not value)
    if off == len(steps) and all(r.output_ids is None for r in records):
        # an OpenAI route without the extension says nothing about speculation either way
        return Check(rule="speculation was on", ok=None)
    return Check(
        rule="speculation was on",
        ok=off == 0,
        seen=f"{off} of {len(steps)} requests without a verify step" if off else None,
        expected="verify steps in every request" if off else None,
    )


def _post_eos(cell: Cell, records: Sequence[Request]) -> Check:
    rule = "share of tokens after the first end of sequence"
    limit = f"at most {MAX_POST_EOS_SHARE:.0%}"
    if cell.stop != "length" or all(r.output_ids is None or not r.eos_known for r in records):
        return Check(rule=rule, ok=None, expected=limit)
    total = sum(r.output_tokens or 0 for r in records)
    after = sum((r.output_tokens or 0) - r.first_eos - 1 for r in records if r.first_eos is not None)
    share = after / total if total else 0.0
    return Check(rule=rule, ok=share <= MAX_POST_EOS_SHARE, seen=f"{share:.0%}", expected=limit)


def _cold(records: Sequence[Request]) -> Check:
    rule = "prompt not served from the cache"
    known = [(r.cached_tokens, r.prompt_tokens or 0) for r in records if r.cached_tokens is not None and not r.turn]
    if not known:
        return Check(rule=rule, ok=None)
    worst, prompt = max(known)
    limit = max(CACHE_TOLERANCE_TOKENS, int(CACHE_TOLERANCE_SHARE * prompt))
    return Check(rule=rule, ok=worst <= limit, seen=f"{worst} cached tokens", expected=f"at most {limit}")


def concurrency_reached(
    cell: Cell, streams: Sequence[Stream], window: Steady | None, polls: Sequence[tuple[float, int, int]]
) -> Check | None:
    """Whether the server worked on as many requests at once as were sent to it.

    Where it tells how long each one queued, all of them must have been in work together at the peak, and half of them
    on average over the window (long prompts are prefilled one after the other). Where it does not, decoding and its own
    counts of running requests show: enough of either proves the rule, too little of both breaks it only where requests
    were seen waiting, and not where all ran at once and nobody looked in the window.

    Args:
        cell: what was asked for.
        streams: the successful requests.
        window: the steady window.
        polls: looks at the server: when, how many ran, how many waited.

    Returns:
        The row; null for concurrency 1 and for open loops.
    """
    wanted = min(cell.concurrency or 1, len(streams))
    if wanted <= 1 or cell.arrival != "closed":
        return None
    rule = "concurrency reached on the server"
    most = max([peak(streams), *(running for _, running, _ in polls)])
    mean = window.running_mean if window else None
    blind = any(s.queue_s is None for s in streams)
    looks = [running for at, running, _ in polls if window and window.start < at <= window.end]
    if blind and mean is not None and looks:
        mean = max(mean, fmean(looks))  # decoding alone leaves prefill out, the server's own count does not
    ok: bool | None = most >= wanted and (mean is None or mean >= MIN_RUNNING_SHARE * wanted)
    if not ok and blind and (not any(waiting for _, _, waiting in polls) or (most >= wanted and not looks)):
        ok = None
    average = "unknown" if mean is None else f"{mean:.2f}"
    return Check(rule=rule, ok=ok, seen=f"{average} on average, {most} at most", expected=wanted)


def client_kept_up(lag: Lag, records: Sequence[Request]) -> Check:
    """Whether the client's own lateness is small against what it measured.

    The event loop's mean lateness is what shifts a time stamp: at most 1 % of the median time from first to last token,
    and 5 % of the median TTFT (5 ms are always allowed). Its 99th percentile is at most ten times that, and the client
    used less than 95 % of one core. Of less than a fifth of a second nothing is said.
    """
    rule = "client kept up"
    spans = [r.finished_s - r.first_s for r in records if r.finished_s is not None and r.first_s is not None]
    ttfts = [r.ttft_s for r in records if r.ttft_s is not None]
    mean = max(MAX_LAG_MEAN_MS, 1e3 * min(0.01 * (median(spans) or 0.0), 0.05 * (median(ttfts) or 0.0)))
    late = 10 * mean
    if lag.seconds < MIN_LAG_S:
        return Check(rule=rule, ok=None)
    return Check(
        rule=rule,
        ok=lag.mean_ms <= mean and lag.p99_ms <= late and lag.cpu < MAX_CLIENT_CPU,
        seen=f"loop lag {lag.mean_ms:.2f} ms on average, {lag.p99_ms:.1f} ms at p99, {lag.cpu:.0%} of a core",
        expected=f"at most {mean:.1f} ms, {late:.0f} ms, {MAX_CLIENT_CPU:.0%}",
    )


def arrivals_kept(records: Sequence[Request], rate: float | None, cap: int | None = None) -> Check:
    """Whether the requests of an open loop left when they were due, within a tenth of the mean gap or 10 ms.

    A request that ``cap`` others were ahead of had to wait until one of them ended, and is late from then on. (Its
    scheduled TTFT holds the wait all the same.)

    Args:
        records: the successful requests.
        rate: requests a second where they come closest.
        cap: how many may run at once, null = any number.
    """
    due = _released(records, cap) if cap else None
    late = sorted(
        r.sent_s - (due(r.scheduled_s, r.sent_s) if due else r.scheduled_s)
        for r in records
        if r.sent_s is not None and r.scheduled_s is not None
    )
    limit = max(0.010, 0.1 / rate) if rate else 0.010
    if not late:
        return Check(rule="requests left when due", ok=None)
    worst = late[min(len(late) - 1, int(len(late) * 0.99))]
    return Check(
        rule="requests left when due",
        ok=worst <= limit,
        seen=f"p99 {worst * 1e3:.1f} ms late",
        expected=f"at most {limit * 1e3:.0f} ms",
    )


def _released(records: Sequence[Request], cap: int) -> Callable[[float, float], float]:
    """When a request with a cap might leave: when due, or when the last of those that it waited for had ended."""
    spans = [(r.sent_s, r.finished_s) for r in records if r.sent_s is not None and r.finished_s is not None]
    begun, ended = sorted(a for a, _ in spans), sorted(b for _, b in spans)

    def released(due: float, sent: float) -> float:
        ahead = bisect_left(begun, sent) - bisect_right(ended, due)
        last = bisect_right(ended, sent)
        return max(due, ended[last - 1]) if ahead >= cap and last else due

    return released


def verdict(checks: Sequence[Check]) -> str | None:
    """The rules that were broken, in one line; null where none was."""
    broken = []
    for check in checks:
        if check.ok is False:
            seen = "" if check.seen is None else f": saw {_show(check.seen)}, expected {_show(check.expected)}"
            broken.append(check.rule + seen)
    return "; ".join(broken) or None


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(item)}" for name, item in value.items())
    return "nothing" if value is None else str(value)
