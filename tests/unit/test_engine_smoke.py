"""The budget and smoke gates' verdicts, by hand-made answers."""

from __future__ import annotations

import msgspec
import pytest

from specrig.engine import smoke
from specrig.errors import UsageError
from specrig.tokens.budget import Limits

CASE = smoke.Case(profile="tp1", url="http://127.0.0.1:1", max_tokens=64, prompt_tokens=4096, context_length=32768)
LIMITS = Limits(context_length=32768, kv_tokens=200_000)


def changed(**changes):
    return msgspec.structs.replace(CASE, **changes)


def answer(completion=64, prompt=4096, **meta):
    return {"text": "x", "meta_info": {"completion_tokens": completion, "prompt_tokens": prompt, **meta}}


def test_a_shape_that_fits_passes():
    row = smoke.budget_row(CASE, LIMITS)
    assert (row["gate"], row["subject"], row["status"]) == ("budget", "tp1", "pass")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [
        # C = 32768, R = 0: P + N <= 32766, P <= 32761.
        (32_510, 256, True),
        (32_511, 256, False),
        (32_761, 5, True),
        (32_762, 4, False),
    ],
)
def test_the_budget_gate_follows_the_engine_s_rules_to_the_token(prompt_tokens, max_tokens, fits):
    row = smoke.budget_row(changed(prompt_tokens=prompt_tokens, max_tokens=max_tokens), LIMITS)
    assert row["status"] == ("pass" if fits else "fail")


def test_a_tree_s_reserve_counts_even_where_the_server_does_not_name_it():
    # DDTree with 15 nodes reserves 16: P + N <= 32752.
    case = changed(prompt_tokens=32_000, max_tokens=752, reserved_tokens=16, block_size=16)
    assert smoke.budget_row(case, smoke.limits_of(case, LIMITS))["status"] == "pass"
    over = changed(prompt_tokens=32_000, max_tokens=753, reserved_tokens=16, block_size=16)
    assert smoke.budget_row(over, smoke.limits_of(over, LIMITS))["status"] == "fail"


def test_another_window_than_the_profile_s_fails():
    row = smoke.budget_row(changed(context_length=131_072), LIMITS)
    assert row["status"] == "fail"
    assert "window is 32768 tokens, the profile says 131072" in row["message"]


def test_a_server_that_truncates_silently_is_never_blessed():
    row = smoke.budget_row(CASE, Limits(context_length=32768, auto_truncate=True))
    assert row["status"] == "fail"
    assert "--allow-auto-truncate" in row["message"]


def test_the_exact_tokens_pass():
    row = smoke.answer_row(CASE, answer(), 1.5, 4096)
    assert row["status"] == "pass"
    assert row["seen"] == {"completion_tokens": 64, "prompt_tokens": 4096, "verify_steps": None, "seconds": 1.5}


@pytest.mark.parametrize(
    ("case", "body", "words"),
    [
        # A silent clip shows only as fewer tokens.
        (CASE, answer(completion=63), "63 tokens came, 64 were asked for"),
        (CASE, answer(prompt=5504), "counts 5504 prompt tokens, 4096 were sent"),
        (CASE, {"text": "x"}, "no token counts"),
        (changed(speculative=True), answer(), "speculation is off"),
        (changed(speculative=True), answer(spec_verify_ct=0), "speculation is off"),
        (changed(speculative=False), answer(spec_verify_ct=12), "12 verify steps were made"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(case, body, words):
    row = smoke.answer_row(case, body, 1.0, 4096)
    assert row["status"] == "fail"
    assert words in row["message"]


def test_speculation_as_the_profile_says_passes():
    assert smoke.answer_row(changed(speculative=True), answer(spec_verify_ct=12), 1.0, 4096)["status"] == "pass"
    assert smoke.answer_row(changed(speculative=False), answer(), 1.0, 4096)["status"] == "pass"


def report(samples, **changes):
    info = msgspec.json.decode(
        (samples / "sglang" / "constructed_server_info_0.5.23_tp4_dflash_WRONG_GPUS.json").read_bytes()
    )
    return {**info, **changes}


def test_a_server_asked_by_hand_is_held_against_what_was_given(samples):
    names = [{"id": "Qwen3.6-27B"}]
    case = changed(model="Qwen3.6-27B", tp=4, speculative=True, draft_tokens=16)
    assert [row["status"] for row in smoke.server_rows(case, report(samples), names)] == ["pass"]
    wrong = [
        (changed(tp=1), {}, "tp 4, the profile says 1"),
        (changed(model="Other"), {}, "answers for Qwen3.6-27B, the profile says Other"),
        (changed(speculative=False), {}, "speculates by DFLASH, the profile is autoregressive"),
        (changed(speculative=True), {"speculative_algorithm": None}, "without a speculative algorithm"),
        (changed(speculative=True, draft_tokens=32), {}, "drafts 16 tokens a step, the profile's method 32"),
    ]
    for wanted, server, words in wrong:
        (row, *_rest) = smoke.server_rows(wanted, report(samples, **server), names)
        assert row["status"] == "fail"
        assert words in row["message"]


def test_a_server_that_is_not_there_is_a_failed_gate_and_no_traceback(capsys):
    # Port 1 of the loopback device: nothing listens.
    assert smoke.main(["--url", "http://127.0.0.1:1", "--max-tokens", "8", "--json"]) == 1
    rows = msgspec.json.decode(capsys.readouterr().out)["rows"]
    assert [(row["gate"], row["status"]) for row in rows] == [("smoke", "fail")]
    assert "http://127.0.0.1:1" in rows[0]["message"]


def test_usage_errors_are_one_line(capsys, tmp_path):
    assert smoke.main(["--url", "http://127.0.0.1:1"]) == 2
    bad = tmp_path / "cases.json"
    bad.write_text('[{"profile": "a"}]')
    assert smoke.main(["--cases", str(bad)]) == 2
    assert smoke.main(["--cases", str(tmp_path / "none.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("smoke: ") for line in lines)


def test_an_exact_prompt_needs_a_tokenizer():
    with pytest.raises(UsageError, match="needs --tokenizer"):
        smoke._prompt(CASE, {})
