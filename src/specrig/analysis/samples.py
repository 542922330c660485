"""Samples: one successful request of a valid cell, seen at one answer length.

A request of 1,024 tokens that was read off at 64 and 256 gives three samples. Tokens after the first end-of-sequence
token do not count: a sample that would hold some is cut at it with the chunk trace, or left out where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specrig.analysis.frames import Part, RunData
from specrig.analysis.validity import PartValidity


@dataclass(frozen=True, order=True)
class Key:
    """What two arms must share to be compared: TP, workload, context, answer length and load.

    0 stands for unknown; a ``concurrency`` of 0 for an open loop without a limit, whose requests/s is ``rate``.
    """

    tp: int
    workload: str
    prompt_tokens: int
    output_tokens: int
    length: int
    concurrency: int
    rate: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One request at one length.

    ``decode_tokens / decode_s`` is the decode rate (n - k_1) / (t_last - t_first); ``tokens / e2e_s`` the end-to-end
    rate; ``steps`` the verify steps after the first chunk, ``verify_steps`` and ``correct_drafts`` as counted by the
    server. None = unknown.
    """

    key: Key
    cell: str
    launch: int
    block: int
    method: str
    prompt_id: str
    session: str | None
    full: bool
    tokens: float
    decode_tokens: float | None
    decode_s: float | None
    e2e_s: float | None
    ttft_s: float | None
    steps: float | None
    prefill_counted: bool
    verify_steps: float | None
    correct_drafts: float | None
    output_ids: tuple[int, ...] | None

    @property
    def decode_rate(self) -> float | None:
        """Decode rate in tokens/s."""
        if self.decode_tokens is None or not self.decode_s:
            return None
        return self.decode_tokens / self.decode_s


@dataclass(frozen=True)
class Samples:
    """The samples of a run and how many could not be used."""

    rows: list[Sample]
    left_out: dict[str, int]


def key_of(run: RunData, cell: str, length: int | None = None) -> Key:
    """The comparison key of a cell; unknown numbers are 0, an unknown workload is ``unknown``."""
    info = run.cells[cell]
    output = info.output_tokens or 0
    return Key(
        tp=info.tp or 0,
        workload=info.workload or "unknown",
        prompt_tokens=info.prompt_tokens or 0,
        output_tokens=output,
        length=output if length is None else length,
        concurrency=info.concurrency or (0 if info.rate else 1),
        rate=info.rate or 0.0,
    )


def arms(run: RunData) -> dict[str, str]:
    """Cell -> name of its arm: the method's label, with ``@profile`` where two profiles of one tp share a label."""
    profiles: dict[tuple[Any, Any], set[str]] = {}
    for info in run.cells.values():
        profiles.setdefault((info.tp, info.method), set()).add(info.profile or "")
    out: dict[str, str] = {}
    for cell, info in run.cells.items():
        label = info.method or "unknown"
        out[cell] = f"{label}@{info.profile}" if len(profiles[(info.tp, info.method)]) > 1 else label
    return out


def method_order(name: str) -> tuple[bool, str, int]:
    """Sorts chains before trees, trees by budget."""
    head, _, tail = name.split("@")[0].rpartition("-b")
    return (True, head, int(tail)) if head and tail.isdigit() else (False, name, 0)


def collect(run: RunData, valid: Mapping[Part, PartValidity]) -> Samples:
    """The samples of every valid part of the run."""
    arm = arms(run)
    rows: list[Sample] = []
    left_out: dict[str, int] = {}
    for raw in run.requests.to_dict("records"):
        part = (raw["cell"], int(raw["launch"]))
        if not raw["ok"] or part not in valid or not valid[part].valid:
            continue
        n = _value(raw["output_tokens"])
        if n is None or n < 1:
            left_out["token count unknown"] = left_out.get("token count unknown", 0) + 1
            continue
        key = key_of(run, raw["cell"])
        trace = run.traces.get((raw["cell"], int(raw["launch"]), int(raw["index"])))
        eos = _value(raw["first_eos"])
        end = n if eos is None else min(n, eos + 1)
        full = _full(raw, key, arm[raw["cell"]], n)
        wanted = [full]
        reads = raw["reads"] if isinstance(raw["reads"], dict) else {}
        wanted += [_read(full, length, read) for length, read in sorted(reads.items()) if 1 <= length < n]
        for sample in wanted:
            if sample.tokens <= end:
                rows.append(sample)
                continue
            cut = _cut(sample, full, trace, end)
            if cut is None:
                why = "past the end of sequence, no chunk trace to cut with"
                left_out[why] = left_out.get(why, 0) + 1
            else:
                rows.append(cut)
    return Samples(rows, left_out)


def _full(raw: Mapping[Any, Any], key: Key, method: str, n: float) -> Sample:
    first, finished, sent = _value(raw["first_s"]), _value(raw["finished_s"]), _value(raw["sent_s"])
    k1, rate, e2e = _value(raw["first_chunk_tokens"]), _value(raw["decode_tokens_per_s"]), _value(raw["e2e_s"])
    decode_s = None if first is None or finished is None or finished <= first else finished - first
    tokens = None if k1 is None or n <= k1 else n - k1
    if tokens is None and rate is not None and decode_s is not None:
        tokens = rate * decode_s
    elif tokens is not None and rate is not None and rate > 0:
        decode_s = tokens / rate
    if e2e is None and sent is not None and finished is not None:
        e2e = finished - sent
    verify, correct = _value(raw["verify_steps"]), _value(raw["correct_drafts"])
    if method.startswith("autoregressive"):
        verify = correct = None
    counted = _prefill_counted(n, verify, correct, _value(raw["chunks"]))
    return Sample(
        key=key,
        cell=raw["cell"],
        launch=int(raw["launch"]),
        block=int(raw["block"]),
        method=method,
        prompt_id=raw["prompt_id"] or f"#{int(raw['index'])}",
        session=raw["session"],
        full=True,
        tokens=n,
        decode_tokens=tokens,
        decode_s=decode_s,
        e2e_s=e2e if e2e is not None and e2e > 0 else None,
        ttft_s=_value(raw["ttft_s"]),
        steps=_steps(method, tokens, verify, counted),
        prefill_counted=counted,
        verify_steps=verify,
        correct_drafts=correct,
        output_ids=tuple(raw["output_ids"]) if raw["output_ids"] is not None else None,
    )


def _prefill_counted(n: float, verify: float | None, correct: float | None, chunks: float | None) -> bool:
    """Whether the server counts the step that brought the first chunk among its verify steps.

    A stream of one chunk a step tells: as many chunks as verify steps, or one more. Where chunks coalesced, the token
    count does: n = verify + correct, or n = 1 + verify + correct (exact where the last step was not trimmed).
    """
    if verify is None:
        return False
    if chunks is not None and chunks >= verify:
        return chunks == verify
    return correct is not None and n == verify + correct


def _steps(method: str, decode_tokens: float | None, verify: float | None, prefill_counted: bool) -> float | None:
    """Steps after the first chunk; a baseline makes one a token."""
    if method.startswith("autoregressive"):
        return decode_tokens
    if verify is None:
        return None
    steps = verify - 1 if prefill_counted else verify
    return steps if steps > 0 else None


def _read(full: Sample, length: int, read: Mapping[str, float | None]) -> Sample:
    """The same request seen when its first ``length`` tokens had arrived."""
    rate, e2e, finished = read.get("decode_tokens_per_s"), read.get("e2e_s"), read.get("finished_s")
    decode_s = None
    if e2e is not None and full.ttft_s is not None:
        decode_s = e2e - full.ttft_s
    decode_s = decode_s if decode_s is not None and decode_s > 0 else None
    tokens = rate * decode_s if rate is not None and decode_s is not None else None
    if rate is not None and tokens is None and finished is not None:
        decode_s, tokens = 1.0, rate
    verify, correct = read.get("verify_steps"), read.get("correct_drafts")
    return replace(
        full,
        key=replace(full.key, length=length),
        full=False,
        tokens=float(length),
        decode_tokens=tokens,
        decode_s=decode_s,
        e2e_s=e2e,
        steps=_steps(full.method, tokens, verify, full.prefill_counted),
        verify_steps=verify,
        correct_drafts=correct,
        output_ids=None,
    )


def _cut(sample: Sample, full: Sample, trace: tuple[list[float], list[float]] | None, end: float) -> Sample | None:
    """``sample`` as if the request had ended at token ``end``, its last chunk trimmed; None without a usable trace."""
    if trace is None or len(trace[0]) < 2 or end < 1:
        return None
    times, counts = trace
    total = 0.0
    at = len(times) - 1
    for i, k in enumerate(counts):
        total += k
        if total >= end:
            at = i
            break
    if at == 0 or end <= counts[0]:
        return None
    seen = math.fsum(counts[: at + 1])
    decode_s = times[at] - times[0]
    if decode_s <= 0:
        return None
    spent = times[-1] - times[at]
    verify = correct = None
    if full.verify_steps is not None and abs(len(times) - full.verify_steps) <= max(1.0, 0.02 * len(times)):
        prefill = len(times) > full.verify_steps  # the first chunk is the prefill's, not a verify step's
        verify = float(at if prefill else at + 1)
        correct = seen - verify - (counts[0] if prefill else 0.0)
    return replace(
        sample,
        tokens=end,
        decode_tokens=end - counts[0],
        decode_s=decode_s,
        e2e_s=None if full.e2e_s is None else full.e2e_s - spent,
        steps=_steps(full.method, end - counts[0], float(at) if verify is not None else None, False),
        verify_steps=verify,
        correct_drafts=correct,
        output_ids=None if sample.output_ids is None else sample.output_ids[: int(end)],
    )


def by_arm(rows: Iterable[Sample]) -> dict[Key, dict[str, list[Sample]]]:
    """Key -> method -> samples."""
    out: dict[Key, dict[str, list[Sample]]] = {}
    for row in rows:
        out.setdefault(row.key, {}).setdefault(row.method, []).append(row)
    return out


def _value(raw: Any) -> float | None:
    if raw is None or isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
        return None
    return float(raw)
