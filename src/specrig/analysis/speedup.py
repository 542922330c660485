"""Speed-ups of one arm over another: per-prompt log ratios, paired by prompt and by launch block.

Three are published, each under its name:

- ``decode``: ratio of decode rates (n - k_1) / (t_last - t_first);
- ``end_to_end``: ratio of n / (t_last - sent);
- ``throughput``: ratio of windowed output throughputs of a cell, for concurrency above 1, with blocks as the unit.

For the agentic workload a fourth, ``session``: tokens of a session over its wall time without tool time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from specrig.analysis.frames import Part, RunData
from specrig.analysis.intervals import DEFAULT_LEVEL, DEFAULT_MARGIN, Estimate, estimate
from specrig.analysis.samples import Key, Sample, arms, by_arm, key_of, method_order
from specrig.analysis.validity import PartValidity

DECODE, END_TO_END, THROUGHPUT, SESSION = "decode", "end_to_end", "throughput", "session"

Cells = Mapping[int, Mapping[str, tuple[float, float]]]
"""Block -> unit (prompt, session) -> (tokens, seconds)."""


@dataclass(frozen=True)
class Decomposition:
    """Mean log speed-up = mean log(tau) + mean log(T_base / T_method), exact by construction.

    Attributes:
        tokens_per_step: geometric mean over prompts of the tokens a step yields after the first chunk.
        base_tokens_per_step: the same of the other arm (1 for an autoregressive one).
        step_ms, base_step_ms: geometric means of the step times.
        log_tau, log_step: the two terms; they add up to the log of the speed-up.
        break_even: tokens per step at which the arms would be equally fast, T_method / T_base.
    """

    tokens_per_step: float
    base_tokens_per_step: float
    step_ms: float
    base_step_ms: float
    log_tau: float
    log_step: float
    break_even: float


@dataclass(frozen=True)
class Speedup:
    """One named speed-up of ``method`` over ``baseline`` at one key."""

    metric: str
    key: Key
    method: str
    baseline: str
    result: Estimate
    ratio_of_sums: float
    maximum: float
    maximum_prompt: str
    decomposition: Decomposition | None


def speedups(
    rows: Iterable[Sample],
    run: RunData,
    valid: Mapping[Part, PartValidity],
    baseline: str,
    *,
    margin: float = DEFAULT_MARGIN,
    level: float = DEFAULT_LEVEL,
    bootstrap: bool = True,
    metrics: tuple[str, ...] = (DECODE, END_TO_END, THROUGHPUT, SESSION),
) -> list[Speedup]:
    """Speed-ups of every method over the baseline, and of every later method over every earlier one.

    Chains come before trees and small budgets before large ones; the other direction is the inverse, ends swapped.
    """
    out: list[Speedup] = []
    samples = list(rows)
    tables: dict[str, dict[Key, dict[str, Cells]]] = {}
    grouped = by_arm(samples)
    if DECODE in metrics:
        tables[DECODE] = {k: {m: decode_cells(s) for m, s in found.items()} for k, found in grouped.items()}
    if END_TO_END in metrics:
        tables[END_TO_END] = {k: {m: end_to_end_cells(s) for m, s in found.items()} for k, found in grouped.items()}
    if THROUGHPUT in metrics:
        tables[THROUGHPUT] = throughput_cells(run, valid)
    if SESSION in metrics:
        tables[SESSION] = session_cells(run, valid)
    for metric, by_key in tables.items():
        for key in sorted(by_key):
            found = by_key[key]
            for base in sorted(found):
                is_baseline = base.split("@")[0] == baseline
                for method in sorted(found):
                    if method == base or method.split("@")[0] == baseline:
                        continue
                    if not is_baseline and method_order(method) <= method_order(base):
                        continue
                    item = compare_cells(found[method], found[base], margin=margin, level=level, bootstrap=bootstrap)
                    if item is None:
                        continue
                    result, ratio, top, top_prompt = item
                    parts = (
                        decompose(grouped[key][method], grouped[key][base])
                        if metric == DECODE and key in grouped
                        else None
                    )
                    out.append(Speedup(metric, key, method, base, result, ratio, top, top_prompt, parts))
    return out


def compare_cells(
    new: Cells, base: Cells, *, margin: float, level: float = DEFAULT_LEVEL, bootstrap: bool = True
) -> tuple[Estimate, float, float, str] | None:
    """Estimate, ratio of sums, largest ratio and its unit of paired (tokens, seconds); None without a common unit."""
    groups: list[list[float]] = []
    names: list[list[str]] = []
    sums = [0.0, 0.0, 0.0, 0.0]
    top, top_name = -math.inf, ""
    for block in sorted(set(new) & set(base)):
        ratios, units = [], []
        for unit in sorted(set(new[block]) & set(base[block])):
            (a_tokens, a_s), (b_tokens, b_s) = new[block][unit], base[block][unit]
            if min(a_tokens, a_s, b_tokens, b_s) <= 0:
                continue
            ratio = math.log(a_tokens / a_s) - math.log(b_tokens / b_s)
            ratios.append(ratio)
            units.append(unit)
            for i, value in enumerate((a_tokens, a_s, b_tokens, b_s)):
                sums[i] += value
            if ratio > top:
                top, top_name = ratio, unit
        if ratios:
            groups.append(ratios)
            names.append(units)
    result = estimate(groups, names, margin=margin, level=level, bootstrap=bootstrap)
    if result is None:
        return None
    return result, (sums[0] / sums[1]) / (sums[2] / sums[3]), math.exp(top), top_name


def _cells(rows: Iterable[Sample], pick: Callable[[Sample], tuple[float | None, float | None]]) -> Cells:
    """Sum tokens and seconds per block and prompt (a prompt sent twice in a launch counts once)."""
    out: dict[int, dict[str, tuple[float, float]]] = {}
    for row in rows:
        tokens, seconds = pick(row)
        if tokens is None or seconds is None or tokens <= 0 or seconds <= 0:
            continue
        block = out.setdefault(row.block, {})
        old = block.get(row.prompt_id, (0.0, 0.0))
        block[row.prompt_id] = (old[0] + tokens, old[1] + seconds)
    return out


def decode_cells(rows: Iterable[Sample]) -> Cells:
    """Decode tokens and decode seconds per block and prompt."""
    return _cells(rows, lambda row: (row.decode_tokens, row.decode_s))


def end_to_end_cells(rows: Iterable[Sample]) -> Cells:
    """All tokens and seconds from sending to the last one, per block and prompt."""
    return _cells(rows, lambda row: (row.tokens, row.e2e_s))


def throughput_cells(run: RunData, valid: Mapping[Part, PartValidity]) -> dict[Key, dict[str, Cells]]:
    """Window tokens and seconds of every valid part with concurrency above 1; the cell is the only unit of a block."""
    arm = arms(run)
    out: dict[Key, dict[str, dict[int, dict[str, tuple[float, float]]]]] = {}
    for part in run.parts:
        judged = valid.get((part["cell"], part["launch"]))
        if judged is None or not judged.valid:
            continue
        key = key_of(run, part["cell"])
        window = part["window"]
        rate, start, end = window["tokens_per_s"], window["start_s"], window["end_s"]
        if key.concurrency <= 1 or rate is None or rate <= 0:
            continue
        seconds = end - start if start is not None and end is not None and end > start else 1.0
        block = out.setdefault(key, {}).setdefault(arm[part["cell"]], {}).setdefault(judged.block, {})
        block["window"] = (rate * seconds, seconds)
    return {key: dict(found) for key, found in out.items()}


def session_cells(run: RunData, valid: Mapping[Part, PartValidity]) -> dict[Key, dict[str, Cells]]:
    """Output tokens and wall seconds without tool time of every session, per block and session."""
    arm = arms(run)
    out: dict[Key, dict[str, dict[int, dict[str, tuple[float, float]]]]] = {}
    for item in sessions(run, valid):
        block = out.setdefault(key_of(run, item.cell), {}).setdefault(arm[item.cell], {})
        block.setdefault(item.block, {})[item.session] = (item.tokens, item.wall_s - item.tool_s)
    return {key: dict(found) for key, found in out.items()}


@dataclass(frozen=True)
class Session:
    """One agentic session: all its turns."""

    cell: str
    launch: int
    block: int
    session: str
    turns: int
    tokens: float
    wall_s: float
    tool_s: float
    last_prompt_tokens: float

    @property
    def tokens_per_s(self) -> float:
        """All output tokens over wall time without tool time."""
        return self.tokens / (self.wall_s - self.tool_s)


def sessions(run: RunData, valid: Mapping[Part, PartValidity]) -> list[Session]:
    """Every complete session of the valid parts (first byte sent to last token, tool time stated beside it)."""
    found: dict[tuple[str, int, str], list[dict[str, object]]] = {}
    frame = run.requests
    for row in frame[frame["session"].notna()].to_dict("records"):
        part = (row["cell"], int(row["launch"]))
        if part in valid and valid[part].valid:
            found.setdefault((*part, row["session"]), []).append({str(k): v for k, v in row.items()})
    out: list[Session] = []
    for (cell, launch, name), rows in sorted(found.items()):
        sent, finished = [_number(r["sent_s"]) for r in rows], [_number(r["finished_s"]) for r in rows]
        tokens = math.fsum(_number(r["output_tokens"]) for r in rows)
        tools = [_number(r["tool_s"]) for r in rows]
        tool_s = math.fsum(t for t in tools if math.isfinite(t))
        wall = max(finished) - min(sent)
        if not all(math.isfinite(v) for v in [*sent, *finished, tokens]) or wall - tool_s <= 0:
            continue
        prompts = [_number(r["prompt_tokens"]) for r in rows]
        out.append(
            Session(
                cell=cell,
                launch=launch,
                block=valid[(cell, launch)].block,
                session=name,
                turns=len(rows),
                tokens=tokens,
                wall_s=wall,
                tool_s=tool_s,
                last_prompt_tokens=max(prompts),
            )
        )
    return out


def decompose(new: Iterable[Sample], base: Iterable[Sample]) -> Decomposition | None:
    """Split the decode speed-up into tokens per step and step time; None unless both arms count their steps.

    Over the same pairs and with the same weights (prompts within a launch pair, launch pairs equal) as the speed-up.
    """
    a, b = _steps_of(new), _steps_of(base)
    tau_a: list[float] = []
    tau_b: list[float] = []
    step_a: list[float] = []
    step_b: list[float] = []
    for block in sorted(set(a) & set(b)):
        units = sorted(set(a[block]) & set(b[block]))
        if not units:
            continue
        for into, table, form in (
            (tau_a, a, _tokens_per_step),
            (tau_b, b, _tokens_per_step),
            (step_a, a, _step_time),
            (step_b, b, _step_time),
        ):
            into.append(math.fsum(math.log(form(table[block][u])) for u in units) / len(units))
    if not tau_a:
        return None
    ta, tb, sa, sb = (math.fsum(v) / len(v) for v in (tau_a, tau_b, step_a, step_b))
    return Decomposition(
        tokens_per_step=math.exp(ta),
        base_tokens_per_step=math.exp(tb),
        step_ms=1000 * math.exp(sa),
        base_step_ms=1000 * math.exp(sb),
        log_tau=ta - tb,
        log_step=sb - sa,
        break_even=math.exp(tb + sa - sb),
    )


def _tokens_per_step(item: tuple[float, float, float]) -> float:
    return item[0] / item[2]


def _step_time(item: tuple[float, float, float]) -> float:
    return item[1] / item[2]


def _steps_of(rows: Iterable[Sample]) -> dict[int, dict[str, tuple[float, float, float]]]:
    """Block -> prompt -> (decode tokens, decode seconds, steps); empty for a prompt whose steps are not known."""
    out: dict[int, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        if not row.decode_tokens or not row.decode_s or not row.steps or row.steps <= 0:
            continue
        block = out.setdefault(row.block, {})
        old = block.get(row.prompt_id, (0.0, 0.0, 0.0))
        block[row.prompt_id] = (old[0] + row.decode_tokens, old[1] + row.decode_s, old[2] + row.steps)
    return out


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
