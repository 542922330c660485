"""Models in a guest's own memory: what it is shown, under which names, and the size of its /dev/shm."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from specrig.facts import guestconf, serving
from specrig.ops.runner import collection_root

sys.path.insert(0, str(collection_root() / ".collections"))
from ansible.errors import AnsibleFilterError
from ansible_collections.specrig.host.plugins.filter import models

GIB = 1 << 30
SOURCES = "/srv/specrig/sources"
SNAPSHOT = "/var/cache/hub/models--Qwen--Qwen3.6-27B/snapshots/" + "ab" * 20


@pytest.mark.parametrize(
    ("about", "folders", "row"),
    [
        (
            {"source": "/srv/models/Q/"},
            [("/srv/models/Q", f"{SOURCES}/Q")],
            {"source": f"{SOURCES}/Q"},
        ),
        # A name of a manifest is one in the source; a path is where the host has it.
        (
            {"source": "/srv/models/Q", "manifest": "sums"},
            [("/srv/models/Q", f"{SOURCES}/Q")],
            {"source": f"{SOURCES}/Q", "manifest": "sums"},
        ),
        (
            {"source": "/srv/models/Q", "manifest": "/srv/models/Q/more/sums"},
            [("/srv/models/Q", f"{SOURCES}/Q")],
            {"source": f"{SOURCES}/Q", "manifest": f"{SOURCES}/Q/more/sums"},
        ),
        (
            {"source": "/srv/models/Q", "manifest": "/etc/specrig/q.sha256"},
            [("/srv/models/Q", f"{SOURCES}/Q"), ("/etc/specrig", f"{SOURCES}/.manifest-Q")],
            {"source": f"{SOURCES}/Q", "manifest": f"{SOURCES}/.manifest-Q/q.sha256"},
        ),
        # The files of a snapshot are links to blobs beside it.
        (
            {"source": SNAPSHOT, "revision": "ab" * 20},
            [("/var/cache/hub/models--Qwen--Qwen3.6-27B", f"{SOURCES}/Q")],
            {"source": f"{SOURCES}/Q/snapshots/{'ab' * 20}", "revision": "ab" * 20},
        ),
        ({"source": "https://mirror.example.net/Q"}, [], {"source": "https://mirror.example.net/Q"}),
    ],
)
def test_a_guest_sees_the_sources_under_names_of_its_own(about, folders, row):
    shown = models.model_folders({"Q": about}, "guest", "/srv/specrig/ram", "/dev/shm/models", SOURCES)
    assert shown == [{"source": source, "target": target, "read_only": True} for source, target in folders]
    assert models.models_in_guest({"Q": about}, SOURCES) == {"Q": row}


def test_of_the_host_s_tmpfs_it_sees_the_whole():
    shown = models.model_folders({"Q": {"source": "/m"}}, "host", "/srv/specrig/ram", "/srv/models", SOURCES)
    assert shown == [{"source": "/srv/specrig/ram", "target": "/srv/models", "read_only": True}]


@pytest.mark.parametrize(("models_", "place"), [([], "host"), ({}, "disk")])
def test_what_is_no_mapping_or_no_place_is_refused(models_, place):
    with pytest.raises(AnsibleFilterError, match="expected"):
        models.model_folders(models_, place, "/ram", "/models", SOURCES)


def test_what_other_guests_of_the_same_host_stage_is_summed():
    def guest(name: str, host: str, *rows: dict[str, Any]) -> dict[str, Any]:
        look = {"models": {str(number): row for number, row in enumerate(rows)}}
        return {"lxc_guest_name": name, "lxc_guest_host": host, "__model_store_look": look}

    hostvars = {
        "a": guest("101", "box", {"bytes": 9, "missing_bytes": 9}),
        "b": guest("102", "box", {"bytes": 7, "missing_bytes": 5}, {"bytes": 3, "complete": False}),
        "c": guest("103", "box", {"bytes": 7, "missing_bytes": 0, "complete": True}),
        "d": guest("101", "other", {"bytes": 7, "missing_bytes": 7}),
        "e": {"lxc_guest_name": "105", "lxc_guest_host": "box"},
    }
    assert models.model_stagings(list("abcde"), hostvars, "a") == {"102": 8}
    assert models.model_stagings(list("abcde"), hostvars, "b") == {"101": 9}


@pytest.mark.parametrize(
    ("draft", "path"),
    [
        ("Draft", "/dev/shm/models/Draft"),
        ("/srv/models/Draft", "/srv/models/Draft"),
        # A name of a hub, which the engine looks up itself.
        ("Qwen/Draft", "Qwen/Draft"),
        (None, None),
    ],
)
def test_a_draft_is_named_like_its_target_or_by_a_path(draft, path):
    profile = {"model": "Q", "draft_model": draft}
    assert serving.draft_path(profile, "/dev/shm/models/") == path
    needed = {row["path"] for row in serving.model_paths(["a"], {"a": profile}, "/dev/shm/models").values()}
    below = {path} if str(path).startswith("/dev/shm/models/") else set()
    assert needed == {"/dev/shm/models/Q"} | below


def test_the_line_of_its_config_is_ours_and_takes_the_place_of_another():
    key, value = guestconf.tmpfs_line("/dev/shm", "64G")
    assert (key, value) == ("lxc.mount.entry", "tmpfs dev/shm tmpfs rw,nosuid,nodev,size=64G,create=dir 0 0")
    text = "arch: amd64\nlxc.mount.entry: tmpfs dev/shm tmpfs size=8G 0 0\n"
    after, report = guestconf.converge(text, "pve", [(key, value)])
    assert after == f"arch: amd64\n{key}: {value}\n"
    assert guestconf.converge(after, "pve", [(key, value)], report["owned"])[0] == after
    assert guestconf.converge(after, "pve", [], report["owned"])[0] == "arch: amd64\n"


@pytest.mark.parametrize(
    ("target", "size"), [("dev/shm", "64G"), ("/dev/s hm", "64G"), ("/dev/shm", "64 G"), ("/x", "0")]
)
def test_a_line_that_lxc_would_not_take_is_refused(target, size):
    with pytest.raises(ValueError, match="expected"):
        guestconf.tmpfs_line(target, size)


@pytest.fixture
def guest(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """The module guest_shm in a guest whose /dev/shm has 12 GiB, 4 of them used; ``guest.fails`` makes mount refuse."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.guest_shm")
    size = tmp_path / "size"
    size.write_text(str(12 * GIB))
    mount = tmp_path / "mount"
    mount.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/fails ] && {{ echo "mount: denied" >&2; exit 32; }}\n'
        f'echo "$*" >> {tmp_path}/log\necho "${{2##*size=}}" > {size}\n'
    )
    mount.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    files = {
        "/proc/meminfo": f"MemTotal: {100 << 20} kB\n",
        "/proc/self/mountinfo": "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /dev/shm rw - tmpfs tmpfs rw\n",
    }
    monkeypatch.setattr(module.unitfiles, "read", files.get)

    def usage(_path: str) -> Any:
        blocks = int(size.read_text()) // 4096
        return types.SimpleNamespace(f_blocks=blocks, f_bfree=blocks - GIB // 1024, f_frsize=4096)

    monkeypatch.setattr(module.os, "statvfs", usage)

    def call(wish: str, check: bool = False, path: str = "/dev/shm/models") -> dict[str, Any]:
        return run("guest_shm", check, path=path, size=wish)

    call.log, call.fails = tmp_path / "log", tmp_path / "fails"
    return call


def test_a_running_guest_s_shared_memory_gets_its_size_once(guest):
    check = guest("64G", check=True)
    assert check["changed"] is True
    assert not guest.log.exists()
    done = guest("64G")
    assert done["size_bytes"] == 64 * GIB
    assert guest.log.read_text() == f"-o remount,size={64 * GIB} /dev/shm\n"
    assert done["specrig"]["changed"] == ["size: /dev/shm 64.0 GiB instead of 12.0 GiB"]
    assert done["diff"] == check["diff"]
    assert guest("64G")["changed"] is False
    # Half of 100 GiB, which the kernel may work out from a little more or less than the guest shows.
    assert guest("50%")["size_bytes"] == 50 * GIB
    assert guest("50%")["changed"] is False


def test_what_lies_there_is_never_cut_off(guest):
    done = guest("3G")
    assert "/dev/shm cannot get 3G: 4.0 GiB lie there" in done["msg"]
    assert not guest.log.exists()


def test_a_kernel_that_refuses_leaves_it_to_the_next_start(guest):
    guest.fails.touch()
    done = guest("64G")
    assert "the kernel refuses 64G while the guest runs (mount: denied); its config has the size" in done["msg"]


def test_a_folder_on_its_disk_is_refused(guest):
    done = guest("64G", path="/srv/models")
    assert done["msg"].startswith(
        "/srv/models lies on overlay, expected a tmpfs of the guest; set model_store_guest_path"
    )
    assert "model_store_guest_size: '6.4G' is no size" in guest("6.4G")["msg"]
