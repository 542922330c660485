"""Guest configs of Proxmox VE, as its own rewriting leaves them: devN lines, numbers, locks, any number of rounds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pve_host
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.facts import explain, guestconf

basic = pytest.importorskip("ansible.module_utils.basic")
ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "stand_ins" / "pve_host.py"

GPU0, UVM = "/dev/nvidia0,mode=0666", "/dev/nvidia-uvm,mode=0666"
PAIRS = sorted(path.stem for path in (ROOT / "tests" / "samples" / "pve" / "rewritten").glob("*.before"))


@pytest.mark.parametrize("name", PAIRS)
def test_the_stand_in_rewrites_as_proxmox_did(samples, name):
    folder = samples / "pve" / "rewritten"
    before, after = (folder / f"{name}.before").read_text(), (folder / f"{name}.after").read_text()
    assert pve_host.rewrite(before) == after
    assert pve_host.rewrite(after) == after


def test_of_a_repeated_key_the_last_wins_in_the_stand_in():
    text = "dev0: /dev/a\n# x\ncores: 1\ndev0: /dev/b\nlxc.x = 1\ncores: 2\nno line\n"
    assert pve_host.rewrite(text) == "# x\ncores: 2\ndev0: /dev/b\nlxc.x: 1\n"


# Deciding on devN lines.


def test_new_devices_take_the_lowest_free_numbers_and_foreign_ones_stay():
    before = "arch: amd64\ndev0: /dev/dri/renderD128,gid=104\ndev2: /dev/nvidia0,mode=0666\n"
    after, report = guestconf.converge(before, "pve", [], (), [GPU0, UVM, "/dev/nvidiactl,mode=0666"])
    assert after == before + "dev1: /dev/nvidia-uvm,mode=0666\ndev3: /dev/nvidiactl,mode=0666\n"
    # The operator's own line for nvidia0 does the work and never becomes ours.
    assert report["covered"] == [GPU0]
    assert report["owned"] == [["dev1", UVM], ["dev3", "/dev/nvidiactl,mode=0666"]]


def test_a_line_of_ours_keeps_its_number_when_its_mode_changes():
    before = "dev7: /dev/nvidia-uvm,mode=0660\ndev8: /dev/x\n"
    after, report = guestconf.converge(before, "pve", [], [("dev7", "/dev/nvidia-uvm,mode=0660")], [UVM])
    assert after == "dev8: /dev/x\ndev7: /dev/nvidia-uvm,mode=0666\n"
    assert report["removed"] == [["dev7", "/dev/nvidia-uvm,mode=0660"]]


def test_a_line_of_ours_that_an_operator_changed_is_the_operators():
    before = "dev7: /dev/nvidia-uvm,gid=44\n"
    after, report = guestconf.converge(before, "pve", [], [("dev7", UVM)], [UVM])
    assert after == before
    assert (report["owned"], report["covered"]) == ([], [UVM])


def test_the_order_of_options_makes_no_other_line():
    before = "dev0: mode=0666,path=/dev/nvidia-uvm\n"
    assert guestconf.converge(before, "pve", [], [("dev0", UVM)], [UVM])[0] == before
    assert guestconf.converge(before, "pve", [], [("dev0", UVM)], [])[0] == ""


@pytest.mark.parametrize("order", [0, 1])
def test_where_ours_and_a_foreign_line_share_a_number_the_foreign_one_gets_it(order):
    lines = ["dev0: /dev/nvidia-uvm,mode=0666\n", "dev0: /dev/kfd\n"]
    before = "".join(lines if order == 0 else reversed(lines))
    after, _ = guestconf.converge(before, "pve", [], [("dev0", UVM)], [UVM])
    assert after == "dev0: /dev/kfd\ndev1: /dev/nvidia-uvm,mode=0666\n"


def test_duplicates_of_ours_are_healed():
    before = "dev0: /dev/nvidia-uvm,mode=0666\ndev0: /dev/nvidia-uvm,mode=0666\ndev4: /dev/nvidia-uvm,mode=0666\n"
    after, _ = guestconf.converge(before, "pve", [], [("dev0", UVM), ("dev4", UVM)], [UVM])
    assert after == "dev0: /dev/nvidia-uvm,mode=0666\n"


def test_a_number_that_a_pending_change_is_about_to_take_is_left_free():
    before = "arch: amd64\n\n[pve:pending]\ndelete: dev1\ndev0: /dev/kfd\n"
    after, _ = guestconf.converge(before, "pve", [], (), [UVM])
    assert after == "arch: amd64\ndev2: /dev/nvidia-uvm,mode=0666\n\n[pve:pending]\ndelete: dev1\ndev0: /dev/kfd\n"


def test_devices_of_snapshots_are_without_effect_and_untouched():
    before = "arch: amd64\n\n[old]\ndev0: /dev/nvidia-uvm,mode=0666\n"
    after, _ = guestconf.converge(before, "pve", [], [("dev0", UVM)], [UVM])
    assert after == "arch: amd64\ndev0: /dev/nvidia-uvm,mode=0666\n\n[old]\ndev0: /dev/nvidia-uvm,mode=0666\n"


def test_rules_and_mounts_of_ours_give_way_to_devices_and_back():
    nodes = [{"path": "/dev/nvidia-uvm", "major": 511, "minor": 0}]
    lines = guestconf.node_lines(nodes)
    first, report = guestconf.converge("arch: amd64\n", "pve", lines)
    assert first.count("lxc.") == 2
    second, report = guestconf.converge(first, "pve", [], report["owned"], [UVM])
    assert second == "arch: amd64\ndev0: /dev/nvidia-uvm,mode=0666\n"
    assert guestconf.converge(second, "pve", lines, report["owned"])[0] == first


def test_more_devices_than_numbers_is_one_line():
    full = "".join(f"dev{number}: /dev/x{number}\n" for number in range(256))
    with pytest.raises(ValueError, match="no devN is free for /dev/nvidia-uvm"):
        guestconf.converge(full, "pve", [], (), [UVM])


@pytest.mark.parametrize(
    ("path", "mode"), [("/dev/a b", "0666"), ("/tmp/x", "0666"), ("/dev/x", "666"), ("/dev/x", "rw")]
)
def test_what_proxmox_would_not_take_is_refused(path, mode):
    with pytest.raises(ValueError, match="expected"):
        guestconf.dev_value(path, mode)


def test_odd_devices_are_explained():
    text = (
        "dev0: /dev/nvidia0,gid=44\ndev1: /dev/nvidiactl,mode=0666,deny-write=1\ndev2: /dev/nvidia-uvm,mode=0666\n"
        "dev3: /dev/nvidia-uvm,mode=0666\n\n[pve:pending]\ndev2: /dev/kfd\n"
    )
    assert explain.explain(text)["problems"] == [
        "dev0: /dev/nvidia0 gets mode 0660 in the guest, for group 44 alone: a service user cannot open it; "
        "add mode=0666",
        "dev1: /dev/nvidiactl denies writing, CUDA opens it for writing; drop deny-write=1",
        "dev2: /dev/nvidia-uvm will be changed by a pending change at the next start",
        "dev2 and dev3 all hand over /dev/nvidia-uvm: one is enough",
    ]


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("pve-manager/8.2.4/faa83925c9641325 (running kernel: 6.8.8-2-pve)", True),
        ("pve-manager/8.1.10/4b06efb5db453f29 (running kernel: 6.5.13-5-pve)", False),
        ("pve-manager/9.0.3/025864202ebb6109 (running kernel: 6.14.8-2-pve)", True),
        ("pve-manager/7.4-17/513c62be (running kernel: 5.15.126-1-pve)", False),
        ("perl: warning: Setting locale failed.", None),
    ],
)
def test_the_version_that_has_devices_is_told(said, known):
    assert guestconf.pve_has_dev(said) is known


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unprivileged: 1\n", True),
        ("unprivileged: 1\nfeatures: keyctl=1\n", True),
        ("unprivileged: 1\nfeatures: keyctl=1,nesting=1\n", False),
        ("unprivileged: 1\narch: amd64\n\n[snap]\nfeatures: nesting=1\n", True),
        ("unprivileged: 0\n", False),
        ("arch: amd64\n", False),
    ],
)
def test_an_unprivileged_guest_without_nesting_is_told_what_that_may_break(text, said):
    note = guestconf.nesting_note(guestconf.parse(text, "pve"))
    assert (note is not None) is said
    assert note is None or "226/NAMESPACE" in note


# Any config, any number of rounds through Proxmox VE.

WANTED = [("lxc.cgroup2.devices.allow", "c 508:0 rw"), ("lxc.mount.entry", "/srv/ram srv/models none bind,ro 0 0")]
LINES = st.sampled_from(
    [
        "# a comment: with colon",
        "#lxc.cgroup2.devices.allow: c 508:0 rw",
        "arch: amd64",
        "cores: 8",
        "cores: 4",
        "dev0: /dev/nvidia0,mode=0666",
        "dev0: /dev/kfd",
        "dev1: path=/dev/nvidia-uvm,gid=44",
        "dev2: /dev/nvidia-uvm,mode=0666",
        "dev2: /dev/nvidia-uvm,mode=0660",
        "dev9: /dev/nvidia0,mode=0666",
        "lxc.cgroup2.devices.allow: c 508:0 rw",
        "lxc.cgroup2.devices.allow: c 234:* rwm",
        "lxc.cgroup.devices.allow: c 195:* rwm",
        "lxc.mount.entry: /x srv/models none bind 0 0",
        "lxc.prlimit.memlock: unlimited",
        "mp0: /tank,mp=/srv/models",
        "[snap]",
        "[pve:pending]",
        "delete: dev0",
        "",
    ]
)
OWNED = st.lists(
    st.sampled_from([("dev0", GPU0), ("dev2", UVM), ("dev9", GPU0), ("dev2", "/dev/nvidia-uvm,mode=0660"), WANTED[0]]),
    unique=True,
)


def devs(text: str) -> dict[str, str]:
    """The devices in effect, as the stand-in reads them: of a repeated key the last."""
    keys = pve_host.sections(text)[""]["keys"]
    return {key: value for key, value in keys.items() if key.startswith("dev")}


def cut(text: str) -> tuple[str, str]:
    """The main section, and all that follows it."""
    header = re.search(r"^\[", text, re.M)
    place = header.start() if header else len(text)
    return text[:place], text[place:]


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(LINES, max_size=10),
    owned=OWNED,
    devices=st.lists(st.sampled_from([GPU0, UVM]), unique=True),
    wanted=st.lists(st.sampled_from(WANTED), unique=True),
    rounds=st.integers(1, 4),
)
def test_any_config_comes_out_right_and_stays_so_whatever_proxmox_rewrites(lines, owned, devices, wanted, rounds):
    before = "".join(line + "\n" for line in lines)
    after, report = guestconf.converge(before, "pve", wanted, owned, devices)
    # Every device is handed over by a line in effect, and no key that stands twice is ours.
    paths = [value.split(",")[0].replace("path=", "") for value in devs(after).values()]
    assert {value.split(",")[0] for value in devices} <= set(paths)
    mine = [tuple(pair) for pair in report["owned"]]
    entries = guestconf.parse(after, "pve")["entries"]
    for key, value in mine:
        assert entries.count((key, value)) == 1
        assert [pair for pair in entries if pair[0] == key] == [(key, value)] or not key.startswith("dev")
    # Foreign devices are as they were, each of them, and the other sections byte for byte.
    ours = {*owned, *mine}
    (old, rest), (new, untouched) = cut(before), cut(after)
    assert untouched == rest
    foreign = [line for line in old.split("\n") if line.startswith("dev") and tuple(line.split(": ", 1)) not in ours]
    assert foreign == [
        line for line in new.split("\n") if line.startswith("dev") and tuple(line.split(": ", 1)) not in ours
    ]
    # What a line of somebody else hands over gets no second one from us.
    in_effect = dict(line.split(": ", 1) for line in foreign)
    theirs = {value.split(",")[0].replace("path=", "") for value in in_effect.values()}
    assert not theirs & {value.split(",")[0] for key, value in mine if key.startswith("dev")}
    # Nor is a number taken that one of them has, or that a pending change is about to give them.
    pending = pve_host.sections(before).get("pve:pending", {"keys": {}})["keys"]
    taken = {*in_effect, *pending, *pending.get("delete", "").split()}
    assert not taken & {key for key, _value in report["added"] if key not in {pair[0] for pair in owned}}
    again, second = guestconf.converge(after, "pve", wanted, mine, devices)
    assert again == after
    assert (second["added"], second["removed"], second["healed"]) == ([], [], [])
    text = after
    for _round in range(rounds):
        text = pve_host.rewrite(text)
        same, report = guestconf.converge(text, "pve", wanted, mine, devices)
        # What Proxmox VE drops of a doubled foreign key may free or take a path; then ours follow, once.
        if devs(text) == devs(after):
            assert same == text
        text, mine = same, [tuple(pair) for pair in report["owned"]]
        assert guestconf.converge(text, "pve", wanted, mine, devices)[0] == text


# The module, on a host that rewrites.


class Box:
    """A stand-in host, and the modules run on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.bin, self.config = folder / "bin", folder / "101.conf"
        self.bin.mkdir()
        for name in ("pct", "pveversion", "lxc-info", "lxc-attach", "lxc-cgroup"):
            (self.bin / name).symlink_to(STAND_IN)
        self.host = {"/dev/nvidiactl": [195, 255, "0666"], "/dev/nvidia0": [195, 0, "0666"]}
        self.host["/dev/nvidia-uvm"] = [511, 0, "0666"]
        self.write(version="pve-manager/8.4.1/2a5fa54a8503f96d (running kernel: 6.8.12-9-pve)", guests={}, calls=[])
        self.write(host=self.host, drivers=[195, 511])
        monkeypatch.setenv("STAND_IN_PVE", str(folder))
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        monkeypatch.setattr(sys, "path", [str(ROOT / ".collections"), *sys.path])

    def read(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, **more: Any) -> None:
        (self.folder / "state.json").write_text(json.dumps({**self.read(), **more}))

    def guest(self, **more: Any) -> dict[str, Any]:
        """The live guest; with arguments, after changing it."""
        state = self.read()
        state["guests"].setdefault("101", {}).update(more)
        self.write(**state)
        return state["guests"]["101"]

    def calls(self, program: str) -> list[list[str]]:
        return [call[1:] for call in self.read()["calls"] if call[0] == program]

    def reboot(self, uvm: int) -> None:
        """The host starts again: another major, and no guest runs."""
        self.host["/dev/nvidia-uvm"][0] = uvm
        self.write(host=self.host, drivers=[195, uvm])
        if "101" in self.read()["guests"]:
            self.guest(running=False)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [{"path": path, "major": row[0], "minor": row[1]} for path, row in self.host.items()]

    def module(self, name: str) -> Any:
        return importlib.import_module("ansible_collections.specrig.host.plugins.modules." + name)

    def run(self, module_: str, check: bool = False, /, **more: Any) -> dict[str, Any]:
        module = self.module(module_)
        arguments = {"ANSIBLE_MODULE_ARGS": {**more, "_ansible_check_mode": check, "_ansible_diff": True}}
        self.monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        self.monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(self.capsys.readouterr().out)

    def converge(self, check: bool = False, **more: Any) -> dict[str, Any]:
        uvm = self.host["/dev/nvidia-uvm"][0]
        arguments = {"name": "101", "kind": "pve", "path": str(self.config), "nodes": self.nodes, "folders": []}
        arguments.update(state_dir=str(self.folder / "state"), majors={"nvidia": 195, "nvidia-uvm": uvm})
        arguments["major_names"] = {"195": ["nvidia"], str(uvm): ["nvidia-uvm"]}
        return self.run("guest_config", check, **{**arguments, **more})


@pytest.fixture
def box(tmp_path, monkeypatch, capsys, samples):
    made = Box(tmp_path, monkeypatch, capsys)
    made.config.write_text(
        "#GPU box\narch: amd64\ncores: 16\nhostname: infer\nostype: debian\n\n[before]\narch: amd64\ncores: 8\n"
        "lxc.cgroup2.devices.allow: c 508:* rwm\n"
    )
    return made


def test_proxmox_gets_devices_that_no_reboot_outdates(box):
    done = box.converge()
    assert (done["changed"], done["dev"], done["written"]) == (True, True, "in-place")
    main, section, rest = box.config.read_text().partition("\n[")
    assert main == (
        "#GPU box\narch: amd64\ncores: 16\nhostname: infer\nostype: debian\ndev0: /dev/nvidiactl,mode=0666\n"
        "dev1: /dev/nvidia0,mode=0666\ndev2: /dev/nvidia-uvm,mode=0666\n"
    )
    assert rest == "before]\narch: amd64\ncores: 8\nlxc.cgroup2.devices.allow: c 508:* rwm\n"
    assert section == "\n["
    # An operator changes something, Proxmox VE rewrites the file; then the host gets another major.
    os.system(f"{box.bin}/pct set 101 --onboot 1")
    rewritten = box.config.read_text()
    assert "onboot: 1\n" in rewritten
    box.reboot(508)
    again = box.converge()
    assert (again["changed"], box.config.read_text()) == (False, rewritten)
    # The live rules that a running guest needs are told all the same.
    assert "c 508:0 rw" in again["rules"]


def test_a_run_notes_what_an_unprivileged_guest_lacks(box):
    assert not any("nesting" in text for text in box.converge()["specrig"]["notes"])
    box.config.write_text("arch: amd64\nunprivileged: 1\n")
    done = box.converge()
    assert any("guest 101: unprivileged and without nesting" in text for text in done["specrig"]["notes"])


@pytest.mark.parametrize(
    ("version", "asked", "dev"),
    [
        ("pve-manager/8.1.3/b46aac3b42da5d15", "auto", False),
        ("pve-manager/8.1.3/b46aac3b42da5d15", True, True),
        ("pve-manager/8.2.2/9355359cd7afbae4", False, False),
        ("gone wrong", "auto", False),
    ],
)
def test_whether_devices_are_used_follows_the_version_and_the_inventory(box, version, asked, dev):
    box.write(version=version)
    done = box.converge(dev=asked)
    assert done["dev"] is dev
    assert ("dev0:" in box.config.read_text()) is dev
    assert ("lxc.mount.entry:" in box.config.read_text()) is not dev
    assert (done["specrig"]["notes"] == []) is (version != "gone wrong")


def test_a_version_that_is_silent_turns_nothing_over(box):
    box.converge()
    box.write(version="")
    done = box.converge()
    assert (done["changed"], done["dev"]) == (False, True)
    assert "the devN lines stay; set lxc_guest_pve_dev" in done["specrig"]["notes"][0]


def test_a_word_that_is_none_of_the_three_is_refused(box):
    assert box.converge(dev="maybe")["msg"] == "dev is 'maybe'; set lxc_guest_pve_dev to auto, true or false"


def test_a_guest_that_proxmox_locked_is_left_alone(box):
    box.config.write_text("lock: backup\n" + box.config.read_text())
    before = box.config.read_text()
    for check in (True, False):
        done = box.converge(check)
        assert done["failed"] is True
        assert "guest 101 is locked by Proxmox VE (backup)" in done["msg"]
    assert box.config.read_text() == before
    # Where nothing has to change the lock is nobody's business.
    box.config.write_text(before.replace("lock: backup\n", ""))
    box.converge()
    box.config.write_text("lock: backup\n" + box.config.read_text())
    assert box.converge()["changed"] is False


def test_proxmoxs_own_lock_is_waited_for_and_then_named(box, monkeypatch):
    module = box.module("guest_config")
    monkeypatch.setattr(module, "PVE_LOCK", str(box.folder / "pve-config-%s.lock"))
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0)
    with (box.folder / "pve-config-101.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = box.config.read_text()
        assert "is held by another program" in box.converge()["msg"]
        assert box.config.read_text() == before
    assert box.converge()["changed"] is True


# Files that cannot be replaced or have their mode set.


def refuse(code: int):
    def call(*_arguments: Any, **_more: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", ["rename", "chmod", "chown"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY])
def test_a_file_system_without_rename_or_chmod_is_written_in_place(box, monkeypatch, call, code):
    config = box.folder / "config"
    config.write_text("lxc.uts.name = gpu\n" + "# filler\n" * 200)
    config.chmod(0o640)
    inode = config.stat().st_ino
    real = getattr(os, call)

    def refused(path: Any, *arguments: Any) -> None:
        # The record of our lines is kept elsewhere, and may be renamed.
        if "state" in Path(path).parts:
            return real(path, *arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(box.module("guest_config").os, call, refused)
    done = box.converge(kind="lxc", path=str(config))
    assert done["written"] == "in-place"
    assert (config.stat().st_ino, config.stat().st_mode & 0o7777) == (inode, 0o640)
    assert config.read_text() == done["diff"]["after"]
    assert sorted(path.name for path in box.folder.iterdir() if path.name.startswith(".")) == []
    shorter = box.converge(kind="lxc", path=str(config), nodes=[])
    assert config.read_text() == "lxc.uts.name = gpu\n" + "# filler\n" * 200
    assert shorter["written"] == "in-place"
    assert box.converge(kind="lxc", path=str(config), nodes=[])["changed"] is False


def test_a_full_disk_leaves_the_file_as_it_was(box, monkeypatch):
    config = box.folder / "config"
    config.write_text("lxc.uts.name = gpu\n")
    module = box.module("guest_config")
    monkeypatch.setattr(module, "write_by_rename", refuse(errno.ENOSPC))
    done = box.converge(kind="lxc", path=str(config))
    assert done["msg"] == f"{config} cannot be written: No space left on device; nothing was changed"
    assert config.read_text() == "lxc.uts.name = gpu\n"


def test_a_cluster_without_quorum_is_thought_of(box, monkeypatch):
    before = box.config.read_text()
    monkeypatch.setattr(box.module("guest_config"), "write_in_place", refuse(errno.EACCES))
    done = box.converge()
    assert done["msg"].endswith("nothing was changed; without quorum /etc/pve is read-only, see 'pvecm status'")
    assert box.config.read_text() == before


def test_a_write_in_place_that_fails_half_way_is_taken_back(box, monkeypatch):
    before = box.config.read_bytes()
    module = box.module("guest_config")
    real = open

    class Short:
        """A file on a disk that is full after ten bytes, once."""

        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, 10

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_error: object) -> None:
            self.stream.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        def write(self, data: Any) -> int:
            if self.left == 0:
                self.left = -1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = self.stream.write(bytes(data)[: self.left] if self.left > 0 else data)
            self.left -= count if self.left > 0 else 0
            return int(count)

    def opened(path: Any, mode: str = "r", **more: Any) -> Any:
        stream = real(path, mode, **more)
        return Short(stream) if mode == "r+b" else stream

    monkeypatch.setattr(module, "open", opened, raising=False)
    done = box.converge()
    assert "cannot be written: No space left on device" in done["msg"]
    assert box.config.read_bytes() == before


# The running guest: started, opened live, restarted only where allowed and only where that can help.


@pytest.fixture
def live(box, monkeypatch):
    """The module guest_devices on the stand-in host; binding shows the host's node in the guest's record."""
    module = box.module("guest_devices")
    box.refuses_binding = False

    def bind(_pid: int, source: str, target: str, folder: bool, read_only: bool = False) -> str | None:
        if box.refuses_binding:
            return f"{source} could not be shown in the guest: move_mount: Function not implemented"
        assert not folder
        assert not read_only
        box.guest(nodes={**box.guest()["nodes"], target: box.host[source]})
        return None

    def run(_guest: Any, *argv: str, **_limit: int) -> tuple[int, str, str]:
        """The stand-in without a process of its own: a test asks it some thirty times."""
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                pve_host.main(argv[0], list(argv[1:]))
        except SystemExit as end:
            return 1, out.getvalue(), str(end.code)
        return 0, out.getvalue(), ""

    monkeypatch.setattr(module.Guest, "run", run)
    monkeypatch.setattr(module, "bind_into", bind)
    monkeypatch.setattr(module, "host_mode", lambda path: int(box.host[path][2], 8))
    monkeypatch.setattr(module, "rules_impossible", lambda: None)

    def call(check: bool = False, **more: Any) -> dict[str, Any]:
        arguments = {"name": "101", "kind": "pve", "path": str(box.config), "nodes": box.nodes, "user": "specrig"}
        return box.run("guest_devices", check, **{**arguments, **more})

    return call


def commands(box: Box) -> list[str]:
    """What pct was told to do, without questions."""
    return [call[0] for call in box.calls("pct") if call[0] != "status"]


def test_a_proxmox_guest_that_never_ran_is_started_by_pct_and_has_its_devices(box, live):
    box.converge()
    told = live(check=True)
    assert (told["changed"], told["init_pid"], commands(box)) == (True, None, [])
    done = live()
    assert commands(box) == ["start"]
    assert done["specrig"]["changed"] == ["guest 101: started"]
    assert done["specrig"]["gates"][0]["status"] == "pass"
    again = live()
    assert (again["changed"], commands(box)) == (False, ["start"])


def test_after_a_reboot_the_devices_are_right_without_a_change(box, live):
    box.converge()
    live()
    box.reboot(508)
    assert box.converge()["changed"] is False
    done = live()
    assert done["specrig"]["changed"] == ["guest 101: started"]
    assert [row["major"] for row in done["seen"]["nodes"]] == [195, 195, 508]


def test_a_major_that_moves_under_a_running_guest_is_followed_live(box, live):
    box.converge()
    live()
    # The driver was loaded anew; the guest never stopped.
    box.host["/dev/nvidia-uvm"] = [508, 0, "0666"]
    box.write(host=box.host, drivers=[195, 508])
    done = live()
    assert done["specrig"]["changed"] == [
        "guest 101: opened live: c 508:0 rw",
        "guest 101: revoked live: major 511",
        "guest 101: put in place live: nvidia-uvm",
    ]
    assert "c 508:0 rw" in box.guest()["rules"]
    assert "c 511:0 rw" not in box.guest()["rules"]
    assert commands(box) == ["start"]
    assert live()["changed"] is False


@pytest.mark.parametrize("dev", [True, False])
def test_a_gpu_that_goes_to_another_guest_is_closed_live(box, live, dev):
    box.converge(dev=dev)
    live(host_nodes=box.nodes)
    rest = [node for node in box.nodes if node["path"] != "/dev/nvidia0"]
    box.converge(dev=dev, nodes=rest)
    assert "nvidia0" not in box.config.read_text()
    done = live(nodes=rest, host_nodes=box.nodes)
    assert done["specrig"]["changed"] == ["guest 101: revoked live: device 195:0"]
    assert "c 195:0 rw" not in box.guest()["rules"]
    assert "c 195:255 rw" in box.guest()["rules"]
    assert live(nodes=rest, host_nodes=box.nodes)["changed"] is False


def test_a_guest_whose_device_is_not_there_does_not_start_and_says_so(box, live):
    box.converge()
    uvm = box.host.pop("/dev/nvidia-uvm")
    box.write(host=box.host)
    box.host["/dev/nvidia-uvm"] = uvm
    done = live()
    assert done["msg"] == (
        "guest '101' does not start: Device /dev/nvidia-uvm does not exist; 'pct start 101 --debug' shows why"
    )


def test_a_guest_that_started_before_its_nodes_is_healed_live(box, live):
    box.converge(dev=False)
    del box.host["/dev/nvidia-uvm"]
    box.write(host=box.host)
    os.system(f"{box.bin}/pct start 101")
    box.host["/dev/nvidia-uvm"] = [511, 0, "0666"]
    box.write(host=box.host)
    assert box.guest()["nodes"]["/dev/nvidia-uvm"] == "file"
    done = live()
    assert "guest 101: /dev/nvidia-uvm is a regular file, not a device" in done["specrig"]["found"]
    assert done["specrig"]["changed"] == ["guest 101: put in place live: nvidia-uvm"]
    assert box.guest()["nodes"]["/dev/nvidia-uvm"] == [511, 0, "0666"]


def test_a_foreign_device_line_with_a_narrow_mode_is_named_and_healed_live(box, live):
    box.config.write_text("dev3: /dev/nvidia-uvm,gid=44\n" + box.config.read_text())
    told = box.converge()
    assert told["specrig"]["found"] == [
        "guest 101: dev3: /dev/nvidia-uvm gets mode 0660 in the guest, for group 44 alone: a service user cannot open "
        "it; add mode=0666"
    ]
    assert "dev3: /dev/nvidia-uvm,gid=44\n" in box.config.read_text()
    done = live()
    assert "guest 101: /dev/nvidia-uvm has mode 0660, the host's has 0666" in done["specrig"]["found"]
    assert done["specrig"]["gates"][0]["status"] == "pass"


def test_an_unprivileged_guest_that_may_open_everything_is_left_with_it(box, live):
    box.config.write_text("unprivileged: 1\n" + box.config.read_text())
    box.converge()
    live()
    done = live()
    assert done["changed"] is False
    assert done["specrig"]["notes"] == ["guest 101 may open every device; its config has a rule for all"]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_guest_is_restarted_only_where_nothing_else_helps_and_only_if_allowed(box, live, allowed):
    box.converge()
    live()
    box.guest(nodes={**box.guest()["nodes"], "/dev/nvidia0": "file"})
    box.refuses_binding = True
    done = live(allow_restart=allowed)
    if allowed:
        assert commands(box) == ["start", "shutdown", "start"]
        shutdown = next(call for call in box.calls("pct") if call[0] == "shutdown")
        assert shutdown == ["shutdown", "101", "--timeout", "120", "--forceStop", "1"]
        assert done["restarted"] is True
        assert done["specrig"]["gates"][0]["status"] == "pass"
    else:
        assert commands(box) == ["start"]
        assert done["msg"].endswith("restart the guest, or set lxc_guest_allow_restart and run again")
        assert "/dev/nvidia0 is a regular file" in done["msg"]
        assert "\n" not in done["msg"]


def test_where_device_rules_cannot_work_at_all_the_reason_is_told_and_nothing_restarted(box, live, monkeypatch):
    box.converge()
    live()
    why = "the kernel takes no device programs from this host (bpf: Operation not permitted)"
    monkeypatch.setattr(box.module("guest_devices"), "rules_impossible", lambda: why)
    # lxc-cgroup says it did, and nothing changed.
    monkeypatch.setattr(box.module("guest_devices").Guest, "rule", lambda _guest, _verb, _text: (0, "", ""))
    box.guest(rules=[])
    done = live(allow_restart=True)
    assert why in done["msg"]
    assert "lxc_guest_allow_restart" not in done["msg"]
    assert commands(box) == ["start"]


def test_libraries_of_another_version_are_named(box, live):
    box.converge()
    live()
    box.guest(answer={"library": "570.124.06"})
    assert live(driver_version="570.124.06")["changed"] is False
    done = live(driver_version="580.95.05")
    assert done["failed"] is True
    assert done["msg"] == (
        "guest 101: NVIDIA libraries are 570.124.06, the host's kernel module is 580.95.05: install 580.95.05 in the "
        "guest (user space only, without the kernel module)"
    )
    assert commands(box) == ["start"]


def test_a_mapped_guest_that_cannot_open_for_the_mode_is_told_what_to_do(box, live):
    box.converge()
    box.host["/dev/nvidia-uvm"][2] = "0660"
    box.write(host=box.host)
    live()
    nodes = {path: [row[0], row[1], row[2]] for path, row in box.host.items()}
    box.guest(nodes=nodes, answer={"privileged": False})
    done = live()
    assert "/dev/nvidia-uvm opens for root and not for user specrig (EACCES, mode 0660)" in done["msg"]
    assert "its ids are mapped, so the host's root is nobody in it: use devN lines with mode=0666" in done["msg"]
    assert commands(box) == ["start"]


def test_a_device_that_a_foreign_line_hands_over_is_never_revoked(box, live, monkeypatch):
    # A driver with a major of the dynamic range that an operator gave the guest on purpose.
    box.config.write_text("dev5: /dev/kfd\n" + box.config.read_text())
    box.host["/dev/kfd"] = [238, 0, "0666"]
    box.write(host=box.host)
    box.converge(nodes=[node for node in box.nodes if node["path"] != "/dev/kfd"])
    module = box.module("guest_devices")
    real = os.stat

    def stat(path: Any, *arguments: Any, **more: Any) -> Any:
        if path == "/dev/kfd":
            return os.stat_result((0o020666, 0, 0, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": os.makedev(238, 0)})
        return real(path, *arguments, **more)

    monkeypatch.setattr(module.os, "stat", stat)
    wanted = [node for node in box.nodes if node["path"] != "/dev/kfd"]
    live(nodes=wanted)
    done = live(nodes=wanted)
    assert (done["changed"], "c 238:0 rw" in box.guest()["rules"]) == (False, True)


def test_a_guest_that_is_not_there_is_one_line(box, live):
    box.config.unlink()
    done = live()
    assert done["failed"] is True
    assert done["msg"].startswith(
        "the host has no guest '101' (Configuration file 'nodes/pve/lxc/101.conf' does not exist"
    )


def test_rules_that_a_config_includes_count_as_what_others_granted(box):
    (box.folder / "conf.d").mkdir()
    (box.folder / "common.conf").write_text("lxc.cgroup2.devices.allow = c 10:200 rwm\n")
    (box.folder / "conf.d" / "more.conf").write_text("lxc.cgroup2.devices.allow = c 240:* rwm\nlxc.include = again\n")
    (box.folder / "conf.d" / "more.txt").write_text("lxc.cgroup2.devices.allow = c 241:* rwm\n")
    config = box.folder / "config"
    config.write_text(
        f"lxc.include = {box.folder}/common.conf\nlxc.include = {box.folder}/conf.d\nlxc.include = {config}\n"
        "lxc.cgroup2.devices.allow = c 195:0 rw\nlxc.cgroup2.devices.allow = c 242:* rwm\n"
    )
    params = {"name": "x", "kind": "lxc", "path": str(config), "nodes": box.nodes}
    found = box.module("guest_devices").foreign_rules(params)
    # Ours (195:0) is none of theirs; a config that includes itself ends all the same.
    assert set(found) == {"c 10:200 rwm", "c 240:* rwm", "c 242:* rwm"}
