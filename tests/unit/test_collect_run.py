"""A collected archive can write below the run's own folder, and nowhere else."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def collect(repository: Path) -> ModuleType:
    """The action plugin's module."""
    path = repository / "plugins" / "action" / "collect_run.py"
    spec = importlib.util.spec_from_file_location("specrig_test_collect_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def archive(path: Path, *members: tuple[str, bytes | None, bytes]) -> Path:
    """An archive of (name, content, type) members; content None makes what the type says."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = "/etc/passwd"
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content) if content is not None else None)
    return path


def test_files_arrive_whole_and_a_second_collection_replaces_them(collect: ModuleType, tmp_path: Path) -> None:
    first = archive(
        tmp_path / "1.tgz",
        ("run1", None, tarfile.DIRTYPE),
        ("run1/requests.jsonl", b'{"a":1}\n', tarfile.REGTYPE),
        ("run1/sub/x", b"x", tarfile.REGTYPE),
    )
    assert collect.unpack(first, "run1", tmp_path / "runs") == 2
    assert (tmp_path / "runs/run1/requests.jsonl").read_bytes() == b'{"a":1}\n'
    assert (tmp_path / "runs/run1/sub/x").read_bytes() == b"x"
    second = archive(tmp_path / "2.tgz", ("run1/requests.jsonl", b'{"a":1}\n{"a":2}\n', tarfile.REGTYPE))
    assert collect.unpack(second, "run1", tmp_path / "runs") == 1
    assert (tmp_path / "runs/run1/requests.jsonl").read_bytes() == b'{"a":1}\n{"a":2}\n'
    assert not list((tmp_path / "runs/run1").glob(".collect-*"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("run1/../evil", tarfile.REGTYPE),
        ("../evil", tarfile.REGTYPE),
        ("/tmp/evil", tarfile.REGTYPE),
        ("other/evil", tarfile.REGTYPE),
        ("run1/link", tarfile.SYMTYPE),
        ("run1/hard", tarfile.LNKTYPE),
        ("run1/fifo", tarfile.FIFOTYPE),
        ("run1/dev", tarfile.CHRTYPE),
    ],
)
def test_anything_that_leads_elsewhere_writes_nothing(
    collect: ModuleType, tmp_path: Path, name: str, kind: bytes
) -> None:
    packed = archive(
        tmp_path / "bad.tgz",
        ("run1/good", b"good", tarfile.REGTYPE),
        (name, b"evil" if kind == tarfile.REGTYPE else None, kind),
    )
    with pytest.raises(ValueError, match=r"leads out of the run folder|neither a file nor a folder"):
        collect.unpack(packed, "run1", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "evil").exists()


def test_a_link_on_the_controller_is_not_followed(collect: ModuleType, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run1").symlink_to(outside)
    packed = archive(tmp_path / "1.tgz", ("run1/x", b"x", tarfile.REGTYPE))
    with pytest.raises(ValueError, match="is a link on the controller"):
        collect.unpack(packed, "run1", tmp_path / "runs")
    assert list(outside.iterdir()) == []
