"""The gates that are asked in the guest, and what stops a play."""

from __future__ import annotations

import pytest

from specrig.facts import serving

PROFILES = {
    "chat": {"model": "M", "tp": 1, "method": "dflash", "draft_model": "/srv/models/D", "port": 31001, "serve": True},
    "tp4": {"model": "M", "tp": 4, "method": "ddtree", "budget": 15, "port": 31404, "context_length": 131072},
    "tp4-plain": {"model": "M", "tp": 4, "method": "autoregressive", "port": 31401},
}
SETTINGS = {"model_root": "/srv/models", "default_shape": {"prompt_tokens": 4096, "max_tokens": 64}}


@pytest.mark.parametrize(
    ("seen", "simulated", "status", "word"),
    [
        ({"kind": "char", "error": None}, False, "pass", "opens"),
        ({"kind": "char", "error": "ENXIO"}, True, "pass", "simulated"),
        # Only the lab declares the simulated driver: on a real host the same answer is a fault.
        ({"kind": "char", "error": "ENXIO"}, False, "fail", "no driver answers"),
        ({"kind": "char", "error": "EPERM"}, True, "fail", "device rules"),
        ({"kind": "char", "error": "EACCES"}, True, "fail", "owner and mode"),
        ({"kind": "file", "error": None}, True, "fail", "regular file"),
        ({"kind": "missing", "error": "ENOENT"}, True, "fail", "is not there"),
        ({"kind": "char", "error": "EIO"}, True, "fail", "EIO"),
    ],
)
def test_an_open_is_judged_by_what_it_proves(seen, simulated, status, word):
    got, text = serving.judge_open("/dev/nvidia-uvm", seen, simulated)
    assert got == status
    assert word in text
    assert "/dev/nvidia-uvm" in text


def test_gates_are_about_what_serves_and_what_else_of_ours_runs():
    look = {"processes": [{"profile": "tp4", "pid": 1}, {"profile": None, "pid": 2}, {"profile": "gone", "pid": 3}]}
    assert serving.gate_subjects(PROFILES, {}) == ["chat"]
    assert serving.gate_subjects(PROFILES, look) == ["chat", "tp4"]
    assert serving.gate_subjects(PROFILES, {"processes": [], "engines": look["processes"]}) == ["chat", "tp4"]
    assert serving.gate_subjects(PROFILES, look, ["tp4-plain"]) == ["tp4-plain"]
    with pytest.raises(serving.ServingError, match="names nosuch, sglang_server_profiles has chat, tp4, tp4-plain"):
        serving.gate_subjects(PROFILES, look, ["nosuch"])


def test_a_short_and_a_full_request_each():
    cases = serving.smoke_cases(PROFILES, ["chat", "tp4-plain"], {**SETTINGS, "kind": "full"})
    assert [(c["profile"], c["label"], c["prompt_tokens"], c["max_tokens"]) for c in cases] == [
        ("chat", "short", None, 8),
        ("chat", "full shape", 4096, 64),
        ("tp4-plain", "short", None, 8),
        ("tp4-plain", "full shape", 4096, 64),
    ]
    assert [c["speculative"] for c in cases] == [True, True, False, False]
    assert cases[0]["tokenizer"] == "/srv/models/M"


def test_the_workload_s_own_shapes_replace_the_default():
    shapes = {"tp4": [{"prompt_tokens": 30000, "max_tokens": 256}, {"prompt_tokens": 100000, "max_tokens": 256}]}
    cases = serving.smoke_cases(PROFILES, ["tp4"], {**SETTINGS, "kind": "full", "shapes": shapes})
    assert [c["prompt_tokens"] for c in cases] == [None, 30000, 100000]
    # DDTree's reserve is its nodes and one more.
    assert cases[0]["reserved_tokens"] == 16


def test_smoke_can_be_short_or_left_out_and_nothing_else():
    assert len(serving.smoke_cases(PROFILES, ["chat"], {**SETTINGS, "kind": "short"})) == 1
    assert serving.smoke_cases(PROFILES, ["chat"], {**SETTINGS, "kind": "none"}) == []
    with pytest.raises(serving.ServingError, match="expected none, short or full"):
        serving.smoke_cases(PROFILES, ["chat"], {**SETTINGS, "kind": "ful"})


def test_the_nodes_to_open_follow_the_minors_not_the_indices():
    plan = {"profiles": {"chat": {"minors": [2]}, "tp4": {"minors": [0, 1, None, 3]}}}
    assert serving.device_paths(["chat", "tp4", "refused"], plan) == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidia2",
        "/dev/nvidia3",
    ]


def test_models_and_drafts_under_the_root_are_looked_for_once():
    wanted = serving.model_paths(["chat", "tp4-plain"], PROFILES, "/srv/models", ".marker")
    assert wanted == {
        "M": {"path": "/srv/models/M", "marker": ".marker"},
        "D": {"path": "/srv/models/D", "marker": ".marker"},
    }


def test_unknown_stops_the_play_unless_it_is_allowed_and_fail_always_does():
    rows = [
        {"gate": "smoke", "subject": "chat", "status": "pass", "message": "ok"},
        {"gate": "placement", "subject": "chat", "status": "unknown", "message": "no pids"},
        {"gate": "device", "subject": "guest", "status": "fail", "message": "EPERM"},
    ]
    assert serving.verdict(rows) == ["fail device guest: EPERM", "unknown placement chat: no pids"]
    assert serving.verdict(rows, ["placement", "device"]) == ["fail device guest: EPERM"]
    assert serving.verdict(rows[:1]) == []
