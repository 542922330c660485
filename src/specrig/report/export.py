"""A run's cells under the keys that users of other load generators read today: aiperf 0.13, vllm 0.32, sglang 0.5.23.

Keys only: every figure keeps this program's definition (docs/load.md), which differs where theirs is known to mislead.
Each document carries a block ``specrig`` that says so, and whether the engine was simulated.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specrig.model.record import CellRow, ChunkTrace, Request
from specrig.runs.lines import encoded

AIPERF_SCHEMA = "1.4"
_AIPERF_QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One cell of one launch with its requests, in the order of their index; ``chunks`` has the traces by index.

    ``t0_unix`` is the moment that the records' times count from, in seconds of the Unix clock.
    """

    run: str
    row: CellRow
    cell: Mapping[str, Any]
    requests: tuple[Request, ...]
    chunks: Mapping[int, ChunkTrace]
    hardware: str | None = None
    t0_unix: float | None = None

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

    def gaps(self, request: Request) -> list[tuple[float, int]]:
        """Seconds between a chunk with tokens and the one before it, and how many tokens it brought."""
        trace = self.chunks.get(request.index)
        if trace is None:
            return []
        steps = zip(trace.t, trace.t[1:], trace.k[1:], strict=False)
        return [(after - before, tokens) for before, after, tokens in steps if tokens > 0]

    def latencies(self, request: Request) -> list[float]:
        """Seconds between tokens after the first chunk: each gap spread over the tokens that ended it."""
        return [gap / tokens for gap, tokens in self.gaps(request) for _ in range(tokens)]

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


def _statistics(values: Sequence[float], name: str, quantiles: Sequence[int]) -> dict[str, float | None]:
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
        "endpoint_type": cell.cell.get("api"),
        "backend": cell.cell.get("api"),
        "label": _label(cell),
        "model_id": cell.cell.get("model"),
        "tokenizer_id": cell.cell.get("model"),
        "num_prompts": len(cell.requests),
        "request_rate": cell.cell.get("rate") or "inf",
        "burstiness": float(cell.cell.get("burstiness") or 1.0),
        "max_concurrency": cell.row.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(cell.requests) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": _per_s(len(good), seconds),
        "request_goodput": None,
        "output_throughput": _per_s(made, seconds),
        "total_token_throughput": _per_s(read + made, seconds),
        "max_output_tokens_per_s": cell.row.peak_tokens_per_s,
        "max_concurrent_requests": _together(cell.requests),
    }
    for name, values in _pools(cell).items():
        out |= _statistics(values, name, (50, 90, 95, 99))
    if (length := _acceptance(good)) is not None:
        known = [r for r in good if r.verify_steps and r.correct_drafts is not None]
        out |= {
            "spec_decode_acceptance_length": length,
            "spec_decode_num_drafts": _sum([r.verify_steps for r in known]),
            "spec_decode_accepted_tokens": _sum([r.correct_drafts for r in known]),
        }
    return out | _details(cell) | {
        "latencies": [r.e2e_s if r.ok else 0.0 for r in cell.requests],
        "start_times": [r.sent_s for r in cell.requests],
        "specrig": cell.note(),
    }  # fmt: skip


def _details(cell: Measured) -> dict[str, list[Any]]:
    """Lists with an entry for each request, failed ones included, as both bench scripts have them."""
    return {
        "input_lens": [r.prompt_tokens for r in cell.requests],
        "output_lens": [r.output_tokens if r.ok else 0 for r in cell.requests],
        "ttfts": [r.ttft_s if r.ok else 0.0 for r in cell.requests],
        "itls": [cell.latencies(r) if r.ok else [] for r in cell.requests],
        "errors": ["" if r.ok else r.server_message or r.error or "failed" for r in cell.requests],
    }


def sglang(cell: Measured) -> dict[str, Any]:
    """One line of the file that ``sglang.bench_serving --output-file --output-details`` appends to."""
    good, seconds = cell.good, cell.duration_s
    read, made = _sum([r.prompt_tokens for r in good]), _sum([r.output_tokens for r in good])
    pools = _pools(cell)
    out: dict[str, Any] = {
        "tag": _label(cell),
        "backend": cell.cell.get("api"),
        "dataset_name": cell.row.prompts,
        "request_rate": cell.cell.get("rate") or "inf",
        "max_concurrency": cell.row.concurrency,
        "sharegpt_output_len": None,
        "random_input_len": cell.row.prompt_tokens,
        "random_output_len": cell.row.output_tokens,
        "duration": seconds,
        "completed": len(good),
        "total_input_tokens": read,
        "total_input_text_tokens": read,
        "total_input_vision_tokens": 0,
        "total_output_tokens": made,
        "request_throughput": _per_s(len(good), seconds),
        "input_throughput": _per_s(read, seconds),
        "output_throughput": _per_s(made, seconds),
        "total_throughput": _per_s(read + made, seconds),
        "max_output_tokens_per_s": cell.row.peak_tokens_per_s,
        "max_concurrent_requests": _together(cell.requests),
        "concurrency": _per_s(sum(r.e2e_s or 0.0 for r in good), seconds),
        "accept_length": _acceptance(good),
        "max_itl_ms": max(pools["itl"], default=None),
    }
    for name, values in pools.items():
        out |= _statistics(values, "e2e_latency" if name == "e2el" else name, (90, 95, 99))
    return out | _details(cell) | {"specrig": cell.note()}


def _single(unit: str, value: float | None) -> dict[str, Any] | None:
    """A block of one number, as aiperf has it."""
    return None if value is None else {"unit": unit, "avg": value}


def _block(unit: str, values: Sequence[float | int | None]) -> dict[str, Any] | None:
    """A block of statistics, as aiperf has it."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return {
        "unit": unit,
        "avg": statistics.fmean(known),
        **{f"p{q}": quantile(known, q / 100) for q in _AIPERF_QUANTILES},
        "min": min(known),
        "max": max(known),
        "std": statistics.pstdev(known),
        "count": len(known),
        "sum": math.fsum(known),
    }


def aiperf(cell: Measured) -> dict[str, Any]:
    """The document ``profile_export_aiperf.json``: a block of statistics per metric, absent ones left out."""
    good, seconds = cell.good, cell.duration_s
    read, made = _sum([r.prompt_tokens for r in good]), _sum([r.output_tokens for r in good])
    failed = [r for r in cell.requests if not r.ok]
    pools = _pools(cell)
    gaps = [[gap for gap, _ in cell.gaps(r)] for r in good]
    blocks = {
        "request_throughput": _single("requests/sec", _per_s(len(good), seconds)),
        "request_latency": _block("ms", pools["e2el"]),
        "request_count": _single("requests", float(len(good))),
        "error_request_count": _single("requests", float(len(failed))) if failed else None,
        "time_to_first_token": _block("ms", pools["ttft"]),
        "time_to_second_token": _block("ms", _ms([row[0] for row in gaps if row])),
        "inter_token_latency": _block("ms", pools["tpot"]),
        "inter_chunk_latency": _block("ms", _ms([gap for row in gaps for gap in row])),
        "output_token_throughput": _single("tokens/sec", _per_s(made, seconds)),
        "total_token_throughput": _single("tokens/sec", _per_s(read + made, seconds)),
        "output_token_throughput_per_user": _block("tokens/sec/user", [r.decode_tokens_per_s for r in good]),
        "output_sequence_length": _block("tokens", [r.output_tokens for r in good]),
        "input_sequence_length": _block("tokens", [r.prompt_tokens for r in good]),
        "total_output_tokens": _single("tokens", float(made)),
        "total_osl": _single("tokens", float(made)),
        "total_isl": _single("tokens", float(read)),
        "benchmark_duration": _single("sec", seconds),
    }
    errors = Counter(r.server_message or r.error or "failed" for r in failed)
    sent, ended = _times(cell, [r.sent_s for r in good]), _times(cell, [r.finished_s for r in good])
    rest: dict[str, Any] = {
        "input_config": _aiperf_config(cell),
        "was_cancelled": cell.row.state == "aborted",
        "is_complete": cell.row.state == "done",
        "error_summary": [{"error_details": {"message": text}, "count": number} for text, number in errors.items()],
        "start_time": min(sent).isoformat() if sent else None,
        "end_time": max(ended).isoformat() if ended else None,
    }
    kept = {name: block for name, block in (blocks | rest).items() if block is not None}
    return {"schema_version": AIPERF_SCHEMA, **kept, "specrig": cell.note()}


def _aiperf_config(cell: Measured) -> dict[str, Any] | None:
    """What plots group runs by, as much as aiperf's own reader wants; a closed loop is all that its words fit."""
    if cell.cell.get("arrival", "closed") != "closed":
        return None
    requests, row = len(cell.requests), cell.row
    kind = "completions" if cell.cell.get("api") == "openai-completions" else "chat"
    known = {"isl": row.prompt_tokens, "osl": row.output_tokens}
    lengths = {name: {"mean": length} for name, length in known.items() if length is not None}
    return {
        "models": {"items": [{"name": cell.cell.get("model")}]},
        "endpoint": {"urls": ["not-recorded"], "type": kind, "streaming": True},
        "datasets": [{"name": "main", "type": "synthetic", "entries": requests, "prompts": lengths}],
        "phases": [
            {"name": "profiling", "type": "concurrency", "requests": requests, "concurrency": row.concurrency or 1}
        ],
    }


def aiperf_records(cell: Measured) -> list[dict[str, Any]]:
    """The lines of ``profile_export.jsonl``, which ``aiperf plot`` wants beside the document: one a good request."""
    out = []
    for r in cell.good:
        if cell.t0_unix is None or r.sent_s is None or r.finished_s is None:
            continue
        values = {
            "request_latency": ("ms", r.e2e_s and r.e2e_s * 1e3),
            "time_to_first_token": ("ms", r.ttft_s and r.ttft_s * 1e3),
            "inter_token_latency": ("ms", r.tpot_s and r.tpot_s * 1e3),
            "inter_chunk_latency": ("ms", _ms([gap for gap, _ in cell.gaps(r)]) or None),
            "output_token_throughput_per_user": ("tokens/sec/user", r.decode_tokens_per_s),
            "output_sequence_length": ("tokens", r.output_tokens),
            "input_sequence_length": ("tokens", r.prompt_tokens),
        }
        metadata = {
            "session_num": r.index if r.session is None else r.session,
            "turn_index": r.turn or 0,
            "request_start_ns": round((cell.t0_unix + r.sent_s) * 1e9),
            "request_end_ns": round((cell.t0_unix + r.finished_s) * 1e9),
            "worker_id": "specrig",
            "record_processor_id": "specrig",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        }
        metrics = {name: {"value": value, "unit": unit} for name, (unit, value) in values.items() if value is not None}
        out.append({"metadata": metadata, "metrics": metrics})
    return out


def _times(cell: Measured, seconds: Sequence[float | None]) -> list[datetime.datetime]:
    """Moments of the records as times of day, UTC; none where the run does not say when it began."""
    if cell.t0_unix is None:
        return []
    return [datetime.datetime.fromtimestamp(cell.t0_unix + s, datetime.UTC) for s in seconds if s is not None]


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
    rows = []
    for cell in cells:
        name, value = file_of(cell, form), FORMATS[form](cell)
        if form == "sglang":
            out[name] = out.get(name, b"") + encoded(value) + b"\n"
        else:
            out[name] = msgspec.json.format(encoded(value), indent=2) + b"\n"
        if form == "aiperf":
            records = b"".join(encoded(line) + b"\n" for line in aiperf_records(cell))
            out[name.replace("profile_export_aiperf.json", "profile_export.jsonl")] = records
        rows.append({key: kept for key, kept in value.items() if not isinstance(kept, list | dict)})
    if form == "vllm":  # the file that `vllm bench sweep plot` collects
        out["summary.json"] = msgspec.json.format(encoded(rows), indent=2) + b"\n"
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
