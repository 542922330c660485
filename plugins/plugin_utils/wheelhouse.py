# SPDX-License-Identifier: Apache-2.0
"""What the controller does for an installation: hashes, a wheelhouse filled by its own pip, wheels made of sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..module_utils import engines

PIECE = 4 * 1024 * 1024
FILLED = ".specrig-filled.json"
# pip install writes compiled Python beside the files of the wheels, and the environment itself has some.
FACTOR = 1.25


def place(path):
    """A path of the inventory on the controller."""
    return Path(path).expanduser().resolve()


class Hashes:
    """Hashes and unpacked sizes of files, remembered by size and time, since a wheelhouse has gigabytes."""

    def __init__(self, path=None):
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = Path(path) if path else root / "specrig" / "wheels.json"
        self.known = {}
        self.changed = False
        with contextlib.suppress(OSError, ValueError):
            self.known = json.loads(self.path.read_text(encoding="utf-8"))
        if not isinstance(self.known, dict):
            self.known = {}

    def of(self, path):
        """``{name, size, sha256, unpacked, mtime_ns}`` of a file."""
        about = path.stat()
        key = str(path)
        row = self.known.get(key)
        if not isinstance(row, dict) or (row.get("size"), row.get("mtime_ns")) != (about.st_size, about.st_mtime_ns):
            digest = hashlib.sha256()
            with path.open("rb") as handle:
                while piece := handle.read(PIECE):
                    digest.update(piece)
            row = {
                "size": about.st_size,
                "mtime_ns": about.st_mtime_ns,
                "sha256": digest.hexdigest(),
                "unpacked": unpacked(path, about.st_size),
            }
            self.known[key] = row
            self.changed = True
        return dict(row, name=path.name)

    def keep(self):
        """Remembers what was read; a cache that can't be written costs time only."""
        if not self.changed:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(self.known, stream)
            Path(scratch).replace(self.path)


def unpacked(path, size):
    """How many bytes an archive's files have; three times the archive where it can't be told."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(info.file_size for info in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        return 3 * size


def tree_hash(folder):
    """The hash of a source tree's names and contents; what tools leave in it is no part of it."""
    digest = hashlib.sha256()
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not engines.left_out(name))
        for name in sorted(names):
            path = Path(base) / name
            if path.is_file() and not engines.left_out(name):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                line = f"{path.relative_to(folder).as_posix()}\0{content}\0"
                digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def contents(install, hashes):
    """Hashes of every path on the controller that an installation names.

    Raises:
        engines.EngineError: where nothing is there.
    """
    found = {}
    for step in install["steps"]:
        for path in step["constraints"]:
            there = place(path)
            if not there.is_file():
                raise engines.EngineError(f"the constraints file {path} is not on the controller; correct its path")
            found["controller:" + path] = hashes.of(there)["sha256"]
        for row in step["requirements"]:
            if row["side"] != "controller" or row["path"] is None:
                continue
            there = place(row["path"])
            if row["kind"] == "file" and there.is_file():
                found[engines.key_of(row)] = hashes.of(there)["sha256"]
            elif row["kind"] == "folder" and there.is_dir():
                if not any((there / name).is_file() for name in ("pyproject.toml", "setup.py")):
                    raise engines.EngineError(
                        f"{row['path']} has neither pyproject.toml nor setup.py: name the folder that has them"
                    )
                found[engines.key_of(row)] = tree_hash(there)
            else:
                what = "wheel or archive" if row["kind"] == "file" else "folder"
                raise engines.EngineError(
                    f"the {what} {row['path']} is not on the controller; correct its path, or write "
                    f"guest:{row['path']} for one in the guest"
                )
    return found


def files(folder, hashes, python=None, machine=None):
    """The files of a wheelhouse that a guest can install from; all where its Python is not known."""
    found = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        if not re.search(r"\.(whl|tar\.gz|zip|tgz)$", path.name):
            continue
        if python and engines.wheel_fits(path.name, python, machine) is False:
            continue
        found.append(hashes.of(path))
    return found


def builds_here(row, offline):
    """Whether a requirement becomes a wheel on the controller: a folder there, or a repository that only it reaches."""
    if row["kind"] == "folder":
        return row["side"] == "controller"
    return row["kind"] == "git" and (offline or (row["path"] is not None and place(row["path"]).exists()))


def environment(step):
    """Pip's indexes as environment variables, which no list of processes shows."""
    env = {}
    if step["index_url"]:
        env["PIP_INDEX_URL"] = step["index_url"]
    if step["extra_index_urls"]:
        env["PIP_EXTRA_INDEX_URL"] = " ".join(step["extra_index_urls"])
    return env


def same_platform(facts):
    """Whether a wheel that is made here runs in the guest: the same Python and machine, and no newer C library."""
    libc = platform.libc_ver()
    ours = [int(part) for part in re.findall(r"\d+", libc[1])[:2]] if libc[0] == "glibc" else None
    return (
        list(facts["version"][:2]) == list(sys.version_info[:2])
        and facts["machine"] == platform.machine()
        and ours is not None
        and facts["libc"] is not None
        and ours <= list(facts["libc"])
    )


def platform_arguments(facts):
    """Pip's arguments for another Python or platform than the controller's; then only wheels can be had."""
    version, machine, libc = facts["version"], facts["machine"], facts["libc"]
    short = f"{version[0]}{version[1]}"
    words = ["--only-binary=:all:", "--python-version", f"{version[0]}.{version[1]}", "--implementation", "cp"]
    for abi in (f"cp{short}", "abi3", "none"):
        words += ["--abi", abi]
    if libc:
        for minor in range(libc[1], 4, -1):
            words += ["--platform", f"manylinux_2_{minor}_{machine}"]
        words += ["--platform", f"manylinux2014_{machine}", "--platform", f"manylinux2010_{machine}"]
        words += ["--platform", f"manylinux1_{machine}"]
    return [*words, "--platform", f"linux_{machine}"]


def pip(words, env=None):
    """Run the controller's own pip.

    Raises:
        engines.EngineError: with pip's own error lines, credentials masked.
    """
    argv = [sys.executable, "-m", "pip", *words, "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, **(env or {})},
    )
    if not done.returncode:
        return
    if "No module named pip" in done.stdout:
        raise engines.EngineError(
            f"the controller's Python ({sys.executable}) has no pip, which fills a wheelhouse and makes wheels of "
            "sources: install it there, or bring wheels"
        )
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    shown = " | ".join((errors or lines)[-4:])
    raise engines.EngineError(f"the controller's pip {words[0]}: {engines.masked(shown)}")


def fill(install, facts, step_files):
    """Have the controller's pip put into the wheelhouse what is missing, step by step.

    Args:
        install: the normalized installation.
        facts: the guest's Python, machine and C library.
        step_files: the requirements of each step that pip has to find: texts.

    Returns:
        Whether pip was run: a folder that was filled for the same steps and guest and has all its files is left alone.
    """
    folder = place(install["wheelhouse"])
    text = json.dumps([step_files, install["steps"], facts["version"][:2], facts["machine"]], sort_keys=True)
    key = hashlib.sha256(engines.masked(text).encode()).hexdigest()[:16]
    if _is_filled(folder, key):
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Several guests of one play want the same folder at once.
        with (folder / (FILLED + ".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_filled(folder, key):
                return False
            _fill(install, facts, step_files, folder)
            names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
            (folder / FILLED).write_text(json.dumps({**_noted(folder), key: names}, indent=1), encoding="utf-8")
    except OSError as error:
        raise engines.EngineError(
            f"the wheelhouse {folder} cannot be filled: {error.strerror}; make it writable on the controller, or leave "
            "install.fill out"
        ) from error
    return True


def _noted(folder):
    """What was filled for which steps and guest: key to the names of the files."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / FILLED).read_text(encoding="utf-8"))
    return {}


def _is_filled(folder, key):
    names = _noted(folder).get(key)
    return bool(names) and all((folder / name).is_file() for name in names)


def _fill(install, facts, step_files, folder):
    same = same_platform(facts)
    for step, texts in zip(install["steps"], step_files, strict=True):
        if not texts:
            continue
        # A wheel that was made here does for the guest; else only what is there as a wheel can be had.
        words = ["wheel", "--wheel-dir", str(folder)] if same else ["download", "--dest", str(folder)]
        words += [] if same else platform_arguments(facts)
        words += ["--find-links", str(folder)]
        words += ["--no-deps"] if step["no_deps"] else []
        for path in step["constraints"]:
            words += ["--constraint", str(place(path))]
        words += step["pip_args"]
        with tempfile.TemporaryDirectory(prefix="specrig-fill-") as scratch:
            listed = Path(scratch) / "requirements.txt"
            listed.touch(mode=0o600)
            listed.write_text("\n".join(texts) + "\n", encoding="utf-8")
            pip([*words, "--requirement", str(listed)], environment(step))


def build(row, step, facts, folder):
    """Make a wheel of a source folder or a git reference of the controller; returns its path.

    Raises:
        engines.EngineError: where it can't be made, or would not fit the guest.
    """
    target = Path(tempfile.mkdtemp(dir=folder))
    # The bare address: an older pip takes no "name @ git+file:///...", and extras are nothing of a wheel's.
    text = str(place(row["path"])) if row["kind"] == "folder" else row["text"].split(" @ ", 1)[-1].strip()
    words = ["wheel", "--no-deps", "--wheel-dir", str(target), *step["pip_args"]]
    listed = target / "requirements.txt"
    listed.touch(mode=0o600)
    listed.write_text(text + "\n", encoding="utf-8")
    pip([*words, "--requirement", str(listed)], environment(step))
    made = sorted(target.glob("*.whl"))
    if len(made) != 1:
        raise engines.EngineError(f"{engines.masked(row['text'])} gave {len(made)} wheels, expected one")
    fits = engines.wheel_fits(made[0].name, facts["version"], facts["machine"])
    if not fits or not (made[0].name.endswith("-any.whl") or same_platform(facts)):
        version = ".".join(str(part) for part in facts["version"][:2])
        raise engines.EngineError(
            f"{made[0].name}, made on the controller, does not run in the guest (Python {version}, "
            f"{facts['machine']}): install from a folder in the guest (guest:/...) or from a wheel that was made for it"
        )
    return made[0]


def ask_guest(action, task_vars, install, **args):
    """What the module engine_venv answers in the guest, for an action plugin.

    Raises:
        engines.EngineError: where it failed, with its line.
    """
    done = action._execute_module(
        module_name="specrig.host.engine_venv",
        module_args=dict(args, path=install["venv"], python=install["python"], python_min=install["python_min"]),
        task_vars=task_vars,
    )
    if done.get("failed"):
        raise engines.EngineError(done.get("msg") or "the guest gave no answer")
    return done
