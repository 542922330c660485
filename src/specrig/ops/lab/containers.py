"""The two containers: their configuration, and starting and stopping the outer one.

Where this machine shows a v1 or hybrid cgroup tree, the outer container is started in a mount namespace of its own that
has cgroup2 at /sys/fs/cgroup. The same namespace holds the overlay mounts, so all mounts of a lab go when it stops.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from pathlib import Path

from specrig.errors import SpecrigError
from specrig.ops.lab import network
from specrig.ops.lab.rootfs import pip_cache, wheels_cache
from specrig.ops.lab.state import GUEST, LabState

_CGROUP_VIEW = """\
set -e
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    if mountpoint -q /sys/fs/cgroup; then umount -R /sys/fs/cgroup; fi
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
"""

_MOUNTS_OF_THE_LAB = """\

# What follows is the lab's: the simulated machine as a guest sees it, and a shared pip cache. No real guest has it.
lxc.mount.entry = /run/specrig-lab/proc_devices proc/devices none bind 0 0
lxc.mount.entry = /run/specrig-lab/proc_driver proc/driver none bind 0 0
lxc.mount.entry = /run/specrig-lab/pci sys/bus/pci/devices none bind 0 0
lxc.mount.entry = /run/specrig-lab/nodes sys/devices/system/node none bind 0 0
lxc.mount.entry = /var/cache/specrig-lab/pip root/.cache/pip none bind,create=dir 0 0
"""


def in_cgroup_view(script: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a new mount namespace that has cgroup2 at /sys/fs/cgroup."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _CGROUP_VIEW + script]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
    )


def guest_config() -> str:
    """The guest's configuration as ``lab up`` leaves it: no GPU, every device denied but LXC's usual few."""
    return f"""\
lxc.include = /usr/share/lxc/config/common.conf
lxc.arch = linux64
lxc.uts.name = {GUEST}
lxc.rootfs.path = dir:/var/lib/lxc/{GUEST}/rootfs
lxc.apparmor.profile = unconfined
lxc.start.auto = 1
lxc.net.0.type = veth
lxc.net.0.link = lxcbr0
lxc.net.0.flags = up
lxc.net.0.name = eth0
lxc.net.0.ipv4.address = {network.GUEST_ADDRESS}/24
lxc.net.0.ipv4.gateway = {network.GUEST_GATEWAY}
lxc.net.0.mtu = {network.mtu()}
{_MOUNTS_OF_THE_LAB}"""


def host_config(state: LabState) -> str:
    """The outer container's configuration."""
    mac = ":".join(f"{byte:02x}" for byte in (0x02, *bytes.fromhex(state.bridge[3:]), 0x02))
    return f"""\
lxc.include = /usr/share/lxc/config/common.conf
lxc.include = /usr/share/lxc/config/nesting.conf
lxc.arch = linux64
lxc.uts.name = lab-host
lxc.rootfs.path = dir:{state.directory}/host/rootfs
lxc.apparmor.profile = unconfined
lxc.cap.drop =
lxc.cap.drop = sys_time sys_module
lxc.mount.auto =
lxc.mount.auto = cgroup:rw:force proc:mixed sys:rw
lxc.cgroup2.devices.allow = a
lxc.mount.entry = {state.directory}/guest/rootfs var/lib/lxc/{GUEST}/rootfs none bind,create=dir 0 0
lxc.mount.entry = {pip_cache()} var/cache/specrig-lab/pip none bind,create=dir 0 0
lxc.mount.entry = {wheels_cache()} {str(wheels_cache()).lstrip("/")} none bind,ro,create=dir 0 0
lxc.net.0.type = veth
lxc.net.0.link = {state.bridge}
lxc.net.0.flags = up
lxc.net.0.name = eth0
lxc.net.0.hwaddr = {mac}
lxc.net.0.ipv4.address = {state.address}/24
lxc.net.0.ipv4.gateway = {state.gateway}
lxc.net.0.mtu = {network.mtu()}
"""


def _lxc(state_or_path: Path, tool: str, container: str, *arguments: str) -> list[str]:
    return [tool, "-P", str(state_or_path), "-n", container, *arguments]


def running(lxc_path: Path, container: str) -> bool:
    """Whether the outer container runs."""
    done = subprocess.run(_lxc(lxc_path, "lxc-info", container, "-sH"), capture_output=True, text=True, check=False)
    return done.stdout.strip() == "RUNNING"


def init_pid(state: LabState) -> int | None:
    """The process id, as this machine counts, of the host's init; None when it does not run."""
    command = _lxc(state.lxc_path, "lxc-info", state.container, "-pH")
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def overlay_works(scratch: Path) -> bool:
    """Whether a folder of this machine's disk can be layered with overlayfs."""
    parts = [scratch / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={parts[0]},upperdir={parts[1]},workdir={parts[2]}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts[3])]
    done = subprocess.run(["unshare", "--mount", "--propagation", "private", *mount], capture_output=True, check=False)
    shutil.rmtree(scratch)
    return done.returncode == 0


def start(state: LabState) -> None:
    """Start the outer container; returns when its init has been started.

    Raises:
        SpecrigError: it did not start; LXC's own reason is in the message.
    """
    script = ""
    if state.layered:
        for role, lowers in (("host", [state.model, state.rootfs]), ("guest", [state.rootfs])):
            base = state.directory / role
            options = f"lowerdir={':'.join(lowers)},upperdir={base}/upper,workdir={base}/work"
            script += shlex.join(["mount", "-t", "overlay", "overlay", "-o", options, f"{base}/rootfs"]) + "\n"
    log = state.directory / "lxc.log"
    log.unlink(missing_ok=True)
    command = _lxc(state.lxc_path, "lxc-start", state.container, "-d", "-l", "INFO", "-o", str(log))
    done = in_cgroup_view(script + "exec " + shlex.join(command))
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line.split(" - ", 2)[-1] for line in lines if " ERROR " in line] or done.stderr.splitlines()
        raise SpecrigError(f"the lab's host did not start: {errors[0] if errors else 'no reason given'}; see {log}")


def stop(lxc_path: Path, container: str, gentle: bool) -> None:
    """Stop the outer container: the inner one first, then its own services (``gentle``), then whatever is left."""
    if gentle and running(lxc_path, container):
        inner = f"lxc-stop -n {GUEST} -t 5; systemctl stop ssh; pkill -x sshd; true"
        attach = _lxc(lxc_path, "lxc-attach", container, "--clear-env", "--", "/bin/sh", "-c", inner)
        halt = _lxc(lxc_path, "lxc-stop", container, "-t", "8")
        in_cgroup_view(f"timeout 20 {shlex.join(attach)} >/dev/null 2>&1 || true\n{shlex.join(halt)} || true\n")
    if lxc_path.is_dir() and running(lxc_path, container):
        in_cgroup_view(f"timeout 20 {shlex.join(_lxc(lxc_path, 'lxc-stop', container, '-k'))} || true\n")
    for _ in range(50):
        if not leftover_cgroups(container, remove=True):
            return
        time.sleep(0.1)


def leftover_cgroups(container: str, remove: bool = False) -> list[str]:
    """The cgroups of a container that are still there; with ``remove``, after killing and removing what can be."""
    name = shlex.quote(container)
    find = f"find /sys/fs/cgroup -maxdepth 4 -type d \\( -name lxc.payload.{name} -o -name lxc.monitor.{name} \\)"
    script = ""
    if remove:
        script = (
            f"for top in $({find}); do echo 1 > $top/cgroup.kill 2>/dev/null || true; "
            "find $top -depth -type d -exec rmdir {} \\; 2>/dev/null || true; done\n"
        )
    return in_cgroup_view(script + find + "\n").stdout.split()
