"""The wheels of the real engine: fetched once by this machine's pip, kept where every checkout and every lab sees them.

    python tests/engine/wheels.py           # fetch what is missing, print the folder
    python tests/engine/wheels.py --lock    # after a change of a version: write the hashes of what pip fetches now

torch comes first and alone, and as its CPU build by its full version: the other build takes gigabytes of CUDA with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from specrig.errors import SpecrigError
from specrig.ops.lab.rootfs import wheels_cache
from specrig.ops.lab.state import locked

LOCK = Path(__file__).resolve().with_name("requirements-engine.lock")
PYTHON = (3, 11)
"""The wheels are for this Python, which is the one of Debian 12."""
FIRST = "torch"


class NotHere(SpecrigError):
    """The wheels cannot be had on this machine; the text says why."""


def folder() -> Path:
    """Where the wheels of this lock are, or will be."""
    return wheels_cache() / f"engine-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"


def _lines(text: str) -> tuple[list[str], list[str]]:
    """The requirements of a lock: those of torch, and the rest."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    first = [line for line in lines if line.startswith(f"{FIRST}==")]
    return first, [line for line in lines if line not in first]


def _download(lines: list[str], target: Path, *options: str) -> None:
    wanted = target.with_name(target.name + ".txt")
    wanted.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *options, "--dest", str(target), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["nothing"]
        raise NotHere(f"pip cannot fetch the engine's wheels ({lines[0].split()[0]}, ...): {said[-1].strip()}")


def fetch() -> Path:
    """The folder with every wheel of the lock, fetched if it isn't there yet; it appears whole or not at all.

    Raises:
        NotHere: this Python is another one, or pip cannot get a wheel with the lock's hash.
    """
    target = folder()
    if target.is_dir():
        return target
    if sys.version_info[:2] != PYTHON or os.uname().machine != "x86_64":
        have = "{}.{} on {}".format(*sys.version_info[:2], os.uname().machine)
        raise NotHere(f"the engine's wheels are for Python 3.11 on x86_64, this is {have}")
    with locked(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        scratch = target.with_name(target.name + ".partial")
        shutil.rmtree(scratch, ignore_errors=True)
        first, rest = _lines(LOCK.read_text())
        try:
            _download(first, scratch, "--require-hashes")
            _download(rest, scratch, "--require-hashes")
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_lock() -> None:
    """Fetch the versions of the lock anew, whatever their hashes, and write those down."""
    scratch = folder().with_name("engine-lock.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    head = [line for line in LOCK.read_text().splitlines() if line.startswith("#")]
    out = []
    try:
        for lines in _lines(LOCK.read_text()):
            pins = [line.split()[0] for line in lines]
            _download(pins, scratch)
            for pin in pins:
                name, version = (re.sub(r"[-_.]+", "_", part).lower() for part in pin.split("=="))
                found = [
                    path
                    for path in scratch.iterdir()
                    if [re.sub(r"[-_.]+", "_", part).lower() for part in path.name.split("-")[:2]] == [name, version]
                ]
                hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in found]
                out.append(f"{pin} " + " ".join(f"--hash=sha256:{value}" for value in hashes))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    LOCK.write_text("\n".join([*head, *sorted(out, key=str.lower)]) + "\n")


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--lock"]:
            write_lock()
        else:
            print(fetch())
    except SpecrigError as error:
        print(f"wheels: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
