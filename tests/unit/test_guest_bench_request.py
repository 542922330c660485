"""What a guest is told of the profiles when it is asked for the plan of a benchmark."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def test_no_key_and_no_environment_of_a_profile_is_sent(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is an argument of a command module, which Ansible logs and shows."""
    pytest.importorskip("ansible")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    action = importlib.import_module("ansible_collections.specrig.host.plugins.action.guest_bench")
    profile = {
        "model": "m",
        "port": 31001,
        "env": {"HF_TOKEN": "hf_4711471147"},
        "extra_args": ["--api-key", "sk-08150815", "--page-size", 16],
    }
    sent: list[dict[str, Any]] = []

    def execute(module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        sent.append(module_args)
        return {"rc": 0, "stdout": "{}"}

    monkeypatch.setattr(action.ActionBase, "run", lambda *_: {})
    plugin = action.ActionModule.__new__(action.ActionModule)
    request = {"profiles": {"chat": profile}}
    plugin._task = SimpleNamespace(args={"ask": "plan", "request": request}, check_mode=False)
    plugin.validate_argument_spec = lambda _spec: (
        None,
        {"ask": "plan", "request": request, "python": "/python", "user": "specrig"},
    )
    plugin._execute_module = execute
    assert plugin.run(task_vars={})["answer"] == {}
    (told,) = json.loads(sent[0]["stdin"])["profiles"].values()
    assert (told["model"], told["port"], "env" in told) == ("m", 31001, False)
    assert told["extra_args"][::2] == ["--api-key", "--page-size"]
    assert "sk-08150815" not in sent[0]["stdin"]
    assert profile["env"] == {"HF_TOKEN": "hf_4711471147"}
