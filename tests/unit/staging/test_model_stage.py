"""Staging of models: real folders of real safetensors files, each way a download goes wrong, a kill in the middle."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
import types
from pathlib import Path

import pytest

from specrig.facts import modelfiles


def test_a_model_is_staged_once_and_then_left_alone(stage, source, folders):
    look = stage(copy=False)
    assert (look["changed"], look["complete"]) == (False, False)
    check = stage(check=True)
    assert check["changed"] is True
    assert not stage.target.exists()

    done = stage()
    assert done["changed"] is True
    assert folders.listing(stage.target) == folders.wanted(source)
    assert done["specrig"]["gates"][0]["status"] == "pass"
    assert not [path.name for path in stage.target.iterdir() if path.name.startswith(modelfiles.TEMPORARY_PREFIX)]

    inodes = {path.name: path.stat().st_ino for path in stage.target.iterdir()}
    again = stage()
    assert (again["changed"], again["complete"]) == (False, True)
    assert {path.name: path.stat().st_ino for path in stage.target.iterdir()} == inodes


def test_an_unchanged_model_is_not_read_again(stage, monkeypatch):
    stage()
    monkeypatch.setattr(stage.module.stagecopy, "Copier", lambda *rest, **more: pytest.fail(f"copied {rest}"))
    monkeypatch.setattr(stage.module.modelsource.LocalSource, "open", lambda *rest: pytest.fail(f"read {rest}"))
    assert stage()["complete"] is True


def test_a_shard_of_right_size_and_wrong_content_is_refused(stage, source, folders):
    folders.corrupt(source / "model-00002-of-00002.safetensors")
    done = stage()
    assert done["failed"] is True
    assert "model-00002-of-00002.safetensors has sha256 " in done["msg"]
    assert "\n" not in done["msg"]
    # It never appears under its name, and nothing vouches for the rest.
    assert not (stage.target / "model-00002-of-00002.safetensors").exists()
    assert not (stage.target / modelfiles.MARKER_NAME).exists()


def truncate(source: Path) -> None:
    path = source / "model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def pointer(source: Path) -> None:
    text = (
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 7000\n"
    )
    (source / "model-00001-of-00002.safetensors").write_text(text)


def lose(source: Path) -> None:
    (source / "model-00001-of-00002.safetensors").unlink()


def misplace(source: Path) -> None:
    weight_map = {"c.weight": "model-00001-of-00002.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def garbage(source: Path) -> None:
    (source / "model-00001-of-00002.safetensors").write_bytes(b"<html>502 Bad Gateway</html>")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (truncate, "is cut off"),
        (pointer, "is a Git LFS pointer of 107 bytes, not the weights; run git lfs pull"),
        (lose, "puts a.weight into model-00001-of-00002.safetensors, which is not there"),
        (misplace, "puts c.weight into model-00001-of-00002.safetensors, which does not hold it"),
        (garbage, "is no whole safetensors file"),
    ],
)
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_damaged_source_is_named_before_anything_is_copied(stage, source, damage, line, with_manifest, folders):
    damage(source)
    (source / "MANIFEST.sha256").unlink()
    if with_manifest:
        # A manifest made of the damaged files: sums alone do not tell.
        folders.manifest(source)
    for arguments in ({"copy": False}, {"check": True}, {}):
        done = stage(**arguments)
        assert done["failed"] is True
        assert line in done["msg"]
        assert "\n" not in done["msg"]
    assert not stage.target.exists()


def test_a_file_damaged_in_ram_is_healed_and_the_rest_is_kept(stage, source, folders):
    stage()
    path = stage.target / "model-00002-of-00002.safetensors"
    kept = (stage.target / "model-00001-of-00002.safetensors").stat().st_ino
    folders.corrupt(path)
    look = stage(copy=False)
    assert look["complete"] is False
    done = stage()
    assert done["models"]["M"]["copied"] == ["model-00002-of-00002.safetensors"]
    assert folders.listing(stage.target) == folders.wanted(source)
    assert (stage.target / "model-00001-of-00002.safetensors").stat().st_ino == kept


def test_a_new_revision_replaces_what_changed_and_drops_what_went(stage, source, folders):
    stage()
    (source / "config.json").write_text('{"revision": 2}')
    (source / "extra.txt").write_text("new")
    folders.manifest(source)
    stage()
    assert folders.listing(stage.target) == folders.wanted(source)
    (source / "extra.txt").unlink()
    folders.manifest(source)
    stage()
    assert folders.listing(stage.target) == folders.wanted(source)
    assert stage()["changed"] is False


def test_without_a_manifest_the_sums_are_unknown_and_said_to_be(stage, source):
    (source / "MANIFEST.sha256").unlink()
    done = stage()
    gate = done["specrig"]["gates"][0]
    assert (gate["status"], done["changed"]) == ("unknown", True)
    again = stage()
    assert again["changed"] is False
    assert again["specrig"]["gates"][0]["status"] == "unknown"


def test_a_model_in_ram_outlives_its_source(stage, source, tmp_path):
    stage()
    source.rename(tmp_path / "unmounted")
    done = stage()
    assert done["changed"] is False
    assert "its source" in done["specrig"]["notes"][0]
    (stage.target / "config.json").unlink()
    assert "is not there; mount or download it" in stage()["msg"]


def test_too_little_room_is_one_line_with_both_numbers(stage, monkeypatch):
    class Room:
        f_bavail, f_frsize, f_blocks = 2, 4096, 8

    monkeypatch.setattr(stage.module.os, "statvfs", lambda path: Room)
    done = stage()
    assert done["failed"] is True
    assert "0.00 GB free and staging M needs 0.00 GB; raise model_store_size" in done["msg"]
    # A tmpfs without limit has no blocks, and none free.
    Room.f_bavail = Room.f_blocks = 0
    assert not stage().get("failed")


@pytest.mark.parametrize(
    "text",
    [
        "abc  file\n",
        "0" * 64 + "  ../../etc/passwd\n",
        "0" * 64 + "  /etc/passwd\n",
        "",
        "0" * 64 + "  a\n" + "1" * 64 + "  a\n",
    ],
)
def test_a_bad_manifest_is_one_line(stage, source, text):
    (source / "MANIFEST.sha256").write_text(text)
    done = stage()
    assert done["failed"] is True
    assert "\n" not in done["msg"]
    assert not stage.target.exists()


def test_hidden_files_that_the_manifest_names_are_left_out_with_it(stage, source, folders):
    """As the manifest of a clone has them, made by a shell that began the manifest first."""
    with (source / "MANIFEST.sha256").open("a") as out:
        out.write(f"{'0' * 64}  .gitattributes\n{'0' * 64}  .git/config\n{'0' * 64}  MANIFEST.sha256\n")
    assert stage()["specrig"]["gates"][0]["status"] == "pass"
    assert folders.listing(stage.target) == folders.wanted(source)


def test_a_share_that_is_not_mounted_takes_nothing_from_ram(stage, source, tmp_path):
    stage()
    source.rename(tmp_path / "elsewhere")
    source.mkdir()
    done = stage()
    assert (done["changed"], done["complete"]) == (False, True)
    shutil.rmtree(stage.target)
    assert "holds no files; mount it, or download the model there" in stage()["msg"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_that_somebody_else_made_where_everybody_may_is_refused(stage, source):
    stage.target.mkdir()
    os.chown(stage.target, 4711, 4711)
    assert not stage(copy=False).get("failed"), "root alone makes folders there"
    stage.target.parent.chmod(0o1777)
    line = stage()["msg"]
    assert line.startswith(f"{stage.target} belongs to user 4711, who could change the models in it; expected root")
    assert list(stage.target.iterdir()) == []


@pytest.mark.parametrize("rows", [None, [], {"config.json": {}}, {"config.json": 7}])
def test_a_marker_that_is_none_vouches_for_nothing(stage, rows):
    stage()
    path = stage.target / modelfiles.MARKER_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": rows}))
    assert stage(copy=False)["complete"] is False
    assert stage()["models"]["M"]["copied"] == []
    assert stage()["changed"] is False


# Keeps the staging alive, and its large file without an end, until it is killed.
HELD = """
import os, time
write = os.pwrite
def pwrite(number, data, position):
    if position > 10_000_000:
        time.sleep(600)
    return write(number, data, position)
os.pwrite = pwrite
"""


def test_killed_in_the_middle_it_goes_on_where_it_was(stage, source, tmp_path, repository, folders):
    folders.safetensors(source / "model-00002-of-00002.safetensors", {"c.weight": os.urandom(20_000_000)})
    folders.manifest(source)
    command = folders.child(repository, stage.parameters, HELD)
    part = stage.target / (modelfiles.TEMPORARY_PREFIX + "model-00002-of-00002.safetensors")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 120
            while not (part.exists() and part.stat().st_blocks and (stage.target / "config.json").exists()):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert part.exists()
    assert not (stage.target / "model-00002-of-00002.safetensors").exists()
    assert not (stage.target / modelfiles.MARKER_NAME).exists()
    small = (stage.target / "config.json").stat().st_ino

    assert stage(copy=False)["complete"] is False
    done = stage()
    assert not part.exists()
    assert folders.listing(stage.target) == folders.wanted(source)
    # What was whole is read again and kept, not copied again.
    assert (stage.target / "config.json").stat().st_ino == small
    assert "config.json" not in done["models"]["M"]["copied"]


def test_a_manifest_that_comes_later_is_compared_with_the_sums_of_the_copy(stage, source):
    text = (source / "MANIFEST.sha256").read_text()
    (source / "MANIFEST.sha256").unlink()
    assert stage()["specrig"]["gates"][0]["status"] == "unknown"
    (source / "MANIFEST.sha256").write_text(text)
    done = stage()
    assert not done["changed"]
    assert done["specrig"]["gates"][0]["status"] == "pass"


def test_two_runs_at_once_one_works_and_the_other_waits_and_says_so(stage, source, monkeypatch, repository, folders):
    """Another run holds the model when this one comes; it is through when this one's turn comes."""
    stage.target.mkdir(parents=True)
    lock = (stage.target / ".specrig-lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("4711")
    lock.flush()
    real, calls = stage.module.stagecopy.locked, []

    def locked(target, wait):
        calls.append(wait)
        if wait:
            lock.close()
            done = subprocess.run(
                folders.child(repository, stage.parameters), capture_output=True, text=True, check=True
            )
            assert len(json.loads(done.stdout)["models"]["M"]["copied"]) == 4
        return real(target, wait)

    monkeypatch.setattr(stage.module.stagecopy, "locked", locked)
    done = stage()
    assert calls == [False, True]
    assert done["models"]["M"]["copied"] == []
    assert "staged model M: 0 files, 0.00 GB" in done["specrig"]["changed"][0]
    assert re.fullmatch(
        r"model M: waited \d+\.\d s for another staging of it \(process 4711\)", done["specrig"]["notes"][0]
    )
    assert folders.listing(stage.target) == folders.wanted(source)


def test_what_a_killed_staging_left_is_not_missed_as_room(stage, monkeypatch):
    left = stage.target / f"{stage.module.modelfiles.TEMPORARY_PREFIX}model-00001-of-00002.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 100_000_000)

    def room(_place):
        return types.SimpleNamespace(f_bavail=1 if left.exists() else 100_000_001, f_frsize=1, f_blocks=200_000_000)

    monkeypatch.setattr(stage.module.os, "statvfs", room)
    assert not stage(copy=False).get("failed")
    assert not stage().get("failed")
    assert not left.exists()


def both(stage, source, tmp_path) -> Path:
    """A second model beside the first one, from a folder of its own."""
    other = tmp_path / "draft"
    shutil.copytree(source, other)
    stage.parameters["models"]["draft"] = {"source": str(other)}
    return other


def test_two_models_are_staged_at_once_and_each_tells_how_far_it_is(stage, source, tmp_path, folders):
    both(stage, source, tmp_path)
    done = stage()
    for name, row in done["models"].items():
        assert folders.listing(stage.target.parent / name) == folders.wanted(source)
        assert len(row["copied"]) == 4
        assert row["bytes"] == sum(len(data) for data in folders.wanted(source).values())
        told = json.loads((Path(stage.parameters["progress_dir"]) / f"{name}.json").read_text())
        assert (told["state"], told["files_done"], told["files_total"]) == ("done", 4, 4)
        assert told["bytes_done"] == told["bytes_total"] == row["bytes"]
    assert [gate["subject"] for gate in done["specrig"]["gates"]] == ["M", "draft"]
    assert stage()["changed"] is False


def test_one_model_that_is_wrong_keeps_no_other_from_being_staged(stage, source, tmp_path, folders):
    other = both(stage, source, tmp_path)
    folders.corrupt(other / "model-00001-of-00002.safetensors")
    done = stage()
    assert done["failed"] is True
    assert done["msg"].startswith(f"{other}/model-00001-of-00002.safetensors has sha256 ")
    assert folders.listing(stage.target) == folders.wanted(source)
    assert stage(copy=False)["models"]["M"]["complete"] is True
    assert stage(copy=False)["models"]["draft"]["complete"] is False
    told = json.loads((Path(stage.parameters["progress_dir"]) / "draft.json").read_text())
    assert (told["state"], told["message"]) == ("failed", done["msg"])


def test_a_new_revision_that_cannot_be_proven_leaves_no_marker_of_the_old_one(stage, source, folders):
    stage()
    assert (stage.target / modelfiles.MARKER_NAME).exists()
    (source / "config.json").write_text('{"revision": 2}')
    folders.manifest(source)
    (source / "config.json").write_text('{"revision": 3}')
    done = stage()
    assert f"{source}/config.json has sha256 " in done["msg"]
    assert not (stage.target / modelfiles.MARKER_NAME).exists()
    folders.manifest(source)
    assert not stage().get("failed")
    assert (stage.target / "config.json").read_text() == '{"revision": 3}'


def test_what_is_left_of_a_file_that_the_model_no_longer_has_is_removed(stage):
    left = stage.target / "sub" / f"{modelfiles.TEMPORARY_PREFIX}gone.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 1000)
    assert not stage().get("failed")
    assert not left.exists()
