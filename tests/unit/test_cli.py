"""The command table: fast, complete, and one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specrig import __version__, cli
from specrig.errors import GateError, UsageError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specrig.cli", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "0 ok, 1 a gate" in done.stdout


def test_help_takes_less_than_the_limit() -> None:
    best = min(_seconds("--help") for _ in range(3))
    assert best < 0.3


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from specrig.cli import main; main(['--help']); "
        "heavy = ('pandas', 'numpy', 'transformers', 'ansible', 'tokenizers', 'httpx', 'msgspec'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_and_loads_nothing_heavy_for_it(name: str) -> None:
    code = (
        f"import sys\nfrom specrig.cli import main\ntry:\n    main([{name!r}, '--help'])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\n"
        "print([m for m in ('pandas', 'transformers', 'ansible', 'tokenizers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    if name not in ("lab", "runs", "sim"):
        assert "--json" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"specrig {__version__}\n"


def test_an_unknown_command_gets_one_line_and_the_nearest_name() -> None:
    done = run("recovre")
    assert done.returncode == 2
    assert done.stderr == "specrig: no command 'recovre'; did you mean 'recover'?\n"


def test_no_command_is_bad_input() -> None:
    assert run().returncode == 2


def test_an_unknown_option_gets_one_line() -> None:
    done = run("recover", "--nope")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--nope" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("saw x"), 2), (GateError("gate"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_end_with_one_line_and_their_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    import specrig.ops.runs_cli

    def fails(_: object) -> int:
        raise error

    monkeypatch.setattr(specrig.ops.runs_cli, "run", fails)
    assert cli.main(["runs", "list"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("specrig runs: ")


@pytest.mark.parametrize("name", ["quick", "nightly", "full"])
def test_a_shipped_sweep_is_planned_by_its_name(
    name: str, repository: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = str(repository / "inventory" / "lab" / "group_vars" / "all.yml")
    assert cli.main(["plan", name, "--tokenizer", str(tokenizer_dir), "--profiles", profiles, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["sweep"] == name
    assert planned["infeasible"] == []
