"""Staging a model into RAM, with its proof, beside the tools that copy and the one that proves: ratios of one run.

The source lies in the page cache (it is read before each run, and how much of it is there is printed), the target is a
tmpfs, and every contestant is a whole process. One round measures all of them, one after the other; what is shown is
the median of the rounds' ratios. The limit is what one machine can do at best: the CPU seconds of `cp -r` and those of
hashing the same bytes with hashlib, over the number of cores, both of the same round; beside it stands the module's
own time, without the start of Python and Ansible's imports, which are in all other figures. Exit code 1 where a claim
is not met. Where the CPU has no SHA instructions only the limit is judged; where other processes took more than a tenth
of the cores meanwhile no figure of wall time is judged, and those of CPU seconds are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import mmap
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from claims import Claims

ROOT = Path(__file__).resolve().parent.parent
MODULE = "ansible_collections.specrig.host.plugins.modules.model_stage"
RUNNER = (
    "import atexit, json, sys, time; sys.path.insert(0, sys.argv[1])\n"
    "from ansible.module_utils import basic\n"
    "basic._ANSIBLE_ARGS = json.dumps({'ANSIBLE_MODULE_ARGS': json.loads(sys.argv[2])}).encode()\n"
    "basic._ANSIBLE_PROFILE = 'legacy'\n"
    f"import {MODULE} as module\n"
    # Not ru_maxrss, which starts with what the parent had.
    "words = lambda: open('/proc/self/status').read().split()\n"
    "peak = lambda found: int(found[found.index('VmHWM:') + 1]) * 1024\n"
    "clocks = lambda: (time.perf_counter(), time.process_time())\n"
    "started = clocks()\n"
    "took = lambda: [now - then for now, then in zip(clocks(), started)]\n"
    "note = lambda: json.dump([*took(), peak(words())], open(sys.argv[3], 'w'))\n"
    "atexit.register(note)\n"
    "module.main()\n"
)
MIB = 1024 * 1024


@dataclass(frozen=True)
class Cost:
    """What one process took."""

    wall_s: float
    cpu_s: float


def run(command: list[str] | str, cwd: Path | None = None) -> Cost:
    """A command to its end; a text is a shell's."""
    before = time.perf_counter()
    shell = isinstance(command, str)
    with subprocess.Popen(command, cwd=cwd, shell=shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - before
    if process.returncode:
        raise SystemExit(f"bench: {command} ended with {process.returncode}: {output.decode()[-400:].strip()}")
    return Cost(wall, usage.ru_utime + usage.ru_stime)


def make_model(folder: Path, size: int, shards: int) -> None:
    """A model of whole safetensors files, its index and its manifest."""
    folder.mkdir(parents=True)
    block = random.Random(0).randbytes(4 * MIB)
    weight_map, sums = {}, []
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        amount = size // shards
        weight_map[f"w{number}"] = name
        header = json.dumps({f"w{number}": {"dtype": "U8", "shape": [amount], "data_offsets": [0, amount]}}).encode()
        sha = hashlib.sha256()
        with (folder / name).open("wb") as out:
            data, left = struct.pack("<Q", len(header)) + header, amount
            while data:
                sha.update(data)
                out.write(data)
                data = (block[number:] + block[:number])[: min(left, len(block))]
                left -= len(data)
        sums.append(f"{sha.hexdigest()}  {name}\n")
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    sums.append(f"{hashlib.sha256(text.encode()).hexdigest()}  model.safetensors.index.json\n")
    (folder / "MANIFEST.sha256").write_text("".join(sums))


def into_page_cache(folder: Path) -> float:
    """Read every file; the share of the bytes that the page cache then holds, as the kernel says."""
    total = there = 0
    view = memoryview(mmap.mmap(-1, 4 * MIB))
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(view):
                pass
            position, size = 0, path.stat().st_size
            while position < size:
                try:
                    count = os.preadv(handle.fileno(), [view], position, os.RWF_NOWAIT)
                except BlockingIOError:
                    count = 0
                there += count
                position += count or len(view)
            total += size
    return there / total


@contextlib.contextmanager
def tmpfs(size: int, huge: str) -> Iterator[Path]:
    """A tmpfs of its own where root runs this, else a folder of /dev/shm, whose huge pages are as they are."""
    if os.geteuid() == 0:
        with tempfile.TemporaryDirectory(prefix="specrig-bench-") as scratch:
            place = Path(scratch) / "ram"
            place.mkdir()
            options = f"size={size},mode=0755,huge={huge}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "specrig-bench", str(place)], check=True)
            try:
                yield place
            finally:
                subprocess.run(["umount", str(place)], check=True)
    else:
        with tempfile.TemporaryDirectory(prefix="specrig-bench-", dir="/dev/shm") as scratch:
            yield Path(scratch)


def empty(folder: Path) -> None:
    """Remove what is in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def parameters(models: dict[str, Path], target: Path, scratch: Path, streams: int) -> dict[str, object]:
    """The module's arguments."""
    return {
        "models": {name: {"source": str(path)} for name, path in models.items()},
        "target": str(target),
        "streams": streams,
        "state_dir": str(scratch / "state"),
        "progress_dir": str(scratch / "progress"),
    }


def ours(arguments: dict[str, object], scratch: Path, code: str = RUNNER) -> list[str]:
    """The module as a process of its own; its seconds after Python's start, and its peak memory, are put down."""
    return [sys.executable, "-c", code, str(ROOT / ".collections"), json.dumps(arguments), str(scratch / "noted")]


def hash_cpu(size: int) -> float:
    """CPU seconds of hashlib for so many bytes that are in the cache already."""
    view = memoryview(random.Random(0).randbytes(MIB))
    sha = hashlib.sha256()
    before = time.process_time()
    for _ in range(size // MIB):
        sha.update(view)
    return time.process_time() - before


def machine_cpu() -> float:
    """CPU seconds that this machine has worked since its boot, whoever it was for; time that was stolen counts."""
    words = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _wait, irq, soft, steal = words
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Others:
    """How much of the cores went to other processes while these were measured."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    def run(self, command: list[str] | str, cwd: Path | None = None) -> Cost:
        """``run``, watched."""
        before = machine_cpu()
        cost = run(command, cwd)
        self._cpu += max(0.0, machine_cpu() - before - cost.cpu_s)
        self._wall += cost.wall_s
        return cost

    def note(self) -> str:
        """Why wall time is not judged, or nothing."""
        share = self._cpu / self._wall / (os.cpu_count() or 1) if self._wall else 0.0
        return f"other processes had {share:.0%} of the cores" if share > 0.1 else ""


def available(name: str) -> str | None:
    """A peer's path; root gets it installed."""
    if not shutil.which(name) and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "--no-install-recommends", name]
        subprocess.run(
            command, capture_output=True, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
    return shutil.which(name)


def sha_instructions() -> bool:
    """Whether the CPU hashes by instructions made for it."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return bool(words & {"sha_ni", "sha2"})


def compare(claims: Claims, source: Path, scratch: Path, size: int, streams: int, repeat: int, huge: str) -> None:
    """Rounds of all contestants, and the claims about them."""
    cores = len(os.sched_getaffinity(0))
    peers = {name: available(name) for name in ("rclone", "rsync")}
    rounds: list[dict[str, Cost]] = []
    others = Others()
    limits, noted = [], []
    with tmpfs(size + size // 4 + 64 * MIB, huge) as target:
        arguments = parameters({"M": source}, target, scratch, streams)
        contestants: dict[str, list[str] | str] = {
            "ours": ours(arguments, scratch),
            "cp": ["cp", "-r", str(source), str(target / "M")],
            "sha256sum": f"cd '{target}/M' && sha256sum --quiet -c MANIFEST.sha256",
        }
        if peers["rclone"]:
            contestants["rclone"] = ["rclone", "--config", "/dev/null", "copy", str(source), str(target / "M")]
        if peers["rsync"]:
            contestants["rsync"] = ["rsync", "-a", f"{source}/", str(target / "M")]
        for number in range(repeat):
            costs, cached = {}, 1.0
            for name, command in contestants.items():
                if name != "sha256sum":
                    empty(target)
                    shutil.rmtree(scratch / "state", ignore_errors=True)
                    cached = min(cached, into_page_cache(source))
                    # A virtual machine's host takes free memory back; the next use costs more. Let that be nobody's.
                    run(contestants["cp"])
                    empty(target)
                costs[name] = others.run(command)
                if name == "ours":
                    noted.append(json.loads((scratch / "noted").read_text()))
            limits.append((costs["cp"].cpu_s + hash_cpu(size)) / cores)
            rounds.append(costs)
            shown = ", ".join(f"{name} {cost.wall_s:.2f}" for name, cost in costs.items())
            print(f"  round {number + 1}: wall s: {shown}; limit {limits[-1]:.2f}; in page cache {cached:.0%}")
        empty(target)

    def median(ratio: Callable[[dict[str, Cost]], float]) -> float:
        return statistics.median(ratio(costs) for costs in rounds)

    busy = others.note()

    def against(name: str) -> Callable[[dict[str, Cost]], float]:
        return lambda costs: costs[name].wall_s / costs["ours"].wall_s

    unfair = busy if sha_instructions() else "this CPU has no SHA instructions"
    both = median(lambda costs: (costs["cp"].wall_s + costs["sha256sum"].wall_s) / costs["ours"].wall_s)
    claims.add("staging with proof, against cp -r then sha256sum -c", both, "x", 5, True, unfair)
    for name in ("rclone", "rsync"):
        title = f"staging with proof, against {name} {'copy' if name == 'rclone' else '-a'}, which prove less"
        if peers[name]:
            claims.add(title, median(against(name)), "x", 1, True, unfair)
        else:
            claims.add(title, None, "x", 1, True, f"{name} is not installed")
    over = statistics.median(seconds / limit for (seconds, _cpu, _peak), limit in zip(noted, limits, strict=True))
    claims.add("staging with proof, against (copy CPU + hash CPU) / cores", over, "x", 1.2, False, busy)
    worked = statistics.median(cpu / limit / cores for (_seconds, cpu, _peak), limit in zip(noted, limits, strict=True))
    claims.add("CPU seconds of staging with proof, against copy CPU + hash CPU", worked, "x", 1.2, False)
    claims.add(
        "peak memory of staging, whatever the size", max(peak for _seconds, _cpu, peak in noted) / 1e6, "MB", 200, False
    )


def default_of(variable: str) -> str:
    """A default of the role that makes the mount."""
    for line in (ROOT / "roles" / "model_store" / "defaults" / "main.yml").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == variable:
            return value.strip()
    raise SystemExit(f"bench: the role model_store has no {variable}")


def unchanged(claims: Claims, scratch: Path, repeat: int, huge: str) -> None:
    """What a model that is there costs: the module's own work, and an Ansible task's beside one that does nothing."""
    models = {}
    for name in ("target", "draft"):
        make_model(scratch / "small" / name, 8 * MIB, 16)
        models[name] = scratch / "small" / name
    with tmpfs(64 * MIB, huge) as target:
        arguments = parameters(models, target, scratch, 4)
        run(ours(arguments, scratch))
        code = RUNNER.replace(
            "module.main()\n",
            "import os, time\nparameters = json.loads(sys.argv[2])\nbest = []\n"
            "for _ in range(20):\n"
            "    started = time.perf_counter()\n"
            "    for name, about in parameters['models'].items():\n"
            "        assert module.Model(name, about, parameters).done\n"
            "    best.append((time.perf_counter() - started) / len(parameters['models']))\n"
            "print(sorted(best)[10])\n",
        )
        done = subprocess.run(ours(arguments, scratch, code), capture_output=True, text=True, check=True)
        claims.add("an unchanged model of 16 shards, the module's own work", float(done.stdout) * 1e3, "ms", 50, False)
        tasks = 8
        plays = {}
        for name, task in (
            ("nothing", {"ansible.builtin.ping": {}}),
            ("stage", {"specrig.host.model_stage": arguments}),
        ):
            plays[name] = scratch / f"{name}.yml"
            play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task] * tasks}
            plays[name].write_text(json.dumps([play]))
        costs: dict[str, list[Cost]] = {"nothing": [], "stage": []}
        others = Others()
        settings = [f"SPECRIG_JOURNAL={scratch / 'journal'}", "ANSIBLE_LOCALHOST_WARNING=false"]
        playbook = str(Path(sys.executable).parent / "ansible-playbook")
        for number in range(repeat + 1):
            for name, path in plays.items():
                interpreter = f"ansible_python_interpreter={sys.executable}"
                command = [playbook, "-i", "localhost,", "-e", interpreter, str(path)]
                cost = others.run(["env", *settings, *command], cwd=ROOT)
                if number:
                    costs[name].append(cost)
        pairs = list(zip(costs["stage"], costs["nothing"], strict=True))
        per_task = 1e3 / tasks / len(models)
        for what, extra, why in (
            ("wall", statistics.median(a.wall_s - b.wall_s for a, b in pairs), others.note()),
            ("CPU", statistics.median(a.cpu_s - b.cpu_s for a, b in pairs), ""),
        ):
            title = f"an unchanged model, {what} time of a task beside one that only pings"
            claims.add(title, extra * per_task, "ms", 50, False, why)


def options(source: Path, scratch: Path, size: int, huge: str) -> None:
    """The ways to copy and hash that were chosen among, in seconds per GB; not part of any claim."""
    path = scratch / "one"
    with path.open("wb") as out:
        for part in sorted(source.glob("*.safetensors")):
            out.write(part.read_bytes())
            out.flush()
        os.fsync(out.fileno())
    amount = path.stat().st_size

    def loop(target: Path, piece: int, hashed: bool = True, allocate: bool = False) -> None:
        sha, view = hashlib.sha256(), memoryview(bytearray(piece))
        with path.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
            if allocate:
                os.posix_fallocate(writer.fileno(), 0, amount)
            while count := reader.readinto(view):
                if hashed:
                    sha.update(view[:count])
                writer.write(view[:count])

    def mapped_source(target: Path) -> None:
        sha = hashlib.sha256()
        with (
            path.open("rb", buffering=0) as reader,
            target.open("wb", buffering=0) as writer,
            mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as pages,
            memoryview(pages) as view,
        ):
            for start in range(0, amount, MIB):
                sha.update(view[start : start + MIB])
                writer.write(view[start : start + MIB])

    def mapped_target(target: Path) -> None:
        sha = hashlib.sha256()
        with path.open("rb", buffering=0) as reader, target.open("w+b", buffering=0) as writer:
            os.ftruncate(writer.fileno(), amount)
            with mmap.mmap(writer.fileno(), amount) as pages, memoryview(pages) as view:
                for start in range(0, amount, MIB):
                    reader.readinto(view[start : start + MIB])
                    sha.update(view[start : start + MIB])

    def sent(target: Path) -> None:
        sha, view, position = hashlib.sha256(), memoryview(bytearray(MIB)), 0
        with path.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
            while count := os.sendfile(writer.fileno(), reader.fileno(), position, MIB):
                os.preadv(reader.fileno(), [view[:count]], position)
                sha.update(view[:count])
                position += count

    def range_copied(target: Path) -> None:
        with path.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
            left = amount
            while left:
                left -= os.copy_file_range(reader.fileno(), writer.fileno(), left)

    ways: dict[str, Callable[[Path], None]] = {
        f"read, hash, write: pieces of {piece // 1024} kB": functools.partial(loop, piece=piece)
        for piece in (64 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB)
    }
    ways |= {
        "read, write, without a hash: pieces of 1024 kB": lambda target: loop(target, MIB, hashed=False),
        "fallocate, then read, hash, write": lambda target: loop(target, MIB, allocate=True),
        "source mapped, hash, write": mapped_source,
        "target mapped, read into it, hash there": mapped_target,
        "sendfile, then read again and hash": sent,
        "copy_file_range, without a hash": range_copied,
    }
    print(f"one thread, {amount / 1e9:.2f} GB from the page cache to a tmpfs with huge={huge} (best of 3):")
    print("  CPU s/GB, wall s/GB")
    with tmpfs(size + size // 4 + 64 * MIB, huge) as target:
        for name, way in ways.items():
            best = (float("inf"), 0.0)
            for _ in range(3):
                empty(target)
                with path.open("rb", buffering=0) as handle:
                    while handle.read(4 * MIB):
                        pass
                cpu, wall = time.process_time(), time.perf_counter()
                try:
                    way(target / "one")
                except OSError as problem:
                    print(f"  {name:<56} not possible: {problem.strerror}")
                    break
                best = min(
                    best, ((time.process_time() - cpu) / amount * 1e9, (time.perf_counter() - wall) / amount * 1e9)
                )
            else:
                print(f"  {name:<56} {best[0]:6.3f} {best[1]:6.3f}")
        empty(target)
    if huge == "never":
        cold(path, amount)
    path.unlink()
    threads(source, scratch, size, huge)


def cold(path: Path, amount: int) -> None:
    """Reading from the disk with nothing cached, hashed on the way."""
    print("reading from the disk, nothing cached, hashed: GB/s, CPU s/GB (best of 3)")

    def part(start: int, stop: int, piece: int, way: str) -> None:
        number = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "O_DIRECT" else 0))
        if way == "sequential hint":
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        view, sha, ahead = memoryview(mmap.mmap(-1, piece)), hashlib.sha256(), start
        while start < stop:
            if way == "WILLNEED 16 MB ahead" and ahead < start + 16 * MIB:
                os.posix_fadvise(number, ahead, 16 * MIB, os.POSIX_FADV_WILLNEED)
                ahead += 16 * MIB
            count = os.preadv(number, [view[: min(piece, stop - start)]], start)
            sha.update(view[:count])
            start += count
        os.close(number)

    amount -= amount % (64 * MIB)
    for count in (1, 2, 4, 8):
        for way, piece in (
            ("plain", MIB),
            ("sequential hint", MIB),
            ("sequential hint", 4 * MIB),
            ("WILLNEED 16 MB ahead", MIB),
            ("O_DIRECT", MIB),
            ("O_DIRECT", 8 * MIB),
        ):
            best = (float("inf"), 0.0)
            for _ in range(3):
                number = os.open(path, os.O_RDONLY)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)
                cpu, wall = time.process_time(), time.perf_counter()
                step = amount // count
                workers = [
                    threading.Thread(target=part, args=(n * step, (n + 1) * step, piece, way)) for n in range(count)
                ]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
            rate, cost = amount / 1e9 / best[0], best[1] / amount * 1e9
            print(f"  {count} threads, {way:<22} {piece // MIB} MB pieces {rate:14.2f} {cost:6.3f}")


def threads(source: Path, scratch: Path, size: int, huge: str) -> None:
    """The copier itself with more and fewer threads, over the shards and over one file of the same size."""
    from specrig.facts import modelsource, stagecopy

    one = scratch / "single"
    one.mkdir()
    with (one / "one.bin").open("wb") as out:
        for part in sorted(source.glob("*.safetensors")):
            out.write(part.read_bytes())
    print(f"the copier, source in page cache, huge={huge}: wall s/GB, CPU s/GB (best of 3)")
    with tmpfs(size + size // 4 + 64 * MIB, huge) as target:
        for folder, title in ((source, "shards"), (one, "one file")):
            for count in (1, 2, 3, 4, 8):
                best = (float("inf"), 0.0)
                for _ in range(3):
                    empty(target)
                    into_page_cache(folder)
                    reader = modelsource.LocalSource("M", {"source": str(folder)})
                    work = [
                        stagecopy.Item("M", reader, path, row, str(target / path))
                        for path, row in reader.list().items()
                    ]
                    cpu, wall = time.process_time(), time.perf_counter()
                    stagecopy.Copier(work, count).run()
                    best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
                    if not all(item.proven for item in work):
                        raise SystemExit("bench: the copier failed")
                print(f"  {title:<9} {count} threads {best[0] / size * 1e9:30.3f} {best[1] / size * 1e9:6.3f}")
        empty(target)
    shutil.rmtree(one)


def fitting(wanted: int, scratch: Path) -> int:
    """The size that memory (cache and target) and disk have room for."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(words["MemAvailable"].split()[0]) * 1024
    disk = shutil.disk_usage(scratch).free
    size = min(wanted, int(memory / 2.5), disk - 1024 * MIB)
    if size < wanted:
        print(f"staging: {wanted / 1e9:.2f} GB do not fit twice into the memory and once on the disk that are free")
    return max(64 * MIB, size - size % MIB)


def main() -> int:
    """Measure everything; write the figures as JSON too where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--streams", type=int, default=0, help="threads; 0 is one per core, 4 to 16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--huge", help="huge pages of the tmpfs; the role's default where it is not said")
    parser.add_argument("--options", action="store_true", help="measure the ways that were chosen among instead")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.size_gb <= 0 or arguments.shards < 1 or arguments.repeat < 1 or arguments.streams < 0:
        parser.error("size, shards and repeat are above 0, streams is 0 or more")
    base = ROOT / ".cache"
    base.mkdir(exist_ok=True)
    claims = Claims()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as folder:
        scratch = Path(folder)
        huge = arguments.huge or default_of("model_store_huge")
        if huge == "auto":
            from specrig.facts import tmpfs as options_of

            huge = options_of.huge_pages(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text())
        size = fitting(int(arguments.size_gb * 1e9), scratch)
        source = scratch / "source"
        make_model(source, size, arguments.shards)
        load = os.getloadavg()[0]
        print(
            f"staging {size / 1e9:.2f} GB in {arguments.shards} shards from the page cache to a tmpfs (huge={huge}); "
            f"{len(os.sched_getaffinity(0))} cores, {'with' if sha_instructions() else 'without'} SHA instructions, "
            f"load {load:.1f} before"
        )
        if arguments.options:
            for huge in [arguments.huge] if arguments.huge else ["never", "within_size"]:
                options(source, scratch, size, huge)
            return 0
        compare(claims, source, scratch, size, arguments.streams, arguments.repeat, huge)
        shutil.rmtree(source)
        unchanged(claims, scratch, arguments.repeat, huge)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"schema": 1, "claims": claims.rows}, indent=2) + "\n")
    return 1 if any(row["met"] is False for row in claims.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
