"""SGLang's own wheel, installed and served by the role in the nested guest, measured, and watched as it fails.

It runs on a CPU: flags, API, counts, units and failures are the real engine's, and no number here is GPU performance.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent
PORT = {"chat": 31301}
MODEL = "tiny-qwen3"
BANNER = "CPU ENGINE: not GPU performance"


SHIPPED = """
import base64, csv, hashlib, importlib.metadata, json
wheel = importlib.metadata.distribution("sglang")
rows = [row for row in csv.reader(wheel.read_text("RECORD").splitlines()) if row[1] and row[0].startswith("sglang/")]
def digest(name):
    data = wheel.locate_file(name).read_bytes()
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
different = [row[0] for row in rows if digest(row[0]) != row[1]]
print(json.dumps({"checked": len(rows) > 1000, "different": different}))
"""
"""Holds every file of the installed wheel against the sums that it was shipped with."""


def said(done: Any) -> str:
    return str(done.stdout + done.stderr)


def generate(port: int, tokens: int) -> str:
    """A program that asks a server for a completion and prints the answer as JSON."""
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    return (
        "import urllib.request\n"
        f"ask = urllib.request.Request('http://127.0.0.1:{port}/generate', {json.dumps(body).encode()!r}, "
        "{'Content-Type': 'application/json'})\n"
        "print(urllib.request.urlopen(ask, timeout=60).read().decode())"
    )


def processes(lab: Any, profile: str) -> dict[str, dict[str, str]]:
    """Title to /proc/PID/status of every process in a profile's unit."""
    program = f"""
import json, pathlib
group = "/sys/fs/cgroup/system.slice/system-specrig\\\\x2dsglang.slice/specrig-sglang@{profile}.service/cgroup.procs"
found = dict()
for pid in open(group).read().split():
    title = pathlib.Path("/proc", pid, "cmdline").read_bytes().replace(b"\\0", b" ").decode().strip()
    rows = pathlib.Path("/proc", pid, "status").read_text().splitlines()
    found[title] = dict(row.split(":", 1) for row in rows)
print(json.dumps({{title: {{key: text.strip() for key, text in rows.items()}} for title, rows in found.items()}}))
"""
    rows: dict[str, dict[str, str]] = lab.python(program)
    return rows


def counters(lab: Any, port: int) -> dict[str, float]:
    """The server's own cumulative counters of requests and tokens."""
    program = f"""
import json, re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
found = dict()
for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total"):
    values = re.findall(r"(?m)^sglang:" + name + r"(?:\\{{[^}}]*\\}})? (\\S+)$", text)
    found[name] = sum(float(value) for value in values)
print(json.dumps(found))
"""
    values: dict[str, float] = lab.python(program)
    return values


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_agree(records: list[dict[str, Any]], engine: list[dict[str, Any]]) -> None:
    """Hold every record against what the engine wrote down of the same request."""
    own = {row["rid"]: row["out"] for row in engine}
    assert records
    for record in records:
        assert record["ok"], record
        out = own[record["rid"]]
        meta = out["meta_info"]
        assert record["prompt_tokens"] == record["prompt_tokens_asked"] == meta["prompt_tokens"]
        assert record["output_tokens"] == meta["completion_tokens"] == len(record["output_ids"])
        assert record["token_source"] == "server"
        assert record["finish_reason"] == meta["finish_reason"]["type"]
        assert record["cached_tokens"] == meta["cached_tokens"]
        assert record["output_ids"] == out["output_ids"]
    assert len({record["rid"] for record in records}) == len(records)


@pytest.fixture(scope="module")
def provisioned(lab: Any) -> tuple[Any, str]:
    """The lab after its first provision, and what that said."""
    done = lab.plays("provision")
    assert done.returncode == 0, said(done)
    return lab, said(done)


@pytest.fixture(scope="module")
def serving(provisioned: tuple[Any, str]) -> Any:
    return provisioned[0]


def test_the_role_installs_the_wheel_and_serves_it(provisioned: tuple[Any, str]) -> None:
    lab, told = provisioned
    assert "installed engine default with sglang 0.5.23 into /opt/specrig/engines/default" in lab.journal.read_text()
    assert re.search(r"gates +all \d+ passed", told)
    (row,) = re.findall(r"(?m)^serving +(chat: .*)$", told)
    assert "GPU 1" in row
    assert "CPU engine, not GPU performance" in row
    installed = lab.guest("/opt/specrig/engines/default/bin/python -m pip list --format=json", check=True).stdout
    versions = {item["name"].lower(): item["version"] for item in json.loads(installed)}
    assert versions["sglang"] == "0.5.23"
    assert versions["torch"] == "2.13.0+cpu"
    assert not [name for name in versions if name.startswith(("nvidia-", "triton", "sgl-kernel", "flashinfer"))]
    # What runs is the wheel as it was shipped.
    assert lab.python(SHIPPED, "/opt/specrig/engines/default/bin/python") == {"checked": True, "different": []}
    info = lab.python(
        "import urllib.request\n"
        f"print(urllib.request.urlopen('http://127.0.0.1:{PORT['chat']}/server_info').read().decode())"
    )
    assert (info["version"], info["device"], info["tp_size"]) == ("0.5.23", "cpu", 1)

    again = lab.plays("provision")
    assert again.returncode == 0, said(again)
    assert not re.search(r"(?m)^changed ", said(again)), said(again)


def test_the_hardened_unit_holds_every_process_of_the_server(serving: Any) -> None:
    found = serving.guest("systemd-analyze security --no-pager specrig-sglang@chat.service", check=True).stdout
    exposure = re.search(r"Overall exposure level for specrig-sglang@chat\.service: ([0-9.]+)", found)
    assert exposure is not None, found
    assert float(exposure.group(1)) <= 4.0
    seen = processes(serving, "chat")
    assert {"sglang::scheduler", "sglang::detokenizer"} <= set(seen)
    assert [title for title in seen if "sglang.launch_server" in title]
    for title, status in seen.items():
        assert (status["NoNewPrivs"], status["Seccomp"], status["CapBnd"]) == ("1", "2", "0" * 16), title
        assert status["Uid"].split()[0] != "0", title
    assert serving.python(generate(PORT["chat"], 5))["meta_info"]["completion_tokens"] == 5


def test_counters_of_a_live_server_agree_with_the_records_of_a_load(serving: Any, tmp_path: Path) -> None:
    sweep = yaml.safe_load((HERE / "sweep.yml").read_text())
    del sweep["profiles"]
    sweep["workloads"] = [
        row | {"requests": 3, "output_tokens": [24]} for row in sweep["workloads"] if row["name"] == "natural"
    ]
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump(sweep))
    serving.put(tmp_path, "/var/tmp/load", guest=True)
    before, logged = counters(serving, PORT["chat"]), len(serving.requests("chat"))
    serving.guest(
        "cd /var/tmp/load && /opt/specrig/venv/bin/specrig load sweep.yml --out run "
        f"--url http://127.0.0.1:{PORT['chat']} --tokenizer /srv/models/{MODEL}",
        check=True,
        timeout_s=300,
    )
    after = counters(serving, PORT["chat"])
    text = serving.guest("cat /var/tmp/load/run/requests.jsonl", check=True).stdout
    records = [json.loads(line) for line in text.splitlines()]
    engine = serving.requests("chat")[logged:]
    assert len(records) == 3
    assert_agree(records, engine)
    # Beside the records there is the warm-up, which says so by its name, and nothing else.
    rest = [row for row in engine if row["rid"] not in {record["rid"] for record in records}]
    assert all(row["rid"].startswith("warmup-") for row in rest)
    counted = {name: after[name] - before[name] for name in after}
    assert counted == {
        "num_requests_total": len(records) + len(rest),
        "prompt_tokens_total": sum(record["prompt_tokens"] for record in records)
        + sum(row["out"]["meta_info"]["prompt_tokens"] for row in rest),
        "generation_tokens_total": sum(record["output_tokens"] for record in records)
        + sum(row["out"]["meta_info"]["completion_tokens"] for row in rest),
    }


def test_recovery_after_a_reboot(serving: Any) -> None:
    serving.reboot()
    told = len(serving.journal.read_text())
    done = serving.plays("recover")
    assert done.returncode == 0, said(done)
    assert re.search(r"gates +all \d+ passed", said(done))
    assert "CPU engine, not GPU performance" in said(done)
    assert "installed engine" not in serving.journal.read_text()[told:]
    assert serving.python(generate(PORT["chat"], 6))["meta_info"]["completion_tokens"] == 6
    again = serving.plays("recover")
    assert again.returncode == 0, said(again)
    assert not re.search(r"(?m)^changed ", said(again)), said(again)


def test_every_record_of_a_benchmark_is_the_engines_own(serving: Any, tmp_path: Path) -> None:
    done = serving.run(
        *("specrig", "bench", str(HERE / "sweep.yml"), "-i", str(HERE / "inventory"), "--take-over", "--yes"),
        *("--out", str(tmp_path), "--reason", "hold the records against the engine"),
        timeout_s=1200,
    )
    assert done.returncode == 0, said(done)
    assert BANNER in said(done)
    (run,) = [path for path in tmp_path.iterdir() if (path / "manifest.json").is_file()]
    records = lines(run / "requests.jsonl")
    cells = lines(run / "cells.jsonl")
    assert [cell["state"] for cell in cells] == ["done"] * 5, cells
    assert_agree(records, serving.requests("bench"))
    by_workload: dict[str, list[dict[str, Any]]] = {}
    named = {cell["cell"]: cell["workload"] for cell in cells}
    for record in records:
        by_workload.setdefault(named[record["cell"]], []).append(record)
    assert {name: len(rows) for name, rows in by_workload.items()} == {"exact": 16, "natural": 8, "agentic": 6}
    for record in by_workload["exact"]:
        assert (record["prompt_tokens"], record["output_tokens"], record["finish_reason"]) == (300, 32, "length")
    for record in by_workload["agentic"]:
        assert (record["output_tokens"], record["finish_reason"]) == (24, "length")
    assert max(record["prompt_tokens"] for record in by_workload["agentic"]) == 700
    # Answers that end by themselves, and answers that are cut: both kinds are told apart. And the text varies.
    assert {record["finish_reason"] for record in by_workload["natural"]} == {"stop", "length"}
    for record in by_workload["natural"]:
        assert (record["finish_reason"] == "length") == (record["output_tokens"] == record["output_tokens_asked"])
    assert all(len(set(record["output_ids"])) > 16 for record in by_workload["exact"])

    manifest = json.loads((run / "manifest.json").read_text())
    engine = manifest["engine"]
    assert (engine["kind"], engine["hardware"], engine["version"]) == ("sglang", "cpu", "0.5.23")
    assert engine["time_scale"] is None
    assert [gate for launch in manifest["launches"] for gate in launch["gates"] if gate["status"] != "pass"] == []
    figures = json.loads((run / "summary.json").read_text())
    assert (figures["hardware"], figures["simulated"], figures["banner"]) == ("cpu", False, BANNER)
    for page in ("report.html", "summary.md"):
        text = (run / page).read_text()
        assert BANNER in text
        assert "SIMULATED" not in text
    # Production is back, on its GPU, with a completion.
    assert serving.python(generate(PORT["chat"], 7))["meta_info"]["completion_tokens"] == 7


def start(lab: Any, folder: Path, profile: str) -> Any:
    """Start one profile by the role's own entry point."""
    role = {"name": "specrig.host.sglang_server", "tasks_from": "start"}
    tasks = [{"name": "Start", "ansible.builtin.include_role": role, "vars": {"sglang_server_names": [profile]}}]
    play = [{"name": "Start", "hosts": "gpu_guests", "gather_facts": False, "tasks": tasks}]
    path = folder / "start.yml"
    path.write_text(yaml.safe_dump(play, sort_keys=False))
    return lab.plays(str(path))


def test_a_method_of_another_release_is_refused_by_its_flag(serving: Any, tmp_path: Path) -> None:
    serving.guest("systemctl stop specrig-sglang@chat", check=True)
    done = start(serving, tmp_path, "ddtree")
    assert done.returncode == 2, said(done)
    assert "--speculative-ddtree-budget" in said(done), said(done)
    assert serving.guest("systemctl is-active specrig-sglang@ddtree").stdout.strip() != "active"


def test_a_method_that_this_engine_cannot_run_ends_in_the_engines_own_words(serving: Any, tmp_path: Path) -> None:
    serving.guest("systemctl stop specrig-sglang@chat", check=True)
    done = start(serving, tmp_path, "ngram")
    assert done.returncode == 2, said(done)
    assert "ngram: specrig-sglang@ngram.service ended while it started" in said(done), said(done)
    assert "No such file or directory: 'ninja'" in said(done)  # its last log lines: a kernel that it tried to compile
    assert "Traceback" not in said(done).partition("PLAY RECAP")[2]
    assert serving.guest("systemctl is-active specrig-sglang@ngram").stdout.strip() != "active"


def test_a_server_that_is_ready_and_dies_at_its_first_request_is_not_called_serving(
    serving: Any, tmp_path: Path
) -> None:
    serving.guest("systemctl stop specrig-sglang@chat specrig-sglang@ngram", check=True)
    done = start(serving, tmp_path, "dies")
    assert done.returncode == 2, said(done)
    assert "dies: specrig-sglang@dies.service ended at its first request, having said that it was ready" in said(done)
    assert "create_flashinfer_kv_indices_triton" in said(done)  # its last log lines: the kernel that is not there
    assert serving.guest("systemctl is-active specrig-sglang@dies").stdout.strip() != "active"
    serving.guest("systemctl stop specrig-sglang@dies", check=True)
