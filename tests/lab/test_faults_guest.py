"""Faults of guests: each is made and shown first, then healed by a play or named in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

UNITS = "specrig-sglang@chat.service specrig-sglang@agent.service"
# A guest for a test: the host's own programs, no network, and a sleep in place of systemd.
GUEST = """set -e
folder=/var/lib/lxc/%(name)s; root=$folder/rootfs
for path in usr bin lib lib64 sbin etc dev proc sys run tmp; do mkdir -p $root/$path; done
cat > $folder/config <<END
lxc.include = /usr/share/lxc/config/common.conf
lxc.arch = linux64
lxc.uts.name = %(name)s
lxc.rootfs.path = dir:$root
lxc.apparmor.profile = unconfined
lxc.net.0.type = empty
lxc.init.cmd = /usr/bin/sleep infinity
lxc.mount.entry = /usr usr none bind,ro 0 0
lxc.mount.entry = /usr/lib lib none bind,ro 0 0
lxc.mount.entry = /usr/lib64 lib64 none bind,ro 0 0
lxc.mount.entry = /usr/bin bin none bind,ro 0 0
lxc.mount.entry = /usr/sbin sbin none bind,ro 0 0
END
printf 'root:x:0:0::/root:/bin/sh\\nspecrig:x:999:999::/:/bin/sh\\n' > $root/etc/passwd
printf 'root:x:0:\\nspecrig:x:999:\\n' > $root/etc/group
if [ %(first_id)d != 0 ]; then
    printf 'lxc.idmap = %%s 0 %(first_id)d 65536\\n' u g >> $folder/config
    chown -R %(first_id)d:%(first_id)d $root
    chmod 755 $folder /var/lib/lxc
fi
lxc-start -n %(name)s
"""
# The roles of a recovery that are about guests alone, for guests that serve nothing.
PLAY = """\
- hosts: gpu_hosts
  gather_facts: false
  roles:
    - role: specrig.host.gpu_host
- hosts: extra_guests
  gather_facts: false
  roles:
    - role: specrig.host.lxc_guest
"""


def uvm_major(lab) -> int:
    return int(lab.host("awk '$2 == \"nvidia-uvm\" {print $1}' /proc/devices").stdout)


def init(lab, name: str = "gpu") -> str:
    """Process id and start time of a guest's init: another start changes them."""
    return lab.host(f"pid=$(lxc-info -n {name} -p -H); cut -d' ' -f1,22 /proc/$pid/stat").stdout


def inside(lab, name: str, command: str) -> str:
    return lab.host(f"lxc-attach --clear-env -n {name} -- /bin/sh -c {json.dumps(command)}").stdout.strip()


def changed(output: str) -> dict[str, int]:
    return {host: int(count) for host, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.M)}


def said(lab) -> str:
    """All that the last run found and did, out of the journal: the screen shortens long lists."""
    lines = [json.loads(line) for line in lab.journal.read_text().splitlines()]
    return json.dumps([line for line in lines if line["run"] == lines[-1]["run"]], ensure_ascii=False)


def recover(lab, *arguments: str):
    done = lab.play("recover", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def served(lab):
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def test_a_major_that_is_now_another_drivers_is_closed_and_rules_of_others_are_named(served):
    config = "/var/lib/lxc/gpu/config"
    served.host(
        f"printf 'lxc.cgroup.devices.allow = c 195:* rwm\\nlxc.cgroup2.devices.allow = c 399:* rwm\\n' >> {config}",
        check=True,
    )
    old = uvm_major(served)
    served.reboot()
    new = uvm_major(served)
    assert new != old
    # The numbers went to others: what the guest may still open is no GPU.
    devices = "/run/specrig-lab/proc_devices"
    others = f"sed 's/^Character devices:$/&\\n{old} gdrdrv\\n399 mei/' {devices}"
    served.host(f"{others} > /tmp/devices && cat /tmp/devices > {devices}", check=True)
    assert served.opens(old) == "ENXIO"
    before = init(served)

    recover(served)

    assert init(served) == before
    assert served.opens(old) == "EPERM"
    assert served.opens(new) == "ENXIO"
    text = served.host(f"cat {config}").stdout
    assert f"c {old}:" not in text
    # What others wrote stays, and is named in every run: its effect on purpose cannot be told from a leftover.
    assert "lxc.cgroup2.devices.allow = c 399:* rwm\n" in text
    assert "lxc.cgroup.devices.allow = c 195:* rwm\n" in text
    assert served.opens(399) == "ENXIO"
    again = recover(served)
    assert changed(again.stdout) == {"lab-host": 0, "lab-guest": 0}
    assert "rule c 399:* rwm allows a major that is not NVIDIA's (now mei)" in again.stdout
    assert "lxc.cgroup.devices.allow = c 195:* rwm has no effect on cgroup v2" in again.stdout
    served.host(f"sed -i '/c 399:\\|^lxc.cgroup.devices/d' {config}", check=True)
    served.host("lxc-cgroup -n gpu devices.deny 'c 399:* rwm'", check=True)


def test_a_guest_that_started_before_the_nodes_is_healed_without_a_restart(served):
    served.host("systemctl disable specrig-gpu-nodes", check=True)
    served.reboot("none")
    assert inside(served, "gpu", "stat -c %F /dev/nvidia-uvm") == "regular empty file"
    before = init(served)

    done = recover(served)

    assert "nvidia-uvm is not loaded on the host" in done.stdout
    assert "is a regular file, not a device" in said(served)
    assert init(served) == before
    major = uvm_major(served)
    assert inside(served, "gpu", "stat -c '%F %t:%T' /dev/nvidia-uvm") == f"character special file {major:x}:0"
    assert served.opens(major) == "ENXIO"
    assert changed(recover(served).stdout) == {"lab-host": 0, "lab-guest": 0}


def test_nodes_too_narrow_for_the_service_user_are_widened_where_they_are(served):
    pids = served.guest(f"systemctl show -p MainPID --value {UNITS}").stdout
    # On the host, as a driver with other settings makes it; and in the guest, a node of its own.
    served.host("chmod 0660 /dev/nvidia-uvm-tools", check=True)
    served.guest("umount -l /dev/nvidia7 && rm /dev/nvidia7 && mknod -m 0600 /dev/nvidia7 c 195 7", check=True)
    recover(served)
    assert "/dev/nvidia-uvm-tools on the host has mode 0660, the service user needs 0666" in said(served)
    assert "/dev/nvidia7 has mode 0600, the host's has 0666" in said(served)
    assert inside(served, "gpu", "stat -c %a /dev/nvidia7 /dev/nvidia-uvm-tools").split() == ["666", "666"]
    assert served.guest(f"systemctl show -p MainPID --value {UNITS}").stdout == pids


def test_a_guest_that_nothing_else_can_help_is_restarted_gracefully_and_only_if_allowed(served):
    major = uvm_major(served)
    # Its rules are gone and no live change gets through any more: lxc-cgroup says it did and does nothing.
    for minor in (0, 1):
        served.host(f"lxc-cgroup -n gpu devices.deny 'c {major}:{minor} rw'", check=True)
    served.host("mv /usr/bin/lxc-cgroup /usr/bin/lxc-cgroup.real && ln -s /bin/true /usr/bin/lxc-cgroup", check=True)
    witness = "systemd-run --unit=witness --property=ExecStop='/bin/touch /root/stopped' /bin/sleep infinity"
    served.guest(witness, check=True)
    before = init(served)
    try:
        done = served.play("recover")
        assert done.returncode != 0
        assert "restart the guest, or set lxc_guest_allow_restart and run again" in done.stdout
        assert init(served) == before
        recover(served, "-e", "lxc_guest_allow_restart=true")
        assert "guest gpu: restarted" in said(served)
    finally:
        served.host("mv /usr/bin/lxc-cgroup.real /usr/bin/lxc-cgroup", check=True)
    assert init(served) != before
    assert served.guest("test -e /root/stopped").returncode == 0, "its units were not stopped, they were killed"
    assert served.opens(major) == "ENXIO"
    assert served.guest(f"systemctl is-active {UNITS}").stdout.split() == ["active", "active"]


@pytest.fixture
def guests(served, tmp_path: Path):
    """Two more guests beside the lab's, one of them unprivileged, and a play for them."""
    for name, first_id in (("two", 0), ("mapped", 100000)):
        served.host(GUEST % {"name": name, "first_id": first_id}, check=True)
    hosts = {name: {"lxc_guest_name": name, "lxc_guest_host": "lab-host"} for name in ("two", "mapped")}
    hosts["two"]["lxc_guest_gpus"] = [0, 1]
    (tmp_path / "extra.json").write_text(json.dumps({"extra_guests": {"hosts": hosts}}))
    (tmp_path / "guests.yml").write_text(PLAY)

    def play(*arguments: str):
        inventories = ["-i", "inventory/lab", "-i", str(tmp_path / "extra.json")]
        return served.run("ansible-playbook", *inventories, str(tmp_path / "guests.yml"), *arguments)

    yield play
    served.host("umount /var/lib/lxc/two/config; for name in two mapped; do lxc-stop -k -n $name; done", timeout_s=60)
    served.host("rm -rf /var/lib/lxc/two /var/lib/lxc/mapped /var/lib/specrig/guests/two.json")
    served.host("rm -rf /var/lib/specrig/guests/mapped.json")


def test_guests_that_share_a_host_get_each_its_own_and_an_unprivileged_one_too(served, guests):
    major = uvm_major(served)
    # A config that cannot be replaced, only written: a bind-mounted single file refuses the rename.
    served.host("mount --bind /var/lib/lxc/two/config /var/lib/lxc/two/config", check=True)
    inode = served.host("stat -c '%i %a' /var/lib/lxc/two/config").stdout
    before = served.host("cat /var/lib/lxc/gpu/config /var/lib/specrig/guests/gpu.json").stdout
    check = guests("--check", "--diff")
    assert check.returncode == 0, check.stdout + check.stderr
    assert f"+lxc.cgroup2.devices.allow = c {major}:0 rw" in check.stdout
    assert served.host("grep -c nvidia /var/lib/lxc/two/config").stdout.strip() == "0"
    assert served.host("ls /var/lib/specrig/guests | grep -v placement").stdout.split() == ["gpu.json"]
    inits = {name: init(served, name) for name in ("gpu", "two", "mapped")}

    done = guests()

    assert done.returncode == 0, done.stdout + done.stderr
    assert served.host("stat -c '%i %a' /var/lib/lxc/two/config").stdout == inode
    assert served.host("ls /var/lib/specrig/guests | grep -v placement").stdout.split() == [
        "gpu.json",
        "mapped.json",
        "two.json",
    ]
    for name in ("two", "mapped"):
        assert f"c {major}:0 rw" in served.host(f"cat /var/lib/lxc/{name}/config").stdout
        seen = inside(served, name, "stat -c '%F %t:%T %a' /dev/nvidia-uvm")
        assert seen == f"character special file {major:x}:0 666"
    # One has two of the eight GPUs, the other all.
    gpus = {name: inside(served, name, "ls /dev/nvidia[0-9]*").split() for name in ("two", "mapped")}
    assert {name: len(paths) for name, paths in gpus.items()} == {"two": 2, "mapped": 8}
    # In the unprivileged guest the host's root is nobody, so it is the mode that opens the node.
    assert inside(served, "mapped", "stat -c %u /dev/nvidia-uvm") == "65534"
    again = guests()
    assert changed(again.stdout) == {"lab-host": 0, "two": 0, "mapped": 0}, again.stdout

    # A leftover in one of them is taken back there and nowhere else; a node that went missing comes back.
    for name in ("gpu", "two", "mapped"):
        served.host(f"lxc-cgroup -n {name} devices.allow 'c 400:* rwm'", check=True)
    other = int(sorted(set(gpus["mapped"]) - set(gpus["two"]))[0].removeprefix("/dev/nvidia"))
    served.host(f"lxc-cgroup -n two devices.allow 'c 195:{other} rw'", check=True)
    inside(served, "mapped", "umount /dev/nvidia-uvm")
    assert inside(served, "mapped", "stat -c %F /dev/nvidia-uvm") == "regular empty file"
    done = guests()
    assert done.returncode == 0, done.stdout + done.stderr
    assert served.opens(400, guest="two") == "EPERM"
    assert served.opens(400) == "ENXIO"
    assert served.opens(195, other, guest="two") == "EPERM"
    assert f"guest two: revoked live: device 195:{other}, major 400" in said(served)
    assert "guest mapped: revoked live: major 400" in said(served)
    assert inside(served, "mapped", "stat -c '%F %t:%T' /dev/nvidia-uvm") == f"character special file {major:x}:0"
    assert {name: init(served, name) for name in inits} == inits
    assert served.host("cat /var/lib/lxc/gpu/config /var/lib/specrig/guests/gpu.json").stdout == before
    served.host("lxc-cgroup -n gpu devices.deny 'c 400:* rwm'", check=True)


def test_guests_whose_user_cannot_open_the_nodes_are_told_what_to_do(served, guests):
    served.host("chmod 0660 /dev/nvidia-uvm", check=True)
    try:
        done = guests("-e", 'gpu_host_node_mode="0660"')
    finally:
        served.host("chmod 0666 /dev/nvidia-uvm", check=True)
    assert done.returncode != 0
    text = said(served)
    assert "opens for root and not for user specrig (EACCES, mode 0660); set gpu_host_node_mode" in text
    assert "(EACCES, mode 0660, owner nobody, an id that the guest does not have); its ids are mapped" in text
