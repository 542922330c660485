"""A run against the simulated engine's own truth: rates, TTFT, acceptance length and speed-ups, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrig.analysis.acceptance import acceptance
from specrig.analysis.frames import Row, RunData, number, read_objects, records, requests_frame
from specrig.analysis.samples import Sample, collect
from specrig.analysis.speedup import THROUGHPUT, Speedup, speedups
from specrig.analysis.validity import judge
from specrig.errors import UsageError

TOLERANCE = 0.02
TTFT_FLOOR_S = 0.002
"""Loopback, parsing and the client's wake-up cost up to some milliseconds on a busy machine, whatever the TTFT."""


@dataclass(frozen=True)
class TruthRow:
    """One figure of the report beside the engine's own; ``error`` is measured / truth - 1."""

    figure: str
    where: str
    measured: float
    truth: float
    error: float
    ok: bool


@dataclass(frozen=True)
class TruthReport:
    """All comparisons, the requests that had a truth, and those that had none."""

    rows: list[TruthRow]
    matched: int
    unmatched: int

    @property
    def ok(self) -> bool:
        """True where something was compared and everything agreed."""
        return bool(self.rows) and self.matched > 0 and all(row.ok for row in self.rows)

    @property
    def worst(self) -> TruthRow | None:
        """The comparison with the largest relative error."""
        return max(self.rows, key=lambda row: abs(row.error), default=None)


def read_truth(paths: Iterable[str | Path]) -> dict[str, Row]:
    """Request id -> the engine's record, from truth files (JSON lines).

    Raises:
        UsageError: a file cannot be read, or holds no record of an engine.
    """
    out: dict[str, Row] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise UsageError(f"{path}: no such truth file; name the file given to --sim-truth")
        rows = {row["rid"]: row for row in read_objects(path, []) if isinstance(row.get("rid"), str)}
        if not rows:
            raise UsageError(
                f"{path}: holds no record of the simulated engine (JSON lines with a rid); name the file given to "
                "--sim-truth"
            )
        out.update(rows)
    return out


def compare_truth(
    run: RunData,
    truth: Mapping[str, Row],
    *,
    tolerance: float = TOLERANCE,
    ttft_floor_s: float = TTFT_FLOOR_S,
    baseline: str = "autoregressive",
) -> TruthReport:
    """Compare per cell (means over its requests) and per speed-up; only requests whose rid the truth knows take part.

    The truth's speed-ups are computed by the same pairing from the engine's chunk times, shorter lengths included.
    """
    valid = judge(run)
    known = run.requests["rid"].isin(list(truth))
    matched = replace(run, requests=run.requests[known], traces=run.traces)
    real = _rewritten(matched, truth)
    measured, exact = collect(matched, valid).rows, collect(real, valid).rows
    rows: list[TruthRow] = []
    for cell in sorted({s.cell for s in measured}):
        info = run.cells[cell]
        where = (
            f"{info.profile or 'server'} {info.workload} "
            f"p{info.prompt_tokens} n{info.output_tokens} c{info.concurrency}"
        )
        a, b = _full(measured, cell), _full(exact, cell)
        rates = [s.decode_rate for s in a], [s.decode_rate for s in b]
        rows += _means("decode rate, tokens/s", where, *rates, tolerance)
        ttfts = [s.ttft_s for s in a], [s.ttft_s for s in b]
        rows += _means("TTFT, s", where, *ttfts, tolerance, ttft_floor_s)
        tau_a, tau_b = acceptance(a), acceptance(b)
        if tau_a and tau_b:
            rows.append(_row("acceptance length", where, tau_a.sum_over_sum, tau_b.sum_over_sum, tolerance))
    metrics = ("decode", "end_to_end")
    mine = speedups(measured, matched, valid, baseline, bootstrap=False, metrics=metrics)
    theirs = {_name(s): s for s in speedups(exact, real, valid, baseline, bootstrap=False, metrics=metrics)}
    for item in mine:
        other = theirs.get(_name(item))
        if item.metric != THROUGHPUT and other is not None:
            where = (
                f"{item.method} over {item.baseline}, tp{item.key.tp} {item.key.workload} "
                f"p{item.key.prompt_tokens} n{item.key.length} c{item.key.concurrency}"
            )
            name = f"{item.metric.replace('_', '-')} speed-up"
            rows.append(_row(name, where, item.result.geometric_mean, other.result.geometric_mean, tolerance))
    return TruthReport(rows, int(known.sum()), int((~known).sum()))


def _name(item: Speedup) -> tuple[Any, ...]:
    return (item.metric, item.key, item.method, item.baseline)


def _full(rows: list[Sample], cell: str) -> list[Sample]:
    return [s for s in rows if s.cell == cell and s.full]


def _means(
    figure: str, where: str, a: list[float | None], b: list[float | None], tolerance: float, floor: float = 0.0
) -> list[TruthRow]:
    seen, real = [v for v in a if v is not None], [v for v in b if v is not None]
    if not seen or not real:
        return []
    return [_row(figure, where, math.fsum(seen) / len(seen), math.fsum(real) / len(real), tolerance, floor)]


def _row(figure: str, where: str, seen: float, real: float, tolerance: float, floor: float = 0.0) -> TruthRow:
    ok = abs(seen - real) <= max(tolerance * abs(real), floor)
    return TruthRow(figure, where, seen, real, seen / real - 1 if real else math.inf, ok)


def _rewritten(run: RunData, truth: Mapping[str, Row]) -> RunData:
    """The run with every measured figure of a request replaced by the engine's, chunk traces included."""
    rows: list[Row] = []
    traces: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    for row in records(run.requests):
        real = truth[row["rid"]]
        times = [t for t in (number(v) for v in real.get("chunk_times") or []) if t is not None]
        counts = [k for k in (number(v) for v in real.get("chunk_tokens") or []) if k is not None]
        arrived, first, last = (number(real.get(f"{n}_unix")) for n in ("arrived", "first_token", "last_token"))
        reads = row["reads"] or {}
        if len(times) == len(counts) > 0 and arrived is not None and first is not None:
            traces[(row["cell"], int(row["launch"]), int(row["index"]))] = (times, counts)
            exact = {length: _read(times, counts, length, first - times[0] - arrived) for length in reads}
            reads = {length: read for length, read in exact.items() if read is not None}
        copied = ("decode_tokens_per_s", "ttft_s", "verify_steps", "correct_drafts", "output_tokens")
        rows.append(
            {
                **row,
                **{name: number(real.get(name)) for name in copied},
                "first_chunk_tokens": counts[0] if counts else None,
                "first_s": first,
                "sent_s": arrived,
                "finished_s": last,
                "e2e_s": None if last is None or arrived is None else last - arrived,
                "reads": reads or None,
            }
        )
    return replace(run, requests=requests_frame(rows), traces=traces)


def _read(times: list[float], counts: list[float], length: int, shift: float) -> Row | None:
    """Figures of a request that had ended at ``length`` tokens (the chunk that brings them is trimmed to it).

    None where the first chunk brings them all, or none does.
    """
    total = 0.0
    for i, k in enumerate(counts):
        total += k
        if total >= length:
            if i == 0 or times[i] <= times[0]:
                return None
            return {
                "decode_tokens_per_s": (length - counts[0]) / (times[i] - times[0]),
                "e2e_s": times[i] + shift,
                "finished_s": times[i],
            }
    return None
