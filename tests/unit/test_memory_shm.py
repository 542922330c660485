"""Shared-memory segments that nobody uses: real files and processes of this machine, and recorded lists."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specrig.facts import shm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may look at every process")
MIB = 1 << 20
# Of a host where a server was killed: 4 GiB that nobody is attached to, of a process that is gone, and one in use.
SYSVIPC = (
    "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid"
    "      atime      dtime      ctime                   rss                  swap\n"
    "         0          3   600            4294967296 77001 77001      0   997   997   997   997"
    " 1759000000 1759000100 1758990000            4294967296                     0\n"
    "1234567890          4   666               8388608  1201  1310      2     0     0     0     0"
    " 1759000000 1759000100 1758990000               1048576                  4096\n"
)


@pytest.fixture
def segment():
    """A function that makes an old segment of 2 MiB in /dev/shm; all are removed at the end."""
    made = []

    def make(name: str, age_s: float = 3600) -> Path:
        path = Path("/dev/shm") / f"{name}-{os.getpid()}"
        path.write_bytes(bytes(2 * MIB))
        os.utime(path, (time.time() - age_s,) * 2)
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def named(found: dict[str, Any]) -> set[str]:
    """Names of the segments of this machine."""
    return {row["name"] for place in found["places"] if not place["guest"] for row in place["segments"]}


@needs_root
def test_only_what_nobody_maps_or_holds_open_is_leaked(segment):
    left, held, mapped, young = (segment(name) for name in ("psm_left", "psm_held", "psm_mapped", "psm_young"))
    os.utime(young)
    opened = held.open("rb")
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    found = shm.look()
    ours = {path.name for path in (left, held, mapped, young)}

    assert named(found) & ours == {left.name}
    (row,) = [row for place in found["places"] for row in place["segments"] if row["name"] == left.name]
    # This process is of the same user, and older than it.
    assert (row["bytes"], row["uid"], row["kind"], row["dead"]) == (2 * MIB, 0, "file", False)
    assert 3600 <= row["age_s"] < 3700
    opened.close()
    memory.close()
    assert named(shm.look()) & ours == {left.name, held.name, mapped.name}


@needs_root
def test_folders_of_staged_models_are_no_leaks(segment):
    path = segment("psm_left")
    folder = Path("/dev/shm") / f"models-{os.getpid()}"
    folder.mkdir()
    try:
        os.link(path, folder / "weights")
        assert f"{folder.name}/weights" in named(shm.look())
        assert f"{folder.name}/weights" not in named(shm.look({"": [str(folder)]}))
    finally:
        (folder / "weights").unlink()
        folder.rmdir()


@needs_root
def test_a_segment_is_removed_only_if_it_is_still_the_same(segment):
    path = segment("psm_left")
    (place,) = [place for place in shm.look()["places"] if not place["guest"]]
    (row,) = [row for row in place["segments"] if row["name"] == path.name]
    other = segment("psm_other")
    path.unlink()
    other.rename(path)
    assert shm.remove(place, row) == f"{path} is another file by now"
    assert path.exists()
    (row,) = [row for row in shm.look()["places"][0]["segments"] if row["name"] == path.name]
    assert shm.remove(place, row) is None
    assert not path.exists()
    assert "No such file" in shm.remove(place, row)


@needs_root
def test_no_link_is_followed_out_of_shared_memory(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    about = victim.stat()
    link = Path("/dev/shm") / f"link-{os.getpid()}"
    link.symlink_to(tmp_path)
    try:
        row = {"kind": "file", "name": f"{link.name}/victim", "path": f"{link}/victim"}
        row.update(device=about.st_dev, inode=about.st_ino)
        assert shm.remove({"init_pid": None}, row) is not None
        assert victim.exists()
        assert shm.files_of("", ()) == [found for found in shm.files_of("", ()) if link.name not in found["name"]]
    finally:
        link.unlink()


def test_a_guest_whose_shared_memory_is_a_link_has_none(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "shm").symlink_to(tmp_path / "outside")
    assert shm.files_of(str(tmp_path)) == []


def test_a_name_that_a_shell_or_a_terminal_would_take_for_more_is_not_repeated():
    row = {"kind": "file", "shmid": None, "uid": 997, "dead": False, "bytes": MIB, "age_s": 130.0, "inode": 77}
    row.update(name="a; reboot \x1b[2J\udcff", path="/dev/shm/a; reboot \x1b[2J\udcff")
    place = {"guest": "gpu", "init_pid": 61, "segments": [row], "bytes": MIB, "unasked": 0}
    line = shm.describe(place, lambda *_args: None)
    assert "a; reboot ?[2J? (1 MiB, uid 997, 2 min old)" in line
    assert "remove with 'lxc-attach -n gpu -- find /dev/shm -xdev -inum 77 -delete' what" in line
    assert line.isprintable()


@needs_root
def test_a_system_v_segment_without_users_is_found_and_removed():
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.shmget(0, 4 * MIB, 0o600 | 0o1000)
    assert number >= 0
    try:
        libc.shmat.restype = ctypes.c_void_p
        address = libc.shmat(number, None, 0)
        ctypes.memset(address, 1, 4 * MIB)

        def mine() -> dict[str, Any]:
            (row,) = [row for row in shm.sysv_of(None) if row["shmid"] == number]
            return row

        assert (mine()["nattch"], mine()["bytes"], mine()["cpid"]) == (1, 4 * MIB, os.getpid())
        libc.shmdt(ctypes.c_void_p(address))
        assert mine()["nattch"] == 0
        # Its own namespace is entered by way of a process of it.
        assert number in {row["shmid"] for row in shm.sysv_of(os.getpid())}
        assert shm.remove({"init_pid": os.getpid()}, {"kind": "sysv", "shmid": number}) is None
        assert number not in {row["shmid"] for row in shm.sysv_of(None)}
        assert "System V segment" in shm.remove({"init_pid": None}, {"kind": "sysv", "shmid": number})
    finally:
        libc.shmctl(number, 0, None)


def test_recorded_system_v_segments_are_read():
    first, second = shm.parse_sysvipc(SYSVIPC)
    assert (first["shmid"], first["bytes"], first["nattch"], first["cpid"], first["uid"]) == (3, 4 << 30, 0, 77001, 997)
    # What was never touched eats nothing: the resident part and what is in swap count.
    assert (second["bytes"], second["nattch"], second["mtime"]) == (MIB + 4096, 2, 1759000100)
    assert shm.parse_sysvipc("") == []
    assert shm.parse_sysvipc("key shmid\n1 x\n") == []


def process(inner_pid: int, uid: int, started: float | None) -> dict[str, Any]:
    return {"inner_pid": inner_pid, "uid": uid, "started_unix": started}


@pytest.mark.parametrize(
    ("row", "living", "dead"),
    [
        # The first number of CUDA's is a user.
        ({"name": "cuda.shm.0.1f.1"}, [process(7, 997, 500)], False),
        # The number in its name is gone: dead, whoever else lives.
        ({"name": "torch_4711_123_0"}, [process(1, 997, 0)], True),
        # It is there, but may be another process by now: what counts is who is older than the file.
        ({"name": "torch_4711_123_0"}, [process(4711, 997, 500)], False),
        ({"name": "torch_4711_123_0"}, [process(4711, 997, 2000)], True),
        ({"name": "psm_ab12"}, [process(7, 997, 500)], False),
        ({"name": "psm_ab12"}, [process(7, 997, 2000), process(1, 0, 0)], True),
        ({"name": "psm_ab12"}, [process(7, 997, None)], False),
        ({"name": "psm_ab12"}, [], True),
        # Its time was set back; it was made later than the process.
        ({"name": "psm_ab12", "ctime": 3000}, [process(7, 997, 2000)], False),
        # Within the clock's grain it is not proven.
        ({"name": "psm_ab12"}, [process(7, 997, 1001)], False),
        ({"cpid": 77001}, [process(9, 997, 500)], True),
        ({"cpid": 9}, [process(9, 997, 500)], False),
    ],
)
def test_a_maker_is_dead_only_where_that_is_proven(row, living, dead):
    assert shm.maker_is_dead({"uid": 997, "mtime": 1000, **row}, living) is dead


@needs_root
def test_processes_of_this_machine_have_their_start_and_their_user():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (row,) = [row for row in shm.processes() if row["pid"] == child.pid]
        assert abs(row["started_unix"] - time.time()) < 60
        assert (row["uid"], row["guest"], row["init"]) == (0, None, False)
    finally:
        child.communicate(b"\n")


def test_a_guest_is_found_by_its_init(tmp_path):
    def put(pid: int, nspid: str, cgroup: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\tx\nUid:\t0\t0\t0\t0\nNSpid:\t{nspid}\n")
        (folder / "stat").write_text(f"{pid} (a) b) S " + " ".join(["1"] * 18) + " 500 0\n")
        (folder / "cgroup").write_text(cgroup)

    put(10, "10", "0::/system.slice/ssh.service\n")
    put(61, "61\t1", "0::/lxc/101/ns/init.scope\n")
    put(62, "62\t2", "0::/lxc/101/ns/system.slice/x.service\n")
    # Another container in that guest is no guest of this host.
    put(63, "63\t9\t1", "0::/lxc/101/ns/lxc.payload.inner/init.scope\n")
    put(70, "70\t1", "0::/system.slice/docker-1.scope\n")
    found = {row["pid"]: row for row in shm.processes(str(tmp_path))}
    assert [pid for pid, row in found.items() if row["init"]] == [61]
    assert (found[62]["guest"], found[62]["inner_pid"]) == ("101", 2)


def test_a_place_is_one_line_with_the_command_that_clears_it():
    row = {"kind": "file", "path": "/dev/shm/psm_a", "name": "psm_a", "shmid": None, "uid": 997, "dead": True}
    rows = [{**row, "bytes": 3 << 30, "age_s": 7300.0}, *({**row, "bytes": MIB, "age_s": 130.0} for _ in range(5))]
    place = {"guest": "101", "init_pid": 61, "segments": rows, "bytes": (3 << 30) + 5 * MIB, "unasked": 0}
    line = shm.describe(place, lambda _place, _uid: "specrig", pve=True)
    assert line == (
        "3.0 GiB in shared memory that no process maps or holds open: psm_a (3.0 GiB, specrig, 2 h old, its maker is "
        "gone), psm_a (1 MiB, specrig, 2 min old, its maker is gone), psm_a (1 MiB, specrig, 2 min old, its maker is "
        "gone), psm_a (1 MiB, specrig, 2 min old, its maker is gone), 2 more; remove with "
        "'pct exec 101 -- rm /dev/shm/psm_a' what nobody needs"
    )
    place = {"guest": "", "init_pid": None, "bytes": MIB, "segments": [{**rows[0], "kind": "sysv", "shmid": 3}]}
    line = shm.describe({**place, "unasked": 2}, lambda *_args: None)
    assert "remove with 'ipcrm -m 3'" in line
    assert "holds open, as far as can be told (2 processes could not be asked): " in line
