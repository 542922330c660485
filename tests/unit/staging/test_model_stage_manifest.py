"""The manifest that is kept of a model, what later stagings make of it, and files that nothing names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def kept(stage) -> Path:
    return Path(stage.parameters["state_dir"]) / "M.json"


@pytest.fixture
def first(stage, source, kept) -> dict:
    """A first copy without a manifest; then the reboot, after which RAM is empty."""
    (source / "MANIFEST.sha256").unlink()
    assert stage()["specrig"]["gates"][0]["status"] == "unknown"
    shutil.rmtree(stage.target)
    return json.loads(kept.read_text())


def swap(path: Path, data: bytes, times: bool = True) -> None:
    """Other content; with the old times, as a disk that rots or a tool that keeps times would leave it."""
    about = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + (0 if times else 1_000_000_000)))


def test_a_first_copy_is_kept_with_size_sum_and_time(first, source):
    assert (first["schema"], first["model"], first["source"]) == (1, "M", str(source))
    path = source / "config.json"
    assert first["files"]["config.json"] == {
        "size": 2,
        # sha256 of the two bytes {}.
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "mtime_ns": path.stat().st_mtime_ns,
    }
    assert len(first["files"]) == 4


def test_a_manifest_of_the_source_is_kept_too(stage, source, kept, folders):
    stage()
    sums = {path: row["sha256"] for path, row in json.loads(kept.read_text())["files"].items()}
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in folders.wanted(source).items()}


def test_the_same_again_is_proven_by_it(first, stage):
    done = stage()
    gate = done["specrig"]["gates"][0]
    assert gate["status"] == "pass"
    assert gate["message"] == (f"staged, sha256 as at the first copy, {first['made_at']} (the source has no manifest)")
    assert done["models"]["M"]["verified"] == "kept"
    assert stage()["changed"] is False


def test_content_that_changed_with_the_same_size_and_time_is_wrong_and_named(first, stage, source):
    data = bytearray((source / SHARD).read_bytes())
    data[-1] ^= 1
    swap(source / SHARD, bytes(data))
    done = stage()
    assert done["failed"] is True
    was = first["files"][SHARD]["sha256"]
    now = hashlib.sha256(bytes(data)).hexdigest()
    assert done["msg"] == (
        f"{source}/{SHARD} has sha256 {now} and had {was} on {first['made_at']}, with the same size and time: "
        "its content is wrong; get that file again"
    )
    assert not (stage.target / SHARD).exists()


def test_a_file_that_was_replaced_is_named_with_what_to_do_about_it(first, stage, source, kept, folders):
    swap(source / "config.json", b'{"a": 1}', times=False)
    done = stage()
    assert done["failed"] is True
    assert f"{source}/config.json has sha256 " in done["msg"]
    assert f"it was replaced since; if that was on purpose, remove {kept} and run again" in done["msg"]
    kept.unlink()
    done = stage()
    assert done["specrig"]["gates"][0]["status"] == "unknown"
    assert folders.listing(stage.target) == folders.wanted(source)
    sums = json.loads(kept.read_text())["files"]
    assert sums["config.json"]["sha256"] == hashlib.sha256(b'{"a": 1}').hexdigest()


def test_the_same_content_downloaded_again_is_as_good(first, stage, source, kept):
    os.utime(source / SHARD, ns=(5, 5))
    assert stage()["specrig"]["gates"][0]["status"] == "pass"
    again = json.loads(kept.read_text())
    assert again["made_at"] == first["made_at"]
    assert again["files"][SHARD] == dict(first["files"][SHARD], mtime_ns=5)


def test_a_file_that_went_is_named(first, stage, source, kept):
    (source / "config.json").unlink()
    assert stage()["msg"] == (
        f"{source} lacks config.json, which the manifest kept since {first['made_at']} names; get it again, or, if "
        f"that is on purpose, remove {kept} and run again"
    )


def test_another_source_or_revision_in_the_inventory_is_another_model(first, stage, source, tmp_path):
    swap(source / "config.json", b'{"a": 1}', times=False)
    done = stage(about={"source": str(source), "revision": "b" * 40})
    assert done["specrig"]["gates"][0]["status"] == "unknown"
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "config.json").write_text('{"b": 1}')
    done = stage(about={"source": str(other)})
    assert (stage.target / "config.json").read_text() == '{"b": 1}'
    assert done["specrig"]["gates"][0]["status"] == "unknown"


def test_a_manifest_made_again_of_a_file_that_rotted_is_not_believed(stage, source, kept, folders):
    stage()
    before = json.loads(kept.read_text())
    shutil.rmtree(stage.target)
    data = bytearray((source / SHARD).read_bytes())
    data[-1] ^= 1
    swap(source / SHARD, bytes(data))
    folders.manifest(source)
    done = stage()
    assert done["failed"] is True
    assert f"{source}/{SHARD} has the size and time it had on {before['made_at']} and another sum" in done["msg"]
    assert f"remove {kept} and run again" in done["msg"]
    kept.unlink()
    assert stage()["specrig"]["gates"][0]["status"] == "pass"


def test_a_kept_manifest_that_is_lost_is_made_of_what_is_proven_in_ram(stage, kept):
    stage()
    was = json.loads(kept.read_text())["files"]
    kept.unlink()
    assert stage(copy=False)["changed"] is False
    assert not kept.exists()
    done = stage()
    assert done["changed"] is True
    assert done["specrig"]["changed"] == ["kept the manifest of model M again, of what is proven in RAM"]
    assert json.loads(kept.read_text())["files"] == was
    assert stage()["changed"] is False


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1, "made_at": "x", "files": {"a": {"size": 1}}}', "\xff"])
def test_a_kept_manifest_that_is_none_is_one_line(first, stage, kept, text):
    kept.write_text(text, encoding="latin-1")
    done = stage()
    assert done["failed"] is True
    assert str(kept) in done["msg"]
    assert "remove it and run again" in done["msg"]
    assert "\n" not in done["msg"]


EXTRA = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("manifest", "who"),
    [(True, "its manifest"), (False, "model.safetensors.index.json")],
)
def test_weights_that_nothing_names_are_refused(stage, source, folders, manifest, who):
    if not manifest:
        (source / "MANIFEST.sha256").unlink()
    folders.safetensors(source / EXTRA, {"d.weight": b"D" * 100})
    done = stage(copy=False)
    assert done["failed"] is True
    assert done["msg"] == (
        f"{source}/{EXTRA} is not named by {who}; remove it, or name it in MANIFEST.sha256 if it belongs to the model"
    )
    # Whoever names it says that it belongs there, although the index does not know it.
    folders.manifest(source)
    assert not stage().get("failed")
    assert (stage.target / EXTRA).exists()


def test_weights_that_came_after_the_first_copy_are_refused(first, stage, source, folders):
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    folders.safetensors(source / EXTRA, {"d.weight": b"D" * 100})
    assert f"{source}/{EXTRA} is not named by the manifest kept of it" in stage()["msg"]


def test_another_file_that_no_manifest_names_is_staged_and_said_to_be_unproven(stage, source):
    (source / "NOTICE.txt").write_text("n")
    done = stage()
    assert (stage.target / "NOTICE.txt").read_text() == "n"
    assert (done["models"]["M"]["verified"], done["specrig"]["gates"][0]["status"]) == ("partly", "unknown")


def test_somebody_elses_file_beside_the_model_is_named_and_weights_are_refused(stage):
    stage()
    (stage.target / "notes.txt").write_text("mine")
    done = stage()
    assert done["changed"] is False
    assert done["specrig"]["notes"] == [f"{stage.target}/notes.txt is no file of model M; left alone"]
    (stage.target / "more.safetensors").write_text("")
    done = stage()
    assert done["failed"] is True
    assert (
        done["msg"] == f"{stage.target}/more.safetensors is no file of model M and an engine would load it; remove it"
    )


def test_a_file_of_ours_that_the_source_lost_is_removed_after_a_reboot_too(stage, source, folders, monkeypatch):
    (source / "old.txt").write_text("o")
    folders.manifest(source)
    stage()
    (source / "old.txt").unlink()
    folders.manifest(source)
    monkeypatch.setattr(stage.module.stagecopy, "boot_id", lambda: "another boot")
    assert stage(copy=False)["models"]["M"]["drop"] == ["old.txt"]
    assert not stage().get("failed")
    assert not (stage.target / "old.txt").exists()


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({}, "model M has no source; set model_store_models.M.source"),
        ({"source": 7}, "model M has no source"),
        ({"source": "models/x"}, "the source models/x is no absolute path"),
        ({"source": "ftp://x/y"}, "no way is known to read ftp://x/y"),
        ({"source": "/nowhere/at/all"}, "the source /nowhere/at/all of model M is not there"),
    ],
)
def test_an_entry_that_says_no_source_is_one_line(stage, about, line):
    done = stage(about=about)
    assert done["failed"] is True
    assert line in done["msg"]
    assert "\n" not in done["msg"]


def test_a_link_to_nothing_and_a_pipe_are_named(stage, source):
    (source / "vocab.json").symlink_to("../blobs/0")
    assert "vocab.json is a link to what is not there; download that file again" in stage()["msg"]
    (source / "vocab.json").unlink()
    os.mkfifo(source / "vocab.json")
    assert "vocab.json is no regular file; remove it from the model's folder" in stage()["msg"]


def test_a_folder_of_links_as_the_hubs_cache_has_is_staged_as_files(stage, source, tmp_path, folders):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(source.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    assert not stage().get("failed")
    assert folders.listing(stage.target) == folders.wanted(source)
    assert not any(path.is_symlink() for path in stage.target.iterdir())


def test_files_in_folders_keep_their_places(stage, source, folders):
    (source / "sub" / "deep").mkdir(parents=True)
    (source / "sub" / "deep" / "x.json").write_text("x")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("not a file of the model")
    with (source / "MANIFEST.sha256").open("a") as out:
        out.write(f"{hashlib.sha256(b'x').hexdigest()} *./sub/deep/x.json\n")
    assert stage()["specrig"]["gates"][0]["status"] == "pass"
    assert (stage.target / "sub" / "deep" / "x.json").read_text() == "x"
    assert not (stage.target / ".git").exists()
    assert stage()["changed"] is False
