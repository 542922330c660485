"""The comparison with other load generators: what is true, what is claimed, and a whole run of our own client."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", ROOT / "bench" / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_truth_is_worked_out_from_the_stamps(peers: ModuleType) -> None:
    rows = [
        {"ok": True, "received": 1.0, "sent": [1.5, 2.0, 2.5], "k": [4, 4, 4], "prompt_tokens": 70},
        {"ok": True, "received": 1.0, "sent": [1.7, 2.1], "k": [4, 4], "prompt_tokens": 72},
        {"ok": False, "received": 1.0, "sent": [1.1], "k": [4], "prompt_tokens": 72},
    ]
    true = peers.truth_of(rows, peers.SCENARIOS["shape"])
    assert true["ttft_p50"] == pytest.approx(600)
    assert true["ttft_p99"] == pytest.approx(698)
    # a second for 8 tokens, 0.4 s for 4
    assert true["tpot"] == true["itl"] == pytest.approx((125 + 100) / 2)
    assert (true["tokens"], true["ok"], true["prompt_told"]) == (20, 2, 71)
    assert true["rate"] == pytest.approx(20 / 1.5)


def row(client: str, error: float | None, wall: float = 1.0, cpu: float = 1.0, chunks: int = 40) -> dict[str, Any]:
    return {"client": client, "wall_s": wall, "load_cpu_s": cpu, "chunks": chunks, "errors": {"tokens": error}}


def test_a_claim_is_met_by_the_best_peer_of_the_same_route_only(peers: ModuleType) -> None:
    found = {
        "start": [
            row("specrig", 0, 2.0),
            row("vllm", 0, 1.9),
            row("aiperf", None, 9.0),
            row("sglang-py native", 0, 1.0),
        ],
        "flood": [
            row("specrig", 1, cpu=3.0, chunks=1_000_040),
            row("vllm", 0, cpu=3.0, chunks=1_000_040),
            row("aiperf", None, cpu=9.0, chunks=1_000_040) | {"problem": "no figures"},
        ],
    }
    told = {claim["claim"]: claim for claim in peers.claims(found)}
    assert told["start: wall s"]["met"] is False
    assert told["start: wall s"]["best_peer"] == "vllm"
    assert told["start: error of output tokens"]["met"] is True
    assert told["flood: error of output tokens"]["met"] is False
    # as much is not less
    cost = told["flood: CPU s per million chunks"]
    assert (cost["specrig"], cost["theirs"], cost["met"]) == (pytest.approx(2.0), {"vllm": pytest.approx(2.0)}, False)
    assert all(claim["met"] is None for claim in peers.claims({"start": [row("specrig", 0)]}))


def test_a_peer_that_cannot_be_installed_is_named_with_the_reason(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(peers, "recipes", lambda: {"other": [["install", "--no-index", "no-such-load-generator==1"]]})
    assert "not installed" in peers.missing("other")
    assert "no-such-load-generator==1" in peers.install("other")
    assert not (tmp_path / "peers" / "other").exists()
    monkeypatch.setattr(peers, "FREE_GB", 10**9)
    assert "GB of disk are free" in peers.install("other")


def test_our_client_finds_the_truth_whatever_goes_wrong_in_a_stream(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench" / "peers.py"), "--clients", "specrig", "--scenarios", "faults"]
    command += ["--json", str(figures), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (seen,) = json.loads(figures.read_text())["scenarios"]["faults"]
    assert "problem" not in seen
    # 40 tokens whole, 10 of one that ends early; the other two are failures
    assert (seen["truth"]["ok"], seen["truth"]["tokens"]) == (2, 50)
    assert (seen["figures"]["ok"], seen["figures"]["tokens"]) == (2, 50)
    assert seen["figures"]["prompt_sent"] == seen["figures"]["prompt_told"] == 64
