# SPDX-License-Identifier: Apache-2.0
"""Copies files into RAM and proves them on the way.  Does I/O; knows nothing of Ansible.

Threads share the files, the largest first.  One thread owns a file: it reads a piece, hashes it while it is hot in the
cache, writes it.  When no file is left to begin, threads without one copy ahead of an owner, segment by segment, and
the owner hashes what they wrote: so one file of 52 GB is limited by its sha256, which is a sequence, and not by that
and the copying one after the other.  Python's hashlib, read and write give up the interpreter's lock for each piece.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
import time

from . import modelfiles
from .modelfiles import ModelError

PIECE_BYTES = 1024 * 1024
# How far ahead of the hash others may copy: what is hashed should still be in the cache, and threads be free for files.
LEAD_SEGMENTS = 4
WAIT_S = 0.5
PROOFS_NAME = ".specrig-proofs"
MARKER_NAME = modelfiles.MARKER_NAME
LOCK_NAME = ".specrig-lock"
RAM_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
TODO, TAKEN, DONE = range(3)
# What a row of the marker has to say.
MARKED = {"size", "mtime_ns", "ino", "stamp", "sha256"}


def read_text(path):
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def boot_id():
    """What this boot is called, or None where nothing tells; then nothing that was proven before is believed."""
    try:
        return read_text("/proc/sys/kernel/random/boot_id").strip() or None
    except OSError:
        return None


def in_ram(folder):
    """Whether a folder lies in RAM, where a sync means nothing."""
    about = os.stat(folder)
    device = "%d:%d" % (os.major(about.st_dev), os.minor(about.st_dev))
    with contextlib.suppress(OSError):
        for line in read_text("/proc/self/mountinfo").splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[2:3] == [device]:
                return right.split()[0] in RAM_FILE_SYSTEMS
    return False


def row_of(about):
    """The fields of a stat result by which a file in RAM is known again."""
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "ino": about.st_ino, "ctime_ns": about.st_ctime_ns}


def look(folder):
    """{relative path: row_of} of a folder's files; ours, hidden folders and temporary files left out."""
    files = {}
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                path = os.path.join(base, name)
                files[os.path.relpath(path, folder)] = row_of(os.lstat(path))
    return files


def temporaries(target):
    """What a staging that was killed, or one that goes on right now, has not finished."""
    for base, _folders, names in os.walk(target):
        for name in names:
            path = os.path.join(base, name)
            if name.startswith(modelfiles.TEMPORARY_PREFIX) and os.path.isfile(path):
                yield path


def temporary_of(final):
    folder, name = os.path.split(final)
    return os.path.join(folder, modelfiles.TEMPORARY_PREFIX + name)


def replace_text(path, text, sync):
    """Puts a whole text in the place of a file; where sync says so it is on the disk before it is seen."""
    temporary = temporary_of(path)
    with open(temporary, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fchmod(handle.fileno(), 0o644)
        if sync:
            os.fsync(handle.fileno())
    os.rename(temporary, path)
    if sync:
        sync_folder(os.path.dirname(path))


def sync_folder(folder):
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_marker(target, boot):
    """(marker or None, whether it is of this boot)."""
    try:
        marker = json.loads(read_text(os.path.join(target, MARKER_NAME)))
        rows = marker["files"].values()
        whole = "verified" in marker and all(MARKED <= set(row) for row in rows)
        if marker["schema"] == modelfiles.MARKER_SCHEMA and whole:
            return marker, boot is not None and marker["boot_id"] == boot
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return None, False


class Proofs:
    """The record of what is proven, kept beside the files.

    It has a line per file that is whole, and per segment of one that is not yet.  A line is one write; a cut or foreign
    line is passed over, and so is every line of another boot.

    ``files``: {path: {"size", "mtime_ns", "ino", "stamp", "sha256"}}; ``parts``: {path: {"ino", "size", "stamp",
    "segment_bytes", "done": {segment numbers}}}.
    """

    def __init__(self, target, boot):
        self._path = os.path.join(target, PROOFS_NAME)
        self._boot, self._number = boot, None
        self.files, self.parts = {}, {}
        try:
            with open(self._path, encoding="utf-8", errors="replace") as handle:
                for line in handle:
                    self._take(line)
        except OSError:
            pass

    def _take(self, line):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = json.loads(line)
            if not line.endswith("\n") or self._boot is None or row.pop("boot_id") != self._boot:
                return
            path = modelfiles.check_relative(row.pop("path"))
            if "segment" in row:
                segment = int(row.pop("segment"))
                part = self.parts.get(path)
                if part is None or {key: part[key] for key in row} != row:
                    part = self.parts[path] = dict(row, done=set())
                part["done"].add(segment)
            elif len(row["sha256"]) == 64:
                self.files[path] = row
                self.parts.pop(path, None)

    def open(self):
        """Begin to write, on a new line."""
        self._number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._number, b"\n")

    def add(self, path, row):
        line = json.dumps(dict(row, path=path, boot_id=self._boot), sort_keys=True) + "\n"
        os.write(self._number, line.encode())

    def close(self, remove=False):
        if self._number is not None:
            os.close(self._number)
            self._number = None
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class Wrong(ModelError):
    """A file's content is not what it has to be."""


class Item:
    """One file to be proven in RAM.

    Args:
        group: whose file it is; a failure of one file ends its group.
        source: where it is copied from; see modelsource.Source.
        path: its name there, relative.
        row: its size and stamp there.
        final: its full name in RAM.
        sha256: what it has to be, or None.
        refuse: called with a sum that is another one, and gives the line to say.
        proofs: the record that its proof, and its segments, go to.
        verify: whether it lies in RAM already and is to be read first.
        sync: whether it lies on a disk and has to be written out before it counts.
    """

    def __init__(
        self, group, source, path, row, final, sha256=None, refuse=None, proofs=None, verify=False, sync=False
    ):
        self.group, self.source, self.path, self.row, self.final = group, source, path, row, final
        self.sha256, self.refuse, self.proofs, self.verify, self.sync = sha256, refuse, proofs, verify, sync
        self.size = row["size"]
        self.segment_bytes, self.count = source.segment_bytes, 0
        self.temporary = temporary_of(final)
        self.found, self.copied_bytes, self.hashed = None, 0, 0
        self.copied, self.proven = False, False
        self.states, self.written, self.at = [], [], 0
        self.awaited, self.number, self.resumed = None, None, False

    def begin(self):
        """Open it, and find out what of it is there."""
        os.makedirs(os.path.dirname(self.final), mode=0o755, exist_ok=True)
        self.hashed, self.at, self.awaited, self.resumed = 0, 0, None, False
        # A source may have learned that its files cannot be read from the middle.
        self.segment_bytes = self.source.segment_bytes
        self.count = -(-self.size // self.segment_bytes)
        part = self.proofs.parts.pop(self.path, None) if self.proofs and self.sha256 else None
        done = part["done"] if part and not self.verify and self._same_part(part) else ()
        done = set(range(self.count)) if self.verify else {number for number in done if number < self.count}
        self.states = [DONE if number in done else TODO for number in range(self.count)]
        self.written = [self.segment_bytes if number in done else 0 for number in range(self.count)]
        # Others may copy segments of it as soon as it has a number, so that comes last.
        if self.verify:
            self.number = os.open(self.final, os.O_RDONLY | os.O_NOFOLLOW)
            return
        self.copied, self.resumed = True, bool(done)
        if done:
            self.number = os.open(self.temporary, os.O_RDWR | os.O_NOFOLLOW)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)
        self.number = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def _same_part(self, part):
        try:
            about = os.lstat(self.temporary)
        except OSError:
            return False
        wanted = (about.st_ino, self.size, modelfiles.stamp(self.row), self.segment_bytes)
        return wanted == (part.get("ino"), part.get("size"), part.get("stamp"), part.get("segment_bytes"))

    def span(self, segment):
        """(first byte, byte after the last one) of a segment."""
        start = segment * self.segment_bytes
        return start, min(start + self.segment_bytes, self.size)

    def wrote(self, segment):
        """Put down that a segment is in the temporary file."""
        if self.proofs and self.sha256 and self.count > 1:
            row = {"ino": os.fstat(self.number).st_ino, "size": self.size, "stamp": modelfiles.stamp(self.row)}
            self.proofs.add(self.path, dict(row, segment_bytes=self.segment_bytes, segment=segment))

    def finish(self):
        """Compare the sum; give the file its name where it is right, and put down the proof before that.

        Returns False where it has to be copied after all.
        """
        if self.sha256 is not None and self.found != self.sha256:
            if self.verify or self.resumed:
                self.end()
                if self.resumed:
                    os.unlink(self.temporary)
                self.verify = False
                return False
            if self.source.changed(self.path, self.row):
                raise ModelError(self._moving())
            raise Wrong(self.refuse(self.found))
        if not self.verify and self.sha256 is None and self.source.changed(self.path, self.row):
            raise ModelError(self._moving())
        if not self.verify:
            os.fchmod(self.number, 0o644)
            if self.sync:
                os.fsync(self.number)
        about = row_of(os.fstat(self.number))
        about.pop("ctime_ns")
        if self.proofs:
            self.proofs.add(self.path, dict(about, stamp=modelfiles.stamp(self.row), sha256=self.found))
        if not self.verify:
            os.rename(self.temporary, self.final)
        self.end()
        self.proven = True
        return True

    def _moving(self):
        return "%s changed while it was copied; let what writes it end and run again" % self.source.where(self.path)

    def end(self):
        number, self.number = self.number, None
        if number is not None:
            os.close(number)

    def give_up(self, keep):
        """After a failure: remove the temporary file, unless what is in it can be gone on with."""
        self.end()
        if not self.verify and not (keep and DONE in self.states and self.sha256 and self.count > 1):
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)


class Copier:
    """Proves items with several threads.  ``failures``: {group: the first exception of one of its items}.

    Args:
        items: what to do.
        threads: how many at a time.
        share: called now and then; how many threads of these may work now.
        tick: called now and then, and at the end.
    """

    def __init__(self, items, threads, share=None, tick=None):
        self.items = items
        self.failures = {}
        sizes = {}
        for item in items:
            sizes[item.group] = sizes.get(item.group, 0) + item.size
        # Taken from the end. The smallest model comes first: what serves with it starts while the others are copied.
        self._waiting = sorted(items, key=lambda item: (-sizes[item.group], str(item.group), item.size, item.path))
        self._live = []
        lock = threading.Lock()
        # Something can be done that could not before; a thread more may work.
        self._change, self._permit = threading.Condition(lock), threading.Condition(lock)
        self._threads, self._share, self._tick = max(1, threads), share, tick
        self._allowed, self._active, self._stop = self._threads, 0, None

    def run(self):
        """Returns when every item is proven or its group has failed."""
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._threads)]
        if self._share:
            self._allowed = max(1, self._share())
        for worker in workers:
            worker.start()
        try:
            left = workers
            while left:
                # It ends with the work: this is half a second at most, and less at the end.
                left[0].join(WAIT_S)
                left = [worker for worker in left if worker.is_alive()]
                if self._share:
                    self._allowed = max(1, self._share())
                if self._tick:
                    self._tick()
        except BaseException as problem:
            self._end(problem)
            for worker in workers:
                worker.join()
            raise
        if self._stop:
            raise self._stop
        if self._tick:
            self._tick()

    def _work(self):
        buffer = memoryview(bytearray(PIECE_BYTES))
        self._enter()
        try:
            while True:
                self._leave()
                self._enter()
                with self._change:
                    item, segment = self._next()
                    while item is None and self._live and not self._stop:
                        self._active -= 1
                        self._permit.notify()
                        self._change.wait(WAIT_S)
                        self._wait_for_permit()
                        item, segment = self._next()
                if item is None or self._stop:
                    return
                if segment is None:
                    self._own(item, buffer)
                else:
                    self._help(item, segment, buffer)
        except BaseException as problem:
            self._end(problem)
        finally:
            self._leave()

    def _end(self, problem):
        with self._change:
            self._stop = self._stop or problem
            self._change.notify_all()
            self._permit.notify_all()

    def _enter(self):
        """Wait until another thread may work."""
        with self._permit:
            self._wait_for_permit()

    def _wait_for_permit(self):
        while self._active >= min(self._allowed, self._threads) and not self._stop:
            self._permit.wait(WAIT_S)
        self._active += 1

    def _leave(self):
        with self._permit:
            self._active -= 1
            self._permit.notify()

    def _next(self):
        """The next thing to do: (item, None) to own, (item, segment) to copy ahead of its owner, or (None, None)."""
        while self._waiting:
            item = self._waiting.pop()
            if item.group not in self.failures:
                self._live.append(item)
                return item, None
        for item in sorted(self._live, key=lambda item: item.at * item.segment_bytes - item.size):
            if item.number is None or item.group in self.failures:
                continue
            for segment in range(item.at + 1, min(item.at + 1 + LEAD_SEGMENTS, item.count)):
                if item.states[segment] == TODO:
                    item.states[segment] = TAKEN
                    return item, segment
        return None, None

    def _over(self, item):
        return self._stop is not None or item.group in self.failures

    def _fail(self, item, problem):
        with self._change:
            self.failures.setdefault(item.group, problem)
            self._change.notify_all()

    def _own(self, item, buffer):
        done = False
        try:
            while not done:
                item.begin()
                if not self._hash(item, buffer):
                    break
                done = item.finish()
        except (OSError, ModelError) as problem:
            self._fail(item, problem)
        finally:
            with self._change:
                # Who copies a segment of it holds its descriptor.
                while TAKEN in item.states and not done:
                    self._change.wait(WAIT_S)
                self._live.remove(item)
                self._change.notify_all()
            if not done:
                problem = self.failures.get(item.group)
                full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
                item.give_up(keep=not isinstance(problem, Wrong) and not full)

    def _hash(self, item, buffer):
        """Copy what nobody else has taken, hash everything in its order; False where the item was given up."""
        sha = hashlib.sha256()
        for segment in range(item.count):
            with self._change:
                item.at = segment
                mine = item.states[segment] == TODO
                if mine:
                    item.states[segment] = TAKEN
                self._change.notify_all()
            if mine:
                try:
                    whole = self._copy(item, segment, buffer, sha)
                except BaseException:
                    item.states[segment] = TODO
                    raise
                item.states[segment] = DONE if whole else TODO
                if not whole:
                    return False
                item.wrote(segment)
            elif not self._follow(item, segment, buffer, sha):
                return False
            if segment + 1 < item.count:
                self._leave()
                self._enter()
        item.found = sha.hexdigest()
        return not self._over(item)

    def _help(self, item, segment, buffer):
        whole = False
        try:
            whole = self._copy(item, segment, buffer, None)
            if whole:
                item.wrote(segment)
        except (OSError, ModelError) as problem:
            self._fail(item, problem)
        finally:
            with self._change:
                item.states[segment] = DONE if whole else TODO
                self._change.notify_all()

    def _copy(self, item, segment, buffer, sha):
        """Bring a segment into the temporary file, and through the hash where there is one; False when given up."""
        position, end = item.span(segment)
        start = position
        reader = item.source.open(item.path, position, end)
        try:
            while position < end:
                if self._over(item):
                    return False
                count = reader.readinto(buffer[: min(len(buffer), end - position)])
                if not count:
                    raise ModelError(
                        "%s ends after %d of %d bytes: it was cut while it was copied; get it again"
                        % (item.source.where(item.path), position, item.size)
                    )
                if sha:
                    sha.update(buffer[:count])
                    item.hashed += count
                written = 0
                while written < count:
                    written += os.pwrite(item.number, buffer[written:count], position + written)
                position += count
                item.written[segment] = position - start
                if item.awaited == segment:
                    with self._change:
                        self._change.notify_all()
        except OSError as problem:
            if problem.filename is None:
                problem.filename = (
                    item.final if problem.errno in (errno.ENOSPC, errno.EDQUOT) else item.source.where(item.path)
                )
            raise
        finally:
            reader.close()
        return True

    def _follow(self, item, segment, buffer, sha):
        """Hash a segment from the temporary file, as far as somebody else has written it; False when given up."""
        position, end = item.span(segment)
        start = position
        while position < end:
            if self._over(item):
                return False
            ready = min(item.written[segment], end - start)
            if start + ready <= position:
                with self._change:
                    item.awaited = segment
                    if start + item.written[segment] <= position and item.states[segment] == TAKEN:
                        self._change.wait(WAIT_S)
                    elif item.states[segment] == TODO:
                        return False
                item.awaited = None
                continue
            count = os.preadv(item.number, [buffer[: min(len(buffer), start + ready - position)]], position)
            if not count:
                raise ModelError("%s is shorter than it was; run again" % item.final)
            sha.update(buffer[:count])
            item.hashed += count
            position += count
        with self._change:
            # Who wrote it still puts that down, with the file's descriptor.
            while item.states[segment] == TAKEN:
                self._change.wait(WAIT_S)
        return not self._over(item)


class Progress:
    """The file that tells how far the staging of one model is, replaced at most every half second."""

    def __init__(self, folder, model):
        self._path = os.path.join(folder, model.replace("/", "--") + ".json")
        self._row = {
            "schema": 1,
            "model": model,
            "pid": os.getpid(),
            "started_unix": round(time.time(), 3),
            "updated_unix": None,
            "bytes_total": 0,
            "bytes_done": 0,
            "files_total": 0,
            "files_done": 0,
            "rate_bytes_s": None,
            "eta_s": None,
            "state": "waiting",
            "message": None,
        }
        self._last, self._seen = None, []

    def tell(self, state, done=0, message=None, **more):
        """Write it; returns whether it could be written, and was due: a state that changes is always due."""
        now = time.monotonic()
        if self._last and state == self._row["state"] and now - self._last < WAIT_S:
            return False
        self._last = now
        self._seen = [(at, amount) for at, amount in self._seen if now - at <= 5] + [(now, done)]
        since, amount = self._seen[0]
        # Where a file is copied from its start again, less is done than was.
        rate = max(0.0, (done - amount) / (now - since)) if now > since else None
        self._row.update(more, state=state, bytes_done=done, message=message, updated_unix=round(time.time(), 3))
        self._row["rate_bytes_s"] = None if rate is None else round(rate)
        left = self._row["bytes_total"] - done
        self._row["eta_s"] = round(left / rate, 1) if state == "running" and rate else None
        try:
            replace_text(self._path, json.dumps(self._row) + "\n", sync=False)
        except OSError:
            return False
        return True


class Share:
    """How many stagings go on on this machine: each holds a lock on a file of its own as long as it lives."""

    def __init__(self, folder):
        self._folder, self._own, self._lock = folder, ".run-%d" % os.getpid(), None

    def __enter__(self):
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o755, exist_ok=True)
            self._lock = open(os.path.join(self._folder, self._own), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *_):
        if self._lock:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, self._own))
            self._lock.close()

    def runs(self):
        """At least 1, which is this one; what a killed one left is removed."""
        count = 1
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if not name.startswith(".run-") or name == self._own:
                    continue
                path = os.path.join(self._folder, name)
                with contextlib.suppress(OSError), open(path) as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        os.unlink(path)
                    except BlockingIOError:
                        count += 1
        return count


def threads_of(streams):
    """How many threads: as asked, or for 0 by the CPUs that this process may use."""
    if streams > 0:
        return streams
    return max(4, min(16, len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def locked(target, wait):
    """Keep other stagings of a model out; gives None, or the holder's text where one is at work and wait is false."""
    os.makedirs(target, mode=0o755, exist_ok=True)
    with open(os.path.join(target, LOCK_NAME), "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock.seek(0)
            yield lock.read().strip() or "unknown"
            return
        lock.seek(0)
        lock.truncate()
        lock.write("%d" % os.getpid())
        lock.flush()
        yield None
