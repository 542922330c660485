"""Whether models fit: recorded texts of /proc and cgroups, sums that a person worked out, and what must always hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import memory

GIB = 1 << 30
# Of a machine with 512 GB, ZFS, and 16 huge pages of 1 GiB in the pool.
MEMINFO = """MemTotal:       528280940 kB
MemFree:        120123456 kB
MemAvailable:   188978560 kB
Buffers:             1024 kB
Cached:          54123456 kB
SwapTotal:       67108860 kB
SwapFree:        67108860 kB
Shmem:           53477376 kB
HugePages_Total:      16
HugePages_Free:       16
HugePages_Rsvd:        0
Hugepagesize:    1048576 kB
Hugetlb:        16777216 kB
DirectMap4k:      512000 kB
"""
ARCSTATS = """13 1 0x01 147 39984 4567891234 98765432123456
name                            type data
hits                            4    903845345
c                               4    15032385536
c_min                           4    2147483648
c_max                           4    68719476736
size                            4    15032385536
memory_available_bytes          3    -123456
"""
NODE0 = """Node 0 MemTotal:       263000000 kB
Node 0 MemFree:         10485760 kB
Node 0 MemUsed:        252514240 kB
Node 0 Active(file):     4194304 kB
Node 0 Inactive(file):   2097152 kB
Node 0 SReclaimable:     2097152 kB
Node 0 HugePages_Total:     8
"""
STAT = "anon 1073741824\nfile 4294967296\nshmem 2147483648\nactive_file 1073741824\ninactive_file 1073741824\n"


def fits(**more: Any) -> dict[str, Any]:
    given_ = {
        "models": {"Qwen3.6-27B": {"bytes": 55_600_000_000, "missing_bytes": 55_600_000_000}},
        "place": "/srv/specrig/ram",
        "place_free": 64 * GIB,
        "meminfo": memory.parse_meminfo(MEMINFO),
        **more,
    }
    return memory.judge(**given_)


def test_recorded_texts_are_read():
    found = memory.parse_meminfo(MEMINFO)
    assert found["MemAvailable"] == 188978560 * 1024
    assert found["HugePages_Total"] == 16
    assert memory.parse_meminfo(NODE0)["MemFree"] == 10 * GIB
    # 14 GiB, of which 2 stay.
    assert memory.parse_arcstats(ARCSTATS) == {"size": 14 * GIB, "c_min": 2 * GIB, "give_back": 12 * GIB}
    # 10 GiB free, and half of 8 GiB of file pages and slabs.
    assert memory.node_room(NODE0) == 14 * GIB
    assert memory.node_room("") is None


@pytest.mark.parametrize(
    ("text", "value"), [("64G", 64 * GIB), ("65536k", 1 << 26), ("4096", 4096), ("2t", 2 << 40), ("50%", 500)]
)
def test_a_size_is_read_as_mount_reads_it(text, value):
    assert memory.parse_size(text, 1000) == value


@pytest.mark.parametrize("text", ["", "0", "1.5G", "2GiB", "-1", "101%", "50 %", "G"])
def test_what_mount_would_not_take_is_no_size(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        memory.parse_size(text, 1000)


@pytest.mark.parametrize(
    ("text", "value"), [("max\n", None), ("68719476736\n", 64 * GIB), ("9223372036854771712", None), ("0", 0)]
)
def test_a_limit_is_read(text, value):
    assert memory.parse_limit(text) == value


@pytest.mark.parametrize("text", [None, "", "64G", "-1"])
def test_no_limit_is_made_up(text):
    with pytest.raises(ValueError, match="is no limit"):
        memory.parse_limit(text)


def test_arcstats_without_its_lines_is_no_zero():
    with pytest.raises(ValueError, match="no line 'c_min'"):
        memory.parse_arcstats(ARCSTATS.replace("c_min", "c_other"))


def test_the_tightest_of_nested_groups_counts_with_its_file_cache_given_back():
    chain = [
        {"name": "/lxc/101/ns", "max": "max\n", "current": "100\n", "stat": ""},
        # 64 GiB, 12 in use, of which 2 are cache of files: 54 are left. Pages of a tmpfs are none of them.
        {"name": "/lxc/101", "max": str(64 * GIB), "current": str(12 * GIB), "stat": STAT},
        {"name": "/lxc", "max": str(128 * GIB), "current": str(20 * GIB), "stat": ""},
    ]
    room = memory.room_below(chain)
    assert (room["known"], room["limit"], room["left"], room["name"]) == (True, 64 * GIB, 54 * GIB, "/lxc/101")
    chain[2]["max"] = "max"
    chain[1]["current"] = None
    assert memory.room_below(chain)["known"] is False
    assert memory.room_below([])["limit"] is None


def test_memory_of_a_guest_of_proxmox_is_that_of_the_main_section():
    text = "arch: amd64\nmemory: 65536\nswap: 0\n\n[before-upgrade]\nmemory: 1024\n"
    assert memory.configured_limit(text) == 64 * GIB
    assert memory.configured_limit("arch: amd64\n[old]\nmemory: 1024\n") is None
    assert memory.configured_limit(None) is None


def test_the_sum_of_target_and_draft_is_one_line_that_a_person_can_check():
    found = fits(
        models={
            "Qwen3.6-27B": {"bytes": 55_600_000_000, "missing_bytes": 55_600_000_000},
            "Qwen3.6-27B-DFlash": {"bytes": GIB, "missing_bytes": 0},
        },
        arc=memory.parse_arcstats(ARCSTATS),
        reserve=GIB,
    )
    assert found["status"] == "pass"
    assert found["need_bytes"] == 55_600_000_000
    assert found["sum"] == (
        "needs 51.8 GiB (Qwen3.6-27B) + 1.0 GiB (Qwen3.6-27B-DFlash) - 1.0 GiB staged = 51.8 GiB; "
        "the tmpfs of /srv/specrig/ram has 64.0 GiB free; "
        "memory available 180.2 GiB + ARC 12.0 GiB (14.0 GiB - c_min 2.0 GiB) - 1.0 GiB kept free = 191.2 GiB, "
        "swap not counted, 16.0 GiB in the huge page pool not usable"
    )
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("more", "short"),
    [
        ({"place_free": 50 * GIB}, {"tmpfs": 55_600_000_000 - 50 * GIB}),
        ({"meminfo": {"MemAvailable": 40 * GIB}}, {"memory": 55_600_000_000 - 40 * GIB}),
        # Swap and the pool of huge pages are no room for a model.
        (
            {"meminfo": {"MemAvailable": 40 * GIB, "SwapFree": 99 * GIB, "Hugetlb": 99 * GIB}},
            {"memory": 55_600_000_000 - 40 * GIB},
        ),
        ({"nodes": {0: 50 * GIB}}, {"NUMA nodes": 55_600_000_000 - 50 * GIB}),
        (
            {
                "limits": [
                    {"subject": "limit of guest 101", "known": True, "limit": 64 * GIB, "left": 30 * GIB, "why": None}
                ]
            },
            {"limit of guest 101": 55_600_000_000 - 30 * GIB},
        ),
        # What the other guest is about to take is not there twice: 60 - 20 = 40.
        (
            {"meminfo": {"MemAvailable": 60 * GIB}, "others": {"102": 20 * GIB}},
            {"memory": 55_600_000_000 - 40 * GIB},
        ),
    ],
)
def test_what_is_too_small_is_named_with_what_lacks(more, short):
    found = fits(**more)
    assert found["status"] == "fail"
    assert {row["name"]: row["bytes"] for row in found["short"]} == short


def test_what_is_staged_and_what_an_interrupted_staging_left_counts_as_present():
    half = {"Qwen3.6-27B": {"bytes": 60 * GIB, "missing_bytes": 30 * GIB}}
    assert fits(models=half, place_free=30 * GIB)["status"] == "pass"
    assert fits(models=half, place_free=29 * GIB)["status"] == "fail"
    found = fits(models=half, place_free=29 * GIB, leftover=2 * GIB)
    assert found["status"] == "pass"
    assert "2.0 GiB of it in temporary files of a staging that did not end" in found["sum"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"place_free": None}, "has unknown free"),
        ({"meminfo": {}}, "memory available unknown"),
        ({"nodes": {0: 99 * GIB, 1: None}}, "1 has unknown"),
        (
            {
                "limits": [
                    {"subject": "limit of guest gpu", "known": False, "limit": None, "left": None, "why": "no word"}
                ]
            },
            "limit of guest gpu unknown (no word)",
        ),
    ],
)
def test_what_cannot_be_read_is_unknown_and_never_enough(more, words):
    found = fits(**more)
    assert found["status"] == "unknown"
    assert words in found["sum"]


def test_an_arc_that_cannot_be_read_matters_only_where_it_is_needed():
    few = {"MemAvailable": 40 * GIB}
    assert fits(meminfo=few)["status"] == "fail"
    found = fits(meminfo=few, arc_problem="arcstats has no line 'size'")
    assert found["status"] == "unknown"
    assert "ARC unknown (arcstats has no line 'size')" in found["sum"]
    assert fits(arc_problem="arcstats has no line 'size'")["status"] == "pass"


def test_a_fit_that_rests_on_the_arc_says_so():
    found = fits(meminfo={"MemAvailable": 45 * GIB}, arc=memory.parse_arcstats(ARCSTATS))
    assert found["status"] == "pass"
    assert "only with what ZFS's ARC gives back" in found["notes"][0]


def test_a_limit_that_stands_aside_is_shown_and_counts_only_where_it_is_known():
    row = {
        "subject": "limit of this session",
        "known": False,
        "limit": None,
        "left": None,
        "why": "no word",
        "aside": True,
    }
    found = fits(limits=[row])
    assert found["status"] == "pass"
    assert "limit of this session unknown (no word)" in found["sum"]
    assert fits(limits=[dict(row, known=True, limit=GIB, left=GIB)])["status"] == "fail"


amounts = st.integers(0, 1 << 42)
maybe = st.one_of(st.none(), amounts)
models = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(amounts, st.floats(0, 1)).map(lambda pair: {"bytes": pair[0], "missing_bytes": int(pair[0] * pair[1])}),
)


@st.composite
def arguments(draw) -> dict[str, Any]:
    limit = draw(st.one_of(st.none(), amounts))
    return {
        "models": draw(models),
        "place": "/ram",
        "place_free": draw(maybe),
        "meminfo": {} if (available := draw(maybe)) is None else {"MemAvailable": available, "SwapFree": draw(amounts)},
        "arc": draw(
            st.one_of(
                st.none(), amounts.map(lambda size: {"size": size, "c_min": size // 3, "give_back": size - size // 3})
            )
        ),
        "limits": [{"subject": "guest", "known": draw(st.booleans()), "limit": limit, "left": limit, "why": "no word"}],
        "nodes": draw(st.one_of(st.none(), st.dictionaries(st.integers(0, 3), maybe))),
        "reserve": draw(amounts),
        "others": draw(st.dictionaries(st.sampled_from(["x", "y"]), amounts)),
        "leftover": draw(amounts),
    }


@given(arguments())
def test_a_pass_means_that_every_room_is_known_and_large_enough(ask):
    found = memory.judge(**ask)
    need = sum(row["missing_bytes"] for row in ask["models"].values())
    rest = max(0, need - ask["leftover"])
    assert found["need_bytes"] == need
    assert "\n" not in found["sum"]
    if found["status"] == "pass" and rest:
        assert rest <= ask["place_free"]
        arc = ask["arc"]["give_back"] if ask["arc"] else 0
        assert rest + ask["reserve"] + sum(ask["others"].values()) <= ask["meminfo"]["MemAvailable"] + arc
        limit = ask["limits"][0]
        assert limit["known"]
        assert limit["left"] is None or rest <= limit["left"]
        assert ask["nodes"] is None or rest <= sum(ask["nodes"].values())
    if found["status"] == "unknown":
        assert "unknown" in found["sum"] or "none is known" in found["sum"]


@given(arguments(), st.integers(1, 1 << 40))
def test_more_to_copy_never_turns_a_refusal_into_a_pass(ask, more):
    order = {"pass": 0, "unknown": 1, "fail": 2}
    before = memory.judge(**ask)["status"]
    ask["models"] = {**ask["models"], "z": {"bytes": more, "missing_bytes": more}}
    assert order[memory.judge(**ask)["status"]] >= order[before]


@given(arguments(), st.integers(0, 1 << 42))
def test_swap_and_huge_pages_change_nothing_but_words(ask, swap):
    before = memory.judge(**ask)
    ask["meminfo"] = {**ask["meminfo"], "SwapFree": swap, "Hugetlb": swap}
    after = memory.judge(**ask)
    assert (after["status"], after["rooms"]) == (before["status"], before["rooms"])


@given(st.integers(0, 1 << 62))
def test_an_amount_is_never_shown_as_nothing(count):
    assert (memory.amount(count) == "0") == (count == 0)
