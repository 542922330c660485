# SPDX-License-Identifier: Apache-2.0
"""Where a model's files come from.  Does I/O: lists and reads folders.

A source has the methods of ``Source``; ``source_of`` is the one place that chooses a class by what the inventory says.
"""

from __future__ import annotations

import contextlib
import os
import stat

from . import modelfiles
from .modelfiles import ModelError


class SourceGone(ModelError):
    """The source cannot be reached at all; what is in RAM and vouched for may still be used."""


class Source:
    """One model's files, read-only.

    ``place`` names it in messages.  ``segment_bytes`` is what one thread reads of a file before another may go on: each
    such part is one ``open``, and the part's end is told, so that no more need be asked for.
    """

    segment_bytes = 64 * 1024 * 1024
    # Whether its list costs requests to another machine, so that what is proven is not listed again.
    remote = False

    def __init__(self, name, about):
        self.name = name
        self.place = about["source"]
        # What somebody should know of the source, found while it was used.
        self.notes = []

    def list(self):
        """{relative path: {"size": bytes, "mtime_ns": int or "version": text}}, hidden names and the manifest left out.

        Raises SourceGone where there is no source, ModelError where it cannot be used.
        """
        raise NotImplementedError

    def manifest(self, patient=True):
        """{relative path: sha256} as the source itself says, or {} where it says nothing.

        Without patience one short try is made, for who has what is needed and only wants to know what is new.
        """
        raise NotImplementedError

    def open(self, path, offset, end=None):
        """Something with ``readinto(view) -> bytes read, 0 at the end`` and ``close()``, for one thread.

        No byte from ``end`` on will be asked for; it may be given all the same.
        """
        raise NotImplementedError

    def changed(self, path, row):  # noqa: ARG002 (not every source can tell)
        """Whether the file is seen to be another one than ``row`` of ``list`` says; asked when it has been copied."""
        return False

    def close(self):
        """Give back what it holds, such as connections; it may be used again."""

    def where(self, path):
        """The file's full name for a message."""
        return "%s/%s" % (self.place.rstrip("/"), path)

    def read(self, path, offset, size):
        """At most size bytes from offset, fewer at the file's end."""
        reader = self.open(path, offset, offset + size)
        try:
            data = bytearray(size)
            view, count = memoryview(data), 0
            while count < size:
                got = reader.readinto(view[count:])
                if not got:
                    break
                count += got
            return bytes(view[:count])
        finally:
            reader.close()


class LocalReader:
    """A part of a file, read through the page cache: with the sequential hint, which was measured to be the fastest.

    What was not in the page cache before is put out of it again.  The bytes are in RAM once more where they are staged;
    a second copy of 52 GB would push out what somebody needs.
    """

    def __init__(self, path, offset, end=None):
        self._file = open(path, "rb", buffering=0)
        self._file.seek(offset)
        self._offset, self._drop = offset, False
        number = self._file.fileno()
        # Measured: see docs/models.md.  Not every file system takes either call.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            last = (os.fstat(number).st_size if end is None else end) - 1
            try:
                os.preadv(number, [bytearray(1)], max(offset, last), os.RWF_NOWAIT)
            except BlockingIOError:
                self._drop = True
        self.readinto = self._file.readinto

    def close(self):
        if self._drop:
            with contextlib.suppress(OSError):
                length = self._file.tell() - self._offset
                if length:
                    os.posix_fadvise(self._file.fileno(), self._offset, length, os.POSIX_FADV_DONTNEED)
        self._file.close()


class LocalSource(Source):
    """A folder of the machine that stages: a disk or a mounted share."""

    def __init__(self, name, about):
        super().__init__(name, about)
        self._manifest_path = os.path.join(self.place, about.get("manifest") or modelfiles.MANIFEST_NAME)
        self._configured = bool(about.get("manifest"))

    def list(self):
        if not os.path.isdir(self.place):
            raise SourceGone(
                "the source %s of model %s is not there; mount or download it, or correct model_store_models"
                % (self.place, self.name)
            )
        files = {}
        own = os.path.relpath(self._manifest_path, self.place)
        for base, folders, names in os.walk(self.place, onerror=_unreadable):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                full = os.path.join(base, name)
                path = os.path.relpath(full, self.place)
                if name.startswith(".") or path == own:
                    continue
                try:
                    about = os.stat(full)
                except FileNotFoundError:
                    raise ModelError("%s is a link to what is not there; download that file again" % full) from None
                if not stat.S_ISREG(about.st_mode):
                    raise ModelError("%s is no regular file; remove it from the model's folder" % full)
                files[path] = {"size": about.st_size, "mtime_ns": about.st_mtime_ns}
        if not files:
            # So looks the folder of a share that is not mounted.
            raise SourceGone(
                "the source %s of model %s holds no files; mount it, or download the model there"
                % (self.place, self.name)
            )
        return files

    def manifest(self, patient=True):  # noqa: ARG002 (a disk answers or does not)
        try:
            with open(self._manifest_path, encoding="utf-8") as handle:
                named = modelfiles.parse_manifest(handle.read())
        except UnicodeDecodeError:
            raise ModelError("%s is no text; make it with sha256sum in the folder" % self._manifest_path) from None
        except FileNotFoundError:
            if self._configured:
                raise ModelError(
                    "the manifest %s is not there; make it with sha256sum in its folder" % self._manifest_path
                ) from None
            return {}
        return modelfiles.seen(named, os.path.relpath(self._manifest_path, self.place))

    def open(self, path, offset, end=None):
        return LocalReader(os.path.join(self.place, path), offset, end)

    def changed(self, path, row):
        about = os.stat(os.path.join(self.place, path))
        return (about.st_size, about.st_mtime_ns) != (row["size"], row["mtime_ns"])

    def where(self, path):
        return os.path.join(self.place, path)


def _unreadable(problem):
    raise problem


def source_of(name, about):
    """The source of one model, from its entry in model_store_models."""
    place = (about or {}).get("source")
    if not place or not isinstance(place, str):
        raise ModelError(
            "model %s has no source; set model_store_models.%s.source to its folder on the host" % (name, name)
        )
    if place.startswith(("http://", "https://")):
        # Not at the top: it has the classes above for its own.
        from .modelsource_http import HttpSource

        return HttpSource(name, about)
    if "://" in place or place.startswith("hf:"):
        raise ModelError(
            "model %s: no way is known to read %s here; expected a folder or an http(s) URL"
            % (name, place.split("@")[-1])
        )
    if not os.path.isabs(place):
        raise ModelError("model %s: the source %s is no absolute path; correct model_store_models" % (name, place))
    return LocalSource(name, about)
