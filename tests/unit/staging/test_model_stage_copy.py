"""The copier alone: threads over files and over the parts of one, its record, its progress, its share of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specrig.facts import modelfiles, modelsource, stagecopy

SEGMENT = 4096


class Memory(modelsource.Source):
    """Files in memory, with a count of who reads at a time."""

    segment_bytes = SEGMENT

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("M", {"source": "/memory"})
        self.files, self.asked = files, []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.pause = lambda: None

    def list(self):
        return {path: {"size": len(data), "version": "1"} for path, data in self.files.items()}

    def manifest(self):
        return {}

    def open(self, path, offset, end=None):
        source = self
        with self.lock:
            self.asked.append((path, offset))

        class Reader:
            position = offset

            def readinto(self, view):
                with source.lock:
                    source.now += 1
                    source.most = max(source.most, source.now)
                source.pause()
                data = source.files[path][self.position : min(self.position + len(view), end)]
                view[: len(data)] = data
                self.position += len(data)
                with source.lock:
                    source.now -= 1
                return len(data)

            def close(self):
                pass

        return Reader()


def items(source: Memory, target: Path, sums: dict[str, str] | None = None, **more) -> list[stagecopy.Item]:
    def refuse(found: str) -> str:
        return f"wrong: {found}"

    return [
        stagecopy.Item("M", source, path, row, str(target / path), (sums or {}).get(path), refuse, **more)
        for path, row in source.list().items()
    ]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(stagecopy, "PIECE_BYTES", 1000)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 7 * SEGMENT + 5])
def test_a_file_of_any_size_is_the_same_in_ram_with_its_sum(tmp_path, threads, size):
    dice = random.Random(size)
    source = Memory({"sub/file": dice.randbytes(size)})
    # Who is behind and who ahead changes all the time.
    source.pause = lambda: time.sleep(dice.random() * 0.0005)
    (item,) = items(source, tmp_path)
    copier = stagecopy.Copier([item], threads)
    copier.run()
    assert copier.failures == {}
    assert (tmp_path / "sub" / "file").read_bytes() == source.files["sub/file"]
    assert item.found == hashlib.sha256(source.files["sub/file"]).hexdigest()
    assert (item.proven, item.copied, item.hashed) == (True, True, size)
    # Every part once, whoever read it.
    assert sorted(source.asked) == [("sub/file", start) for start in range(0, size, SEGMENT)]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["file"]


def test_several_threads_share_one_file(tmp_path):
    """While one thread is kept from reading on, the parts ahead of it are read by the others."""
    source = Memory({"file": bytes(6 * SEGMENT)})
    together = threading.Barrier(3, timeout=60)
    waits = iter([True] * 3)

    def pause() -> None:
        if next(waits, False):
            together.wait()

    source.pause = pause
    stagecopy.Copier(items(source, tmp_path), 3).run()
    assert source.most == 3
    assert (tmp_path / "file").read_bytes() == source.files["file"]


def test_the_largest_file_is_begun_first_and_no_more_threads_read_than_were_asked_for(tmp_path):
    source = Memory({f"f{size}": bytes(size) for size in (10, 30, 20, 50, 40)})
    stagecopy.Copier(items(source, tmp_path), 1).run()
    assert [path for path, _ in source.asked] == ["f50", "f40", "f30", "f20", "f10"]
    source = Memory({f"f{number}": bytes(3 * SEGMENT) for number in range(9)})
    source.pause = lambda: time.sleep(0.0002)
    stagecopy.Copier(items(source, tmp_path / "b"), 3).run()
    assert source.most <= 3


def test_where_the_machine_is_shared_fewer_threads_work(tmp_path):
    source = Memory({f"f{number}": bytes(3 * SEGMENT) for number in range(9)})
    source.pause = lambda: time.sleep(0.0002)
    stagecopy.Copier(items(source, tmp_path), 6, share=lambda: 2).run()
    assert source.most <= 2
    assert len(list(tmp_path.iterdir())) == 9


def test_a_share_that_falls_while_it_works_is_obeyed_and_nothing_is_left_behind(tmp_path):
    source = Memory({f"f{number}": bytes(40 * SEGMENT) for number in range(4)})
    seen, shares, told = [], [4], threading.Event()

    def share() -> int:
        if shares[0] == 1:
            told.set()
        return shares[0]

    def pause() -> None:
        time.sleep(0.0002)
        if len(source.asked) > 20:
            shares[0] = 1
            assert told.wait(60)
            seen.append(source.now)

    source.pause = pause
    work = items(source, tmp_path)
    copier = stagecopy.Copier(work, 4, share=share)
    # Asked twice a second by itself; here at each change.
    copier_wait = stagecopy.WAIT_S
    stagecopy.WAIT_S = 0.005
    try:
        copier.run()
    finally:
        stagecopy.WAIT_S = copier_wait
    assert seen[-1] == 1
    assert all(item.proven for item in work)


def test_a_wrong_sum_ends_its_model_and_no_other(tmp_path):
    good, bad = Memory({"a": b"A" * 100, "b": b"B" * 50}), Memory({"c": b"C" * 80, "d": b"D"})
    rows = items(good, tmp_path / "good") + items(bad, tmp_path / "bad", {"c": "0" * 64})
    for item in rows[2:]:
        item.group = "BAD"
    copier = stagecopy.Copier(rows, 1)
    copier.run()
    assert set(copier.failures) == {"BAD"}
    assert str(copier.failures["BAD"]) == f"wrong: {hashlib.sha256(b'C' * 80).hexdigest()}"
    assert sorted(path.name for path in (tmp_path / "good").iterdir()) == ["a", "b"]
    assert list((tmp_path / "bad").iterdir()) == []


def test_an_error_that_nobody_foresaw_is_not_swallowed_and_stops_all(tmp_path):
    source = Memory({f"f{number}": bytes(3 * SEGMENT) for number in range(5)})

    def pause() -> None:
        raise ZeroDivisionError

    source.pause = pause
    with pytest.raises(ZeroDivisionError):
        stagecopy.Copier(items(source, tmp_path), 3).run()
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_progress_is_a_whole_file_at_most_twice_a_second(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(stagecopy.time, "monotonic", lambda: clock[0])
    progress = stagecopy.Progress(str(tmp_path), "org/M")
    path = tmp_path / "org--M.json"
    assert progress.tell("running", 0, bytes_total=1000, files_total=4, files_done=0)
    clock[0] = 100.4
    assert not progress.tell("running", 100)
    assert json.loads(path.read_text())["bytes_done"] == 0
    clock[0] = 102.0
    assert progress.tell("running", 400, files_done=1)
    row = json.loads(path.read_text())
    # 400 bytes in 2 s; 600 are left.
    assert (row["rate_bytes_s"], row["eta_s"], row["files_done"], row["pid"]) == (200, 3.0, 1, os.getpid())
    assert set(row) == {
        *("schema", "model", "pid", "started_unix", "updated_unix", "bytes_total", "bytes_done", "files_total"),
        *("files_done", "rate_bytes_s", "eta_s", "state", "message"),
    }
    clock[0] = 108.0
    progress.tell("running", 460)
    # Only the last seconds count: nothing is known of them yet but this one look.
    assert json.loads(path.read_text())["rate_bytes_s"] is None
    clock[0] = 109.0
    progress.tell("running", 100)
    row = json.loads(path.read_text())
    assert (row["rate_bytes_s"], row["eta_s"]) == (0, None), "what is copied again takes no negative time"
    clock[0] = 109.1
    assert progress.tell("failed", 460, "why")
    row = json.loads(path.read_text())
    assert (row["state"], row["message"], row["eta_s"]) == ("failed", "why", None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["org--M.json"]


def test_progress_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    assert stagecopy.Progress(str(tmp_path / "file"), "M").tell("running", 1) is False


def test_stagings_of_one_machine_know_of_each_other_and_not_of_the_dead(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from specrig.facts import stagecopy\n"
        "with stagecopy.Share(sys.argv[2]):\n"
        "    print(flush=True); sys.stdin.read()\n"
    )
    (tmp_path / ".run-1").write_text("")
    with stagecopy.Share(str(tmp_path)) as share:
        assert share.runs() == 1
        assert not (tmp_path / ".run-1").exists()
        command = [sys.executable, "-c", code, str(Path(stagecopy.__file__).parents[2]), str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            assert share.runs() == 2
            other.kill()
            other.wait()
        assert share.runs() == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("asked", "cpus", "threads"), [(3, 64, 3), (0, 1, 4), (0, 8, 8), (0, 128, 16)])
def test_threads_are_as_asked_or_by_the_cpus(monkeypatch, asked, cpus, threads):
    monkeypatch.setattr(stagecopy.os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert stagecopy.threads_of(asked) == threads


def test_memory_stays_flat_whatever_the_size(tmp_path):
    """A file of holes costs nothing at the source; what is read of it is not kept."""
    code = (
        "import sys\n"
        "from specrig.facts import modelsource, stagecopy\n"
        "source = modelsource.LocalSource('M', {'source': sys.argv[1]})\n"
        "rows = source.list()\n"
        "work = [stagecopy.Item('M', source, path, rows[path], sys.argv[2] + '/' + path) for path in rows]\n"
        "stagecopy.Copier(work, 4).run()\n"
        "assert all(item.proven for item in work)\n"
        # Not ru_maxrss, which starts with what the parent had.
        "words = open('/proc/self/status').read().split()\n"
        "print(words[words.index('VmHWM:') + 1])\n"
    )
    peaks = []
    for size in (1_000_000, 400_000_000):
        source, target = tmp_path / f"s{size}", tmp_path / f"t{size}"
        source.mkdir()
        with (source / "file").open("wb") as out:
            out.truncate(size)
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), str(target)], capture_output=True, text=True, check=True
        )
        (target / "file").unlink()
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] < 200_000_000
    # The larger one reads with three more threads, of a piece each.
    assert peaks[1] - peaks[0] < 20_000_000


def test_what_was_not_in_the_page_cache_is_put_out_of_it_again(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as out:
        out.write(os.urandom(40 * resource.getpagesize()))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cached() -> bool:
        with path.open("rb") as handle:
            try:
                return os.preadv(handle.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False
            except OSError:
                pytest.skip("this file system does not tell what is cached")

    if cached():
        pytest.skip("this file system keeps its pages")
    source = modelsource.LocalSource("M", {"source": str(tmp_path)})
    assert len(source.read("file", 0, 40 * resource.getpagesize())) == 40 * resource.getpagesize()
    assert not cached()
    path.read_bytes()
    source.read("file", 0, 40 * resource.getpagesize())
    assert cached()


def test_a_mount_in_ram_is_told_from_a_disk(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = "22 1 0:999999 / /x rw - tmpfs tmpfs rw\n30 1 {} / / rw,relatime shared:1 - {} /dev/vda rw\n"
    for kind, answer in (("tmpfs", True), ("ext4", False), ("zfs", False)):
        monkeypatch.setattr(stagecopy, "read_text", lambda _path, kind=kind: lines.format(number, kind))
        assert stagecopy.in_ram(str(tmp_path)) is answer


def test_the_plan_of_each_kind_of_file():
    stat = {"size": 3, "mtime_ns": 1, "ino": 1, "ctime_ns": 1}
    row = {"size": 3, "mtime_ns": 1, "ino": 1, "stamp": "v1", "sha256": "a" * 64}
    files = {path: {"size": 3, "version": "v1"} for path in "abcdefg"}
    target = dict.fromkeys("abcde", stat) | {"f": dict(stat, size=2)}
    vouched = {
        "a": row,
        "b": dict(row, ino=2),
        "c": dict(row, stamp="v0"),
        "d": dict(row, sha256="b" * 64),
        "e": dict(row, stamp="v0"),
    }
    sums = {
        "b": ("a" * 64, "manifest", True),
        "c": ("a" * 64, "manifest", True),
        "d": ("a" * 64, "kept", True),
        "e": ("a" * 64, "kept", False),
    }
    assert modelfiles.plan(files, target, vouched, sums) == {
        # a: proven, nothing else is known. c: proven to be what the manifest says, whatever the source's time is.
        "keep": ["a", "c"],
        # b: another inode than the one that was proven. d: proven to be something else.
        "verify": ["b", "d"],
        # e: the source has a new version that only reading it tells about. f: another size. g: not there.
        "copy": ["e", "f", "g"],
    }


def test_everything_that_runs_on_a_host_is_python_3_8(repository):
    import ast

    for folder in ("modules", "module_utils"):
        for path in sorted((repository / "plugins" / folder).glob("*.py")):
            ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("BF16", [3, 5], 30),
        ("F8_E4M3", [7], 7),
        ("F4", [3, 3], 5),
        ("I64", [], 8),
        ("F32", [4, 0], 0),
        ("NEWER", [2], 9),
    ],
)
def test_a_header_whose_types_and_shapes_fit_their_bytes(dtype, shape, size):
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    assert modelfiles.parse_header("a.safetensors", header, 8 + len(header) + size) == {"w"}


@pytest.mark.parametrize(
    ("tensor", "line"),
    [
        ({"dtype": "BF16", "shape": [3, 5]}, "tensor w has 29 bytes and BF16 of shape 3x5 needs 30; copy it again"),
        ({"dtype": "F32", "shape": []}, r"tensor w has 29 bytes and F32 of shape \(\) needs 4"),
        ({"shape": [29]}, "no readable safetensors header"),
        ({"dtype": "U8"}, "no readable safetensors header"),
    ],
)
def test_a_header_whose_types_and_shapes_do_not_fit_is_refused(tensor, line):
    header = json.dumps({"w": {**tensor, "data_offsets": [0, 29]}}).encode()
    with pytest.raises(modelfiles.ModelError, match=line):
        modelfiles.parse_header("a.safetensors", header, 8 + len(header) + 29)
