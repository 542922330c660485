"""Kills stagings with SIGKILL, many of them, and looks after each; run by a test in a process without threads.

Two ways: at each call that changes a folder, one after the other, before or after it; and after a random time, from a
list of seeds. Prints one JSON object: how many kills there were, how many hit, and what was wrong.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

collections, parameters, only = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sys.path.insert(0, collections)
basic = importlib.import_module("ansible.module_utils.basic")
module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.model_stage")
stagecopy = module.stagecopy
stagecopy.PIECE_BYTES = 16384
module.modelsource.Source.segment_bytes = 65536

SOURCE = Path(parameters["models"]["M"]["source"])
TARGET = Path(parameters["target"]) / "M"
WANTED = {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in SOURCE.iterdir()
    if path.name != "MANIFEST.sha256"
}
CHANGES = ("pwrite", "write", "rename", "unlink", "mkdir", "fchmod", "fsync")
wrong: list[str] = []


def visible() -> dict[str, tuple[int, str]]:
    """{name: (inode, sha256)} of what a server would see."""
    seen = {}
    if TARGET.is_dir():
        for entry in os.scandir(TARGET):
            if not entry.name.startswith("."):
                try:
                    with Path(entry.path).open("rb") as handle:
                        seen[entry.name] = (os.fstat(handle.fileno()).st_ino, hashlib.sha256(handle.read()).hexdigest())
                except FileNotFoundError:
                    continue
    return seen


def check(when: str) -> dict[str, tuple[int, str]]:
    """Note every file that is seen and is not whole, and a marker that comes too early."""
    marker = (TARGET / ".specrig-staged.json").exists()
    seen = visible()
    for name, (_inode, digest) in seen.items():
        if digest != WANTED.get(name):
            wrong.append(f"{when}: {name} is seen and is not whole")
    if marker and set(seen) != set(WANTED):
        wrong.append(f"{when}: there is a marker and {sorted(set(WANTED) - set(seen))} is not there")
    return seen


def child(prepare=lambda: None) -> int:
    """A process that stages."""
    pid = os.fork()
    if pid:
        return pid
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        prepare()
        basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": parameters}).encode()
        basic._ANSIBLE_PROFILE = "legacy"
        module.main()
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException as problem:
        os.write(2, f"{problem!r}\n".encode())
    os._exit(99)


def kill_at(number: int, after: bool) -> None:
    """Have the process die at its call of that number among those that change something."""
    count = itertools.count(1)

    def wrap(real):
        def call(*arguments, **more):
            due = next(count) == number
            if due and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **more)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))


def finish(when: str, proven: dict[str, int]) -> None:
    """The next run makes it whole, and copies nothing again that was whole and proven."""
    _, status = os.waitpid(child(), 0)
    if status:
        wrong.append(f"{when}: the next run ended with {os.waitstatus_to_exitcode(status)}")
    seen = check(f"{when}, after the next run")
    if set(seen) != set(WANTED) or not (TARGET / ".specrig-staged.json").exists():
        wrong.append(f"{when}: the next run left {sorted(set(WANTED) - set(seen))} out, or the marker")
    # The same inode, also of a file that was proven and did not have its name yet.
    again = [name for name, inode in proven.items() if seen.get(name, (0,))[0] != inode]
    if again:
        wrong.append(f"{when}: {again} was proven and was copied again")
    left = [path.name for path in stagecopy_temporaries()]
    if left:
        wrong.append(f"{when}: {left} was left over")


def stagecopy_temporaries() -> list[Path]:
    return [Path(path) for path in stagecopy.temporaries(str(TARGET))]


def proven_now() -> dict[str, int]:
    """What the record or the marker vouches for, with its inode."""
    boot = stagecopy.boot_id()
    marker, current = stagecopy.read_marker(str(TARGET), boot)
    rows = {**stagecopy.Proofs(str(TARGET), boot).files, **(marker["files"] if current else {})}
    return {name: row["ino"] for name, row in rows.items()}


def every_step() -> dict[str, int]:
    """Die at each step once, and at each step once more just after it."""
    kills = 0
    for after in (False, True):
        for number in itertools.count(1):
            shutil.rmtree(TARGET, ignore_errors=True)
            shutil.rmtree(parameters["state_dir"], ignore_errors=True)
            _, status = os.waitpid(child(lambda n=number, a=after: kill_at(n, a)), 0)
            when = f"killed {'after' if after else 'before'} step {number}"
            if status == 0:
                check(f"{when}, which did not come")
                break
            if not os.WIFSIGNALED(status):
                wrong.append(f"{when}: ended with {os.waitstatus_to_exitcode(status)}")
                break
            kills += 1
            check(when)
            finish(when, proven_now())
    return {"kills": kills, "hits": kills}


def any_time(seeds: list[int]) -> dict[str, int]:
    """Die after a random time, several times in a row, while somebody watches the folder."""
    stop, looks = threading.Event(), itertools.count()

    def watch() -> None:
        while not stop.is_set():
            check("while it ran")
            next(looks)
            # Not a busy loop: the staging has to get on, too.
            stop.wait(0.002)

    # The shortest of some: one that was held up by others would have the kills come too late.
    whole = float("inf")
    for _ in range(3):
        shutil.rmtree(TARGET, ignore_errors=True)
        started = time.monotonic()
        os.waitpid(child(), 0)
        whole = min(whole, time.monotonic() - started)
    kills = hits = 0
    for seed in seeds:
        dice = random.Random(seed)
        shutil.rmtree(TARGET, ignore_errors=True)
        for _ in range(dice.randint(1, 4)):
            watcher = threading.Thread(target=watch)
            stop.clear()
            pid = child()
            watcher.start()
            time.sleep(dice.random() * whole)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            stop.set()
            watcher.join()
            kills += 1
            hits += os.WIFSIGNALED(status)
        check(f"seed {seed}")
        finish(f"seed {seed}", proven_now())
    return {"kills": kills, "hits": hits, "looks": next(looks)}


result = every_step() if only == "steps" else any_time(list(range(int(only))))
print(json.dumps({**result, "wrong": wrong}))
