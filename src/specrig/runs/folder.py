"""The run folder: one execution of a sweep on disk, appended to as results come and readable with pandas alone.

Files: ``manifest.json`` (replaced by rename), ``requests.jsonl``, ``chunks.jsonl``, ``cells.jsonl``,
``journal.jsonl``, ``telemetry.jsonl`` (appended, on disk by the end of each cell). A process that is killed at any
point leaves a folder that opens; the cells that were not finished are the ones ``--resume`` runs.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import SpecrigError, UsageError
from specrig.runs.lines import LineFile, WriteError, encoded, read_lines, write_atomic, write_error

SCHEMA = 1
FINAL_STATES = frozenset({"done", "invalid", "skipped"})
"""Cell states that ``--resume`` leaves alone: measured, measured and found invalid, or cannot fit."""

_SHAPE = {"run": str, "created_at": str, "label": str, "launches": list, "cells": list, "skipped": list}
"""What every manifest has; :meth:`RunFolder.create` fills it in."""

__all__ = ["FINAL_STATES", "SCHEMA", "RunFolder", "WriteError", "is_run_folder", "utc_now"]


def utc_now() -> str:
    """The time now, ISO 8601, UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_run_folder(path: Path) -> bool:
    """Whether a path holds a run.

    Args:
        path: any path.

    Returns:
        True where a manifest is there.
    """
    return (path / "manifest.json").is_file()


class RunFolder:
    """One run on disk.

    Reading needs no lock. Whoever appends holds :meth:`lock` for as long as it does.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """Wrap a folder; use :meth:`create` or :meth:`open`."""
        self.path = path
        self._manifest = manifest
        self._requests = LineFile(path / "requests.jsonl")
        self._chunks = LineFile(path / "chunks.jsonl")
        self._cells = LineFile(path / "cells.jsonl")
        self._journal = LineFile(path / "journal.jsonl")
        self._telemetry = LineFile(path / "telemetry.jsonl")

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: dict[str, Any]) -> RunFolder:
        """Make a new run.

        Args:
            path: the folder; made where it is not there, refused where it holds a run already.
            manifest: what is known at the start; ``schema``, ``run``, ``created_at``, ``label``, ``launches``,
                ``cells`` and ``skipped`` are filled in where missing.

        Returns:
            The run.

        Raises:
            UsageError: the folder holds a run, or other files, or cannot be made.
            WriteError: the manifest cannot be written.
        """
        folder = Path(path)
        if is_run_folder(folder):
            raise UsageError(f"{folder}: a run is there already; go on with it by --resume, or name another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise UsageError(f"{folder}: cannot be used as a run folder: {error.strerror or error}") from error
        if strangers:
            raise UsageError(
                f"{folder}: not empty (holds {sorted(strangers)[0]}) and no run; name a new or empty folder"
            )
        whole: dict[str, Any] = {
            "schema": SCHEMA,
            "run": folder.name,
            "created_at": utc_now(),
            "label": "running",
            "launches": [],
            "cells": [],
            "skipped": [],
            **manifest,
        }
        run = cls(folder, whole)
        run._write_manifest(whole)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open a run that is there.

        Args:
            path: the folder.

        Returns:
            The run.

        Raises:
            UsageError: no run is there, or its format is not one this version reads.
        """
        folder = Path(path)
        return cls(folder, cls._read_manifest(folder))

    @staticmethod
    def _read_manifest(folder: Path) -> dict[str, Any]:
        file = folder / "manifest.json"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{folder}: no run there ({error.strerror}: manifest.json); name a run folder") from error
        try:
            manifest = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UsageError(f"{file}: not a manifest: {error}") from error
        if manifest.get("schema") != SCHEMA:
            raise UsageError(f"{file}: schema {manifest.get('schema')!r}, this version reads {SCHEMA}")
        for name, kind in _SHAPE.items():
            if not isinstance(manifest.get(name), kind):
                raise UsageError(
                    f"{file}: {name} is {type(manifest.get(name)).__name__}, expected {kind.__name__}; "
                    "this is no manifest of a run, or a damaged one"
                )
        for name in ("launches", "cells", "skipped"):
            if not all(isinstance(item, dict) for item in manifest[name]):
                raise UsageError(f"{file}: {name} holds something else than objects; the manifest is damaged")
        return manifest

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The run's name, as its records carry it."""
        return str(self._manifest["run"])

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as last read or written; change it by :meth:`update_manifest`."""
        return self._manifest

    def read_requests(self) -> Iterator[dict[str, Any]]:
        """Every request of every cell, in the order of their ends; a cut-off last line is passed over."""
        return read_lines(self._requests.path)

    def read_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunk traces: ``cell, launch, index, t, k``."""
        return read_lines(self._chunks.path)

    def read_journal(self) -> Iterator[dict[str, Any]]:
        """The run's own journal."""
        return read_lines(self._journal.path)

    def read_cells(self) -> list[dict[str, Any]]:
        """The last row of each cell and launch, in order of first appearance."""
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for row in read_lines(self._cells.path):
            rows[str(row["cell"]), int(row.get("launch", 0))] = row
        return list(rows.values())

    def done_cells(self) -> set[tuple[str, int]]:
        """The ``(cell, launch)`` pairs that need no more running.

        Failed and aborted ones are not among them, nor is one whose requests are not all there any more (a file that
        was lost, or cut by hand): resuming runs those again.
        """
        there: collections.Counter[tuple[str, int]] = collections.Counter()
        for record in self.read_requests():
            there[str(record.get("cell")), int(record.get("launch", 0))] += 1
        return {
            part
            for row in self.read_cells()
            if row["state"] in FINAL_STATES
            and there[part := (str(row["cell"]), int(row.get("launch", 0)))] >= int(row.get("requests") or 0)
        }

    # -- writing ------------------------------------------------------------------------------------------------

    def append_request(self, record: object) -> None:
        """Append one request's record (a RequestRecord or a dict)."""
        self._requests.append(record)

    def append_chunks(self, row: object) -> None:
        """Append one request's trace: ``cell, launch, index, t`` (seconds) and ``k`` (tokens)."""
        self._chunks.append(row)

    def append_telemetry(self, row: object) -> None:
        """Append one poll of the server."""
        self._telemetry.append(row)

    def sync(self) -> None:
        """Have everything appended so far on the disk."""
        for file in (self._requests, self._chunks, self._telemetry, self._cells, self._journal):
            file.sync()

    def finish_cell(self, row: dict[str, Any]) -> None:
        """Record a cell's end: its requests are on the disk before its row is, and the row before this returns.

        Args:
            row: a row of cells.jsonl; ``cell`` and ``state`` at least.

        Raises:
            WriteError: no room; the row is then not there and ``--resume`` runs the cell again.
        """
        self.sync()
        self._cells.append(row)
        self._journal.append(
            {
                "at": utc_now(),
                "event": "cell",
                "cell": row["cell"],
                "launch": row.get("launch", 0),
                "outcome": row["state"],
                "message": row.get("reason"),
            }
        )
        self.sync()

    def journal(self, event: dict[str, Any]) -> None:
        """Append an event to the run's journal, with the time."""
        self._journal.append({"at": utc_now(), **event})
        self._journal.sync()

    def update_manifest(self, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Change the manifest as it is on disk now, in one step.

        Args:
            change: gets the manifest, changes it in place or returns the new one.
        """
        current = self._read_manifest(self.path)
        changed = change(current)
        self._write_manifest(current if changed is None else changed)

    def set_label(self, label: str) -> None:
        """Label the run: running, partial, complete or aborted."""

        def change(manifest: dict[str, Any]) -> None:
            manifest["label"] = label
            manifest["labelled_at"] = utc_now()

        self.update_manifest(change)

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        data = msgspec.json.format(encoded(manifest), indent=1)
        write_atomic(self.path / "manifest.json", data + b"\n")
        self._manifest = manifest

    def write_file(self, name: str, data: bytes) -> None:
        """Replace a derived file (summary.json, report.html) in one step."""
        write_atomic(self.path / name, data)

    def set_aside(self, parts: Collection[tuple[str, int]]) -> int:
        """Set aside what earlier tries of some parts left, so that running them again leaves each request once.

        Their lines go to ``superseded.jsonl``; the files they were in are replaced in one step.

        Args:
            parts: the ``(cell, launch)`` pairs that are about to run.

        Returns:
            How many requests were set aside.
        """
        wanted = set(parts)
        moved = 0
        with contextlib.closing(LineFile(self.path / "superseded.jsonl")) as aside:
            for file in (self._requests, self._chunks, self._telemetry, self._cells):
                keep: list[bytes] = []
                gone: list[dict[str, Any]] = []
                for row in read_lines(file.path):
                    if (str(row.get("cell")), int(row.get("launch", 0))) in wanted:
                        gone.append(row)
                    else:
                        keep.append(msgspec.json.encode(row))
                if not gone:
                    continue
                for row in gone:
                    aside.append({"file": file.path.name, "set_aside_at": utc_now(), "row": row})
                aside.sync()
                file.close()
                write_atomic(file.path, b"".join(line + b"\n" for line in keep))
                if file is self._requests:
                    moved = len(gone)
        return moved

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; a second holder is refused at once.

        Raises:
            SpecrigError: another process holds it.
        """
        file = self.path / ".lock"
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_error(file, error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
                raise SpecrigError(
                    f"{self.path}: another process (pid {holder}) is writing this run; wait for it or stop it"
                ) from None
            with contextlib.suppress(OSError):  # the pid is a courtesy, and a full disk must not stop a resume
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            self._sweep_up()
            yield
        finally:
            os.close(fd)

    def _sweep_up(self) -> None:
        """Remove what processes that were killed while they replaced a file have left."""
        for scratch in self.path.glob(".*.new"):
            pid = scratch.name.split(".")[-2]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    scratch.unlink()

    def locked(self) -> bool:
        """Whether some process is writing this run now."""
        try:
            fd = os.open(self.path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def close(self) -> None:
        """Close every file; the folder can be used again."""
        for file in (self._requests, self._chunks, self._cells, self._journal, self._telemetry):
            file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
