"""Prometheus text: every name that a 0.5.23 server has, true values where the simulation has them, zeros elsewhere."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrig.sim.api import Server

GRAPH_PHASES = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")


@functools.cache
def _families() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(Path(__file__).with_name("metrics.json").read_text(encoding="utf-8"))
    return loaded


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{name}="{_escape(labels[name])}"' for name in sorted(labels))
    return f"{{{inside}}}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(float(value))


def _gauges(server: Server) -> dict[str, float]:
    config, row = server.config, server.load_row()
    scheduler = server.scheduler
    held = scheduler.cache.tokens if scheduler else 0
    speculative = row.get("speculative", {"accept_length": 0.0, "accept_rate": 0.0})
    return {
        "max_total_num_tokens": config.kv_tokens,
        "weight_memory_usage_gb": config.weights_gib / config.tp_size,
        "kv_cache_memory_usage_gb": row["memory"]["kv_cache_gb"],
        "page_size": config.page_size,
        "num_pages": config.kv_tokens // config.page_size,
        "context_len": config.context_length,
        "startup_available_gpu_memory_gb": 94.2,
        "num_running_reqs": row["num_running_reqs"],
        "num_queue_reqs": row["num_waiting_reqs"],
        "gen_throughput": row["gen_throughput"],
        "token_usage": row["token_usage"],
        "full_token_usage": row["token_usage"],
        "num_used_tokens": row["num_used_tokens"],
        "kv_used_tokens": row["num_used_tokens"],
        "kv_evictable_tokens": held,
        "kv_available_tokens": max(0, config.kv_tokens - held - row["num_used_tokens"]),
        "decode_sum_seq_lens": row["num_used_tokens"],
        "spec_accept_length": speculative["accept_length"],
        "spec_accept_rate": speculative["accept_rate"],
        "spec_num_steps": 1.0 if config.spec_on else 0.0,
        "spec_num_draft_tokens": float(config.method.verified) if config.spec_on else 0.0,
        "utilization": row["utilization"],
        "fwd_occupancy": math.nan,
    }


def _counters(server: Server) -> dict[str, float]:
    scheduler = server.scheduler
    if scheduler is None:
        return {}
    return {
        "prompt_tokens_total": scheduler.prompt_total,
        "generation_tokens_total": scheduler.generated_total,
        "cached_tokens_total": scheduler.cached_total,
        "num_requests_total": scheduler.finished_total,
    }


def render(server: Server) -> str:
    """The text of /metrics."""
    values = _gauges(server) | _counters(server)
    model = server.config.model_name
    lines = ["# simulated: these figures are of a simulated engine, not of a GPU"]
    for family in _families():
        name, kind = family["name"], family["type"]
        lines += [f"# HELP {name} {family['help']}", f"# TYPE {name} {kind}"]
        short = name.removeprefix("sglang:")
        for given in family["labels"]:
            labels = {key: model if text == "$" else text for key, text in given.items()}
            if kind == "histogram":
                lines += [f"{name}_bucket{_labels(labels | {'le': bound})} 0.0" for bound in family["le"]]
                lines += [f"{name}_sum{_labels(labels)} 0.0", f"{name}_count{_labels(labels)} 0.0"]
                continue
            value = 0.0 if labels.get("is_streaming") == "false" else values.get(short, 0.0)
            if short in ("num_retracted_reqs", "num_paused_reqs"):
                labels["pid"] = str(os.getpid())
            lines.append(f"{name}{_labels(labels)} {_number(value)}")
        if short == "http_requests_total":
            for (method, path), count in sorted(server.calls.items()):
                lines.append(f"{name}{_labels({'endpoint': path, 'method': method})} {_number(count)}")
    if server.config.spec_on and server.scheduler is not None:
        lines += [
            "# TYPE sglang:spec_verify_calls_total counter",
            f"sglang:spec_verify_calls_total{_labels({'model_name': model})} {_number(server.scheduler.verify_total)}",
        ]
    return "\n".join(lines) + "\n"
