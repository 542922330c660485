"""Fixtures of the tests that need no lab."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

MODULES = "ansible_collections.specrig.host.plugins.modules."


@pytest.fixture
def run(repository: Path, monkeypatch, capsys):
    """Run a module with parameters; returns what it prints."""
    basic = pytest.importorskip("ansible.module_utils.basic")
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])

    def call(name_: str, /, check: bool = False, **params: Any) -> dict[str, Any]:
        module = importlib.import_module(MODULES + name_)
        arguments = {"ANSIBLE_MODULE_ARGS": {**params, "_ansible_check_mode": check, "_ansible_diff": True}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call
