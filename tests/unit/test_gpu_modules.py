"""The modules gpu_settings, host_look and driver_nodes as Ansible runs them, with an nvidia-smi of this test."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

basic = pytest.importorskip("ansible.module_utils.basic")
MODULES = "ansible_collections.specrig.host.plugins.modules."
# Keeps what is set in a file, a line per GPU: persistence, then watts. It rounds down to a whole watt, as a driver may.
SMI = r"""#!/bin/sh
state=$(dirname "$0")/state
echo "$*" >>"$state.calls"
set_column() { # column, value, GPUs
    awk -v c="$1" -v v="$2" -v ids=",$3," 'index(ids, ",GPU-" (NR - 1) ",") {$c = v} {print}' "$state" >"$state.new"
    mv "$state.new" "$state"
}
case "$*" in
*--query-gpu*)
    echo "index, uuid, pci.bus_id, persistence_mode, power.limit [W]"
    n=0
    while read -r mode watts; do
        echo "$n, GPU-$n, 00000000:0$n:00.0, $mode, $watts W"
        n=$((n + 1))
    done <"$state" ;;
*-pm*) [ -e "$state.virtual" ] && { echo "Unable to set persistence mode: Not Supported"; exit 3; }
    set_column 1 Enabled "$2" ;;
*-pl*) [ -e "$state.deaf" ] || set_column 2 "${4%.*}.00" "$2" ;;
*-lgc*) [ -e "$state.old" ] && { echo "Setting locked GPU clocks is not supported for GPU 0."; exit 3; } ;;
esac
exit 0
"""


@pytest.fixture
def box(run, tmp_path: Path, monkeypatch):
    """Three GPUs without persistence at 600 W, and where clock locks are recorded."""
    settings = importlib.import_module("ansible_collections.specrig.host.plugins.module_utils.gpusettings")
    monkeypatch.setattr(settings, "RECORD", str(tmp_path / "run" / "gpu-clocks"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "state").write_text("Disabled 600.00\n" * 3)
    return tmp_path


def seen(run, **asked: Any) -> dict[str, Any]:
    return run("host_look", guests=[], settings={"persistence": True, **asked})


def test_settings_are_put_back_once_and_check_mode_tells_it_exactly(run, box):
    asked = {"power_limit_w": {"all": 450.7, "1": 400}, "lock_clocks_mhz": [1200, 1800]}
    first = seen(run, **asked)
    assert first["changed"] is False
    assert [(row["gpu"], row["setting"]) for row in first["settings_due"]] == [
        *((gpu, "persistence") for gpu in range(3)),
        *((gpu, "power_limit_w") for gpu in range(3)),
        *((gpu, "lock_clocks_mhz") for gpu in range(3)),
    ]
    told = run("gpu_settings", check=True, gpus=first["look"]["gpus"], **asked)
    assert told["changed"] is True
    assert (box / "state").read_text() == "Disabled 600.00\n" * 3
    assert not (box / "run").exists()

    done = run("gpu_settings", gpus=first["look"]["gpus"], **asked)
    assert done["changed"] is True
    assert done["diff"] == told["diff"]
    assert "GPU 1: power limit 400 W\n" in done["diff"]["after"]
    assert done["specrig"]["changed"] == [
        "GPU 0-2: persistence on",
        "GPU 0,2: power limit 450.7 W",
        "GPU 1: power limit 400 W",
        "GPU 0-2: clocks locked to 1200-1800 MHz",
    ]
    assert (box / "state").read_text().split() == ["Enabled", "450.00", "Enabled", "400.00", "Enabled", "450.00"]

    again = seen(run, **asked)
    assert again["settings_due"] == []
    assert [gpu["clock_lock_mhz"] for gpu in again["look"]["gpus"]] == [[1200, 1800]] * 3
    calls = (box / "state.calls").read_text()
    assert run("gpu_settings", gpus=again["look"]["gpus"], **asked)["changed"] is False
    assert (box / "state.calls").read_text() == calls, "nothing to set, nothing is asked"


def test_one_gpu_that_lost_its_limit_is_the_only_one_that_is_set(run, box):
    (box / "state").write_text("Enabled 450.00\nEnabled 600.00\nEnabled 450.00\n")
    facts = seen(run, power_limit_w=450)
    run("gpu_settings", gpus=facts["look"]["gpus"], power_limit_w=450)
    assert [line for line in (box / "state.calls").read_text().split("\n") if "-pl" in line] == ["-i GPU-1 -pl 450"]


def test_a_limit_that_does_not_take_is_a_failure(run, box):
    (box / "state.deaf").touch()
    facts = seen(run, power_limit_w=450)
    told = run("gpu_settings", gpus=facts["look"]["gpus"], power_limit_w=450)
    assert told["failed"] is True
    assert (
        told["msg"] == "GPU 0: power limit 450 W was set and power limit 600 W is read back; see nvidia-smi -q -d POWER"
    )


def test_a_card_without_persistence_does_not_stop_a_recovery_that_needs_none(run, box):
    (box / "state.virtual").touch()
    facts = seen(run)
    told = run("gpu_settings", gpus=facts["look"]["gpus"])
    assert told["changed"] is False
    assert told["specrig"]["notes"] == [
        "GPU 0-2: persistence could not be turned on: Unable to set persistence mode: Not Supported"
    ]
    assert run("gpu_settings", gpus=facts["look"]["gpus"], power_limit_w=450)["failed"] is True


def test_a_lock_that_a_card_does_not_take_says_so_and_is_not_recorded(run, box):
    (box / "state.old").touch()
    facts = seen(run, lock_clocks_mhz=1800)
    told = run("gpu_settings", gpus=facts["look"]["gpus"], lock_clocks_mhz=1800)
    assert told["failed"] is True
    assert "GPU 0-2: clocks locked to 1800-1800 MHz could not be set: Setting locked GPU clocks is not" in told["msg"]
    assert not (box / "run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"power_limit_w": "much"}, "gpu_host_power_limit_w is 'much'"),
        ({"watts": 3}, "settings has watts; expected persistence, power_limit_w, lock_clocks_mhz"),
        ({"persistence": False, "power_limit_w": 450}, "hold with persistence mode only"),
    ],
)
def test_a_wrong_inventory_is_one_line(run, box, settings, words):
    told = run("host_look", guests=[], settings={"persistence": True, **settings})
    assert told["failed"] is True
    assert words in told["msg"]
    assert "\n" not in told["msg"]


def test_a_kernel_without_the_module_fails_in_one_line(run, tmp_path, monkeypatch):
    module = importlib.import_module(MODULES + "driver_nodes")
    monkeypatch.setattr(module, "read_majors", lambda: dict.fromkeys(("nvidia", "nvidia-uvm", "nvidia-caps")))
    monkeypatch.setattr(module.probe, "module_kernels", lambda: ["1.0-old"])
    for name in ("modprobe", "nvidia-modprobe"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'modprobe: FATAL: Module nvidia not found in directory /lib/modules/x' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(basic.AnsibleModule, "get_bin_path", lambda _self, name, **_: str(tmp_path / name))
    told = run("driver_nodes")
    assert told["failed"] is True
    assert told["msg"].startswith("the module nvidia does not load: kernel ")
    assert "has no module of it (DKMS did not build one): there is one for 1.0-old; see 'dkms status'" in told["msg"]
    assert "\n" not in told["msg"]
    assert run("driver_nodes", check=True)["specrig"]["changed"] == [
        "would load nvidia; its major and nodes are unknown until loaded",
        "would load nvidia-uvm; its major and nodes are unknown until loaded",
    ]


def test_a_stuck_driver_fails_in_one_line(run, monkeypatch):
    module = importlib.import_module(MODULES + "driver_nodes")
    monkeypatch.setattr(module, "read_majors", lambda: {"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": None})
    monkeypatch.setattr(
        module.probe,
        "guarded_texts",
        lambda _paths, limit: ({}, f"the driver's files did not answer within {limit:g} s"),
    )
    told = run("driver_nodes", timeout=7)
    assert told["msg"] == (
        "the driver's files did not answer within 7 s: it is stuck; see dmesg for Xid and reboot the host"
    )
