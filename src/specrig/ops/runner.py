"""Drive a playbook of the collection through ansible-runner, live on the terminal, from a checkout or a wheel.

The playbook is the same file that ``ansible-playbook`` takes, and so is what it does. This module only finds it,
gives Ansible the same settings in both kinds of installation, listens to the results, and turns the first Ctrl-C into
an orderly end of the play.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from specrig.errors import UsageError
from specrig.facts import stageprogress
from specrig.ops.bundle import checkout

_GRACE_S = 20.0


@dataclass
class PlayResult:
    """What a playbook run came to.

    Attributes:
        rc: ansible-playbook's exit code (0 ok, 2 a task failed, 4 unreachable).
        interrupted: whether Ctrl-C or SIGTERM ended it.
        changed: hosts' changed tasks, added up; None where the play did not get to its end.
        specrig: what tasks reported under ``specrig``, lists of each kind put together in order.
        results: full results of tasks that carry a ``specrig`` report, by task name.
        failures: one line per failed task: host, task, message.
        seconds: wall time.
    """

    rc: int = 1
    interrupted: bool = False
    changed: int | None = None
    specrig: dict[str, list[Any]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def collection_root() -> Path:
    """The folder that holds playbooks/, roles/ and inventory/: the checkout, or the installed collection."""
    root = checkout()
    if root is not None:
        return root
    for place in (Path(__file__).resolve().parents[2], Path(sysconfig.get_path("purelib"))):
        candidate = place / "ansible_collections" / "specrig" / "host"
        if (candidate / "playbooks").is_dir():
            return candidate
    raise UsageError("the collection specrig.host is not beside the package; reinstall specrig from its wheel")


def inventory_path(given: str | None) -> Path:
    """Resolve ``-i``: a path, the name of an embedded inventory, or the embedded lab by default.

    Raises:
        UsageError: neither a path nor an embedded inventory.
    """
    embedded = collection_root() / "inventory"
    if given is None:
        return embedded / "lab"
    path = Path(given)
    if path.exists():
        return path.resolve()
    if "/" not in given and (embedded / given).is_dir():
        return embedded / given
    names = ", ".join(sorted(entry.name for entry in embedded.iterdir() if entry.is_dir()))
    raise UsageError(
        f"inventory {given!r} is not a path here and not an embedded one ({names}); give the path of yours"
    )


def environment() -> dict[str, str]:
    """Settings that make ansible-playbook find the collection and write the journal, wherever it is started."""
    root = collection_root()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    settings = {
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(root / ".collections" if checkout() else root.parents[2]),
        "ANSIBLE_CALLBACKS_ENABLED": "specrig.host.journal",
        # Its child ends when it does, also by kill -9.
        "SPECRIG_DRIVER": str(os.getpid()),
        # It writes to a terminal of ansible-runner's, whatever this process writes to.
        # Said in a line of our own, with the exit code of bad input:
        "ANSIBLE_HOST_PATTERN_MISMATCH": "warning",
        "ANSIBLE_INVENTORY_UNPARSED_FAILED": "False",
        "ANSIBLE_FORCE_COLOR" if colour else "ANSIBLE_NOCOLOR": "1",
        # A line that writes over the one before may come more often.
        "SPECRIG_REDRAW": "1" if sys.stdout.isatty() else "0",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    return {**settings, **{name: os.environ[name] for name in ("ANSIBLE_CONFIG",) if name in os.environ}}


def run_playbook(
    playbook: str,
    inventory: Path,
    extra: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    *,
    quiet: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> PlayResult:
    """Run one of the collection's playbooks.

    Args:
        playbook: its name without ``.yml``.
        inventory: path of the inventory.
        extra: extra variables, passed in a file of mode 0600 that is gone afterwards.
        arguments: more arguments of ansible-playbook, such as ``--check``.
        quiet: show nothing of Ansible's output (for ``--json``).
        on_event: called with each of ansible-runner's events.

    Returns:
        The outcome; a failed play is not an exception.

    Raises:
        UsageError: no such playbook, or ansible-runner is not installed.
    """
    path = collection_root() / "playbooks" / f"{playbook}.yml"
    if not path.is_file():
        raise UsageError(f"no playbook {playbook!r} in {path.parent}")
    try:
        import ansible_runner
    except ImportError:
        raise UsageError("ansible-runner is not installed here; install specrig[ops]") from None
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise UsageError("the current folder is not there any more; change to one that is") from None
    result = PlayResult()
    nobody: list[bool] = []
    started = time.monotonic()
    screen = None if quiet else Screen(sys.stdout)

    def handle(event: dict[str, Any]) -> bool:
        _collect(event, result)
        if screen is not None:
            screen.show(event)
        if event.get("event") == "playbook_on_stats":
            nobody.append(not (event.get("event_data") or {}).get("processed"))
        if on_event is not None:
            on_event(event)
        return False  # nothing is kept on disk: a result may hold what no_log hid elsewhere

    with tempfile.TemporaryDirectory(prefix="specrig-") as scratch, _Interrupts() as interrupts:
        runner = ansible_runner.run(
            private_data_dir=scratch,
            project_dir=here,
            playbook=str(path),
            inventory=str(inventory),
            extravars=dict(extra or {}),
            cmdline=_quote(arguments),
            envvars=environment(),
            quiet=True,
            event_handler=handle,
            cancel_callback=interrupts.overdue,
            settings={"suppress_env_files": False, "pexpect_timeout": 1},
        )
        result.interrupted = interrupts.count > 0
    if screen is not None:
        screen.end()
    if any(nobody) and not result.failures and not result.interrupted:
        # Ansible calls a play without hosts a success; a recovery of nothing is none.
        raise UsageError(
            f"{inventory}: names no host that {playbook} works on, so nothing was done; expected hosts in the groups "
            "gpu_hosts and gpu_guests, and a --limit that keeps them"
        )
    result.rc = int(runner.rc if runner.rc is not None else 1)
    if result.interrupted and result.rc == 0:
        result.interrupted = False
    result.seconds = time.monotonic() - started
    return result


class Screen:
    """Shows what ansible-playbook prints, as it prints it, with plain line ends.

    On a terminal a line of progress writes over the one before, as long as nothing else comes.
    """

    def __init__(self, out: TextIO, redraw: bool | None = None, columns: int | None = None) -> None:
        self._out = out
        self._redraw = out.isatty() if redraw is None else redraw
        self._columns = columns
        self._open = False

    def show(self, event: Mapping[str, Any]) -> None:
        """Print one of ansible-runner's events; some print nothing, some several lines."""
        text = event.get("stdout")
        if text is None or not (text or event.get("event") == "verbose"):
            return
        for line in str(text).replace("\r\n", "\n").split("\n"):
            self._line(line.rstrip("\r"))
        self._out.flush()

    def end(self) -> None:
        """Leave the terminal at the start of a line."""
        if self._open:
            self._open = False
            self._out.write("\n")
            self._out.flush()

    def _line(self, line: str) -> None:
        if self._redraw and stageprogress.LINE.match(line):
            # One that the terminal breaks into two could not be written over.
            width = (self._columns or shutil.get_terminal_size().columns) - 1
            self._out.write("\r\x1b[K" + (line if len(line) <= width else line[: width - 1] + "…"))
            self._open = True
            return
        self._out.write(("\r\x1b[K" if self._open else "") + line + "\n")
        self._open = False


def _quote(arguments: Sequence[str]) -> str:
    import shlex

    return shlex.join(arguments)


def _collect(event: dict[str, Any], result: PlayResult) -> None:
    data = event.get("event_data") or {}
    kind = event.get("event", "")
    if kind == "playbook_on_stats":
        result.changed = sum((data.get("changed") or {}).values())
        return
    if kind not in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable", "runner_item_on_ok"):
        return
    outcome = data.get("res") or {}
    report = outcome.get("specrig")
    if isinstance(report, dict):
        for name, rows in report.items():
            if isinstance(rows, list):
                result.specrig.setdefault(name, []).extend(rows)
        result.results[str(data.get("task", ""))] = outcome
    if kind not in ("runner_on_ok", "runner_item_on_ok") and not data.get("ignore_errors"):
        message = " ".join(str(outcome.get("msg", "no message")).split())
        result.failures.append(f"{data.get('host', '?')}: {data.get('task', '?')}: {message}")


class _Interrupts:
    """Pass Ctrl-C on to ansible-playbook once, wait for its orderly end, and end it hard only after that."""

    def __init__(self) -> None:
        self.count = 0
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._deadline = 0.0
            return
        self._deadline = time.monotonic() + _GRACE_S
        for child in _children():
            try:
                os.kill(child, signal.SIGINT)
            except ProcessLookupError:
                continue


def _children() -> list[int]:
    """Process ids of this process's children that run ansible-playbook."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return [pid for pid in found if b"ansible-playbook" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
