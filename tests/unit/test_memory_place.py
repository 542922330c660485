"""The module model_place: what the kernel says to options, how a live tmpfs is converged, and what is left alone."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import tmpfs

pytest.importorskip("ansible.module_utils.basic")
ROOT = "22 1 0:20 / / rw,relatime - ext4 /dev/vda rw\n"
UNIT = "srv-specrig-ram.mount"
FACTS = {"nodes": [0, 1], "shmem_enabled": "always within_size advise [never] deny force\n", "release": "6.8.12-4-pve"}
FACTS["memory"] = 64 << 30
PLAIN = {
    "size": "64G",
    "huge": "never",
    "numa": "default",
    "noswap": False,
    "inodes": None,
    "options": "mode=0755,nosuid",
}


def line(point: str, options: str, flags: str = "rw,nosuid,nodev,noexec,relatime", kind: str = "tmpfs") -> str:
    """A line of mountinfo."""
    return f"40 22 0:33 / {point} {flags} shared:7 - {kind} tmpfs rw,{options}\n"


# ---- what was asked for


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, ["size=64G", "mode=0755", "nosuid"]),
        ({"size": "50%"}, ["size=50%", "mode=0755", "nosuid"]),
        ({"huge": "within_size", "noswap": True}, ["size=64G", "huge=within_size", "noswap", "mode=0755", "nosuid"]),
        ({"numa": "interleave", "options": ""}, ["size=64G", "mpol=interleave"]),
        ({"numa": "bind=static:0-1", "options": ""}, ["size=64G", "mpol=bind=static:0-1"]),
        ({"numa": "prefer:1", "inodes": 99, "options": ""}, ["size=64G", "mpol=prefer:1", "nr_inodes=99"]),
    ],
)
def test_options_are_what_mount_takes(more, options):
    assert tmpfs.wanted({**PLAIN, **more}, FACTS) == (options, [])


@pytest.mark.parametrize(
    ("more", "facts", "words"),
    [
        ({"size": "0"}, {}, "model_store_size: '0' is no size"),
        ({"huge": "yes"}, {}, "expected one of auto, never, always, within_size, advise"),
        ({"huge": "always"}, {"shmem_enabled": None}, "this kernel has no huge pages for a tmpfs"),
        ({"numa": "bind:0,2-3"}, {}, "has no memory on NUMA node 2-3, only on 0-1"),
        ({"numa": "bind"}, {}, "bind takes nodes, as in bind:0"),
        ({"numa": "prefer:0-1"}, {}, "prefer takes one node"),
        ({"numa": "local:0"}, {}, "local takes neither nodes nor a flag"),
        ({"numa": "default=static"}, {}, "default takes neither nodes nor a flag"),
        ({"numa": "node0"}, {}, "expected default, local, prefer:NODE"),
        ({"numa": "bind:1-0"}, {}, "have to be a list such as 0"),
        ({"noswap": True}, {"release": "6.1.0-31-amd64"}, "Linux 6.1.0-31-amd64 has no noswap"),
        ({"inodes": 0}, {}, "expected a number of files above 0"),
        ({"options": "mode=0755,mpol=local"}, {}, "has mpol=local; set model_store_numa instead"),
        ({"options": "mode=0755;x"}, {}, "expected mount options such as nosuid"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(more, facts, words):
    with pytest.raises(tmpfs.TmpfsError, match=re.escape(words)) as caught:
        tmpfs.wanted({**PLAIN, **more}, {**FACTS, **facts})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("huge", "says", "words"),
    [
        ("always", "always within_size advise never [deny] force", "has no effect"),
        ("never", "always within_size advise never deny [force]", "gets huge pages although"),
        ("always", FACTS["shmem_enabled"], None),
    ],
)
def test_a_kernel_that_overrules_is_noted(huge, says, words):
    _options, notes = tmpfs.wanted({**PLAIN, "huge": huge}, {**FACTS, "shmem_enabled": says})
    assert len(notes) == (1 if words else 0)
    assert words is None or words in notes[0]


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("always within_size advise [never] deny force", ["huge=within_size"]),
        ("[always] within_size advise never deny force", ["huge=within_size"]),
        ("always within_size advise never [deny] force", []),
        (None, []),
    ],
)
def test_auto_takes_huge_pages_where_the_kernel_gives_them(says, options):
    found, notes = tmpfs.wanted({**PLAIN, "huge": "auto"}, {**FACTS, "shmem_enabled": says})
    assert [word for word in found if word.startswith("huge")] == options
    assert notes == []


def test_nodes_that_are_not_known_are_the_kernel_s_to_judge():
    assert tmpfs.wanted({**PLAIN, "numa": "bind:7"}, {**FACTS, "nodes": None})[0][1] == "mpol=bind:7"


def test_a_list_of_nodes_is_tried_plain_and_quoted():
    assert tmpfs.spellings(["size=1G", "mpol=bind:0,2"]) == ["size=1G,mpol=bind:0,2", 'size=1G,mpol="bind:0,2"']
    assert tmpfs.spellings(["size=1G", "mpol=bind:0-2"]) == ["size=1G,mpol=bind:0-2"]


# ---- what is mounted


def test_the_topmost_mount_of_a_path_is_read_with_what_the_kernel_leaves_out():
    text = (
        ROOT + line("/srv/ram", "size=64k,mode=755") + line("/srv/ram", "size=1024k,mpol=bind:0,2,huge=always,noswap")
    )
    found = tmpfs.of_mountinfo(text, "/srv/ram")
    assert found["options"] == {
        "size_k": 1024,
        "huge": "always",
        "mpol": "bind:0,2",
        "nr_inodes": None,
        "noswap": True,
        "mode": 0o1777,
    }
    assert found["flags"] == {"nosuid", "nodev", "noexec"}
    assert tmpfs.of_mountinfo(text, "/srv") is None
    assert tmpfs.of_mountinfo(ROOT + line("/srv/my\\040ram", "size=4k"), "/srv/my ram")["options"]["size_k"] == 4
    assert tmpfs.mount_of(text, "/srv/ram/Qwen/x")[1] == "/srv/ram"
    assert tmpfs.mount_of(text, "/srv/rambling")[1] == "/"


def mount(text: str, flags: str = "rw,nosuid") -> dict[str, Any]:
    return tmpfs.of_mountinfo(line("/m", text, flags), "/m")


@pytest.mark.parametrize(
    ("live", "want", "how"),
    [
        ("size=1024k", "size=2048k", {"size": "remount"}),
        ("size=1024k", "size=512k", {"size": "remount"}),
        ("size=1024k", "size=128k", {"size": "refuse"}),
        ("size=0k", "size=1024k", {"size": "new"}),
        ("size=4k,huge=always", "size=4k", {"size": None, "huge": "remount"}),
        ("size=4k", "size=4k,mpol=bind:0", {"mpol": "remount"}),
        ("size=4k,mpol=bind:0", "size=4k", {"mpol": "new"}),
        ("size=4k", "size=4k,noswap", {"swap": "new"}),
        ("size=4k,noswap", "size=4k", {"swap": "new"}),
        ("size=4k,nr_inodes=100", "size=4k,nr_inodes=200", {"nr_inodes": "remount"}),
        ("size=4k,nr_inodes=100", "size=4k,nr_inodes=2", {"nr_inodes": "refuse"}),
        ("size=4k,nr_inodes=0", "size=4k,nr_inodes=200", {"nr_inodes": "new"}),
        # What was not asked for is no difference.
        ("size=4k,nr_inodes=100", "size=4k", {}),
        ("size=4k,mode=700", "size=4k,mode=755", {}),
    ],
)
def test_each_difference_is_made_good_the_way_the_kernel_allows(live, want, how):
    used = 256 << 10 if "1024k" in live else 0
    rows = tmpfs.differences(mount(want), mount(live), used, 10)
    assert {row["what"]: row["how"] for row in rows} == {what: way for what, way in how.items() if way}


def test_a_remount_names_what_differs_and_every_flag():
    want = mount("size=2048k,mpol=bind:0,2", "rw,nosuid,noexec")
    rows = tmpfs.differences(want, mount("size=1024k", "rw,nodev"), 0, 0)
    words = ["remount", "rw", "nosuid", "dev", "noexec", "size=2048k", "mpol=bind:0,2"]
    assert tmpfs.remount_options(want, rows) == words


options_ = st.builds(
    lambda size, huge, mpol, inodes, noswap: (
        f"size={size * 4}k{huge}{mpol}"
        + ("" if inodes is None else f",nr_inodes={inodes}")
        + (",noswap" if noswap else "")
    ),
    st.integers(0, 4096),
    st.sampled_from(["", ",huge=always", ",huge=advise"]),
    st.sampled_from(["", ",mpol=local", ",mpol=bind:0,2", ",mpol=prefer=static:1"]),
    st.one_of(st.none(), st.integers(0, 100)),
    st.booleans(),
)


@given(options_, options_)
def test_a_mount_differs_never_from_itself_and_from_another_only_in_what_is_told(one, other):
    assert tmpfs.differences(mount(one), mount(one), 0, 0) == []
    rows = {row["what"] for row in tmpfs.differences(mount(one), mount(other), 0, 0)}
    a, b = mount(one)["options"], mount(other)["options"]
    names = {"huge": "huge", "mpol": "mpol", "noswap": "swap"}
    assert set(names.values()) & rows == {name for key, name in names.items() if a[key] != b[key]}


# ---- the module, with stand-ins for the commands


TOOLS = {
    "systemctl": """verb=$1; shift
case $verb in
show) echo Id=srv-specrig-ram.mount
    [ -e $state/active ] && echo ActiveState=active || echo ActiveState=inactive
    [ -e $state/enabled ] && echo UnitFileState=enabled || echo UnitFileState=disabled ;;
enable) : > $state/enabled; echo "enable $*" >> $state/log ;;
start) : > $state/active; cp $state/trial $state/mountinfo; echo "start $*" >> $state/log ;;
stop) rm -f $state/active; echo "stop $*" >> $state/log ;;
*) echo "$verb $*" >> $state/log ;;
esac""",
    # What the kernel makes of options: the file 'trial', unless one of the words in 'refused' is among them.
    "unshare": """for last; do :; done
for word in $(cat $state/refused 2>/dev/null); do
    case "$*" in *$word*) echo "mount: x: wrong fs type, bad option" >&2; exit 32 ;; esac
done
sed "s|POINT|$last|" $state/trial""",
    "mount": 'echo "mount $*" >> $state/log; cp $state/trial $state/mountinfo',
    "journalctl": "true",
}


@pytest.fixture
def host(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """The module on a host of this test; ``host.kernel`` sets what the kernel makes of the options."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.model_place")
    state, tools, store = tmp_path / "state", tmp_path / "bin", tmp_path / "store"
    for folder in (state, tools, store, tmp_path / "units"):
        folder.mkdir()
    store.chmod(0o755)
    for name, body in TOOLS.items():
        (tools / name).write_text(f"#!/bin/sh\nstate={state}\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(module, "UNIT_FOLDER", str(tmp_path / "units"))
    monkeypatch.setattr(module, "MOUNTINFO", str(state / "mountinfo"))
    monkeypatch.setattr(module, "machine", lambda: FACTS)
    empty = types.SimpleNamespace(f_blocks=1 << 18, f_bfree=1 << 18, f_frsize=4096, f_files=100, f_ffree=100)
    monkeypatch.setattr(module.os, "statvfs", lambda _path: empty)
    monkeypatch.setattr(module.shm, "look", lambda *_args: {"places": [], "unasked": None})
    monkeypatch.setattr(module.units, "escape_path", lambda _path: "srv-specrig-ram")

    def call(check: bool = False, **more: Any) -> dict[str, Any]:
        return run("model_place", check, **{"path": str(store), "size": "1G", **more})

    def kernel(options: str) -> None:
        # Both the place of the trial and the store itself have what the kernel makes of the options.
        (state / "trial").write_text(line("POINT", options) + line(str(store), options))

    call.kernel, call.state, call.store, call.unit = kernel, state, store, tmp_path / "units" / UNIT
    (state / "mountinfo").write_text(ROOT)
    kernel("size=1048576k,mode=755")
    return call


def log(host: Any) -> list[str]:
    path = host.state / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_a_store_is_written_enabled_and_mounted_once(host):
    check = host(check=True)
    assert check["changed"] is True
    assert log(host) == []
    assert not host.unit.exists()
    done = host()
    text = host.unit.read_text()
    assert "Options=size=1G,mode=0755,nosuid,nodev,noexec\n" in text
    assert "Before=lxc.service pve-guests.service" in text
    assert log(host) == ["daemon-reload ", f"enable {UNIT}", f"start {UNIT}"]
    assert done["specrig"]["found"] == [f"{host.store} is not mounted on the host"]
    assert [row["after"] for row in done["diff"]] == [row["after"] for row in check["diff"]]
    again = host()
    assert again["changed"] is False
    assert len(log(host)) == 3


def test_a_percentage_is_no_specifier_of_systemd(host):
    host(size="50%")
    assert "Options=size=50%%,mode=0755" in host.unit.read_text()


def test_a_mounted_store_is_resized_in_place_and_nothing_is_stopped(host):
    host()
    (host.store / "Qwen").mkdir()
    (host.state / "log").unlink()
    host.kernel("size=2097152k,mode=755")
    done = host(size="2G")
    assert done["changed"] is True
    remount = f"mount -o remount,rw,nosuid,nodev,noexec,size=2097152k {host.store}"
    assert log(host) == ["daemon-reload ", remount]
    assert "model store: remounted: size 2.0 GiB instead of 1.0 GiB" in done["specrig"]["changed"]
    assert host(size="2G")["changed"] is False


def test_what_needs_a_new_mount_waits_while_a_model_lies_there(host):
    host()
    (host.store / "Qwen").mkdir()
    (host.state / "log").unlink()
    host.kernel("size=1048576k,mode=755,noswap")
    done = host(noswap=True)
    assert [row["what"] for row in done["pending"]] == ["swap"]
    (note,) = done["specrig"]["notes"]
    assert "Qwen in it would be lost: stop what serves, then 'systemctl restart" in note
    assert log(host) == ["daemon-reload "]
    # The unit has it for the next boot, so there is nothing more to change; what is pending is said again.
    again = host(noswap=True)
    assert again["changed"] is False
    assert again["specrig"]["notes"] == [note]
    (host.store / "Qwen").rmdir()
    assert host(check=True, noswap=True)["changed"] is True
    assert log(host) == ["daemon-reload "]
    done = host(noswap=True)
    assert done["pending"] == []
    assert log(host)[1:] == [f"stop {UNIT}", f"start {UNIT}"]


def test_an_option_that_the_kernel_refuses_is_named_before_anything_is_written(host):
    (host.state / "refused").write_text("mpol=")
    done = host(numa="bind:1", noswap=True)
    assert done["failed"] is True
    assert done["msg"].startswith(
        "the kernel refuses a tmpfs with mpol=bind:1 (wrong fs type, bad option); in a container"
    )
    assert not host.unit.exists()
    assert log(host) == []


def test_a_mount_of_something_else_is_left_alone(host):
    (host.state / "mountinfo").write_text(ROOT + line(str(host.store), "rw", kind="ext4"))
    done = host()
    assert "is a mount of ext4, expected a tmpfs or nothing" in done["msg"]
    assert not host.unit.exists()


def test_a_lost_mode_of_the_live_store_is_healed(host):
    host()
    host.store.chmod(0o700)
    done = host()
    assert done["changed"] is True
    assert host.store.stat().st_mode & 0o777 == 0o755
    assert host()["changed"] is False


def test_folders_that_the_inventory_does_not_name_are_told_with_their_size(host):
    host()
    for name in ("Qwen", "old"):
        (host.store / name).mkdir()
        (host.store / name / "weights").write_bytes(bytes(3 << 20))
    (note,) = host(models=["Qwen"])["specrig"]["notes"]
    assert re.search(r"holds old \(3 MiB\), which the inventory does not name: 'rm -r \S+/old'", note)
    # A name with a folder in it is known by that folder.
    assert host(models=["Qwen/Qwen3-32B", "old"])["specrig"]["notes"] == []
    # Where the guests hold the models, all of it is too much, and nothing is mounted here.
    (host.state / "log").unlink()
    done = host(models=["Qwen"], place="guest")
    assert "holds Qwen (3 MiB), old (3 MiB), and the models are to lie in the guests" in done["specrig"]["notes"][0]
    assert (done["changed"], done["mount_unit"]) == (False, None)
    assert log(host) == []


def test_a_relative_mount_point_is_refused(run):
    done = run("model_place", path="srv/ram")
    assert done["failed"] is True


def test_leaked_segments_are_told_and_change_nothing_unless_asked_to(host, monkeypatch):
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.model_place")
    row = {"kind": "file", "shmid": None, "bytes": 5 << 20, "uid": 0, "age_s": 400.0, "device": 1, "inode": 1}
    rows = [
        {**row, "name": name, "path": f"/dev/shm/{name}", "dead": name != "torch_b"} for name in ("psm_a", "torch_b")
    ]

    def look(_skip: Any) -> dict[str, Any]:
        place = {"guest": "", "init_pid": None, "segments": list(rows), "bytes": 10 << 20, "unasked": 0}
        return {"places": [place], "unasked": 0}

    removed = []
    monkeypatch.setattr(module.shm, "look", look)
    monkeypatch.setattr(module.shm, "remove", lambda _place, row: removed.append(row["name"]))
    host()
    done = host(user="root")
    assert done["changed"] is False
    assert done["specrig"]["notes"][0].startswith(
        "host: 10 MiB in shared memory that no process maps or holds open: psm_a"
    )
    assert [row["name"] for row in done["leaked"][0]["segments"]] == ["psm_a", "torch_b"]
    # Of another user nothing is removed, and of ours only what is proven.
    assert host(user="specrig", remove_leaked=True)["changed"] is False
    check = host(True, user="root", remove_leaked=True)
    assert check["specrig"]["changed"] == ["host: would remove 5 MiB of leaked shared memory of root"]
    assert removed == []
    done = host(user="root", remove_leaked=True)
    assert done["changed"] is True
    assert done["specrig"]["changed"] == ["host: removed 5 MiB of leaked shared memory of root"]
    assert removed == ["psm_a"]
    assert [row["name"] for row in done["leaked"][0]["segments"]] == ["torch_b"]


def test_a_guest_s_user_has_the_name_that_the_guest_gives_its_number(host, tmp_path, monkeypatch):
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.model_place")
    texts = {
        "/proc/61/uid_map": "         0     100000      65536\n",
        "/proc/61/root/etc/passwd": "root:x:0:0::/:/bin/sh\nspecrig:x:997:997::/:/bin/false\n",
    }
    monkeypatch.setattr(module.unitfiles, "read", texts.get)
    known = tmp_path.joinpath("bin", "mount")
    monkeypatch.setattr(module.os, "lstat", lambda _path: known.stat())
    place = {"guest": "101", "init_pid": 61}
    assert module.owner_of(place, 100997) == "specrig"
    # A number that the guest does not have is nobody's there.
    assert module.owner_of(place, 997) is None
    assert module.owner_of(place, 100001) is None
    # What is no list of users by its size, and what is no regular file, is not opened.
    with known.open("r+b") as file:
        file.truncate(2 << 20)
    assert module.owner_of(place, 100997) is None
    monkeypatch.setattr(module.os, "lstat", lambda _path: tmp_path.stat())
    assert module.owner_of(place, 100997) is None
