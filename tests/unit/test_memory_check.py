"""The module model_memory on a made-up tree of /proc and cgroups: whose limit counts, and what a refusal says."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible.module_utils.basic")
GIB = 1 << 30
ROOT = "22 1 0:20 / / rw,relatime - ext4 /dev/vda rw\n"
ARC = "name type data\nc_min 4 2147483648\nsize 4 15032385536\n"


@pytest.fixture
def host(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """The module where every file of /proc, /sys and /etc/pve is one of this test; ``host.put`` writes one."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.model_memory")
    tree, store = tmp_path / "tree", tmp_path / "store"
    store.mkdir()
    group = {"path": None}

    def put(path: str, text: str) -> None:
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def read(path: str) -> str | None:
        try:
            return (tree / path.replace(f"{tree}/", "").lstrip("/")).read_text()
        except OSError:
            return None

    monkeypatch.setattr(module.unitfiles, "read", read)
    monkeypatch.setattr(module, "cgroup_folder", lambda _pid: group["path"])
    monkeypatch.setattr(module, "free_of", lambda _path: 64 * GIB)
    monkeypatch.setattr(module, "ARC", str(tree / "proc/spl/kstat/zfs/arcstats"))
    for pid in (os.getpid(), 61):
        put(f"/proc/{pid}/mountinfo", ROOT + f"40 22 0:33 / {store} rw - tmpfs tmpfs rw,size=67108864k\n")
    put("/proc/meminfo", "MemAvailable: 209715200 kB\n")

    def call(missing: int, **more: Any) -> dict[str, Any]:
        models = {"Qwen": {"bytes": 52 * GIB, "missing_bytes": missing}}
        return run("model_memory", more.pop("check", False), **{"path": str(store), "models": models, **more})

    call.put, call.group, call.store = put, group, store
    return call


def groups(host: Any, chain: dict[str, tuple[str, int]]) -> None:
    """Control groups with their memory.max and memory.current; the first is the one that is charged."""
    host.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n")
    host.group["path"] = "/sys/fs/cgroup" + next(iter(chain))
    for path, (limit, used) in chain.items():
        for name, text in (("max", limit), ("current", str(used)), ("stat", "active_file 0\ninactive_file 0\n")):
            host.put(f"/sys/fs/cgroup{path}/memory.{name}", text + "\n")


def test_what_fits_is_a_gate_with_the_sum(host):
    groups(host, {"/system.slice/ssh.service": ("max", 0), "/system.slice": ("max", 0)})
    done = host(52 * GIB)
    (row,) = done["specrig"]["gates"]
    assert (row["gate"], row["status"]) == ("memory", "pass")
    assert row["message"] == (
        f"needs 52.0 GiB (Qwen) - 0 staged = 52.0 GiB; the tmpfs of {host.store} has 64.0 GiB free; memory available "
        "200.0 GiB - 1.0 GiB kept free = 199.0 GiB, swap not counted; limit of this host's session: none"
    )
    assert done["changed"] is False


def test_the_arc_is_counted_apart_and_only_what_it_can_give_back(host):
    host.put("/proc/meminfo", f"MemAvailable: {42 << 20} kB\n")
    assert host(52 * GIB)["failed"] is True
    host.put("/proc/spl/kstat/zfs/arcstats", ARC)
    # 42 + 12 - 1 = 53.
    done = host(52 * GIB)
    assert "42.0 GiB + ARC 12.0 GiB (14.0 GiB - c_min 2.0 GiB) - 1.0 GiB kept free = 53.0 GiB" in done["memory"]["sum"]
    assert "only with what ZFS's ARC gives back" in done["specrig"]["notes"][0]
    assert host(52 * GIB, reserve="3G")["failed"] is True


def test_a_guest_is_charged_by_its_own_group_and_those_above_not_by_what_is_in_it(host):
    groups(
        host,
        {
            "/lxc/101/ns/init.scope": ("1048576", 1 << 19),
            "/lxc/101/ns": ("max", 0),
            "/lxc/101": (str(48 * GIB), 8 * GIB),
            "/lxc": ("max", 0),
        },
    )
    done = host(52 * GIB, guest="101", kind="pve", init_pid=61)
    assert done["failed"] is True
    assert "\n" not in done["msg"]
    assert done["msg"].startswith("the models do not fit, and nothing was copied: needs 52.0 GiB (Qwen)")
    assert "limit of guest 101 48.0 GiB, 40.0 GiB of it left" in done["msg"]
    assert "the guest lacks 12.0 GiB: raise its memory, 'pct set 101 --memory MiB'" in done["msg"]
    # What is staged is charged already.
    assert host(40 * GIB, guest="101", kind="pve", init_pid=61)["specrig"]["gates"][0]["status"] == "pass"


def test_a_config_that_says_less_than_the_running_guest_counts(host):
    groups(host, {"/lxc/101/ns": ("max", 0), "/lxc/101": (str(96 * GIB), 8 * GIB)})
    host.put("/etc/pve/lxc/101.conf", "memory: 65536\n\n[old]\nmemory: 512\n")
    done = host(52 * GIB, guest="101", kind="pve", init_pid=61)
    assert "memory of its config 64.0 GiB, 56.0 GiB of it left" in done["memory"]["sum"]
    assert done["memory"]["status"] == "pass"
    host.put("/etc/pve/lxc/101.conf", "memory: 32768\n")
    assert host(52 * GIB, guest="101", kind="pve", init_pid=61)["failed"] is True


@pytest.mark.parametrize(
    ("path", "controllers", "why"),
    [
        (None, None, "no cgroup v2 here"),
        ("/sys/fs/cgroup/lxc.payload.gpu", "hugetlb\n", "no memory controller on cgroup v2 here"),
    ],
)
def test_a_limit_that_cannot_be_read_is_unknown(host, path, controllers, why):
    host.group["path"] = path
    if controllers:
        host.put("/sys/fs/cgroup/cgroup.controllers", controllers)
    done = host(52 * GIB, guest="gpu", init_pid=61)
    assert done["specrig"]["gates"][0]["status"] == "unknown"
    assert f"limit of guest gpu unknown ({why})" in done["memory"]["sum"]
    # A host's own session is shown alike, and holds nobody up.
    assert host(52 * GIB)["specrig"]["gates"][0]["status"] == "pass"


def test_a_tmpfs_that_is_bound_to_a_node_is_held_to_that_node(host):
    row = f"40 22 0:33 / {host.store} rw - tmpfs tmpfs rw,size=67108864k,mpol=bind=static:0\n"
    host.put(f"/proc/{os.getpid()}/mountinfo", ROOT + row)
    host.put("/sys/devices/system/node/node0/meminfo", f"Node 0 MemFree: {30 << 20} kB\n")
    done = host(52 * GIB)
    assert "of NUMA nodes it is bound to, 0 has 30.0 GiB" in done["msg"]
    assert "the NUMA nodes lack 22.0 GiB" in done["msg"]
    assert host(30 * GIB)["memory"]["status"] == "pass"


def test_a_folder_on_a_disk_is_no_place_for_models(host):
    host.put("/proc/61/mountinfo", ROOT)
    done = host(GIB, guest="gpu", init_pid=61)
    assert done["msg"] == (
        f"in guest gpu {host.store} lies on ext4, expected a tmpfs; set model_store_guest_path to a folder of one, "
        "such as /dev/shm/models"
    )


def test_a_link_of_a_guest_is_not_followed(host, monkeypatch):
    real = os.path.islink
    linked = f"/proc/61/root{host.store}"
    monkeypatch.setattr(os.path, "islink", lambda path: path == linked or real(path))
    assert host(GIB, guest="gpu", init_pid=61)["msg"] == (
        f"in guest gpu {host.store} is a link; remove it, or set model_store_guest_path to a folder without links"
    )


def test_files_of_an_interrupted_staging_count_as_room(host):
    part = host.store / "Qwen" / ".specrig-part.weights"
    part.parent.mkdir()
    part.write_bytes(bytes(8 << 20))
    done = host(52 * GIB)
    assert "8 MiB of it in temporary files of a staging that did not end" in done["memory"]["sum"]


def test_a_look_without_sizes_is_made_good_by_what_lies_there(host, run):
    (host.store / "Qwen").mkdir()
    (host.store / "Qwen" / "a").write_bytes(bytes(3 << 20))
    models = {"Qwen": {"bytes": 5 << 20, "keep": ["a"], "verify": ["gone"], "copy": ["b"]}}
    done = run("model_memory", path=str(host.store), models=models)
    assert done["memory"]["need_bytes"] == 2 << 20


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"reserve": "1.5G"}, "model_store_reserve: '1.5G' is no size"),
        ({"reserve": "10%"}, "model_store_reserve is 10%; expected an amount such as 1G, or 0"),
        ({"guest": "gpu"}, "guest gpu is not running"),
    ],
)
def test_bad_input_is_one_line(host, more, words):
    done = host(GIB, **more)
    assert words in done["msg"]
    assert "\n" not in done["msg"]
