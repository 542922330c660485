"""A run's cells under the keys that users of other load generators read today.

Keys only: every figure keeps this program's definition (docs/load.md), which differs where theirs is known to mislead.
Each document carries a block ``specrig`` that says so, and whether the engine was simulated.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specrig.model.record import CellRow, ChunkTrace, Request

AIPERF_SCHEMA = "1.1"
_AIPERF_QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One cell of one launch with its requests, in the order of their index; ``chunks`` has the traces by index."""

    run: str
    row: CellRow
    cell: Mapping[str, Any]
    requests: tuple[Request, ...]
    chunks: Mapping[int, ChunkTrace]
    hardware: str | None = None

    @property
    def good(self) -> list[Request]:
        """The requests that succeeded; only these enter a figure."""
        return [request for request in self.requests if request.ok]

    @property
    def duration_s(self) -> float | None:
        """From the first request's bytes to the last token, of those that succeeded."""
        sent = [r.sent_s for r in self.good if r.sent_s is not None]
        ended = [r.finished_s for r in self.good if r.finished_s is not None]
        return max(ended) - min(sent) if sent and ended and max(ended) > min(sent) else None

    def latencies(self, request: Request) -> list[float]:
        """Seconds between tokens after the first chunk: each gap spread over the tokens that ended it."""
        trace = self.chunks.get(request.index)
        if trace is None:
            return []
        out: list[float] = []
        for before, after, tokens in zip(trace.t, trace.t[1:], trace.k[1:], strict=False):
            if tokens > 0:
                out += [(after - before) / tokens] * tokens
        return out

    def note(self) -> dict[str, Any]:
        """What the other format has no key for: where it comes from, whether it counts, what it was measured on."""
        row = self.row
        return {
            "run": self.run,
            "cell": row.cell,
            "launch": row.launch,
            "title": row.title,
            "valid": row.state == "done",
            "state": row.state,
            "reason": row.reason,
            "method": row.method,
            "tp": row.tp,
            "hardware": self.hardware,
            "simulated": row.simulated,
            "time_scale": row.time_scale,
            "window_tokens_per_s": row.window.tokens_per_s if row.window else None,
            "definitions": "TPOT = (t_last - t_first) / (n - k_first); ITL = a gap spread over its tokens",
        }


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile by linear interpolation between order statistics (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _per_s(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if seconds else None


def _ms(values: Sequence[float | None]) -> list[float]:
    return [value * 1e3 for value in values if value is not None]


def _pools(cell: Measured) -> dict[str, list[float]]:
    """Milliseconds of each latency, over requests; ITL over tokens."""
    good = cell.good
    return {
        "ttft": _ms([r.ttft_s for r in good]),
        "tpot": _ms([r.tpot_s for r in good]),
        "itl": [gap * 1e3 for r in good for gap in cell.latencies(r)],
        "e2el": _ms([r.e2e_s for r in good]),
    }


def _four(values: Sequence[float], name: str, quantiles: Sequence[int]) -> dict[str, float | None]:
    out = {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": quantile(values, 0.5),
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
    }
    return out | {f"p{q}_{name}_ms": quantile(values, q / 100) for q in quantiles}


def _together(requests: Sequence[Request]) -> int:
    """The most requests that were in flight at one moment."""
    moves = sorted(
        (at, step)
        for r in requests
        if r.sent_s is not None and r.finished_s is not None
        for at, step in ((r.sent_s, 1), (r.finished_s, -1))
    )
    now = most = 0
    for _, step in moves:
        now += step
        most = max(most, now)
    return most


def _acceptance(requests: Sequence[Request]) -> float | None:
    """1 + sum of correct drafts / sum of verify steps; None where the server told neither."""
    known = [r for r in requests if r.verify_steps and r.correct_drafts is not None]
    steps = sum(r.verify_steps or 0 for r in known)
    return 1 + sum(r.correct_drafts or 0 for r in known) / steps if steps else None


def _sum(values: Sequence[int | None]) -> int:
    return sum(value or 0 for value in values)


def vllm(cell: Measured) -> dict[str, Any]:
    """One result file of ``vllm bench serve --save-result --save-detailed``."""
    good, seconds = cell.good, cell.duration_s
    read, made = _sum([r.prompt_tokens for r in good]), _sum([r.output_tokens for r in good])
    out: dict[str, Any] = {
        "date": _date(cell.row.started_at),
        "backend": cell.cell.get("api"),
        "label": _label(cell),
        "model_id": cell.cell.get("model"),
        "tokenizer_id": cell.cell.get("model"),
        "num_prompts": len(cell.requests),
        "request_rate": cell.cell.get("rate") or "inf",
        "max_concurrency": cell.row.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(cell.requests) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": _per_s(len(good), seconds),
        "output_throughput": _per_s(made, seconds),
        "total_token_throughput": _per_s(read + made, seconds),
        "max_output_tokens_per_s": cell.row.peak_tokens_per_s,
        "max_concurrent_requests": _together(cell.requests),
    }
    for name, values in _pools(cell).items():
        out |= _four(values, name, (50, 90, 95, 99))
    lengths = {"spec_decode_acceptance_length": _acceptance(good)}
    out |= {name: value for name, value in lengths.items() if value is not None}
    return out | {
        "input_lens": [r.prompt_tokens for r in cell.requests],
        "output_lens": [r.output_tokens if r.ok else 0 for r in cell.requests],
        "ttfts": [r.ttft_s if r.ok else 0.0 for r in cell.requests],
        "itls": [cell.latencies(r) if r.ok else [] for r in cell.requests],
        "errors": ["" if r.ok else r.server_message or r.error or "failed" for r in cell.requests],
        "specrig": cell.note(),
    }


def sglang(cell: Measured) -> dict[str, Any]:
    """One line of the file that ``sglang.bench_serving --output-file`` appends to."""
    good, seconds = cell.good, cell.duration_s
    read, made = _sum([r.prompt_tokens for r in good]), _sum([r.output_tokens for r in good])
    pools = _pools(cell)
    out: dict[str, Any] = {
        "tag": _label(cell),
        "backend": cell.cell.get("api"),
        "dataset_name": cell.row.prompts,
        "request_rate": cell.cell.get("rate") or "inf",
        "max_concurrency": cell.row.concurrency,
        "random_input_len": cell.row.prompt_tokens,
        "random_output_len": cell.row.output_tokens,
        "duration": seconds,
        "completed": len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": _per_s(len(good), seconds),
        "input_throughput": _per_s(read, seconds),
        "output_throughput": _per_s(made, seconds),
        "total_throughput": _per_s(read + made, seconds),
        "max_output_tokens_per_s": cell.row.peak_tokens_per_s,
        "max_concurrent_requests": _together(cell.requests),
        "concurrency": _per_s(sum(r.e2e_s or 0.0 for r in good), seconds),
        "accept_length": _acceptance(good),
        **_four(pools["e2el"], "e2e_latency", (90, 99)),
        **_four(pools["ttft"], "ttft", (99,)),
        **_four(pools["tpot"], "tpot", (99,)),
        **_four(pools["itl"], "itl", (95, 99)),
        "max_itl_ms": max(pools["itl"], default=None),
    }
    return out | {"specrig": cell.note()}


def aiperf(cell: Measured) -> dict[str, Any]:
    """The document ``profile_export_aiperf.json``: a block of statistics per metric, absent ones left out."""
    good, seconds = cell.good, cell.duration_s
    made = _sum([r.output_tokens for r in good])
    pools = _pools(cell)

    def one(unit: str, value: float | None) -> dict[str, Any] | None:
        return None if value is None else {"unit": unit, "avg": value}

    def many(unit: str, values: Sequence[float | int | None]) -> dict[str, Any] | None:
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        block: dict[str, Any] = {
            "unit": unit,
            "avg": statistics.fmean(known),
            "min": min(known),
            "max": max(known),
            "count": len(known),
            "sum": math.fsum(known),
        }
        if len(known) > 1:
            block["std"] = statistics.stdev(known)
        return block | {f"p{q}": quantile(known, q / 100) for q in _AIPERF_QUANTILES}

    blocks = {
        "request_throughput": one("requests/sec", _per_s(len(good), seconds)),
        "request_latency": many("ms", pools["e2el"]),
        "request_count": one("requests", float(len(good))),
        "error_request_count": one("requests", float(len(cell.requests) - len(good))),
        "time_to_first_token": many("ms", pools["ttft"]),
        "inter_token_latency": many("ms", pools["tpot"]),
        "output_token_throughput": one("tokens/sec", _per_s(made, seconds)),
        "output_token_throughput_per_user": many("tokens/sec/user", [r.decode_tokens_per_s for r in good]),
        "output_sequence_length": many("tokens", [r.output_tokens for r in good]),
        "input_sequence_length": many("tokens", [r.prompt_tokens for r in good]),
        "total_output_tokens": one("tokens", float(made)),
        "benchmark_duration": one("sec", seconds),
    }
    kept = {name: block for name, block in blocks.items() if block is not None}
    return {"schema_version": AIPERF_SCHEMA, **kept, "specrig": cell.note()}


FORMATS: dict[str, Callable[[Measured], dict[str, Any]]] = {"aiperf": aiperf, "vllm": vllm, "sglang": sglang}


def file_of(cell: Measured, form: str) -> str:
    """Where a cell's document goes below the output folder; cells of ``sglang`` are lines of one file."""
    if form == "sglang":
        return "sglang.jsonl"
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", cell.row.title or cell.row.workload).strip("-")
    name = f"{stem}-{cell.row.cell[:6]}-launch{cell.row.launch}"
    return f"{name}/profile_export_aiperf.json" if form == "aiperf" else f"{name}.json"


def render(cells: Sequence[Measured], form: str) -> dict[str, bytes]:
    """All documents of a run.

    Args:
        cells: what was measured.
        form: one of :data:`FORMATS`.

    Returns:
        Relative path to content.
    """
    out: dict[str, bytes] = {}
    for cell in cells:
        name, value = file_of(cell, form), FORMATS[form](cell)
        if form == "sglang":
            out[name] = out.get(name, b"") + msgspec.json.encode(value) + b"\n"
        else:
            out[name] = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return out


def _label(cell: Measured) -> str:
    """The arm's name, and what the figures are not."""
    name = cell.row.profile or cell.row.method or cell.row.workload
    if cell.row.simulated:
        return f"{name} (SIMULATED)"
    return f"{name} (CPU)" if cell.hardware == "cpu" else name


def _date(started: str | None) -> str | None:
    """``YYYYMMDD-HHMMSS`` of an ISO time."""
    digits = re.sub(r"\D", "", started or "")
    return f"{digits[:8]}-{digits[8:14]}" if len(digits) >= 14 else None
