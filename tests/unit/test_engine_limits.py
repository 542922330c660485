"""Limits as live servers report them, by recorded bodies of several versions; what is missing stays unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specrig.engine.errors import EngineError
from specrig.engine.limits import from_info, total_below
from specrig.tokens.budget import Limits, check

SAMPLES = Path(__file__).parent.parent / "samples" / "sglang"


def sample(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((SAMPLES / name).read_text())
    return value


def test_a_pool_that_is_smaller_than_the_window() -> None:
    report = from_info(sample("real_server_info_2026-05_excerpt.json"), 32_768)
    limits = report.limits
    assert (limits.context_length, limits.kv_tokens, limits.max_input, limits.page_size) == (32_768, 20_480, 20_474, 1)
    assert (limits.room, limits.reserved_tokens, limits.block, limits.prefix_cache) == (20_480, 0, 0, True)
    assert check(20_473, 5, limits).fits
    assert check(20_474, 1, limits).outcome == "rejected"


def test_a_live_server() -> None:
    models = sample("live-0.5.23-cpu/v1_models.txt")
    report = from_info(sample("live-0.5.23-cpu/server_info.txt"), models["data"][0]["max_model_len"])
    assert report.limits == Limits(
        context_length=8_192,
        kv_tokens=20_000,
        reserved_tokens=0,
        block=0,
        max_running=32,
        page_size=1,
        max_input=8_186,
        total_below=False,
        prefix_cache=True,
        auto_truncate=False,
        source="server",
    )
    assert report.warnings == ()


def test_what_runs_at_once_is_the_effective_number() -> None:
    report = from_info(sample("constructed_server_info_0.5.23_tp4_dflash_WRONG_GPUS.json"), 131_072)
    assert (report.limits.max_running, report.running_configured) == (9, 48)
    assert (report.limits.reserved_tokens, report.limits.block) == (0, 16)
    assert report.warnings == ("max_running_requests is 48 but only 9 run at once",)


@pytest.mark.parametrize(
    ("key", "unknown"),
    [
        ("max_total_num_tokens", {"kv_tokens": None}),
        ("page_size", {"page_size": None}),
        ("max_req_input_len", {"max_input": None}),
        ("disable_radix_cache", {"prefix_cache": None}),
        ("allow_auto_truncate", {"auto_truncate": None}),
        ("speculative_algorithm", {"reserved_tokens": None, "block": None}),
        ("version", {"total_below": True}),
    ],
)
def test_a_missing_key_is_unknown_and_nothing_else_changes(key: str, unknown: dict[str, Any]) -> None:
    info = sample("live-0.5.23-cpu/server_info.txt")
    whole = from_info(info, 8_192).limits
    del info[key]
    info["internal_states"][0].pop("memory_usage")
    assert from_info(info, 8_192).limits == msgspec.structs.replace(whole, **unknown)


def test_old_reports() -> None:
    info = sample("live-0.5.23-cpu/server_info.txt")
    del info["max_total_num_tokens"]
    assert from_info(info, 8_192).limits.kv_tokens == 20_000  # memory_usage.token_capacity
    del info["internal_states"]
    report = from_info(info, 8_192)
    assert (report.limits.kv_tokens, report.limits.max_running) == (None, 32)
    assert report.warnings == ("max_running_requests is 32; how many run at once in effect is not reported",)
    del info["max_running_requests"]
    assert from_info(info, 8_192).limits.max_running is None
    bare = from_info({}, 8_192).limits
    assert len(bare.unknown) == 6
    assert check(8_100, 50, bare, 900).fits


def test_the_window_is_the_servers_and_no_models_card() -> None:
    info = sample("live-0.5.23-cpu/server_info.txt")
    # SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN: more than the model was made for, or less by --context-length
    for window in (262_144, 4_096):
        assert from_info(info | {"context_length": 40_960}, window).limits.context_length == window
    assert from_info(info | {"context_length": 40_960}, None).limits.context_length == 40_960
    with pytest.raises(EngineError, match="does not say how long its context is"):
        from_info(info, None)


SPECULATIVE = {"speculative_num_steps": 5, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32}


@pytest.mark.parametrize(
    ("info", "reserved"),
    [
        ({"speculative_algorithm": None}, 0),
        ({"speculative_algorithm": "EAGLE", **SPECULATIVE}, 40),
        ({"speculative_algorithm": "EAGLE3", **SPECULATIVE, "speculative_num_draft_tokens": 64}, 64),
        ({"speculative_algorithm": "NEXTN", **SPECULATIVE}, 40),
        ({"speculative_algorithm": "FROZEN_KV_MTP", **SPECULATIVE}, 40),
        ({"speculative_algorithm": "STANDALONE", **SPECULATIVE}, 0),
        ({"speculative_algorithm": "NGRAM", **SPECULATIVE}, 0),
        ({"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}, 0),
        ({"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 16}, 0),
        ({"speculative_algorithm": "UNO", "speculative_num_draft_tokens": 16}, 0),
        ({"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 31}, 32),
        ({"speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": 16}, 16),
        ({"speculative_algorithm": "DDTREE"}, None),
        (
            {
                "speculative_algorithm": "DFLASH",
                "speculative_dflash_tree_verify": True,
                "speculative_num_draft_tokens": 16,
            },
            16,
        ),
        ({"speculative_algorithm": "EAGLE", **SPECULATIVE, "speculative_eagle_topk": None}, None),
        ({"speculative_algorithm": "MINE", **SPECULATIVE}, None),
        ({}, None),
    ],
)
def test_reserved_tokens_by_method(info: dict[str, Any], reserved: int | None) -> None:
    assert from_info(info, 4_096).limits.reserved_tokens == reserved


def test_adaptive_drafts_are_warned_of() -> None:
    info = {"speculative_algorithm": "EAGLE", **SPECULATIVE, "speculative_adaptive": True}
    assert from_info(info, 4_096).warnings == (
        "the drafts' length is adaptive: more tokens may be reserved for them than reported now",
    )


@pytest.mark.parametrize(
    ("version", "below"),
    [
        ("0.5.9", True),
        ("0.5.10.post1", True),
        ("0.5.10rc0", True),
        ("0.5.11", False),
        ("0.5.12.post1", False),
        ("0.5.23", False),
        ("0.6", False),
        ("v1.0.0", False),
        ("main", True),
        (None, True),
    ],
)
def test_when_the_whole_window_may_be_used(version: str | None, below: bool) -> None:
    assert total_below(version) is below


def test_replicas_share_the_requests() -> None:
    info = sample("live-0.5.23-cpu/server_info.txt") | {"dp_size": 2}
    limits = from_info(info, 8_192).limits
    assert (limits.max_running, limits.replicas) == (64, 2)
    assert check(4_500, 500, limits, 8).fits  # 4 x 5,000 on each
    assert check(4_500, 500, limits, 9).problems == (
        "9 at once / 2 replicas = 5 at once x (prompt 4,500 + 500 to generate) = 25,000 is over the KV capacity of "
        "20,000 tokens: at most 8 at once",
    )


@pytest.mark.parametrize(("value", "cap"), [("512", 512), ("0", None), ("-1", None), ("", None), ("x", None)])
def test_the_cap_in_the_servers_environment(value: str, cap: int | None) -> None:
    info = sample("live-0.5.23-cpu/server_info.txt")
    assert from_info(info, 8_192, {"SGLANG_MAX_NEW_TOKENS_LIMIT": value}).limits.new_tokens_limit == cap
