"""The lab itself: bare containers, real device rules, the recorded box, reboots, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specrig.ops.lab import lifecycle, network, state
from specrig.ops.lab.model import DEFAULT_SIZE_MB

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.lab

PROBE = """
import errno, os, sys
try:
    os.close(os.open(sys.argv[1], os.O_RDWR))
    print('opened')
except OSError as error:
    print(errno.errorcode[error.errno])
"""
HOLD = """
import os, sys, time
os.open(sys.argv[1], os.O_PATH)
print('holding', flush=True)
time.sleep(60)
"""


def in_python(program: str, *words: str) -> str:
    """The shell command that runs a Python program with arguments."""
    return shlex.join(["python3", "-c", program, *words])


def uvm_major(lab: Lab) -> int:
    """The major that the host's /proc/devices gives nvidia-uvm."""
    found = re.findall(r"^ *(\d+) nvidia-uvm$", lab.host("cat /proc/devices", check=True).stdout, re.MULTILINE)
    assert len(found) == 1
    return int(found[0])


@pytest.fixture(autouse=True, scope="module")
def _bare_again(lab: Lab) -> Iterator[None]:
    """Leave the lab bare to the modules that come after this one."""
    yield
    lab.bare()


@pytest.fixture
def second_name() -> Iterator[str]:
    """A name for one more lab, which is removed after the test."""
    name = f"{state.default_name()}-2"
    yield name
    lifecycle.down(name, lambda _line: None)


def test_both_are_bare_and_settled(lab: Lab) -> None:
    lab.bare()
    for reach in (lab.host, lab.guest):
        assert reach("systemctl is-system-running").stdout.strip() == "running"
        assert reach("python3 -c 'import sys; print(sys.version_info >= (3, 8))'").stdout.strip() == "True"
        for path in ("/opt/specrig", "/etc/specrig", "/var/lib/specrig", "/etc/systemd/system/specrig-sglang@.service"):
            assert reach(f"test ! -e {path}").returncode == 0, path
        assert reach("id specrig").returncode != 0
    assert lab.guest("ls /dev").stdout.count("nvidia") == 0
    assert "nvidia" not in lab.host("grep -v '^lxc.mount' /var/lib/lxc/gpu/config", check=True).stdout


def test_the_box_answers_as_recorded(lab: Lab, samples: Path) -> None:
    topo = (samples / "topo/01_rtxpro6000_8gpu_2numa_ansi_tabs.txt").read_text()
    assert lab.host("nvidia-smi topo -m", check=True).stdout == topo
    csv = lab.host(
        "nvidia-smi --query-gpu=index,uuid,pci.bus_id,name,memory.total,memory.used --format=csv", check=True
    )
    assert csv.stdout == (samples / "smi/02_csv_index_uuid_bus_DERIVED_from_01.csv").read_text()

    def told(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if not line.startswith("Timestamp")]
        return [line for line in lines if not re.match(r"    Processes +: None", line)]

    recorded = (samples / "smi/01_q_rtxpro6000_8gpu_minor_ne_index_excerpt.txt").read_text()
    lab.host("nvidia-smi -pm 1", check=True)  # as it was when this was recorded
    assert told(lab.host("nvidia-smi -q", check=True).stdout) == told(recorded)
    assert lab.host("nvidia-smi -L", check=True).stdout.splitlines()[7] == (
        "GPU 7: NVIDIA RTX PRO 6000 Blackwell Server Edition (UUID: GPU-56d53c23-9ee5-68ed-1272-67429de58e29)"
    )


def test_one_unknown_field_fails_the_whole_query(lab: Lab) -> None:
    done = lab.host("nvidia-smi --query-gpu=index,minor_number --format=csv")
    assert done.returncode != 0
    assert "0000:06" not in done.stdout
    assert 'Field "minor_number" is not a valid field to query.' in done.stdout


def test_sysfs_tells_the_nodes_in_host_and_guest(lab: Lab, samples: Path) -> None:
    recorded = (samples / "numa/05_sysfs_gpu_numa_map_rtxpro6000.txt").read_text()
    command = "for f in /sys/bus/pci/devices/*/numa_node; do echo $f $(cat $f); done"
    minors = {"06": 2, "07": 3, "75": 0, "76": 1, "84": 6, "85": 7, "f4": 4, "f5": 5}
    for reach in (lab.host, lab.guest):
        assert reach(command, check=True).stdout == recorded
        lines = reach("cat /sys/devices/system/node/node*/cpulist", check=True).stdout.split("\n")
        assert len([line for line in lines if line]) == min(2, os.cpu_count() or 1)
        for bus, minor in minors.items():
            text = reach(f"cat /proc/driver/nvidia/gpus/0000:{bus}:00.0/information", check=True).stdout
            assert re.search(rf"^Device Minor: \t {minor}$", text, re.MULTILINE)


def test_a_device_rule_is_real_and_can_be_given_live(lab: Lab) -> None:
    lab.bare()
    major = uvm_major(lab)
    lab.guest(f"mknod -m 666 /root/probe c {major} 0", check=True)
    assert lab.guest(in_python(PROBE, "/root/probe")).stdout == "EPERM\n"
    lab.host(f"lxc-cgroup -n gpu devices.allow 'c {major}:* rwm'", check=True)
    assert lab.guest(in_python(PROBE, "/root/probe")).stdout == "ENXIO\n"


def test_a_process_is_on_the_gpu_whose_node_it_opened(lab: Lab) -> None:
    """Minor 2 is GPU 0 and minor 0 is GPU 2 on this box: the node counts, not the number in its name."""
    query = "nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv,noheader,nounits"
    assert lab.host(query, check=True).stdout == ""
    line = lifecycle.ssh_command(lab.state, in_python(HOLD, "/dev/nvidia2"))
    with subprocess.Popen(line, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        bus, pid, used = lab.host(query, check=True).stdout.strip().split(", ")
        assert bus == "00000000:06:00.0"
        assert "time.sleep" in lab.host(f"tr '\\0' ' ' < /proc/{pid}/cmdline").stdout
        memory = lab.host("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits", check=True).stdout.split()
        assert memory == [used, "0", "0", "0", "0", "0", "0", "0"]
        assert int(used) > 0
        lab.host(f"kill {pid}", check=True)
    assert lab.host(query, check=True).stdout == ""


def test_reboot_moves_the_major_and_loses_what_is_in_memory(lab: Lab) -> None:
    lab.bare()
    old = uvm_major(lab)
    rules = f"lxc.cgroup2.devices.allow = c {old}:* rwm\nlxc.cgroup2.devices.allow = c 195:* rwm\n"
    nodes = "".join(
        f"lxc.mount.entry = /dev/{node} dev/{node} none bind,optional,create=file 0 0\n"
        for node in ("nvidia-uvm", "nvidiactl")
    )
    lab.host(f"printf %s {shlex.quote(rules + nodes)} >> /var/lib/lxc/gpu/config", check=True)
    lab.host(
        "mkdir -p /srv/ram && mount -t tmpfs tmpfs /srv/ram && touch /srv/ram/x /dev/shm/x /run/x /root/kept",
        check=True,
    )
    lab.reboot()
    new = uvm_major(lab)
    assert new != old
    assert lab.host("ls /srv/ram/x /dev/shm/x /run/x 2>/dev/null").stdout == ""
    assert lab.host("test -e /root/kept").returncode == 0
    assert lab.host("stat -c '%t:%T %a' /dev/nvidia-uvm").stdout.strip() == f"{new:x}:0 666"
    assert lab.guest("stat -c %t:%T /dev/nvidia-uvm").stdout.strip() == f"{new:x}:0"
    assert lab.guest(in_python(PROBE, "/dev/nvidia-uvm")).stdout == "EPERM\n"
    assert lab.guest(in_python(PROBE, "/dev/nvidiactl")).stdout == "ENXIO\n"
    lab.reboot()
    assert uvm_major(lab) not in (old, new)


def test_a_guest_that_starts_before_the_driver_gets_a_plain_file(lab: Lab) -> None:
    lab.bare()
    entry = "lxc.mount.entry = /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file 0 0\n"
    lab.host(f"printf %s {shlex.quote(entry)} >> /var/lib/lxc/gpu/config", check=True)
    lab.reboot("none")
    assert "nvidia" not in lab.host("cat /proc/devices; ls /dev", check=True).stdout
    assert lab.host("nvidia-smi").returncode == 9
    assert lab.guest("test -f /dev/nvidia-uvm").returncode == 0
    lab.host("nvidia-modprobe -u -c 0", check=True)
    assert lab.host("test -c /dev/nvidia-uvm").returncode == 0
    assert f"{uvm_major(lab)} nvidia-uvm" in lab.guest("cat /proc/devices").stdout
    lab.reboot("no-uvm")
    assert lab.host("test -c /dev/nvidia0 && test ! -e /dev/nvidia-uvm").returncode == 0
    lab.host("modprobe nvidia-uvm", check=True)
    assert uvm_major(lab) > 0


def test_the_guest_reaches_out_through_both_bridges(lab: Lab) -> None:
    with socket.create_server((lab.state.gateway, 0)) as server:
        server.settimeout(20)
        seen: list[str] = []

        def answer() -> None:
            connection, address = server.accept()
            seen.append(address[0])
            with connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        read = (
            "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(9).decode())"
        )
        assert lab.guest(in_python(read, lab.state.gateway, str(server.getsockname()[1]))).stdout == "hello\n"
        thread.join()
    assert seen == [lab.state.address]
    assert [rule[0] for rule in network.rules_of(lab.state.bridge)] == ["nat", "filter", "filter"]
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"


def test_the_model_source_is_whole(lab: Lab) -> None:
    done = lab.host(
        "cd /srv/models/Qwen3.6-27B && sha256sum --quiet -c MANIFEST.sha256 && du -sm . | cut -f1", check=True
    )
    assert 200 <= int(done.stdout) <= 400


def test_the_inventory_names_host_and_guest(lab: Lab) -> None:
    done = lab.run("inventory/lab/hosts")
    told = json.loads(done.stdout)
    assert told["gpu_hosts"]["hosts"] == ["lab-host"]
    assert told["gpu_guests"]["hosts"] == ["lab-guest"]
    assert told["_meta"]["hostvars"]["lab-guest"]["lxc_guest_host"] == "lab-host"
    assert told["_meta"]["hostvars"]["lab-host"]["ansible_host"] == lab.state.address
    ping = lab.run("ansible", "-i", "inventory/lab", "gpu_hosts", "-m", "ansible.builtin.ping")
    assert ping.returncode == 0, ping.stdout + ping.stderr


def test_commands_tell_in_json(lab: Lab) -> None:
    told = json.loads(lab.run("specrig", "lab", "status", "--name", lab.name, "--json").stdout)
    assert (told["name"], told["state"], told["guest"]) == (lab.name, "up", "running")
    again = lab.run("specrig", "lab", "up", "--name", lab.name, "--json")
    assert json.loads(again.stdout)["address"] == lab.state.address
    echoed = lab.run("specrig", "lab", "shell", "guest", "--name", lab.name, "--", "echo", "a  b", "$HOME")
    assert echoed.stdout == "a  b $HOME\n"
    failed = lab.run("specrig", "lab", "shell", "host", "--name", lab.name, "--", "sh", "-c", "exit 7")
    assert failed.returncode == 7


def test_two_labs_stand_side_by_side(lab: Lab, second_name: str) -> None:
    done = lab.run("specrig", "lab", "up", "--name", second_name, "--json")
    assert done.returncode == 0, done.stderr
    other = lifecycle.existing(second_name)
    assert other.subnet != lab.state.subnet
    assert lifecycle.in_guest(other, "hostname").stdout == lab.guest("hostname").stdout == "gpu\n"
    assert lab.run("specrig", "lab", "down", "--name", second_name).returncode == 0
    assert lifecycle.leftovers(second_name) == []
    assert lab.guest("true").returncode == 0
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"


def test_a_machine_with_pure_cgroup_v2_will_do(lab: Lab, second_name: str) -> None:
    """From a namespace that looks like a pure v2 machine, where the lab finds its view ready made."""
    view = "umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec"
    pure = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{view} "$@"', "sh"]
    done = lab.run(*pure, "specrig", "lab", "up", "--name", second_name)
    assert done.returncode == 0, done.stderr
    assert lifecycle.in_guest(lifecycle.existing(second_name), "systemctl is-system-running").stdout == "running\n"
    assert lab.run(*pure, "specrig", "lab", "down", "--name", second_name).returncode == 0
    assert lifecycle.leftovers(second_name) == []


def test_where_overlays_do_not_work_the_lab_is_a_copy(second_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle.containers, "overlay_works", lambda _scratch: False)
    made = lifecycle.up(second_name, DEFAULT_SIZE_MB, lambda _line: None)
    assert not made.layered
    assert lifecycle.on_host(made, "test -f /srv/models/Qwen3.6-27B/MANIFEST.sha256").returncode == 0
    assert lifecycle.in_guest(made, "test ! -e /srv/models && systemctl is-system-running").stdout == "running\n"


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.5])
def test_down_cleans_what_a_killed_up_left(lab: Lab, second_name: str, after_s: float) -> None:
    folder = state.STATE_ROOT / second_name
    command = ["specrig", "lab", "up", "--name", second_name]
    with subprocess.Popen(command, env=lab.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        deadline = time.monotonic() + 20
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert folder.exists()
        time.sleep(after_s)
        up.send_signal(signal.SIGKILL)
    for _ in range(2):
        done = lab.run("specrig", "lab", "down", "--name", second_name)
        assert done.returncode == 0, done.stderr
        assert lifecycle.leftovers(second_name) == []


def test_what_is_missing_is_said_in_one_line(lab: Lab) -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = lab.run(*nobody, "specrig", "lab", "up", "--name", "nobody")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "root" in done.stderr
    probe = (
        "from specrig.ops.lab import lifecycle; lifecycle.shutil.which = lambda *a, **k: None; "
        "print(lifecycle.missing())"
    )
    told = lab.run(sys.executable, "-c", probe).stdout
    assert "lxc-start" in told
    assert "apt-get install" in told
    named = lab.run("specrig", "lab", "reboot", "--name", "no-such-lab")
    assert (named.returncode, named.stderr.count("\n")) == (2, 1)
    assert lab.run("specrig", "lab", "up", "--name", "../x").returncode == 2
