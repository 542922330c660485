"""Model folders of real safetensors files, and the module that stages them, called here or in a process of its own."""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest

basic = pytest.importorskip("ansible.module_utils.basic")
MODULE = "ansible_collections.specrig.host.plugins.modules.model_stage"


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """Write a file by the published format: header length, JSON header, data."""
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def manifest(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.name != "MANIFEST.sha256")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "MANIFEST.sha256").write_text("".join(lines))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    weights = {"a.weight": b"A" * 5000, "b.weight": b"B" * 3000}, {"c.weight": b"C" * 7000}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(shards, weights, strict=True):
        safetensors(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in zip(shards, weights, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    manifest(folder)
    return folder


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def child(repository: Path, parameters: dict[str, Any], before: str = "") -> list[str]:
    """The command that runs the module in a process of its own."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from ansible.module_utils import basic\n"
        "basic._ANSIBLE_ARGS = json.dumps({'ANSIBLE_MODULE_ARGS': json.loads(sys.argv[2])}).encode()\n"
        "basic._ANSIBLE_PROFILE = 'legacy'\n"
        f"import {MODULE} as module\n{before}\nmodule.main()\n"
    )
    return [sys.executable, "-c", code, str(repository / ".collections"), json.dumps(parameters)]


@pytest.fixture
def folders() -> types.SimpleNamespace:
    """The functions above."""
    own = (safetensors, manifest, corrupt, child, listing, wanted)
    return types.SimpleNamespace(**{function.__name__: function for function in own})


@pytest.fixture
def stage(tmp_path: Path, source: Path, repository: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module(MODULE)
    target = tmp_path / "ram"
    target.mkdir()

    def call(check: bool = False, about: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        parameters = {**call.parameters, **({"models": {"M": about}} if about is not None else {}), **more}
        arguments = {"ANSIBLE_MODULE_ARGS": {**parameters, "_ansible_check_mode": check}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    call.target = target / "M"
    call.module = module
    call.parameters = {
        "models": {"M": {"source": str(source)}},
        "target": str(target),
        "streams": 2,
        "state_dir": str(tmp_path / "state"),
        "progress_dir": str(tmp_path / "progress"),
    }
    return call


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def wanted(source: Path) -> dict[str, bytes]:
    return {name: data for name, data in listing(source).items() if name != "MANIFEST.sha256"}
