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
        ("eagle", None, "eagle", (4, 4, 3, 4)),
        ("eagle3", None, "eagle3", (4, 4, 3, 4)),
        ("standalone", None, "standalone", (4, 4, 3, 0)),
        ("ngram", None, "ngram", (12, 12, 11, 0)),
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


def test_numbers_of_a_tree_follow_from_its_steps_and_branching():
    """EAGLE holds max(topk * steps, draft tokens) back from the window; a chain drafts steps + 1."""
    tree = dialects.resolve("eagle3", None, {"eagle3": {"steps": 5, "topk": 4, "draft_tokens": 16}})
    assert tuple(tree[key] for key in NUMBERS) == (16, 16, 5, 20)
    assert tree["flags"][4:] == [
        "--speculative-num-steps",
        "5",
        "--speculative-eagle-topk",
        "4",
        "--speculative-num-draft-tokens",
        "16",
    ]
    chain = dialects.resolve("nextn", None, {"nextn": {"steps": 1}})
    assert (chain["draft_tokens"], chain["tree_depth"], chain["reserved_tokens"]) == (2, 1, 2)
    assert dialects.resolve("ngram", None)["flags"] == [
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        "12",
    ]


def test_a_row_extends_another():
    own = {"wide": {"extends": "ddtree/pr-36196", "env": {"OURS": "{budget}"}, "block_size": 8, "source": "our branch"}}
    facts = dialects.resolve("wide", 15, own)
    assert (facts["label"], facts["dialect"], facts["tree_depth"]) == ("wide-b15", "ddtree/pr-36196", 7)
    assert facts["env"] == {"OURS": "15", "SGLANG_DFLASH_MAX_NUM_NODES": "15"}
    assert facts["flags"][-2:] == ["--speculative-dflash-tree-width", "4"]
    assert (facts["requires"], facts["source"]) == ("branch", "our branch")
    twice = dialects.resolve("wider", 3, {**own, "wider": {"extends": "wide", "env": {"OURS": "2"}}})
    assert twice["env"] == {"OURS": "2", "SGLANG_DFLASH_MAX_NUM_NODES": "3"}


def test_an_engine_names_its_dialects():
    engine, engines = {"kind": "sglang"}, {"tree": {"dialects": {"ddtree": "pr-31069"}}}
    general = {"ddtree": "pr-36196", "dflash": {"block_size": 8}}
    plain = dialects.for_profile({"method": "ddtree"}, general, engine, engines)
    assert dialects.resolve("ddtree", 15, plain)["dialect"] == "pr-36196"
    own = dialects.for_profile({"method": "ddtree", "engine": "tree"}, general, engine, engines)
    assert dialects.resolve("ddtree", 15, own)["dialect"] == "pr-31069"
    assert dialects.resolve("dflash", None, own)["block_size"] == 8
    with pytest.raises(
        dialects.DialectError, match=r"engine 'tre' is not in sglang_server_engines \(did you mean tree"
    ):
        dialects.for_profile({"engine": "tre"}, general, engine, engines)


def test_the_table_itself_is_never_changed():
    before = repr(dialects.TABLE)
    dialects.resolve("dflash", None, {"dflash": {"block_size": 8, "flags": ["--x"]}})
    dialects.command(PROFILE, "/m", "127.0.0.1")
    assert repr(dialects.TABLE) == before


@pytest.mark.parametrize(
    ("method", "budget", "overrides", "words"),
    [
        (
            "medusa",
            None,
            None,
            "method 'medusa' is not known; expected one of autoregressive, ddtree, dflash, eagle, eagle3, nextn, "
            "ngram, standalone, or a row for it in sglang_server_dialects",
        ),
        ("dflsh", None, None, "method 'dflsh' is not known (did you mean dflash?); expected one of"),
        ("Eagle-3", None, None, "(did you mean eagle3 or eagle?)"),
        ("ours2", None, {"mine": {"aliases": ["ours"], "flags": []}}, "(did you mean ours?)"),
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
        ("ddtree", 15, {"ddtree": "pr-36195"}, "has no dialect 'pr-36195' (did you mean pr-36196?)"),
        ("a", None, {"a": {"extends": "b"}, "b": {"extends": "a"}}, "leads back to it"),
        ("a", None, {"a": {"extends": "dflsh"}}, "extends dflsh: method 'dflsh' is not known (did you mean dflash?)"),
        ("a", None, {"a": {"extends": "dflash", "dialect": "sglang"}}, "both extends and dialect"),
        ("dflash", None, {"dflash": {"requires": "newest"}}, "expected releases such as >=0.5.11"),
        ("x", None, {"x": {"flags": "--x"}}, "expected a list of arguments"),
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
