"""A lab's name, its paths and its record on disk, and the locks that keep two calls apart."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from specrig.errors import UsageError

STATE_ROOT = Path("/var/lib/specrig-lab")
CACHE_ROOT = Path("/var/cache/specrig-lab")
GUEST = "gpu"
"""Name of the guest inside the lab's host."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is, as recorded in its ``state.json``.

    Attributes:
        schema: version of this record.
        name: the lab's name.
        phase: ``building`` until ``up`` has finished once, then ``up``.
        container: name of the outer container, the host.
        bridge: the bridge on this machine that the host hangs on.
        subnet: the bridge's network, ``10.a.b.0/24``.
        gateway: this machine's address on the bridge.
        address: the host's address.
        key: private key that the host's root accepts.
        known_hosts: file with the host's own key.
        rootfs: the cached root file system that both containers are layered on.
        model: the cached layer that holds the model under ``srv/models``.
        layered: the containers are overlays on the cache; otherwise they are copies.
        checkout: the checkout that the lab belongs to, if any.
        created_at: ISO 8601 time, UTC.
    """

    schema: int = 1
    name: str
    phase: Literal["building", "up"]
    container: str
    bridge: str
    subnet: str
    gateway: str
    address: str
    key: str
    known_hosts: str
    rootfs: str
    model: str
    layered: bool
    checkout: str | None
    created_at: str

    @property
    def directory(self) -> Path:
        """The folder that holds all of this lab."""
        return STATE_ROOT / self.name

    @property
    def lxc_path(self) -> Path:
        """The folder that LXC is told to keep the outer container in."""
        return self.directory / "lxc"

    def tree(self, role: Literal["host", "guest"]) -> Path:
        """The writable part of a container's root: an overlay's upper folder, or the whole copy."""
        return self.directory / role / ("upper" if self.layered else "rootfs")


def checkout_of(start: Path) -> Path | None:
    """The specrig checkout that ``start`` lies in, or None."""
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "inventory" / "lab" / "hosts").is_file():
            return folder
    return None


def current_checkout() -> Path | None:
    """The checkout that this package is run from, else the one of the working folder, else None."""
    return checkout_of(Path(__file__).resolve()) or checkout_of(Path.cwd())


def default_name() -> str:
    """The lab's name when none is given: ``SPECRIG_LAB``, else a hash of the checkout's path, else ``default``."""
    if named := os.environ.get("SPECRIG_LAB"):
        return named
    checkout = current_checkout()
    return hashlib.sha256(str(checkout).encode()).hexdigest()[:8] if checkout else "default"


def checked_name(name: str) -> str:
    """``name`` if it can name a lab.

    Raises:
        UsageError: it has other characters than lower-case letters, digits and hyphens, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"lab name {name!r}: expected 1 to 32 lower-case letters, digits and hyphens, the first no hyphen"
        )
    return name


def container_name(name: str) -> str:
    """Name of the outer container of lab ``name``."""
    return f"specrig-{name}"


def bridge_name(name: str) -> str:
    """Name of the bridge of lab ``name``: at most 15 characters, whatever the lab is called."""
    return "srl" + hashlib.sha256(name.encode()).hexdigest()[:8]


def load(name: str) -> LabState | None:
    """The record of lab ``name``; None where there is none or it cannot be read (``down`` cleans by name)."""
    try:
        return msgspec.json.decode((STATE_ROOT / name / "state.json").read_bytes(), type=LabState)
    except (OSError, msgspec.DecodeError):
        return None


def save(state: LabState) -> None:
    """Write the record by rename."""
    path = state.directory / "state.json"
    scratch = path.with_suffix(".new")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    scratch.rename(path)


def labs() -> list[str]:
    """Names of all labs that have a folder here."""
    if not STATE_ROOT.is_dir():
        return []
    return sorted(path.name for path in STATE_ROOT.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, waiting for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lab_lock(name: str) -> Iterator[None]:
    """Keep two commands on one lab apart.

    Raises:
        UsageError: another command holds this lab.
    """
    STATE_ROOT.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(STATE_ROOT / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"lab {name}: another specrig lab command is at work on it; wait for it to end, or use --name"
            ) from None
        yield
    finally:
        os.close(descriptor)
