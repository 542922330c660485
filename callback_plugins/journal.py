"""The journal of every run, and one screen at its end: what was found, what was changed, what serves where."""

from __future__ import annotations

DOCUMENTATION = r"""
name: journal
type: notification
author: specrig developers
short_description: append-only journal, and a summary of one screen
description:
  - Appends one JSON line per start, play, changed or failed task, gate, cell and end to the journal file.
  - Any result may carry C(specrig={found, changed, serving, gates, cells, notes}); these are collected over the whole
    run and shown once at its end.
  - A journal that cannot be written costs one warning line and never a play.
requirements:
  - enabled in C(callbacks_enabled) of ansible.cfg, or by C(ANSIBLE_CALLBACKS_ENABLED=specrig.host.journal)
options:
  journal_file:
    description:
      - Where the journal is appended to.
      - Left out, /var/log/specrig/journal.jsonl for root, else $XDG_STATE_HOME/specrig/journal.jsonl.
    type: str
    env:
      - name: SPECRIG_JOURNAL
    ini:
      - section: specrig
        key: journal
  reason:
    description: Why this run is made; the extra variable C(specrig_reason) wins.
    type: str
    env:
      - name: SPECRIG_REASON
    ini:
      - section: specrig
        key: reason
  summary_file:
    description: A file that gets the screen of the last run besides, for runs that nobody watches.
    type: str
    env:
      - name: SPECRIG_SUMMARY
    ini:
      - section: specrig
        key: summary
  run:
    description: The id of this run, when a driver has chosen one.
    type: str
    env:
      - name: SPECRIG_RUN
"""

import atexit
import contextlib
import ctypes
import datetime
import getpass
import json
import os
import re
import signal
import socket
import time
import uuid
from pathlib import Path

from ansible import context
from ansible.plugins.callback import CallbackBase
from ansible_collections.specrig.host.plugins.module_utils import criticalpath

SCHEMA = 1
# The callback of this run, for actions that journal while they work.
CURRENT = None
LINE_LIMIT = 1000
SECTIONS = ("found", "changed", "serving", "gates", "cells", "notes")
LISTED = 12
PR_SET_PDEATHSIG = 1
# Roles in the words of the summary; another role goes by its own name.
PARTS = {
    "gpu_host": "host",
    "lxc_guest": "guest",
    "model_store": "model store",
    "sglang_server": "servers",
    "preflight": "gates",
}


def journal_path(configured: str | None) -> Path:
    """Returns the journal's path by the rules of the option `journal_file`."""
    if configured:
        return Path(configured).expanduser()
    if os.geteuid() == 0:
        return Path("/var/log/specrig/journal.jsonl")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "specrig" / "journal.jsonl"


def one_line(text: object, limit: int = LINE_LIMIT) -> str:
    """Returns `text` on one line of at most `limit` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def append(path: Path, record: dict) -> None:
    """Appends one line by one write and syncs it; starts on a new line after one that a crash cut off."""
    data = (json.dumps(record, ensure_ascii=False, default=str) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(handle, data) != len(data):
            raise OSError(f"only a part of a line could be written to {path}")
        os.fsync(handle)
    finally:
        os.close(handle)


def version() -> str | None:
    """Returns the version of this collection, from the file that names it."""
    root = Path(__file__).resolve().parent.parent
    for candidate in (root, root.parent):
        with contextlib.suppress(OSError):
            match = re.search(r"^version:\s*(\S+)", (candidate / "galaxy.yml").read_text(), re.M)
            if match:
                return match.group(1)
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads((candidate / "MANIFEST.json").read_text())["collection_info"]["version"]
    return None


def part_of(task) -> str:
    """Returns what a task's time is put down to on the critical path: its role, else its name."""
    role = getattr(task, "_role", None)
    if role is None:
        return one_line(task.get_name(), 60)
    name = role.get_name().rpartition(".")[2]
    return PARTS.get(name, name)


def serving_line(row: dict) -> str:
    """Returns one line for one serving row; what is unknown says so."""

    def show(key: str) -> str:
        value = row.get(key)
        if value is None or value == []:
            return "unknown"
        if isinstance(value, (list, tuple)):
            return ",".join("unknown" if item is None else str(item) for item in value)
        return str(value)

    text = (
        f"{show('profile')}: GPU {show('gpus')} · NUMA node {show('numa_nodes')} · CPUs {show('cpus')}"
        f" · port {show('port')}"
    )
    if row.get("method"):
        text += f" · {row['method']}"
    if row.get("status"):
        text += f" · {row['status']}"
    if row.get("tokens_per_s") is not None:
        text += f" · {row['tokens_per_s']:g} tok/s"
    if row.get("note"):
        text += f" ({row['note']})"
    return one_line(text, 300)


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "specrig.host.journal"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._pid = os.getpid()
        self._ended = True
        self._broken = False
        self._interrupted = False
        self._begin("")
        atexit.register(self._at_exit)

    # what a run collects

    def _begin(self, playbook: str) -> None:
        self._playbook = playbook
        self._play = ""
        self._started = time.monotonic()
        self._collected = {name: [] for name in SECTIONS}
        self._failed = []
        self._host = None
        # The critical path: the tasks one after the other, and what went on beside them.
        self._line = []
        self._beside = []

    def v2_playbook_on_start(self, playbook):
        self._begin(Path(getattr(playbook, "_file_name", "") or "").name)
        self._file = journal_path(self.get_option("journal_file"))
        self._run = self.get_option("run") or str(uuid.uuid4())
        # The lock and the modules that a run starts name the same run.
        os.environ["SPECRIG_RUN"] = self._run
        self._reason = self._extra_var(playbook, "specrig_reason") or self.get_option("reason") or None
        self._by = f"{os.environ.get('SUDO_USER') or _user()}@{socket.gethostname()}"
        self._version = version()
        self._check = bool(context.CLIARGS.get("check", False))
        self._ended = False
        global CURRENT
        CURRENT = self
        self._watch_signals()
        self._end_with_the_driver()
        limits = {key: context.CLIARGS.get(key) for key in ("subset", "tags", "skip_tags")}
        self._write("start", "ok", **{key: value for key, value in limits.items() if value and value != ("all",)})

    @staticmethod
    def _extra_var(playbook, name):
        with contextlib.suppress(Exception):
            for play in playbook.get_plays():
                value = play.get_variable_manager().extra_vars.get(name)
                return str(value) if value else None
        return None

    def v2_playbook_on_play_start(self, play):
        self._play = one_line(play.get_name(), 200)
        self._write("play", "ok")

    def v2_runner_on_ok(self, result):
        self._result(result, "changed" if result.result.get("changed") else "ok")

    def v2_runner_on_failed(self, result, ignore_errors=False):
        self._result(result, "failed", ignored=bool(ignore_errors))

    def v2_runner_on_unreachable(self, result):
        self._result(result, "unreachable")

    def _result(self, result, outcome, ignored=False):
        with self._never_break_a_play():
            data = result.result
            host = result.host.get_name()
            hidden = bool(data.get("censored") or data.get("_ansible_no_log") or result.task.no_log is True)
            task = one_line(result.task_name, 200)
            parts = [] if hidden else [data, *(row for row in data.get("results") or [] if isinstance(row, dict))]
            told = self._collect(parts, host)
            where = str(getattr(result.task, "delegate_to", None) or host)
            for part in parts:
                self._note_beside(part, where)
            if outcome == "ok":
                return
            message = None if hidden else self._message(parts, outcome)
            extra = {"ignored": True} if ignored else {}
            if told:
                extra["changes"] = told
            self._write("task", outcome, host=host, task=task, message=message, **extra)
            if outcome == "changed" and not told:
                self._collected["changed"].append(f"{task} ({host})")
            if outcome in ("failed", "unreachable") and not ignored:
                message = message or "no message (hidden by no_log)"
                # A rescue that adds its words and fails again tells nothing new.
                if not any(earlier[2][:80] in message for earlier in self._failed):
                    self._failed.append((host, task, message, outcome))

    def _collect(self, parts, host):
        """Takes what results carry for the summary; returns the changes told in words."""
        told = []
        for part in parts:
            said = part.get("specrig")
            if not isinstance(said, dict):
                continue
            # Steps are for the journal; the screen shows what they came to.
            told += [one_line(row) for row in said.get("steps") or []]
            for name in SECTIONS:
                rows = said.get(name) or []
                for row in rows if isinstance(rows, list) else [rows]:
                    if name == "changed":
                        told.append(one_line(row))
                    if name == "serving":
                        # A later look at a profile replaces an earlier one; what was stopped serves nowhere.
                        key = (host, row.get("profile"))
                        kept = [old for old in self._collected[name] if old[0] != key]
                        self._collected[name] = kept if row.get("status") == "stopped" else [*kept, (key, row)]
                    elif row not in self._collected[name]:
                        self._collected[name].append(row if isinstance(row, dict) else one_line(row))
                    if name == "gates":
                        outcome = {"pass": "ok", "fail": "failed"}.get(row.get("status"), "unknown")
                        self._write("gate", outcome, host=host, **{k: v for k, v in row.items() if k != "host"})
                    elif name == "cells":
                        self._write("cell", str(row.get("outcome", "ok")), host=host, cell=row)
        return told

    @staticmethod
    def _message(parts, outcome):
        if outcome == "changed":
            return None
        for part in [*parts[1:], *parts[:1]]:
            if outcome == "failed" and not (part.get("failed") or len(parts) == 1):
                continue
            text = part.get("msg") or part.get("stderr") or part.get("module_stderr")
            if text:
                detail = part.get("stderr") or part.get("module_stderr")
                if part.get("msg") and detail and "non-zero return code" in str(part["msg"]):
                    text = detail
                return one_line(text)
        return one_line(parts[0].get("msg") or "no message")

    # the end

    def v2_playbook_on_stats(self, stats):
        with self._never_break_a_play():
            hosts = sorted(stats.processed)
            totals = {}
            for host in hosts:
                for key, value in stats.summarize(host).items():
                    totals[key] = totals.get(key, 0) + value
            bad = totals.get("failures", 0) + totals.get("unreachable", 0)
            if not hosts:
                why = "no host that it works on is in the inventory, or left by --limit"
                self._failed.append(("nobody", "nothing was done", why, "failed"))
            outcome = "failed" if bad or not hosts else "changed" if totals.get("changed") else "ok"
            seconds = round(time.monotonic() - self._started, 1)
            found = self._collected["found"]
            path_lines, path = self._path(seconds) if self._beside and not self._check else ([], None)
            if path:
                self._write("path", "ok", **path)
            self._end(outcome, seconds=seconds, changed=totals.get("changed", 0), hosts=hosts, found=found)
            # A benchmark starts servers by the dozen, and a failure has its own lines: the journal has their paths.
            if self._collected["cells"] or outcome == "failed":
                path_lines = []
            lines = self._summary(outcome, seconds, totals.get("changed", 0), path_lines)
            for line in lines:
                self._display.display(line)
            if self.get_option("summary_file"):
                self._keep(Path(self.get_option("summary_file")).expanduser(), lines)

    def _end(self, outcome, **extra):
        if not self._ended:
            self._ended = True
            self._write("end", outcome, **extra)

    def _at_exit(self):
        if os.getpid() == self._pid and not self._ended:
            with contextlib.suppress(Exception):
                self._end("aborted", seconds=round(time.monotonic() - self._started, 1))

    @staticmethod
    def _end_with_the_driver():
        """A driver that is killed outright passes nothing on; the kernel does, else this play went on for nobody."""
        driver = os.environ.get("SPECRIG_DRIVER")
        if driver != str(os.getppid()):
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if driver != str(os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch_signals(self):
        """Puts the journal in front of Ansible's own handlers, which go on doing what they do.

        A process that SIGTERM ends runs nothing at exit, so the end is written first. The KeyboardInterrupt of a Ctrl-C
        that arrives inside a fork or a finalizer is dropped by Python; it is raised again at the next event.
        """

        def terminated(number, frame):
            self._at_exit()
            before[number](number, frame)

        def interrupted(number, frame):
            self._interrupted = True
            before[number](number, frame)

        before = {}
        with contextlib.suppress(ValueError):  # not the main thread
            for number, handler in ((signal.SIGTERM, terminated), (signal.SIGINT, interrupted)):
                before[number] = signal.getsignal(number)
                if callable(before[number]):
                    signal.signal(number, handler)

    def v2_playbook_on_task_start(self, task, is_conditional):  # noqa: ARG002
        if self._interrupted:
            raise KeyboardInterrupt
        with self._never_break_a_play():
            self._line.append(
                {"name": part_of(task), "task": one_line(task.get_name(), 200), "start": time.monotonic()}
            )

    # the critical path

    def _note_beside(self, part, host):
        """Keeps what a result says of things that went on beside the tasks, in this process's own time.

        Clocks differ between machines, so the moments are taken as so long before the result, which just came.
        """
        said = part.get("specrig")
        rows = said.get("chain") if isinstance(said, dict) else None
        if not rows or not self._line:
            return
        offset = time.monotonic() - said["clock_unix"]
        for row in rows:
            start = row["started_unix"] + offset
            about = {key: row.get(key) for key in ("name", "detail", "kind", "at_most")}
            self._beside.append(
                {
                    **about,
                    "host": host,
                    "start": start,
                    "end": start + row["seconds"],
                    "task": len(self._line) - 1,
                    "after": row.get("after") or [],
                }
            )

    def _path(self, wall):
        """(lines for the screen, what the journal keeps) of the critical path; nothing where nothing was waited for."""
        if not self._beside or not self._line:
            return [], None
        now = time.monotonic()
        line = [{"name": "start", "task": None, "start": self._started, "end": self._line[0]["start"]}]
        ends = [task["start"] for task in self._line[1:]] + [now]
        line += [{**task, "end": end} for task, end in zip(self._line, ends, strict=True)]
        rows = [{**row, "task": row["task"] + 1} for row in self._beside]
        several = len({row["host"] for row in rows if row["kind"] != "model"}) > 1
        for row in rows:
            if several and row["kind"] != "model":
                row["name"] = f"{row['host']} {row['name']}"
        return criticalpath.told(line, rows, wall)

    def _summary(self, outcome, seconds, changed, path=()):
        word = {"failed": "FAILED", "changed": "done", "ok": "done, nothing to change"}[outcome]
        mode = " (check mode: nothing was changed)" if self._check else ""
        head = f"{self._playbook or 'run'}: {word}{mode} · changed={changed} · {seconds:.1f} s"
        lines = ["", head, "=" * min(len(head), 100)]
        rows = self._collected
        lines += _section("found", [str(row) for row in rows["found"]])
        lines += _section("would change" if self._check else "changed", [str(row) for row in rows["changed"]])
        lines += _section("serving", [serving_line(row) for key, row in rows["serving"]])
        lines += _section("cells", _cell_lines(rows["cells"]))
        gates = rows["gates"]
        open_gates = [row for row in gates if row.get("status") != "pass"]
        lines += _section("gates not passed", [_gate_line(row) for row in open_gates])
        if gates and not open_gates:
            lines.append(f"gates      all {len(gates)} passed")
        lines += _section("notes", [str(row) for row in rows["notes"]])
        lines += _section("critical path", list(path))
        lines += _section("failed", [_failure(*row) for row in self._failed])
        lines.append(f"journal    {self._file if not self._broken else 'not written'} · run {self._run}")
        return lines

    # writing

    def write(self, event, outcome, **extra):
        """Appends an event for an action, which calls this in the fork that it runs in."""
        with self._never_break_a_play():
            self._write(event, outcome, **extra)

    def _keep(self, path, lines):
        """Replaces the summary file; what cannot be written costs a warning."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text("\n".join([f"at {now}", *lines]) + "\n", encoding="utf-8")
            scratch.replace(path)
        except OSError as problem:
            self._display.warning(f"the summary {path} could not be written ({problem.strerror or problem})")

    def _write(self, event, outcome, **extra):
        now = datetime.datetime.now(datetime.UTC)
        record = {
            "schema": SCHEMA,
            "at": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "run": self._run,
            "event": event,
            "playbook": self._playbook,
            "play": self._play or None,
            "host": None,
            "task": None,
            "outcome": outcome,
            "reason": self._reason,
            "by": self._by,
            "version": self._version,
            "check": self._check,
        }
        record.update(extra)
        try:
            append(self._file, record)
        except OSError as problem:
            if not self._broken:
                self._broken = True
                self._display.warning(
                    f"the journal {self._file} could not be written ({problem.strerror or problem}):"
                    " the play goes on without it; set SPECRIG_JOURNAL to a file you may write"
                )

    @contextlib.contextmanager
    def _never_break_a_play(self):
        try:
            yield
        except Exception as problem:
            self._display.warning(one_line(f"the journal left something out: {type(problem).__name__}: {problem}"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _section(title, items):
    if not items:
        return []
    lines = [f"{title if i == 0 else '':<10} {item}" for i, item in enumerate(items[:LISTED])]
    if len(title) > 10:
        lines = [title, *(f"{'':<10} {item}" for item in items[:LISTED])]
    if len(items) > LISTED:
        lines.append(f"{'':<10} … and {len(items) - LISTED} more, in the journal")
    return lines


def _gate_line(row):
    subject = row.get("subject") or row.get("profile") or ""
    return one_line(f"{row.get('gate')} {subject}: {row.get('status')}: {row.get('message')}", 400)


def _cell_lines(rows):
    """How many ended how, then each that is not done."""
    states = [row.get("state", row.get("outcome")) for row in rows]
    if not rows:
        return []
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=str))
    return [counts, *(_cell_line(row) for row, state in zip(rows, states, strict=True) if state != "done")]


def _cell_line(row):
    state = row.get("state", row.get("outcome"))
    return one_line(f"{row.get('cell')} {row.get('profile', '')}: {state} {row.get('reason') or ''}", 200)


def _failure(host, task, message, outcome):
    return one_line(f"{host}: {task}: {'UNREACHABLE: ' if outcome == 'unreachable' else ''}{message}", 500)
