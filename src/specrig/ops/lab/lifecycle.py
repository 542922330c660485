"""A lab from nothing to running and back: up, reboot, status, down."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import SpecrigError, UsageError
from specrig.ops.lab import containers, driver, model, network, rootfs
from specrig.ops.lab import state as states
from specrig.ops.lab.state import GUEST, STATE_ROOT, LabState

Say = Callable[[str], None]

_TOOLS = {
    "lxc-start": "lxc",
    "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
}
_MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "container-getty@.service",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@.service",
    "systemd-pstore.service",
)
READY_TIMEOUT_S = 90.0


def missing() -> str | None:
    """What keeps a lab from running here, as one line; None if nothing does."""
    if os.geteuid() != 0:
        return "the lab needs root (containers, device rules, a bridge); run it as root"
    absent = [
        tool for tool in _TOOLS if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None
    ]
    if absent:
        packages = sorted({_TOOLS[tool] for tool in absent})
        return f"not found: {', '.join(absent)}; the lab needs them: apt-get install {' '.join(packages)}"
    if Path("/proc/driver/nvidia/version").exists():
        return (
            "a real NVIDIA driver is loaded here, and the lab's simulated device nodes would reach it; "
            "use another machine"
        )
    try:
        view = containers.in_cgroup_view("test -w /sys/fs/cgroup/cgroup.procs")
    except OSError as error:
        return f"no mount namespace of its own can be made for the lab ({error}); it needs CAP_SYS_ADMIN"
    if view.returncode:
        reason = (view.stderr.strip().splitlines() or ["/sys/fs/cgroup is not writable"])[-1]
        return f"no writable cgroup v2 view can be had ({reason}); the lab needs one for its device rules"
    return None


def require() -> None:
    """Raise UsageError with what is missing, if anything is."""
    if problem := missing():
        raise UsageError(problem)


def ssh_command(state: LabState, *arguments: str) -> list[str]:
    """The ssh command line that reaches the host as root; ``arguments`` come after the host's name."""
    options = ["-i", state.key, "-o", f"UserKnownHostsFile={state.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
    options += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR"]
    return ["ssh", "-F", "none", *options, f"root@{state.address}", *arguments]


def guest_command(command: str) -> str:
    """The command that runs the shell command ``command`` in the guest when it is run on the host."""
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    attach = ["lxc-attach", "-n", GUEST, "--clear-env", "-v", path, "-v", "HOME=/root", "-v", "LANG=C.UTF-8"]
    return shlex.join([*attach, "--", "/bin/sh", "-c", command])


def on_host(state: LabState, command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a shell command on the host over SSH, as root."""
    return subprocess.run(
        ssh_command(state, command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def in_guest(state: LabState, command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a shell command in the guest, through the host, as root."""
    return on_host(state, guest_command(command), timeout_s)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def wait_ready(state: LabState, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until the host's sshd answers and the guest's systemd has finished its start.

    Raises:
        SpecrigError: that did not happen in time; the message says what was the last state seen.
    """
    deadline = time.monotonic() + timeout_s
    while not _answers(state.address):
        if time.monotonic() > deadline:
            raise SpecrigError(
                f"lab {state.name}: no SSH answer from {state.address} within {timeout_s:.0f} s; "
                f"see {state.directory}/lxc.log, or specrig lab down and up again"
            )
        time.sleep(0.05)
    settled = guest_command("systemctl is-system-running --wait || true")
    script = (
        f"until lxc-info -n {GUEST} -sH | grep -q RUNNING; do sleep 0.1; done; "
        f"until {settled} | grep -Eq 'running|degraded'; do sleep 0.2; done"
    )
    left = max(5.0, deadline - time.monotonic())
    try:
        done = on_host(state, script, left)
    except subprocess.TimeoutExpired:
        raise SpecrigError(
            f"lab {state.name}: the guest was not up within {timeout_s:.0f} s; "
            "look with: specrig lab shell host -- lxc-ls --fancy"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise SpecrigError(f"lab {state.name}: its host refuses SSH at {state.address}: {reason}")


def _require_enforced(state: LabState) -> None:
    """Check that the guest is refused a device that no rule allows: some kernels take rules and ignore them."""
    probe = (
        "import errno, os, stat; os.mknod('/dev/.lab-probe', 0o600 | stat.S_IFCHR, os.makedev(195, 255))\n"
        "try: os.open('/dev/.lab-probe', os.O_RDWR)\n"
        "except OSError as error: print(errno.errorcode[error.errno])\n"
        "finally: os.unlink('/dev/.lab-probe')\n"
    )
    seen = in_guest(state, shlex.join(["python3", "-c", probe])).stdout.strip()
    if seen != "EPERM":
        raise UsageError(
            f"a device that the guest's rules deny gave {seen or 'no error'} on open, expected EPERM: "
            "this kernel does not enforce cgroup v2 device rules (CONFIG_CGROUP_BPF); use another machine"
        )


def _furnish(state: LabState) -> None:
    """Write what the two bare containers have beyond the packages: keys, names, network, the simulated driver."""
    lower = Path(state.rootfs)
    for role, name in (("host", "lab-host"), ("guest", GUEST)):
        tree = rootfs.Tree(lower, state.tree("host" if role == "host" else "guest"))
        tree.write("/etc/hostname", f"{name}\n")
        tree.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost\n")
        tree.write("/etc/machine-id", os.urandom(16).hex() + "\n", 0o444)
        tree.write("/etc/resolv.conf", rootfs.nameservers())
        tree.write("/etc/pip.conf", rootfs.pip_settings())
        tree.write("/etc/default/locale", "LANG=C.UTF-8\n")
        for folder in ("/etc/ssl/certs", "/usr/local/share/ca-certificates"):
            tree.copy(folder)
        tree.mask(*_MASKED)
        if role == "guest":
            tree.mask("ssh.service", "lxc.service", "lxc-net.service", "lxc-monitord.service")
            driver.into_guest(tree)
            continue
        tree.mask("lxc-monitord.service")
        tree.folder("/root/.ssh", 0o700)
        tree.write("/root/.ssh/authorized_keys", Path(state.key + ".pub").read_text(), 0o600)
        for kind in ("rsa", "ecdsa", "ed25519"):  # the cached root's own keys, which no lab must share
            if (lower / f"etc/ssh/ssh_host_{kind}_key").exists() and kind != "ed25519":
                tree.write(f"/etc/ssh/ssh_host_{kind}_key", "", 0o600)
        keys = state.directory / "keys"
        tree.write("/etc/ssh/ssh_host_ed25519_key", (keys / "host").read_bytes(), 0o600)
        tree.write("/etc/ssh/ssh_host_ed25519_key.pub", (keys / "host.pub").read_bytes())
        tree.write(
            "/etc/ssh/sshd_config.d/specrig-lab.conf",
            "HostKey /etc/ssh/ssh_host_ed25519_key\nUseDNS no\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\n",
        )
        tree.write(f"/var/lib/lxc/{GUEST}/config", containers.guest_config())
        tree.folder(f"/var/lib/lxc/{GUEST}", 0o770)
        driver.into_host(tree)


def _keys(state: LabState) -> None:
    folder = state.directory / "keys"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("root", "host"):
        make = [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            f"specrig-lab-{state.name}",
            "-f",
            str(folder / name),
        ]
        subprocess.run(make, check=True, capture_output=True)
    algorithm, key = (folder / "host.pub").read_text().split()[:2]
    Path(state.known_hosts).write_text(f"{state.address} {algorithm} {key}\n")


def _others_subnets(name: str) -> list[str]:
    return [other.subnet for other in map(states.load, states.labs()) if other and other.name != name]


def _build(name: str, size_mb: int, say: Say) -> LabState:
    base = rootfs.rootfs(say)
    layer = rootfs.model_layer(size_mb, say)
    with states.locked(STATE_ROOT / ".lock"):
        directory = STATE_ROOT / name
        directory.mkdir(mode=0o711, parents=True)
        layered = containers.overlay_works(directory / "probe")
        bridge = states.bridge_name(name)
        subnet = network.free_subnet(name, [*network.routes(), *_others_subnets(name)])
        prefix = subnet.rsplit(".", 1)[0]
        checkout = states.current_checkout()
        state = LabState(
            name=name,
            phase="building",
            container=states.container_name(name),
            bridge=bridge,
            subnet=subnet,
            gateway=f"{prefix}.1",
            address=f"{prefix}.2",
            key=str(directory / "keys" / "root"),
            known_hosts=str(directory / "keys" / "known_hosts"),
            rootfs=str(base),
            model=str(layer),
            layered=layered,
            checkout=str(checkout) if checkout else None,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        states.save(state)
        network.up(state.bridge, state.gateway, state.subnet)
    for role in ("host", "guest"):
        parts = ("upper", "work", "rootfs") if state.layered else ()
        (directory / role).mkdir()
        for part in parts:
            (directory / role / part).mkdir()
        if not state.layered:
            say("copying the rootfs (overlayfs does not work here)")
            target = directory / role / "rootfs"
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(target)], check=True)
            if role == "host":
                subprocess.run(["cp", "-a", "--reflink=auto", f"{layer}/.", str(target)], check=True)
    _keys(state)
    _furnish(state)
    folder = state.lxc_path / state.container
    folder.mkdir(parents=True)
    (folder / "config").write_text(containers.host_config(state))
    return state


def up(name: str, size_mb: int, say: Say) -> LabState:
    """Bring lab ``name`` up, bare; does nothing to one that is up, and starts again one that was stopped.

    Raises:
        UsageError: a lab cannot run here.
        SpecrigError: a part of it did not start.
    """
    require()
    with states.lab_lock(name):
        state = states.load(name)
        if state is not None and state.phase == "up":
            with states.locked(STATE_ROOT / ".lock"):
                network.up(state.bridge, state.gateway, state.subnet)
            if not containers.running(state.lxc_path, state.container):
                say("starting the lab's host again")
                containers.start(state)
            wait_ready(state)
            return state
        if state is not None or (STATE_ROOT / name).exists():
            say("removing what an interrupted run left")
            _remove(name)
        state = _build(name, size_mb, say)
        containers.start(state)
        wait_ready(state)
        _require_enforced(state)
        state = msgspec.structs.replace(state, phase="up")
        states.save(state)
        return state


def existing(name: str) -> LabState:
    """The record of a lab that is up.

    Raises:
        UsageError: there is no such lab, or it has never come up.
    """
    state = states.load(name)
    if state is None or state.phase != "up":
        raise UsageError(f"no lab named {name} is up (labs here: {', '.join(states.labs()) or 'none'}); specrig lab up")
    return state


def reboot(name: str, load: driver.Load, say: Say) -> LabState:
    """Stop and start the host: /dev, /run and tmpfs are lost, and nvidia-uvm gets another major.

    Args:
        name: the lab's name.
        load: how far the driver is loaded at this boot, before guests start.
        say: gets a line per step.
    """
    require()
    existing(name)  # before a lock file is made for a name that is no lab's
    with states.lab_lock(name):
        state = existing(name)
        say("stopping the lab's host")
        containers.stop(state.lxc_path, state.container, gentle=True)
        if containers.running(state.lxc_path, state.container):
            raise SpecrigError(f"lab {name}: its host does not stop; specrig lab down, then up")
        settings = state.tree("host") / "etc/specrig-lab/driver.json"
        settings.write_text(json.dumps({"load": load}) + "\n")
        with states.locked(STATE_ROOT / ".lock"):
            network.up(state.bridge, state.gateway, state.subnet)
        say("starting it again")
        containers.start(state)
        wait_ready(state)
        return state


def leftovers(name: str) -> list[str]:
    """What of lab ``name`` is on this machine still; empty when all is gone."""
    container, bridge = states.container_name(name), states.bridge_name(name)
    found = []
    if (STATE_ROOT / name).exists():
        found.append(f"folder {STATE_ROOT / name}")
    if Path("/sys/class/net", bridge).exists():
        found.append(f"bridge {bridge}")
    found += [f"iptables -t {table} rule {' '.join(rule)}" for table, rule in network.rules_of(bridge)]
    found += [f"cgroup {path}" for path in containers.leftover_cgroups(container)]
    mounted = f" {STATE_ROOT / name}/"
    found += [
        f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if mounted in line
    ]
    marks = (f"{STATE_ROOT / name}/".encode(), f"specrig-lab-{name}\0".encode())
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes() + b"\0"
            except OSError:
                continue
            if any(mark in line for mark in marks) and b"lxc" in line:
                found.append(
                    f"process {process.name}: {line.replace(bytes(1), b' ').decode(errors='replace').strip()[:80]}"
                )
    return found


def _remove(name: str) -> None:
    directory = STATE_ROOT / name
    container, bridge = states.container_name(name), states.bridge_name(name)
    state = states.load(name)
    containers.stop(directory / "lxc", container, gentle=False)
    if state is not None:
        network.hang_up(state.address)
    with states.locked(STATE_ROOT / ".lock"):
        # In one step: of two labs that go at once, the second must not find the first still there.
        if directory.exists():
            shutil.rmtree(directory)
        network.down(bridge, last=not [other for other in states.labs() if other != name])
    shutil.rmtree(f"/run/lxc/lock{directory}", ignore_errors=True)


def down(name: str, _say: Say) -> bool:
    """Remove lab ``name`` and all it left on this machine; also what an interrupted ``up`` left.

    Returns:
        Whether there was anything to remove.

    Raises:
        SpecrigError: something is still there afterwards.
    """
    if (problem := missing()) and (os.geteuid() != 0 or not (STATE_ROOT / name).exists()):
        raise UsageError(problem)
    with states.lab_lock(name):
        there = bool(leftovers(name))
        _remove(name)
        left = leftovers(name)
    (STATE_ROOT / f".{name}.lock").unlink(missing_ok=True)
    if left:
        raise SpecrigError(f"lab {name} is not wholly gone: {'; '.join(left)}")
    return there


@dataclasses.dataclass(frozen=True)
class Status:
    """What ``specrig lab status`` shows."""

    name: str
    state: str
    address: str | None
    subnet: str | None
    bridge: str | None
    guest: str | None
    uvm_major: int | None
    model: str | None
    ssh: str | None
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        """As printed by ``--json``."""
        return {"schema": 1, **dataclasses.asdict(self)}


def status(name: str) -> Status:
    """Where lab ``name`` stands; never raises for a lab that is absent or broken."""
    state = states.load(name)
    problem = missing()
    if state is None:
        there = (STATE_ROOT / name).exists()
        return Status(
            name=name,
            state="broken" if there else "absent",
            address=None,
            subnet=None,
            bridge=None,
            guest=None,
            uvm_major=None,
            model=None,
            ssh=None,
            problem="a run was interrupted: specrig lab down" if there else problem,
        )
    root = os.geteuid() == 0
    alive = root and containers.running(state.lxc_path, state.container)
    guest: str | None = None
    major: int | None = None
    if alive:
        script = f"lxc-info -n {GUEST} -sH; awk '$2 == \"nvidia-uvm\" {{print $1}}' /proc/devices"
        try:
            lines = on_host(state, script, 15).stdout.split()
        except subprocess.TimeoutExpired:
            lines = []
        guest = lines[0].lower() if lines else None
        major = int(lines[1]) if len(lines) > 1 else None
    if state.phase != "up":
        problem = "a run was interrupted: specrig lab up, or down"
    if state.phase != "up":
        word = "building"
    elif not root:
        word = "unknown"
    elif alive:
        word = "up" if guest == "running" else "degraded"
    else:
        word = "stopped"
    return Status(
        name=name,
        state=word,
        address=state.address,
        subnet=state.subnet,
        bridge=state.bridge,
        guest=guest,
        uvm_major=major,
        model=f"/srv/models/{model.MODEL_NAME}",
        ssh=shlex.join(ssh_command(state)),
        problem=problem,
    )
