"""Methods as data: labels, flags and the numbers that budgets rest on."""

from __future__ import annotations

import pytest

from specrig.facts import dialects

PROFILE = {
    "model": "Qwen3.6-27B",
    "tp": 4,
    "method": "ddtree",
    "budget": 15,
    "context_length": 131072,
    "port": 31007,
    "draft_model": "/srv/models/Qwen3.6-27B-DFlash",
}
NUMBERS = ("draft_tokens", "block_size", "tree_depth", "reserved_tokens")


@pytest.mark.parametrize(
    ("method", "budget", "label", "numbers"),
    [
        ("autoregressive", None, "autoregressive", (0, 1, 0, 0)),
        ("auto", None, "autoregressive", (0, 1, 0, 0)),
        ("dflash", None, "dflash", (16, 16, 15, 0)),
        ("linear", None, "dflash", (16, 16, 15, 0)),
        ("ddtree", 8, "ddtree-b8", (9, 16, 8, 9)),
        ("ddtree", 15, "ddtree-b15", (16, 16, 15, 16)),
        ("ddtree", 31, "ddtree-b31", (32, 16, 15, 32)),
        ("nextn", None, "nextn", (4, 4, 3, 4)),
    ],
)
def test_what_a_method_means(method, budget, label, numbers):
    facts = dialects.resolve(method, budget)
    assert facts["label"] == label
    assert tuple(facts[key] for key in NUMBERS) == numbers


def test_flags_of_the_default_dialects():
    assert dialects.resolve("auto", None)["flags"] == []
    assert dialects.resolve("dflash", None)["flags"] == [
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        "{draft_model}",
        "--speculative-num-draft-tokens",
        "16",
        "--speculative-dflash-block-size",
        "16",
    ]
    assert dialects.resolve("ddtree", 15)["flags"] == [
        "--speculative-algorithm",
        "DDTREE",
        "--speculative-draft-model-path",
        "{draft_model}",
        "--speculative-ddtree-budget",
        "15",
    ]


def test_the_inventory_chooses_changes_and_adds():
    chosen = dialects.resolve("ddtree", 15, {"ddtree": "fork-enable-ddtree"})
    assert "--speculative-dflash-enable-ddtree" in chosen["flags"]
    assert chosen["dialect"] == "fork-enable-ddtree"
    width = dialects.resolve("ddtree", 30, {"ddtree": "pr-36196"})
    assert width["env"] == {"SGLANG_DFLASH_MAX_NUM_NODES": "30"}
    changed = dialects.resolve("dflash", None, {"dflash": {"block_size": 8}})
    assert (changed["draft_tokens"], changed["tree_depth"]) == (8, 7)
    assert changed["flags"][-1] == "8"
    row = {
        "flags": ["--speculative-algorithm", "MINE", "--nodes", "{budget}"],
        "draft_tokens": "budget+1",
        "needs": ["budget"],
        "aliases": ["ours"],
    }
    added = dialects.resolve("ours", 7, {"mine": row})
    assert (added["label"], added["draft_tokens"], added["tree_depth"]) == ("mine-b7", 8, None)
    assert added["flags"][-1] == "7"


def test_the_table_itself_is_never_changed():
    before = repr(dialects.TABLE)
    dialects.resolve("dflash", None, {"dflash": {"block_size": 8, "flags": ["--x"]}})
    dialects.command(PROFILE, "/m", "127.0.0.1")
    assert repr(dialects.TABLE) == before


@pytest.mark.parametrize(
    ("method", "budget", "overrides", "words"),
    [
        ("medusa", None, None, "method 'medusa' is not known; expected one of autoregressive, ddtree, dflash, nextn"),
        ("ddtree", None, None, "needs a budget"),
        ("ddtree", 0, None, "expected a whole number of nodes"),
        ("ddtree", "15", None, "expected a whole number of nodes"),
        ("dflash", 15, None, "takes no budget"),
        ("ddtree", 15, {"ddtree": "pr-1"}, "has no dialect 'pr-1'"),
        ("ddtree", 15, {"ddtree": 3}, "expected a dialect name or a mapping"),
        ("ddtree", 15, {"ddtree": {"flag": []}}, "unknown keys"),
        ("x", None, {"x": {"draft_tokens": 1}}, "has no flags"),
        ("dflash", None, {"dflash": {"draft_tokens": "2*budget"}}, "expected a number, budget"),
        ("dflash", None, {"dflash": {"flags": ["{budget}"]}}, "which is not set"),
        ("dflash", None, ["dflash"], "expected a mapping of method to dialect"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(method, budget, overrides, words):
    with pytest.raises(dialects.DialectError) as refusal:
        dialects.resolve(method, budget, overrides)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_command_line_of_a_profile():
    assert dialects.command(PROFILE, "/srv/models/Qwen3.6-27B", "127.0.0.1") == [
        "--model-path",
        "/srv/models/Qwen3.6-27B",
        "--served-model-name",
        "Qwen3.6-27B",
        "--tp-size",
        "4",
        "--context-length",
        "131072",
        "--host",
        "127.0.0.1",
        "--port",
        "31007",
        "--enable-metrics",
        "--enable-cache-report",
        "--speculative-algorithm",
        "DDTREE",
        "--speculative-draft-model-path",
        "/srv/models/Qwen3.6-27B-DFlash",
        "--speculative-ddtree-budget",
        "15",
    ]


def test_extra_arguments_come_last_and_memory_is_passed():
    profile = {
        **PROFILE,
        "method": "auto",
        "budget": None,
        "mem_fraction_static": 0.85,
        "extra_args": ["--log-level", "info"],
    }
    argv = dialects.command(profile, "/m", "0.0.0.0")
    assert argv[-4:] == ["--mem-fraction-static", "0.85", "--log-level", "info"]
    assert "--speculative-algorithm" not in argv


@pytest.mark.parametrize("field", ["model", "tp", "method", "context_length", "port"])
def test_a_profile_without_a_field_is_named(field):
    with pytest.raises(dialects.DialectError, match=f"has no {field}"):
        dialects.command({**PROFILE, field: None}, "/m", "0.0.0.0")


def test_a_draft_model_is_asked_for():
    with pytest.raises(dialects.DialectError, match="needs draft_model, the path of the draft model"):
        dialects.command({**PROFILE, "draft_model": None}, "/m", "0.0.0.0")
