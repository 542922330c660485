"""Streams, folders and files that no command foresees: one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specrig.errors import UsageError
from specrig.model import read

LONG = "x" * 5000


def shell(command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``specrig`` in a shell that mistreats its streams."""
    script = f'specrig() {{ "{sys.executable}" -m specrig.cli "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("specrig --version >&-", 0),
        ("specrig --version <&- >&- 2>&-", 0),
        ("specrig explain - <&-", 2),
        ("specrig sim --list-faults | true; exit ${PIPESTATUS[0]}", 141),
        ("specrig --help >/dev/full", 1),
        ("specrig sim --list-faults >/dev/full", 1),
        (f"specrig report {LONG}", 2),
        (f"specrig compare {LONG} {LONG}", 2),
        (f"specrig plan {LONG} --tokenizer .", 2),
        (f"specrig budget --tokenizer {LONG} --max-tokens 1 --context-length 9 --prompt-file /etc/hostname", 2),
        ("specrig plan /dev/zero --tokenizer .", 2),
        ("specrig plan $'a\\xff\\xfe' --tokenizer .", 2),
        ("specrig explain $'a\\xff\\xfe'", 2),
    ],
)
def test_odd_streams_and_paths_end_in_one_line(command: str, code: int, tmp_path: Path) -> None:
    done = shell(command, tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (0 if code in (0, 141) else 1)


def test_no_file_of_ours_becomes_a_closed_standard_stream() -> None:
    code = "import os; from specrig.cli import main; main(['--version']); print(os.open('/etc/hostname', 0))"
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" <&-'], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout.split()[-1]) > 2


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_without_unicode_gets_replacements(settings: dict[str, str]) -> None:
    code = "from specrig import cli; cli._mend_streams(); print('5', chr(177), '1')"
    done = shell(f'"{sys.executable}" -c "{code}"', PYTHONCOERCECLOCALE="0", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 ? 1\n"


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    done = shell("mkdir gone; cd gone; rmdir ../gone; specrig recover", tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("the current folder is not there any more; change to one that is\n")


def test_a_device_as_a_sweep_ends(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no end after 1000000 bytes"):
        read.read_text(Path("/dev/zero"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["bash", "-c", f"printf 'a: 1' > {pipe}"])
    try:
        assert read.read_text(pipe) == "a: 1"
    finally:
        assert writer.wait(10) == 0
