"""JSON lines on disk: whole lines are appended, a cut-off last line is mended, a full disk loses nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import SpecrigError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TAIL_BYTES = 1 << 20


class WriteError(SpecrigError):
    """A file of the run folder could not be written; what was there before is still whole."""


def write_error(path: Path, error: OSError) -> WriteError:
    """Say in one line why a file could not be written and what to do.

    Args:
        path: the file.
        error: what the system said.

    Returns:
        The error to raise.
    """
    if error.errno in _FULL:
        return WriteError(
            f"{path}: no room left to write ({os.strerror(error.errno or 0)}); every finished line is kept. "
            "Free some space and run the same command with --resume"
        )
    return WriteError(f"{path}: cannot write: {error.strerror or error}; every finished line is kept")


def encoded(value: object) -> bytes:
    """JSON of a value, also where a text in it is no Unicode.

    That is half a character in a server's answer, written as a question mark, or bytes of an argument that the locale
    does not know, read as UTF-8.

    Args:
        value: what msgspec can encode.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_mended(msgspec.to_builtins(value)))


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return value.encode(errors="surrogateescape").decode(errors="replace")
        except UnicodeEncodeError:
            return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, list) else value


class LineFile:
    """An append-only file of JSON lines.

    A line is either whole on disk or not there: a write that the system cuts short (a full disk) is taken back.
    Opening for append mends what a killed process may have left: a last line without its end is completed if it is
    whole JSON and removed if it is not.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is opened before the first append."""
        self.path = path
        self._fd: int | None = None
        self._size = 0
        self._dirty = False
        self.mended = False

    def _open(self) -> int:
        if self._fd is None:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise write_error(self.path, error) from error
            self._size = self._mend(fd)
            self._fd = fd
        return self._fd

    def _mend(self, fd: int) -> int:
        size = os.fstat(fd).st_size
        if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
            return size
        self.mended = True
        start = size
        tail = b""
        while start > 0 and b"\n" not in tail:
            step = min(_TAIL_BYTES, start)
            start -= step
            tail = os.pread(fd, step, start) + tail
        keep = tail.rfind(b"\n") + 1
        try:
            msgspec.json.decode(tail[keep:], type=dict[str, Any])
        except msgspec.DecodeError:
            size = start + keep
            os.ftruncate(fd, size)
            return size
        try:
            os.write(fd, b"\n")
        except OSError as error:
            os.close(fd)
            raise write_error(self.path, error) from error
        return size + 1

    def append(self, row: object) -> None:
        """Write one line.

        Args:
            row: what msgspec can encode to a JSON object.

        Raises:
            WriteError: the line could not be written whole; the file is as it was.
        """
        self.append_bytes(encoded(row) + b"\n")

    def append_bytes(self, data: bytes) -> None:
        """Write whole lines already encoded.

        Args:
            data: one or more lines, each with its newline.

        Raises:
            WriteError: they could not be written whole; the file is as it was.
        """
        fd = self._open()
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError as error:
            os.ftruncate(fd, self._size)
            raise write_error(self.path, error) from error
        self._size += len(data)
        self._dirty = True

    def sync(self) -> None:
        """Have everything appended so far on the disk.

        Raises:
            WriteError: the system could not.
        """
        if self._fd is not None and self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise write_error(self.path, error) from error
            self._dirty = False

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines, also while it is being written.

    Args:
        path: the file; one that is not there has no lines.

    Yields:
        Each line as a dict. A last line without its end is passed over unless it is whole.

    Raises:
        SpecrigError: a line before the last is not a JSON object.
    """
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        handle = path.open("rb")
    except FileNotFoundError:
        return
    with handle:
        for number, line in enumerate(handle, 1):
            if line.isspace():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise SpecrigError(f"{path}:{number}: not a line of a run folder: {error}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, also after a power cut.

    Args:
        path: the file.
        data: its new content.

    Raises:
        WriteError: it could not be written; the old one is untouched.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with scratch.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        scratch.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise write_error(path, error) from error
