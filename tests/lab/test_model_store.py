"""Where models lie: the host's tmpfs with its options, seen by two guests; a guest's own memory; what does not fit."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

MODEL = "Qwen3.6-27B"
STORE = "/srv/specrig/ram"
UNIT = "/etc/systemd/system/srv-specrig-ram.mount"
# What makes the place, shows it in the guests and stages; no server is needed for that.
TAGS = ("--tags", "gpu_host,lxc_guest,model_store")
HOST = ("--tags", "model_store", "--limit", "lab-host")
OPTIONS = {
    "model_store_size": "700M",
    "model_store_huge": "within_size",
    "model_store_numa": "interleave",
    "model_store_noswap": True,
    "model_store_inodes": 4000,
}
GUEST = {
    "model_store_place": "guest",
    "model_store_guest_path": "/dev/shm/models",
    "model_store_guest_size": "2G",
}
# A second guest on the first one's files, which it changes in memory only.
SECOND = """set -e
mkdir -p /var/lib/lxc/gpu2/rootfs /run/gpu2
mount -t tmpfs -o size=512M tmpfs /run/gpu2
mkdir /run/gpu2/upper /run/gpu2/work
mount -t overlay -o lowerdir=/var/lib/lxc/gpu/rootfs,upperdir=/run/gpu2/upper,workdir=/run/gpu2/work overlay \
  /var/lib/lxc/gpu2/rootfs
grep -v 'cgroup2.devices\\|/dev/nvidia\\|srv/models\\|ipv4\\|start.auto' /var/lib/lxc/gpu/config |
  sed 's/uts.name = gpu$/uts.name = gpu2/; s|lxc/gpu/rootfs|lxc/gpu2/rootfs|' > /var/lib/lxc/gpu2/config
lxc-start -n gpu2"""
# A segment as a killed server leaves it: 8 MiB, an hour old, of the user that serves.
LEAK = """set -e
id specrig >/dev/null 2>&1 || useradd --system --no-create-home specrig
head -c 8388608 /dev/zero > /dev/shm/psm_leaked
head -c 8388608 /dev/zero > /dev/shm/psm_of_root
chown specrig /dev/shm/psm_leaked
touch -d '1 hour ago' /dev/shm/psm_leaked /dev/shm/psm_of_root"""
# One that a process maps, though nobody holds a descriptor of it.
HOLD = """nohup python3 -c '
import mmap, os, time
f = open("/dev/shm/psm_used", "w+b")
f.write(bytes(8 << 20)); f.flush()
m = mmap.mmap(f.fileno(), 8 << 20); f.close()
os.utime("/dev/shm/psm_used", (1e9, 1e9)); print("ready", flush=True); time.sleep(600)' > /run/held 2>&1 &
echo $! > /run/holder
for _ in $(seq 600); do grep -q ready /run/held && exit 0; sleep 0.1; done; exit 1"""


def recover(lab: Any, more: dict[str, Any], *arguments: str, part: tuple[str, ...] = TAGS) -> str:
    """Run the part of recover that is about models; returns its output."""
    done = lab.play("recover", "-e", json.dumps(more), *part, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def refused(lab: Any, more: dict[str, Any], part: tuple[str, ...] = HOST) -> str:
    """Run it where it has to stop; returns the one line that says why."""
    done = lab.play("recover", "-e", json.dumps(more), *part)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = re.findall(r"^failed\s+lab-\w+: (.*)$", done.stdout, re.M)
    return str(line)


def changes(output: str) -> dict[str, int]:
    return {host: int(count) for host, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.M)}


def mounted(lab: Any) -> set[str]:
    """Options of the store as the kernel shows them."""
    line = lab.host(f"grep ' {STORE} ' /proc/mounts", check=True).stdout.split()
    return set(line[3].split(","))


def inode(lab: Any, path: str, guest: str = "") -> str:
    """Device and inode of a file, on the host or in a guest."""
    words = f"stat -c %d:%i {path}"
    command = f"lxc-attach --clear-env -n {guest} -- {words}" if guest else words
    return str(lab.host(command, check=True).stdout).strip()


@pytest.fixture(scope="module")
def placed(lab: Any) -> Any:
    """A bare lab with its model on a tmpfs of the host, whose options are not the usual ones."""
    lab.bare()
    told = recover(lab, OPTIONS, "--check", "--diff")
    assert "would write " + UNIT in told
    assert "+Options=size=700M,huge=within_size,mpol=interleave,noswap,nr_inodes=4000,mode=0755" in told
    assert lab.host(f"test -e {UNIT} || grep {STORE} /proc/mounts").returncode != 0

    done = recover(lab, OPTIONS)
    assert f"staged model {MODEL}" in done
    # The sum is shown where it passes too.
    (line,) = [row for row in done_gates(lab) if row["gate"] == "memory"]
    assert line["status"] == "pass"
    assert re.search(
        rf"needs [\d.]+ GiB \({re.escape(MODEL)}\) - 0 staged = [\d.]+ GiB; the tmpfs of {STORE} has 0.7 GiB free; "
        r"memory available [\d.]+ GiB (\+ ARC .+ )?- 1.0 GiB kept free = [\d.]+ GiB, swap not counted",
        line["message"],
    )
    return lab


def done_gates(lab: Any) -> list[dict[str, Any]]:
    """Gates of the last run, from the journal."""
    lines = [json.loads(line) for line in lab.journal.read_text().splitlines()]
    return [line for line in lines if line["run"] == lines[-1]["run"] and line["event"] == "gate"]


def test_the_tmpfs_has_the_options_of_the_role_and_a_live_one_is_converged(placed):
    # The kernel has one node only, whatever the lab shows: interleave comes out as that one.
    assert mounted(placed) >= {"size=716800k", "huge=within_size", "mpol=interleave:0", "noswap", "nr_inodes=4000"}
    assert mounted(placed) >= {"nosuid", "nodev", "noexec"}
    again = recover(placed, OPTIONS)
    assert changes(again) == {"lab-host": 0, "lab-guest": 0}, again

    kept = inode(placed, f"{STORE}/{MODEL}/config.json")
    other = {**OPTIONS, "model_store_size": "800M", "model_store_huge": "never", "model_store_numa": "local"}
    check = recover(placed, other, "--check", part=HOST)
    assert "would be remounted: size 0.8 GiB instead of 0.7 GiB, huge never instead of within_size" in check
    assert "size=716800k" in mounted(placed)
    done = recover(placed, other, part=HOST)
    assert "model store: remounted: size 0.8 GiB" in done
    assert f"{MODEL} lie in the pages they were given" in done
    assert mounted(placed) >= {"size=819200k", "mpol=local"}
    assert not [word for word in mounted(placed) if word.startswith("huge=")]
    assert inode(placed, f"{STORE}/{MODEL}/config.json") == kept

    # Swap again, and no policy: only a new mount can, and that would lose the model.
    fixed = {**other, "model_store_noswap": False, "model_store_numa": "default"}
    done = recover(placed, fixed, part=HOST)
    assert f"{STORE} keeps mpol local instead of default, swap off instead of on until it is mounted anew" in done
    assert f"{MODEL} in it would be lost: stop what serves, then 'systemctl restart srv-specrig-ram.mount'" in done
    assert "noswap" in mounted(placed)
    assert inode(placed, f"{STORE}/{MODEL}/config.json") == kept
    # Said and done: nothing lies there, so nothing has to be said.
    placed.host("systemctl restart srv-specrig-ram.mount", check=True)
    done = recover(placed, fixed)
    assert not mounted(placed) & {"noswap", "mpol=local"}
    assert f"staged model {MODEL}" in done
    assert "until it is mounted anew" not in done


def test_what_cannot_be_is_one_line_and_nothing_is_touched(placed):
    before = placed.host(f"cat {UNIT}; grep {STORE} /proc/mounts", check=True).stdout
    for more, words in (
        # The lab shows two nodes, its kernel knows one.
        ({"model_store_numa": "bind:1"}, "the kernel refuses a tmpfs with mpol=bind:1"),
        ({"model_store_size": "100M"}, "cannot get size 100 MiB: 0.2 GiB lie there"),
    ):
        assert words in refused(placed, more), more
    assert placed.host(f"cat {UNIT}; grep {STORE} /proc/mounts").stdout == before

    # A draft beside the target: 4 GiB, of which not one byte is copied.
    placed.host(
        "mkdir -p /srv/models/draft && truncate -s 4G /srv/models/draft/weights.bin"
        " && echo '{}' > /srv/models/draft/config.json",
        check=True,
    )
    both = {
        "model_store_models": {MODEL: {"source": f"/srv/models/{MODEL}"}, "draft": {"source": "/srv/models/draft"}},
        "model_store_size": "800M",
    }
    line = refused(placed, both)
    assert re.search(
        rf"do not fit, and nothing was copied: needs [\d.]+ GiB \({re.escape(MODEL)}\) \+ 4.0 GiB \(draft\)"
        r" - 0.2 GiB staged = 4.0 GiB; the tmpfs of \S+ has 0.5 GiB free; memory available ",
        line,
    ), line
    assert "the tmpfs lacks 3.5 GiB: raise model_store_size" in line
    assert placed.host(f"ls {STORE}").stdout.split() == [MODEL]
    # Room on the tmpfs is not all: what is kept free of the host's memory counts.
    line = refused(placed, {**both, "model_store_size": "6G", "model_store_reserve": "900T"})
    assert "= 0, swap not counted" in line
    assert "the host lacks 4.0 GiB" in line
    assert placed.host(f"ls {STORE}").stdout.split() == [MODEL]


@pytest.fixture(scope="module")
def two(placed: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The lab with a second guest, and the inventory that has it."""
    placed.host(SECOND, check=True)
    about = placed.run("ansible-inventory", "-i", "inventory/lab", "--host", "lab-guest")
    known = {
        key: value
        for key, value in json.loads(about.stdout).items()
        if key.startswith("ansible_") or key in ("lxc_guest_host",)
    }
    inventory: Path = tmp_path_factory.mktemp("two") / "more.json"
    rows = {"lab-guest-2": {**known, "lxc_guest_name": "gpu2"}}
    inventory.write_text(json.dumps({"gpu_guests": {"hosts": rows}}))
    return placed, str(inventory)


def test_two_guests_see_one_model_read_only_and_a_restart_keeps_it(two):
    lab, inventory = two
    recover(lab, {}, "-i", inventory)
    file = f"{MODEL}/config.json"
    kept = inode(lab, f"{STORE}/{file}")
    assert inode(lab, f"/srv/models/{file}", "gpu") == kept
    assert inode(lab, f"/srv/models/{file}", "gpu2") == kept
    for guest in ("gpu", "gpu2"):
        done = lab.host(f"lxc-attach -n {guest} -- touch /srv/models/{file}")
        assert "Read-only file system" in done.stderr

    lab.host("lxc-stop -k -n gpu && lxc-start -n gpu", check=True)
    again = recover(lab, {}, "-i", inventory)
    assert "staged model" not in again
    assert inode(lab, f"/srv/models/{file}", "gpu") == kept
    assert changes(recover(lab, {}, "-i", inventory)) == {"lab-host": 0, "lab-guest": 0, "lab-guest-2": 0}


def test_shared_memory_that_nobody_uses_is_named_and_removed_only_when_asked(two):
    lab, _inventory = two
    lab.guest(LEAK, check=True)
    lab.guest(HOLD, check=True)
    try:
        told = recover(lab, {}, part=HOST)
        (line,) = re.findall(r"guest gpu: .*shared memory.*", told)
        assert line.startswith("guest gpu: 16 MiB in shared memory that no process maps or holds open: ")
        assert re.search(r"psm_leaked \(8 MiB, specrig, 1 h old, its maker is gone\)", line)
        assert re.search(r"psm_of_root \(8 MiB, root, 1 h old", line)
        assert "remove with 'lxc-attach -n gpu -- rm /dev/shm/psm_" in line
        assert "psm_used" not in line

        remove = {"model_store_remove_leaked": True}
        assert "would remove 8 MiB of leaked shared memory of specrig" in recover(lab, remove, "--check", part=HOST)
        assert lab.guest("ls /dev/shm/psm_leaked").returncode == 0
        assert "guest gpu: removed 8 MiB of leaked shared memory of specrig" in recover(lab, remove, part=HOST)
        left = lab.guest("ls /dev/shm").stdout.split()
        assert {"psm_of_root", "psm_used"} <= set(left)
        assert "psm_leaked" not in left
    finally:
        lab.guest("kill $(cat /run/holder); rm -f /dev/shm/psm_*")


def test_the_guest_s_own_memory_is_staged_again_after_each_restart_and_reboot(two):
    lab, inventory = two
    done = recover(lab, GUEST, "-i", inventory)
    path = f"/dev/shm/models/{MODEL}/config.json"
    # Two copies, each charged to its guest; the sum of one knows of the other's.
    assert inode(lab, path, "gpu") != inode(lab, path, "gpu2")
    assert f"staged model {MODEL}" in done
    gates = {row["subject"]: row for row in done_gates(lab) if row["gate"] == "memory"}
    assert " - 0.2 GiB for gpu2 = " in gates["gpu"]["message"]
    assert " - 0.2 GiB for gpu = " in gates["gpu2"]["message"]
    # The machine keeps its memory controller on v1: the limit is unknown, and said to be.
    assert "limit of guest gpu unknown" in gates["gpu"]["message"]
    assert gates["gpu"]["status"] == "unknown"
    # What the host held for both before is named.
    assert f"{STORE} holds {MODEL}" in done
    assert lab.guest(f"touch /srv/specrig/sources/{MODEL}/x").returncode != 0
    size = "df --output=size -k /dev/shm | tail -1"
    assert lab.guest(size).stdout.strip() == "2097152"
    assert changes(recover(lab, GUEST, "-i", inventory)) == {"lab-host": 0, "lab-guest": 0, "lab-guest-2": 0}

    # A restart loses it; the size comes from the guest's config.
    lab.host("lxc-stop -k -n gpu && lxc-start -n gpu", check=True)
    assert lab.guest(f"ls {path}").returncode != 0
    assert lab.guest(size).stdout.strip() == "2097152"
    assert "lxc.mount.entry = tmpfs dev/shm tmpfs rw,nosuid,nodev,size=2G,create=dir 0 0" in (
        lab.host("cat /var/lib/lxc/gpu/config").stdout
    )
    done = recover(lab, GUEST)
    assert f"staged model {MODEL}" in done
    # Too small for it: nothing is copied, and the line says what to set.
    lab.guest("rm -r /dev/shm/models && mount -o remount,size=64M /dev/shm", check=True)
    line = refused(lab, {**GUEST, "model_store_guest_size": ""}, TAGS)
    assert re.search(r"the tmpfs of /dev/shm has \d+ MiB free", line)
    assert "the guest's /dev/shm lacks " in line
    assert "set model_store_guest_size" in line
    assert lab.guest("find /dev/shm -type f -size +1M").stdout == ""

    # After a reboot, one provision: the server reads the model from there, and finds its draft by name.
    lab.reboot()
    profile = {"model": MODEL, "tp": 1, "method": "dflash", "draft_model": MODEL, "context_length": 32768}
    serve = {**GUEST, "sglang_server_profiles": {"chat": {**profile, "gpus": "auto", "port": 31001, "serve": True}}}
    done = lab.play("provision", "-e", json.dumps(serve))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"staged model {MODEL}" in done.stdout
    assert re.search(r"chat: GPU \d .* serving", done.stdout)
    pid = lab.guest("systemctl show -p MainPID --value specrig-sglang@chat.service").stdout.strip()
    words = lab.guest(f"tr '\\0' ' ' < /proc/{pid}/cmdline").stdout
    assert f"--model-path /dev/shm/models/{MODEL} " in words
    assert f"--speculative-draft-model-path /dev/shm/models/{MODEL} " in words


# Runs on the host: stops every process of the guest in the midst of a staging, then ends it as a power cut would.
CUT = """
import glob, os, subprocess, sys, time
model = sys.argv[1]
init = subprocess.run(["lxc-info", "-n", "gpu", "-p", "-H"], capture_output=True, text=True, check=True).stdout.strip()
folder = "/proc/%s/root/dev/shm/models/%s" % (init, model)
deadline = time.time() + 120
while not glob.glob(folder + "/.specrig-part.*"):
    assert time.time() < deadline, "no staging began"
    time.sleep(0.001)
for path in glob.glob("/sys/fs/cgroup/lxc.payload.gpu*/cgroup.freeze"):
    with open(path, "w") as handle:
        handle.write("1")
time.sleep(0.2)
print("marker" if os.path.exists(folder + "/.specrig-staged.json") else "midst")
subprocess.run(["lxc-stop", "-k", "-n", "gpu"], check=True)
"""


def test_a_guest_that_goes_while_it_stages_is_a_line_and_the_next_run_finishes(lab):
    recover(lab, GUEST)
    lab.guest("systemctl stop 'specrig-sglang@*'; rm -r /dev/shm/models", check=True)
    lab.host(f"cat > /root/cut.py <<'END'\n{CUT}\nEND", check=True)
    cut: list[Any] = []
    holder = threading.Thread(target=lambda: cut.append(lab.host(f"python3 /root/cut.py {MODEL}")))
    holder.start()
    done = lab.play("recover", "-e", json.dumps(GUEST), *TAGS, timeout_s=300)
    holder.join()
    assert (cut[0].returncode, cut[0].stdout.strip()) == (0, "midst"), cut[0].stdout + cut[0].stderr
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^failed\s+lab-guest: .*(gpu|guest|unreachable)", done.stdout, re.M), done.stdout[-3000:]
    assert lab.host("test -e /run/specrig/lock").returncode != 0, done.stdout
    lab.host("lxc-start -n gpu", check=True)
    again = recover(lab, GUEST)
    assert f"staged model {MODEL}" in again
    sums = f"/srv/specrig/sources/{MODEL}/MANIFEST.sha256"
    lab.guest(f"cd /dev/shm/models/{MODEL} && sha256sum -c --quiet {sums}", check=True)
    assert changes(recover(lab, GUEST)) == {"lab-host": 0, "lab-guest": 0}
