"""Converging a guest's configuration: our lines right, every other byte as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import guestconf

ALLOW, MOUNT = guestconf.ALLOW, guestconf.MOUNT
UVM_511 = (ALLOW, "c 511:0 rw")
UVM_508 = (ALLOW, "c 508:0 rw")
GPU0 = (ALLOW, "c 195:0 rw")
GPU0_MOUNT = (MOUNT, "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file 0 0")
MODEL = (MOUNT, "/srv/specrig/ram srv/models none bind,ro,create=dir 0 0")
WANTED = [GPU0, UVM_508, GPU0_MOUNT, MODEL]


def test_nodes_and_folders_become_lines():
    nodes = [
        {"path": "/dev/nvidia-uvm", "major": 508, "minor": 0},
        {"path": "/dev/nvidia0", "major": 195, "minor": 0},
    ]
    assert guestconf.node_lines(nodes) == [
        (ALLOW, "c 195:0 rw"),
        (ALLOW, "c 508:0 rw"),
        (MOUNT, "/dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file 0 0"),
        (MOUNT, "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file 0 0"),
    ]
    assert guestconf.folder_line("/srv/specrig/ram", "/srv/models") == MODEL
    with pytest.raises(ValueError, match="absolute path without blanks"):
        guestconf.folder_line("/srv/a b", "/srv/models")


def test_lines_go_to_the_end_of_plain_lxc():
    new, report = guestconf.converge("lxc.uts.name = gpu\n", "lxc", [GPU0, MODEL])
    assert new == (
        "lxc.uts.name = gpu\n"
        "lxc.cgroup2.devices.allow = c 195:0 rw\n"
        "lxc.mount.entry = /srv/specrig/ram srv/models none bind,ro,create=dir 0 0\n"
    )
    assert report["added"] == [list(GPU0), list(MODEL)]
    assert report["owned"] == [list(GPU0), list(MODEL)]


def test_lines_go_to_the_end_of_the_main_section_of_pve(samples: Path):
    before = (samples / "pve" / "02_lines_landed_in_first_snapshot.conf").read_text()
    new, _ = guestconf.converge(before, "pve", [UVM_508])
    main, rest = before.split("\n\n[fresh]")
    assert new == main + "\nlxc.cgroup2.devices.allow: c 508:0 rw\n\n[fresh]" + rest


def test_a_recorded_stale_rule_goes_a_foreign_one_stays():
    before = "lxc.cgroup2.devices.allow = c 511:0 rw\nlxc.cgroup2.devices.allow = c 234:* rwm\n"
    new, report = guestconf.converge(before, "lxc", [UVM_508], owned=[UVM_511])
    assert new == "lxc.cgroup2.devices.allow = c 234:* rwm\nlxc.cgroup2.devices.allow = c 508:0 rw\n"
    assert report["removed"] == [list(UVM_511)]
    unrecorded, report = guestconf.converge(before, "lxc", [UVM_508])
    assert unrecorded == before + "lxc.cgroup2.devices.allow = c 508:0 rw\n"
    assert report["removed"] == []


def test_a_line_that_stood_there_before_us_is_used_but_never_ours_to_remove():
    before = "lxc.cgroup2.devices.allow =   c  508:0 rw\n"
    new, report = guestconf.converge(before, "lxc", [UVM_508])
    assert new == before
    assert report["owned"] == []
    assert guestconf.converge(new, "lxc", [], owned=report["owned"])[0] == before


def test_duplicates_of_ours_are_healed_others_kept():
    foreign = "lxc.cgroup2.devices.allow = c 10:200 rwm\n"
    ours = "lxc.cgroup2.devices.allow = c 508:0 rw\n"
    new, report = guestconf.converge(ours + foreign + ours + foreign, "lxc", [UVM_508], owned=[UVM_508])
    assert new == ours + foreign + foreign
    assert report["healed"] == [list(UVM_508)]


def test_another_mount_on_our_target_is_replaced():
    before = "lxc.mount.entry = /tank/models srv/models none bind 0 0\nlxc.mount.entry = /a b none bind 0 0\n"
    new, report = guestconf.converge(before, "lxc", [MODEL])
    assert new == "lxc.mount.entry = /a b none bind 0 0\n" + guestconf._render(MODEL, "lxc", "\n")
    assert report["removed"] == [[MOUNT, "/tank/models srv/models none bind 0 0"]]


def test_comments_that_look_like_lines_are_left_alone():
    before = "# lxc.cgroup2.devices.allow = c 511:0 rw\n#lxc.cgroup2.devices.allow = c 508:0 rw\n"
    new, _ = guestconf.converge(before, "lxc", [UVM_508], owned=[UVM_511])
    assert new == before + "lxc.cgroup2.devices.allow = c 508:0 rw\n"


def test_line_ends_and_a_missing_last_one():
    new, _ = guestconf.converge("a = b\r\nc = d", "lxc", [GPU0])
    assert new == "a = b\r\nc = d\r\nlxc.cgroup2.devices.allow = c 195:0 rw\r\n"
    assert guestconf.converge("", "pve", [GPU0])[0] == "lxc.cgroup2.devices.allow: c 195:0 rw\n"


@pytest.mark.parametrize(
    "name",
    [
        "01_two_snapshots_pve_testsuite",
        "02_lines_landed_in_first_snapshot",
        "09_marker_block",
        "10_marker_block_after_pve_rewrite_CONSTRUCTED",
        "a",
    ],
)
def test_what_proxmox_makes_of_a_file_needs_no_second_change(samples: Path, name: str):
    before = (samples / "pve" / "rewritten" / f"{name}.before").read_text()
    after = (samples / "pve" / "rewritten" / f"{name}.after").read_text()
    converged, report = guestconf.converge(before, "pve", WANTED)
    lines = "".join(guestconf._render(pair, "pve", "\n") for pair in WANTED)
    main, section, rest = after.partition("\n[")
    rewritten = main + lines + section + rest
    assert guestconf.converge(rewritten, "pve", WANTED, report["owned"])[0] == rewritten
    for text in (before, after):
        new, _ = guestconf.converge(text, "pve", WANTED)
        assert new.partition("\n[")[2] == text.partition("\n[")[2]
    assert guestconf.converge(converged, "pve", [], report["owned"])[0].split("\n[")[1:] == before.split("\n[")[1:]


@pytest.mark.parametrize("pair", [("lxc.a b", "x"), (ALLOW, ""), (ALLOW, "c 1:1 rw\nlxc.x = y"), ("no key\n", "x")])
def test_a_wanted_line_that_is_none_is_refused(pair):
    with pytest.raises(ValueError, match="is no line of a lxc config") as refusal:
        guestconf.converge("", "lxc", [pair])
    assert "\n" not in str(refusal.value)


def test_stale_is_told_from_live_majors_and_never_guessed():
    config = "\n".join(
        f"lxc.cgroup2.devices.allow = {rule}"
        for rule in (
            "c 195:* rwm",
            "c 508:* rwm",
            "c 511:* rwm",
            "c 10:200 rwm",
            "c *:* m",
            "a",
            "c 509:* rwm",
            "b 511:0 r",
        )
    )
    names = {195: ["nvidia"], 509: ["gdrdrv"], 511: ["nvidia-uvm"]}
    facts = guestconf.parse(config, "lxc", {"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": None}, names)
    stale = {rule["text"]: rule["stale"] for rule in facts["device_rules"]}
    assert stale["c 195:* rwm"] is False
    assert stale["c 511:* rwm"] is False
    assert stale["c 508:* rwm"] is True
    assert stale["c 509:* rwm"] is True
    assert stale["c 10:200 rwm"] is False
    unloaded = guestconf.parse(config, "lxc", {"nvidia": 195, "nvidia-uvm": None, "nvidia-caps": None}, names)
    assert {rule["text"]: rule["stale"] for rule in unloaded["device_rules"]}["c 508:* rwm"] is None
    alone = guestconf.parse(config, "lxc")
    assert {rule["stale"] for rule in alone["device_rules"]} == {None}


def test_style_is_told_by_the_lines():
    assert guestconf.style_of("lxc.uts.name = x\n") == "lxc"
    assert guestconf.style_of("arch: amd64\nlxc.apparmor.profile: unconfined\n") == "pve"
    assert guestconf.style_of("hello\n") is None


RULES = st.sampled_from(
    [GPU0, UVM_508, UVM_511, GPU0_MOUNT, MODEL, (ALLOW, "c 10:200 rwm"), (MOUNT, "/x y none bind 0 0")]
)
ODD = st.sampled_from(
    [
        "",
        "# comment",
        "#lxc.cgroup2.devices.allow = c 511:0 rw",
        "garbage",
        "\t",
        "lxc.uts.name = x",
        "arch: amd64",
        "[snap]",
        "[pve:pending]",
        "lxc.include = /usr/share/lxc/config/common.conf",
        "description: a%3Ab",
    ]
)
ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def configs(draw, style):
    lines = draw(st.lists(st.one_of(RULES.map(lambda pair: guestconf._render(pair, style, "")), ODD), max_size=14))
    end = draw(ENDS)
    text = end.join(lines)
    return text + end if draw(st.booleans()) else text


@pytest.mark.parametrize("style", ["lxc", "pve"])
@given(data=st.data())
def test_any_config_in_our_lines_right_all_else_unchanged_and_stable(style, data):
    before = data.draw(configs(style))
    wanted = data.draw(st.lists(st.sampled_from(WANTED), unique=True))
    owned = data.draw(st.lists(st.sampled_from([*WANTED, UVM_511]), unique=True))
    after, report = guestconf.converge(before, style, wanted, owned)
    entries = guestconf.parse(after, style)["entries"]
    for pair in wanted:
        assert entries.count(pair) == 1
    for pair in owned:
        if pair not in wanted:
            assert pair not in entries
    # What is left when our lines are taken out of both is the same text, but for the end of a last line without one.
    ours = {*wanted, *owned}
    targets = {guestconf._mount_target(*pair) for pair in ours} - {None}

    def foreign(text: str) -> list[str]:
        lines = guestconf._split(text)
        length = guestconf._main_length(lines, style)
        kept = []
        for number, line in enumerate(lines):
            pair = guestconf._pair(line, style) if number < length else None
            if pair is None or (pair not in ours and guestconf._mount_target(*pair) not in targets):
                kept.append(line)
        return kept

    left, right = foreign(before), foreign(after)
    assert [line.rstrip("\r\n") for line in left] == [line.rstrip("\r\n") for line in right]
    assert left[:-1] == right[: len(left) - 1]
    again, second = guestconf.converge(after, style, wanted, report["owned"])
    assert again == after
    assert (second["added"], second["removed"], second["healed"]) == ([], [], [])
