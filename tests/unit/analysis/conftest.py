"""A generator of run folders from a stated model, so that a test knows every true figure beforehand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

METHODS = {
    "autoregressive": {"tau": 1.0, "step_s": 0.020},
    "dflash": {"tau": 4.0, "step_s": 0.025},
    "ddtree-b15": {"tau": 5.0, "step_s": 0.028},
}
"""True speed-ups: dflash 4 * 20/25 = 3.2, ddtree 5 * 20/28 = 3.5714."""


class Builder:
    """Writes a run folder line by line; times are exact functions of the method's tau and step time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest: dict[str, Any] = {
            "schema": 1,
            "run": folder.name,
            "name": "synthetic",
            "created_at": "2031-05-04T03:02:01Z",
            "sweep": {
                "name": "synthetic",
                "model": "Qwen3.6-27B",
                "baseline": "autoregressive",
                "sampling": {"temperature": 0, "thinking": False},
            },
            "reason": "check the arithmetic",
            "by": "op@box",
            "versions": {"specrig": "0.1.0"},
            "label": "complete",
            "engine": {"kind": "simulated", "time_scale": 0.2, "hardware": "simulated"},
            "placements": {},
            "launches": [],
            "cells": [],
            "skipped": [],
        }
        self.requests: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []

    def cell(
        self,
        method: str,
        *,
        tp: int = 1,
        prompt_tokens: int = 4096,
        output_tokens: int = 257,
        concurrency: int = 1,
        requests: int = 4,
        workload: str = "decode",
        cache: str = "flush",
        **more: Any,
    ) -> dict[str, Any]:
        profile = f"tp{tp}-{method}"
        cell = {
            "id": f"{profile}-{workload}-{prompt_tokens}-{output_tokens}-c{concurrency}",
            "workload": workload,
            "profile": profile,
            "method": method,
            "tp": tp,
            "prompts": "questions",
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "concurrency": concurrency,
            "requests": requests,
            "cache": cache,
            "stop": "length",
            **more,
        }
        self.manifest["cells"].append(cell)
        return cell

    def request(
        self,
        cell: dict[str, Any],
        launch: int,
        block: int,
        index: int,
        *,
        decode_rate: float,
        ttft_s: float = 0.5,
        first_chunk: int = 1,
        tau: float = 1.0,
        **changes: Any,
    ) -> dict[str, Any]:
        n = changes.get("output_tokens", cell["output_tokens"])
        decode_s = (n - first_chunk) / decode_rate
        sent = 10.0 + index
        spec = not cell["method"].startswith("autoregressive")
        verify = round((n - first_chunk) / tau) if spec else None
        row = {
            "schema": 1,
            "run": self.folder.name,
            "cell": cell["id"],
            "profile": cell["profile"],
            "method": cell["method"],
            "tp": cell["tp"],
            "launch": launch,
            "block": block,
            "prompt_id": f"q{index:03d}",
            "index": index,
            "ok": True,
            "error": None,
            "status": 200,
            "finish_reason": "length",
            "prompt_tokens": cell["prompt_tokens"],
            "prompt_tokens_asked": cell["prompt_tokens"],
            "output_tokens": n,
            "output_tokens_asked": cell["output_tokens"],
            "token_source": "server",
            "scheduled_s": sent,
            "sent_s": sent,
            "first_s": sent + ttft_s,
            "finished_s": sent + ttft_s + decode_s,
            "first_chunk_tokens": first_chunk,
            "ttft_s": ttft_s,
            "ttfa_s": ttft_s,
            "e2e_s": ttft_s + decode_s,
            "decode_tokens_per_s": decode_rate,
            "tpot_s": 1 / decode_rate,
            "itl_mean_s": 1 / decode_rate,
            "chunks": None,
            "first_eos": None,
            "cached_tokens": 0,
            "verify_steps": verify,
            "correct_drafts": (n - first_chunk) - verify if spec else None,
            "server_message": None,
            "rid": f"{cell['id']}-{launch}-{index}",
            "session": None,
            "turn": None,
            "tool_s": None,
            "reads": {},
            "output_ids": None,
        }
        row.update(changes)
        self.requests.append(row)
        return row

    def close(
        self,
        cell: dict[str, Any],
        launch: int,
        *,
        state: str = "done",
        tokens_per_s: float | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        mine = [r for r in self.requests if r["cell"] == cell["id"] and r["launch"] == launch]
        row = {
            "cell": cell["id"],
            "launch": launch,
            "profile": cell["profile"],
            "workload": cell["workload"],
            "method": cell["method"],
            "tp": cell["tp"],
            "prompt_tokens": cell["prompt_tokens"],
            "output_tokens": cell["output_tokens"],
            "concurrency": cell["concurrency"],
            "prompts": cell["prompts"],
            "cache": cell["cache"],
            "state": state,
            "reason": None,
            "requests": len(mine),
            "ok": sum(r["ok"] for r in mine),
            "wall_s": 10.0,
            "checks": [],
            "started_at": "2031-05-04T03:02:02Z",
            "window": None
            if tokens_per_s is None
            else {
                "start_s": 5.0,
                "end_s": 15.0,
                "tokens": tokens_per_s * 10,
                "tokens_per_s": tokens_per_s,
                "running_mean": cell["concurrency"],
            },
            "simulated": True,
            "time_scale": 0.2,
        }
        row.update(changes)
        self.cells.append(row)
        return row

    def write(self, tail: str = "") -> Path:
        (self.folder / "manifest.json").write_text(json.dumps(self.manifest))
        for name, rows in (("requests", self.requests), ("cells", self.cells), ("chunks", self.chunks)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.folder / f"{name}.jsonl").write_text(text + (tail if name == "requests" else ""))
        return self.folder


def fill(
    builder: Builder,
    *,
    methods: tuple[str, ...] = tuple(METHODS),
    tps: tuple[int, ...] = (1,),
    launches: int = 3,
    prompts: int = 4,
    contexts: tuple[int, ...] = (4096,),
    concurrency: tuple[int, ...] = (1,),
    seed: int = 1,
    launch_sd: float = 0.0,
    prompt_sd: float = 0.0,
    noise_sd: float = 0.0,
    reads: tuple[int, ...] = (),
    scale: dict[str, float] | None = None,
) -> Builder:
    """A balanced run. Rates are tau / step times log-normal launch, prompt-by-method and residual factors."""
    rng = random.Random(seed)
    number = 0
    cells = {
        (m, tp, p, c): builder.cell(m, tp=tp, prompt_tokens=p, concurrency=c, requests=prompts)
        for m in methods
        for tp in tps
        for p in contexts
        for c in concurrency
    }
    still = random.Random(0)
    taste = {
        (m, i): still.gauss(0, prompt_sd) if m != "autoregressive" else 0.0 for m in methods for i in range(prompts)
    }
    for block in range(launches):
        for tp in tps:
            for method in methods:
                level = rng.gauss(0, launch_sd)
                builder.manifest["launches"].append({"launch": number, "profile": f"tp{tp}-{method}", "block": block})
                for context in contexts:
                    for load in concurrency:
                        cell = cells[(method, tp, context, load)]
                        model = METHODS[method]
                        for i in range(prompts):
                            rate = model["tau"] / model["step_s"] * (scale or {}).get(method, 1.0)
                            rate *= math.exp(level + taste[(method, i)] + rng.gauss(0, noise_sd))
                            row = builder.request(cell, number, block, i, decode_rate=rate, tau=model["tau"])
                            row["reads"] = {
                                str(n): {
                                    "finished_s": row["first_s"] + (n - 1) / rate,
                                    "decode_tokens_per_s": rate,
                                    "e2e_s": 0.5 + (n - 1) / rate,
                                    "verify_steps": None,
                                    "correct_drafts": None,
                                }
                                for n in reads
                            }
                        builder.close(cell, number, tokens_per_s=load * rate * 0.9 if load > 1 else None)
                number += 1
    return builder


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    """An empty run folder to fill by hand."""
    return Builder(tmp_path / "20310504-run")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a balanced run; keyword arguments as of ``fill``, ``name`` for its folder."""

    def make(name: str = "20310504-run", tail: str = "", **options: Any) -> Path:
        return fill(Builder(tmp_path / name), **options).write(tail)

    return make


@pytest.fixture
def fill_run() -> Callable[..., Builder]:
    """The filler itself, for tests that change a builder before it is written."""
    return fill
