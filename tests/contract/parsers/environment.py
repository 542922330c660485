"""The real argument parsers of pinned SGLang versions, without torch: sources of the wheel, a few packages, no GPU.

The wheel's Python sources and the packages of ``pins.txt`` lie in a cache outside the checkout, under the hash of all
pins; it is made once a machine by pip, checked against the pinned hashes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERSIONS: dict[str, dict[str, Any]] = json.loads((HERE / "versions.json").read_text())
_SHARED = Path("/var/cache/specrig-lab")
_LEFT_OUT = ("sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/")
_PLATFORM = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--implementation", "cp"]
"""The wheel is the same on every machine: only its sources are read, nothing compiled in it is loaded."""


class Unavailable(Exception):
    """The packages cannot be had here; the text says why, in one line."""


def cache_root() -> Path:
    """Where environments are kept: the lab's cache, or the user's."""
    if _SHARED.is_dir() and os.access(_SHARED, os.W_OK):
        return _SHARED / "parsers"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "specrig" / "parsers"


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    except subprocess.TimeoutExpired:
        raise Unavailable("pip did not end within 400 s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["failed"]
        raise Unavailable("pip: " + lines[-1][:300])


def _packages(folder: Path) -> None:
    _pip("install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(folder),
         "-r", str(HERE / "pins.txt"))  # fmt: skip


def _sources(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(f"sglang=={version} --hash=sha256:{VERSIONS[version]['sha256']}\n")
        _pip("download", "--no-deps", "--require-hashes", "--only-binary", ":all:", *_PLATFORM, "-d", scratch,
             "-r", str(wanted))  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if not name.startswith(_LEFT_OUT) and (name.endswith((".py", ".json")) or ".dist-info/" in name)
            ]
            archive.extractall(folder, names)


def _made(name: str, fill: Any) -> Path:
    """A folder of the cache, made where it is not there; several processes may ask at once."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    target = root / name
    if target.is_dir():
        return target
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}-"))
            try:
                fill(scratch)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def packages() -> Path:
    """The folder with the packages of ``pins.txt`` for this interpreter."""
    about = f"{sys.implementation.cache_tag}\n".encode() + (HERE / "pins.txt").read_bytes()
    return _made("packages-" + hashlib.sha256(about).hexdigest()[:16], _packages)


def sources(version: str) -> Path:
    """The folder with a version's sources."""
    return _made(f"sglang-{version}-{VERSIONS[version]['sha256'][:12]}", lambda folder: _sources(version, folder))


class RealParser:
    """A release's real parser, in a process of its own that stays until `close`.

    Attributes:
        options: spelling to ``[dest, action, type, nargs, choices]``.

    Raises:
        Unavailable: pip cannot get the pinned packages.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        paths = [str(HERE), str(packages()), str(sources(version))]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={"PATH": os.defpath, "HOME": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        absent = VERSIONS[version]["absent"].split()
        self.options: dict[str, list[Any]] = self._ask({"paths": paths, "absent": absent})["options"]

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"the parser of {self._version} does not load: {self._errors.read()[-2000:]}")
        return json.loads(line)

    def parse(self, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Parse command lines (without the program); an answer is described in ``driver.py``."""
        answers: list[dict[str, Any]] = self._ask([list(line) for line in lines])
        return answers

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
        self._errors.close()
