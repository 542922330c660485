"""Staging that is interrupted: by SIGKILL at every step and any time, a full disk, a source or target that goes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest


@pytest.fixture
def shards(source: Path, folders) -> Path:
    """Three more files, each of a few segments as the killer sees them."""
    for number in (3, 4, 5):
        (source / f"part-{number}.bin").write_bytes(os.urandom(150_000 + number))
    folders.manifest(source)
    return source


def killer(repository: Path, stage, what: str) -> dict:
    command = [sys.executable, str(Path(__file__).parent / "kill.py"), str(repository / ".collections")]
    done = subprocess.run(
        [*command, json.dumps(stage.parameters), what], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_killed_at_every_step_the_next_run_finishes_from_what_is_proven(shards, stage, repository, with_manifest):
    if not with_manifest:
        (shards / "MANIFEST.sha256").unlink()
    done = killer(repository, stage, "steps")
    assert done["wrong"] == []
    # 7 files: each is at least a write, a proof and a rename, twice over.
    assert done["kills"] > 2 * 7 * 3


def test_killed_at_any_time_no_half_file_is_ever_seen(shards, stage, repository):
    done = killer(repository, stage, "25")
    assert done["wrong"] == []
    assert done["kills"] >= 25
    assert done["hits"] > done["kills"] // 3
    assert done["looks"] > done["kills"]


@pytest.fixture
def small_tmpfs(tmp_path: Path):
    """A tmpfs of 400 kB; gone again afterwards."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "ram"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "specrig-test", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_is_named_and_the_next_run_finishes(shards, stage, small_tmpfs, monkeypatch, folders):
    # Room is there when it is looked at, and somebody else takes it.
    monkeypatch.setattr(stage.module.Model, "check_space", lambda self: None)
    done = stage(streams=1)
    assert done["failed"] is True
    assert "No space left on device" in done["msg"]
    assert "part-" in done["msg"]
    assert "\n" not in done["msg"]
    whole = {path.name: path.stat().st_ino for path in stage.target.iterdir() if not path.name.startswith(".")}
    assert 1 <= len(whole) < 7
    assert all((stage.target / name).read_bytes() == (shards / name).read_bytes() for name in whole)
    # What was not finished gives its room back.
    assert not [path.name for path in stage.target.iterdir() if path.name.startswith(".specrig-part")]
    assert json.loads((Path(stage.parameters["progress_dir"]) / "M.json").read_text())["state"] == "failed"

    subprocess.run(["mount", "-o", "remount,size=4m", str(small_tmpfs)], check=True)
    done = stage()
    assert sorted(done["models"]["M"]["copied"]) == sorted(set(folders.wanted(shards)) - set(whole))
    assert folders.listing(stage.target) == folders.wanted(shards)
    assert {name: (stage.target / name).stat().st_ino for name in whole} == whole


def breaking(stage, monkeypatch, path: str, after: int, act) -> None:
    """Have something happen when so many bytes of one file were read."""
    real = stage.module.modelsource.LocalSource.open

    def opened(self, name, offset, end=None):
        reader = real(self, name, offset, end)
        readinto, read = reader.readinto, [offset]

        def counted(view):
            if name == path and read[0] >= after and threading.current_thread() is not threading.main_thread():
                act()
            count = readinto(view[: max(1, after - read[0])] if read[0] < after else view)
            read[0] += count
            return count

        reader.readinto = counted
        return reader

    monkeypatch.setattr(stage.module.modelsource.LocalSource, "open", opened)


def test_a_source_that_fails_mid_way_is_named_and_the_rest_of_the_file_is_read_later(shards, stage, monkeypatch):
    monkeypatch.setattr(stage.module.modelsource.Source, "segment_bytes", 65536)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        breaking(stage, patch, "part-5.bin", 140_000, fail)
        done = stage(streams=1)
    assert done["failed"] is True
    assert f"{shards}/part-5.bin: Input/output error; see to that and run again" in done["msg"]
    assert not (stage.target / "part-5.bin").exists()
    # Two segments of 65,536 bytes are there and put down; only the rest is asked for.
    asked = []
    real = stage.module.modelsource.LocalSource.open
    monkeypatch.setattr(
        stage.module.modelsource.LocalSource,
        "open",
        lambda self, name, offset, end=None: asked.append((name, offset)) or real(self, name, offset, end),
    )
    done = stage()
    assert [offset for name, offset in asked if name == "part-5.bin"] == [131072]
    assert (stage.target / "part-5.bin").read_bytes() == (shards / "part-5.bin").read_bytes()
    assert done["specrig"]["gates"][0]["status"] == "pass"


def test_a_part_that_was_spoilt_meanwhile_is_copied_whole(shards, stage, monkeypatch):
    monkeypatch.setattr(stage.module.modelsource.Source, "segment_bytes", 65536)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        breaking(stage, patch, "part-5.bin", 140_000, fail)
        assert stage(streams=1)["failed"] is True
    with (stage.target / ".specrig-part.part-5.bin").open("r+b") as part:
        part.write(b"spoilt")
    assert not stage().get("failed")
    assert (stage.target / "part-5.bin").read_bytes() == (shards / "part-5.bin").read_bytes()


def test_a_source_that_is_unmounted_mid_way_is_named(shards, stage, monkeypatch, tmp_path, folders):
    with monkeypatch.context() as patch:
        patch.setattr(stage.module.modelsource.Source, "segment_bytes", 65536)
        away = tmp_path / "away"
        breaking(stage, patch, "part-5.bin", 60_000, lambda: shards.exists() and shards.rename(away))
        done = stage(streams=1)
    assert done["failed"] is True
    assert f"{shards}/part-" in done["msg"]
    assert "\n" not in done["msg"]
    assert stage()["failed"] is True
    away.rename(shards)
    assert not stage().get("failed")
    assert folders.listing(stage.target) == folders.wanted(shards)


def test_a_target_that_goes_mid_way_is_named_and_the_next_run_starts_anew(shards, stage, monkeypatch, folders):
    with monkeypatch.context() as patch:
        breaking(stage, patch, "part-5.bin", 60_000, lambda: shutil.rmtree(stage.target, ignore_errors=True))
        done = stage(streams=1)
    assert done["failed"] is True
    assert f"{stage.target}/" in done["msg"]
    assert "\n" not in done["msg"]
    assert not stage().get("failed")
    assert folders.listing(stage.target) == folders.wanted(shards)


def test_a_source_that_is_written_to_meanwhile_is_no_copy_of_anything(shards, stage, monkeypatch):
    (shards / "MANIFEST.sha256").unlink()
    breaking(stage, monkeypatch, "part-5.bin", 60_000, lambda: os.utime(shards / "part-5.bin", ns=(1, 1)))
    done = stage(streams=1)
    assert "part-5.bin changed while it was copied; let what writes it end and run again" in done["msg"]
    assert not (stage.target / "part-5.bin").exists()


def test_a_source_that_is_cut_meanwhile_is_named(shards, stage, monkeypatch):
    breaking(stage, monkeypatch, "part-5.bin", 60_000, lambda: os.truncate(shards / "part-5.bin", 70_000))
    done = stage(streams=1)
    assert "part-5.bin ends after 70000 of 150005 bytes: it was cut while it was copied; get it again" in done["msg"]
    assert not (stage.target / "part-5.bin").exists()


def test_what_a_boot_proved_is_read_again_after_the_next_and_kept(shards, stage, monkeypatch, folders):
    stage()
    inodes = {name: (stage.target / name).stat().st_ino for name in folders.wanted(shards)}
    monkeypatch.setattr(stage.module.stagecopy, "boot_id", lambda: "another boot")
    look = stage(copy=False)
    assert look["complete"] is False
    assert len(look["models"]["M"]["verify"]) == 7
    folders.corrupt(stage.target / "part-4.bin")
    done = stage()
    assert done["models"]["M"]["copied"] == ["part-4.bin"]
    assert folders.listing(stage.target) == folders.wanted(shards)
    del inodes["part-4.bin"]
    assert {name: (stage.target / name).stat().st_ino for name in inodes} == inodes


def test_where_no_boot_can_be_told_nothing_is_believed(shards, stage, monkeypatch):
    monkeypatch.setattr(stage.module.stagecopy, "boot_id", lambda: None)
    stage()
    assert stage(copy=False)["complete"] is False


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "7", '{"path": "config.json"}', '{"path": "../x", "sha256": "00", "boot_id": "B"}', "\x00\xff"],
)
def test_a_cut_or_foreign_line_proves_nothing(stage, tmp_path, line):
    good = {"path": "a", "boot_id": "B", "sha256": "0" * 64, "size": 1, "mtime_ns": 1, "ino": 1, "stamp": 1}
    other = dict(good, path="b", boot_id="A")
    text = f"{line}\n{json.dumps(good)}\n{json.dumps(other)}\n{json.dumps(dict(good, path='c'))}"
    (tmp_path / ".specrig-proofs").write_text(text, encoding="latin-1")
    # The last line was cut off before its end, however whole it looks.
    assert list(stage.module.stagecopy.Proofs(str(tmp_path), "B").files) == ["a"]
