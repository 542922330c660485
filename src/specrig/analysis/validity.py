"""Which (cell, launch) parts may be counted, and why the others may not.

Every rule is looked at again from the records, besides the checks the load client wrote down. A rule that the records
cannot answer is unknown: it is listed, and does not invalidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specrig.analysis.frames import CellInfo, Part, Row, RunData, number

MAX_POST_EOS_SHARE = 0.25
"""A cell with a larger share of its tokens after the first end-of-sequence token is invalid."""
CACHE_TOLERANCE_TOKENS = 64
"""Prompt tokens found in the cache that a flushed or unique cell may show: chat templates share their first tokens."""
CACHE_TOLERANCE_SHARE = 0.01
MIN_RUNNING_SHARE = 0.5
"""Mean running requests on the server over the window, as a share of the concurrency asked for."""

BASELINE_METHODS = frozenset({"autoregressive"})


@dataclass(frozen=True)
class Check:
    """One rule on one part: ``ok`` is None where the records do not tell."""

    rule: str
    ok: bool | None
    seen: Any = None
    expected: Any = None

    @property
    def line(self) -> str:
        """The rule and, where known, what was seen and expected."""
        if self.seen is None and self.expected is None:
            return self.rule
        return f"{self.rule}: saw {_show(self.seen)}, expected {_show(self.expected)}"


@dataclass(frozen=True)
class PartValidity:
    """The judgement of one cell in one launch."""

    cell: str
    launch: int
    block: int
    state: str
    valid: bool
    reason: str | None
    requests: int
    ok: int
    checks: list[Check] = field(default_factory=list)

    @property
    def unknown(self) -> list[str]:
        """Rules that could not be answered."""
        return [check.rule for check in self.checks if check.ok is None]


def judge(run: RunData, max_post_eos: float = MAX_POST_EOS_SHARE) -> dict[Part, PartValidity]:
    """Judge every (cell, launch) that has a row or a request."""
    requests: dict[Part, list[Row]] = {}
    for row in run.requests.to_dict("records"):
        requests.setdefault((row["cell"], int(row["launch"])), []).append({str(k): v for k, v in row.items()})
    parts = {(row["cell"], row["launch"]): row for row in run.parts}
    bounds = _draft_bounds(run.manifest)
    gates = _failed_gates(run.manifest)
    out: dict[Part, PartValidity] = {}
    for key in sorted({*requests, *parts}):
        info = run.cells[key[0]]
        bound = bounds.get(info.profile or "")
        out[key] = _judge_part(
            key, info, parts.get(key), requests.get(key, []), bound, max_post_eos, gates.get(key[1], [])
        )
    return out


def _judge_part(
    key: Part,
    info: CellInfo,
    part: Row | None,
    rows: list[Row],
    bound: float | None,
    max_post_eos: float,
    gates: list[str],
) -> PartValidity:
    state = (part or {}).get("state") or ("unknown" if part else "unfinished")
    ok_rows = [row for row in rows if row["ok"]]
    block = int(rows[0]["block"]) if rows else int((part or {}).get("block") or key[1])
    checks: list[Check] = [
        Check("every gate of its launch passed", False, gate, "no failed gate") for gate in gates[:1]
    ]
    if part is not None:
        for raw in part["checks"]:
            said = raw["ok"] if isinstance(raw["ok"], bool) else None
            checks.append(Check(str(raw["rule"]), said, raw["seen"], raw["expected"]))
    if rows:
        checks = _united(checks + _record_checks(info, part, rows, ok_rows, bound, max_post_eos))
    reasons: list[str] = []
    if state == "unfinished":
        reasons.append("not finished: requests were recorded, the cell was never closed")
    elif state != "done":
        reasons.append((part or {}).get("reason") or f"state is {state}")
    elif not rows:
        reasons.append("no requests were recorded")
    seen = {check.rule for check in checks if check.ok is False}
    reasons += [check.line for check in checks if check.ok is False] if state in ("done", "invalid") else []
    if state == "invalid" and seen and (part or {}).get("reason"):
        reasons = reasons[:1]
    return PartValidity(
        cell=key[0],
        launch=key[1],
        block=block,
        state=state,
        valid=not reasons,
        reason="; ".join(dict.fromkeys(reasons)) or None,
        requests=len(rows),
        ok=len(ok_rows),
        checks=checks,
    )


def _united(checks: list[Check]) -> list[Check]:
    """One check a rule: a failed one goes before a passed one, and that before an unknown one."""
    order = {False: 0, True: 1, None: 2}
    best: dict[str, Check] = {}
    for check in checks:
        known = best.get(check.rule)
        if known is None or order[check.ok] < order[known.ok]:
            best[check.rule] = check
    return list(best.values())


def _record_checks(
    info: CellInfo, part: Row | None, rows: list[Row], ok_rows: list[Row], bound: float | None, max_post_eos: float
) -> list[Check]:
    checks: list[Check] = []
    failed = [row for row in rows if not row["ok"]]
    if failed:
        why = failed[0]["server_message"] or failed[0]["error"] or "no reason recorded"
        checks.append(Check("every request succeeded", False, f"{len(failed)} of {len(rows)} failed ({why})", "none"))
    else:
        checks.append(Check("every request succeeded", True, len(rows), len(rows)))
    if info.requests is not None:
        checks.append(Check("all requests recorded", len(rows) == info.requests, len(rows), info.requests))
    if not ok_rows:
        return checks
    if info.stop != "natural":
        checks.append(_each("finish reason is length", [r["finish_reason"] for r in ok_rows], "length"))
        checks.append(_pairs("output tokens as asked", ok_rows, "output_tokens", "output_tokens_asked"))
    checks.append(_pairs("prompt tokens as asked", ok_rows, "prompt_tokens", "prompt_tokens_asked"))
    mismatch = [
        (len(r["output_ids"]), r["output_tokens"])
        for r in ok_rows
        if r["output_ids"] is not None and _known(r["output_tokens"])
    ]
    if mismatch:
        bad = [(a, b) for a, b in mismatch if a != b]
        checks.append(
            Check("output ids match the token count", not bad, bad[0][0] if bad else None, bad[0][1] if bad else None)
        )
    checks.append(_speculation(info, ok_rows))
    if bound is not None:
        taus = [1 + r["correct_drafts"] / r["verify_steps"] for r in ok_rows if _positive(r["verify_steps"])]
        taus = [tau for tau in taus if math.isfinite(tau)]
        if taus:
            checks.append(
                Check("acceptance length within its bound", max(taus) <= bound + 1e-9, round(max(taus), 3), bound)
            )
    checks.append(_post_eos(ok_rows, max_post_eos))
    if info.cache in ("flush", "unique") and not any(r["session"] for r in rows):
        checks.append(_cold_cache(ok_rows))
    running = (part or {}).get("window", {}).get("running_mean") if part else None
    if info.concurrency is not None and info.concurrency > 1 and info.arrival in (None, "closed"):
        reached = None if running is None else running >= MIN_RUNNING_SHARE * info.concurrency
        checks.append(Check("concurrency reached on the server", reached, running, info.concurrency))
    return checks


def _each(rule: str, seen: Sequence[Any], expected: Any) -> Check:
    known = [value for value in seen if value is not None]
    if not known:
        return Check(rule, None, None, expected)
    bad = [value for value in known if value != expected]
    return Check(rule, not bad, bad[0] if bad else expected, expected)


def _pairs(rule: str, rows: list[Row], seen: str, asked: str) -> Check:
    known = [(r[seen], r[asked]) for r in rows if _known(r[seen]) and _known(r[asked])]
    if not known:
        return Check(rule, None)
    bad = [(a, b) for a, b in known if a != b]
    return Check(rule, not bad, int(bad[0][0]) if bad else None, int(bad[0][1]) if bad else None)


def _speculation(info: CellInfo, rows: list[Row]) -> Check:
    steps = [r["verify_steps"] for r in rows if _known(r["verify_steps"])]
    if info.method in BASELINE_METHODS:
        on = any(value > 0 for value in steps)
        return Check("no speculation in the baseline", not on, "verify steps" if on else None, "none" if on else None)
    if info.method is None or not steps:
        return Check("speculation was on", None)
    off = sum(1 for value in steps if value <= 0)
    seen, wanted = (f"{off} of {len(steps)} requests without a verify step", "none") if off else (None, None)
    return Check("speculation was on", off == 0, seen, wanted)


def _post_eos(rows: list[Row], limit: float) -> Check:
    rule = "share of tokens after the first end of sequence"
    share = post_eos_share(rows)
    if share is None:
        return Check(rule, None, None, f"at most {limit:.0%}")
    return Check(rule, share <= limit, f"{share:.0%}", f"at most {limit:.0%}")


def post_eos_share(rows: list[Row]) -> float | None:
    """Tokens after the first end-of-sequence token over all output tokens; None where nobody could have seen one."""
    rows = [row for row in rows if row["eos_known"]]
    if all(row["output_ids"] is None and not _known(row["first_eos"]) for row in rows):
        return None
    total = after = 0.0
    for row in rows:
        if not _known(row["output_tokens"]):
            continue
        total += row["output_tokens"]
        if _known(row["first_eos"]):
            after += max(0.0, row["output_tokens"] - row["first_eos"] - 1)
    return after / total if total else None


def _cold_cache(rows: list[Row]) -> Check:
    rule = "prompt not served from the cache"
    known = [(r["cached_tokens"], r["prompt_tokens"]) for r in rows if _known(r["cached_tokens"])]
    if not known:
        return Check(rule, None)
    worst = max(known, key=lambda pair: pair[0])
    limit = max(CACHE_TOLERANCE_TOKENS, CACHE_TOLERANCE_SHARE * (worst[1] if _known(worst[1]) else 0))
    return Check(rule, worst[0] <= limit, f"{int(worst[0])} cached tokens", f"at most {int(limit)}")


def _failed_gates(manifest: Row) -> dict[int, list[str]]:
    """Launch -> messages of its failed gates, before and after its cells: placement, device, model, configuration.

    A failed budget gate is about single cells, which are skipped for it.
    """
    out: dict[int, list[str]] = {}
    launches = manifest.get("launches")
    for launch in launches if isinstance(launches, list) else []:
        if not isinstance(launch, dict) or number(launch.get("launch")) is None:
            continue
        gates = launch.get("gates")
        for gate in gates if isinstance(gates, list) else []:
            if isinstance(gate, dict) and gate.get("status") == "fail" and gate.get("gate") != "budget":
                out.setdefault(int(launch["launch"]), []).append(str(gate.get("message") or gate.get("gate")))
    return out


def _draft_bounds(manifest: Row) -> dict[str, float]:
    """Profile -> most tokens one verify step can yield (bonus included), where the manifest tells.

    A chain: its draft tokens. A tree: its depth + 1, and nothing where the depth is not recorded.
    """
    bounds: dict[str, float] = {}
    launches = manifest.get("launches")
    for launch in launches if isinstance(launches, list) else []:
        if not isinstance(launch, dict) or not isinstance(launch.get("profile"), str):
            continue
        dialect = launch.get("dialect") if isinstance(launch.get("dialect"), dict) else {}
        info = launch.get("server_info") if isinstance(launch.get("server_info"), dict) else {}
        depth = number((dialect or {}).get("tree_depth"))
        algorithm = str((info or {}).get("speculative_algorithm") or "").upper()
        drafts = number((info or {}).get("speculative_num_draft_tokens"))
        if depth is not None:
            bounds[launch["profile"]] = depth + 1
        elif algorithm == "DFLASH" and drafts is not None and "ddtree" not in launch["profile"]:
            bounds[launch["profile"]] = drafts
    return bounds


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _positive(value: Any) -> bool:
    return _known(value) and value > 0


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
