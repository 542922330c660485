"""The module unit_files on files of this test, with a stand-in for systemctl."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

basic = pytest.importorskip("ansible.module_utils.basic")

SYSTEMCTL = """#!/bin/sh
# Keeps what is enabled and active as files of a folder; writes down what it is asked to do.
state={state}
verb=$1; shift
case $verb in
show)
    shift 2
    for unit; do
        echo "Id=$unit"
        echo "Result=success"
        [ -e "$state/stale" ] && echo NeedDaemonReload=yes
        [ -e "$state/active-$unit" ] && echo ActiveState=active || echo ActiveState=inactive
        [ -e "$state/enabled-$unit" ] && echo UnitFileState=enabled || echo UnitFileState=disabled
        echo
    done ;;
daemon-reload) rm -f "$state/stale"; echo "daemon-reload $*" >> "$state/log" ;;
enable) for unit; do : > "$state/enabled-$unit"; done; echo "enable $*" >> "$state/log" ;;
start)
    echo "start $*" >> "$state/log"
    [ -e "$state/broken" ] && {{ echo "Job for $1 failed." >&2; exit 1; }}
    : > "$state/active-$1" ;;
*) echo "$verb $*" >> "$state/log" ;;
esac
"""


@pytest.fixture
def host(tmp_path: Path, repository: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.unit_files")
    units, state, tools = tmp_path / "units", tmp_path / "state", tmp_path / "bin"
    for folder in (units, state, tools):
        folder.mkdir()
    monkeypatch.setattr(module, "UNIT_FOLDER", str(units))
    for name in ("systemctl", "mount", "journalctl"):
        script = SYSTEMCTL if name == "systemctl" else f'#!/bin/sh\necho "{name} $*" >> {{state}}/log\n'
        (tools / name).write_text(script.format(state=state))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def call(check: bool = False, **parameters: Any) -> dict[str, Any]:
        arguments = {"ANSIBLE_MODULE_ARGS": {"subject": "test", **parameters, "_ansible_check_mode": check}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    call.units, call.state = units, state
    return call


def log(host) -> list[str]:
    path = host.state / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_files_are_written_and_units_enabled_and_started_once(host):
    parameters = {
        "files": {str(host.units / "a.service"): "[Unit]"},
        "enabled": ["a.service"],
        "started": ["a.service"],
    }
    check = host(check=True, **parameters)
    assert check["changed"] is True
    assert list(host.units.iterdir()) == []
    assert log(host) == []

    done = host(**parameters)
    assert (host.units / "a.service").read_text() == "[Unit]\n"
    assert done["written"] == [str(host.units / "a.service")]
    assert log(host) == ["daemon-reload ", "enable a.service", "start a.service"]
    assert [row["after"] for row in done["diff"]] == [row["after"] for row in check["diff"]]

    again = host(**parameters)
    assert again["changed"] is False
    assert len(log(host)) == 3


def test_a_script_becomes_executable_and_a_lost_mode_is_healed(host, tmp_path):
    script, unit = tmp_path / "lib" / "tool", host.units / "x.service"
    parameters = {"files": {str(script): "#!/bin/sh\n", str(unit): "[Unit]\n"}, "enabled": ["x.service"]}
    host(**parameters)
    assert script.stat().st_mode & 0o777 == 0o755
    assert unit.stat().st_mode & 0o777 == 0o644
    script.chmod(0o600)
    assert host(**parameters)["changed"] is True
    assert script.stat().st_mode & 0o777 == 0o755
    # It is enabled for the next boot and not started now.
    assert "enable x.service" in log(host)
    assert not [line for line in log(host) if line.startswith("start")]
    assert host(**parameters)["changed"] is False


def test_a_unit_that_does_not_start_is_one_line(host):
    (host.state / "broken").write_text("")
    done = host(files={str(host.units / "a.service"): "[Unit]"}, started=["a.service"])
    assert done["failed"] is True
    assert "systemctl start a.service failed: Job for a.service failed." in done["msg"]
    assert "\n" not in done["msg"]


def test_a_full_disk_is_one_line_with_the_path_and_leaves_nothing(host, monkeypatch):
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.unit_files")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    path = host.units / "a.service"
    done = host(files={str(path): "[Unit]"}, enabled=["a.service"])
    assert done["failed"] is True
    assert done["msg"].startswith(f"{path} cannot be written: No space left on device; ")
    assert list(host.units.iterdir()) == []
    assert log(host) == []


def test_a_unit_that_was_written_and_never_read_is_read(host):
    path = host.units / "a.service"
    host(files={str(path): "[Unit]"}, enabled=["a.service"])
    (host.state / "log").unlink()
    (host.state / "stale").touch()
    done = host(files={str(path): "[Unit]"}, enabled=["a.service"])
    assert not done["changed"]
    assert log(host) == ["daemon-reload "]
