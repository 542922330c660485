"""The plan names what does not fit and why; the commands exit 1 for it and 2 for bad input."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.errors import UsageError
from specrig.model.cell import expand
from specrig.model.profile import parse_profiles
from specrig.model.sweep import parse_sweep
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.budget import Limits
from specrig.tokens.plan import Pace, cell_seconds, ci_width, plan
from specrig.tokens.student import quantile
from specrig.tokens.tokenizer import Tokenizer

SWEEP = """\
name: n
model: M
profiles: ['tp*']
workloads:
  - {name: short, prompts: questions, prompt_tokens: 4096, output_tokens: 1024, requests: 16}
  - {name: long, prompts: prose, prompt_tokens: [25000, 31730], output_tokens: 1024, requests: 8}
"""
LOAD = tokenizers.load
PROFILES = parse_profiles(
    {
        "tp1-autoregressive": {"model": "M", "context_length": 32_768},
        "tp1-ddtree-b15": {"model": "M", "method": "ddtree", "budget": 15, "context_length": 32_768},
    }
)
LIMITS = {
    "tp1-autoregressive": Limits(context_length=32_768),
    "tp1-ddtree-b15": Limits(context_length=32_768, reserved_tokens=16, block=16),
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return _load(str(tokenizer_dir))


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands load the tokenizer at each run, which is half a second."""
    monkeypatch.setattr(tokenizers, "load", _load)


@functools.cache
def _load(path: str) -> Tokenizer:
    return LOAD(path)


def test_only_the_cell_that_does_not_fit_is_left_out(tokenizer: Tokenizer) -> None:
    planned = plan(parse_sweep(SWEEP), tokenizer, LIMITS, PROFILES)
    assert len(planned.cells) == 6
    (bad,) = planned.infeasible
    # 31,730 + 1,024 + 16 = 32,770 with the tree, 32,754 without
    assert bad.title == "tp1-ddtree-b15/long p31730 n1024 c1"
    assert (
        "31,730 + 1,024 to generate + 16 reserved for drafts = 32,770 is 2 over the context length 32,768" in bad.reason
    )
    assert len(planned.feasible) == 5
    assert all(bad.cell not in launch.cells for launch in planned.launches)
    assert len(planned.launches) == 3 * 2
    assert set(planned.prompt_tokens.values()) == {4_096, 25_000, 31_730}
    assert planned.tokenizer == tokenizer.revision
    assert set(planned.corpora) == {"prose", "code", "questions"}


def test_headroom_and_concurrency(tokenizer: Tokenizer) -> None:
    sweep = parse_sweep(SWEEP)
    tight = plan(sweep, tokenizer, LIMITS, PROFILES, headroom=500)
    assert len(tight.infeasible) == 2
    own = plan(parse_sweep(SWEEP + "headroom: 500\n"), tokenizer, LIMITS, PROFILES)
    assert own.infeasible == tight.infeasible
    assert not plan(
        parse_sweep(SWEEP.replace(", 31730", "") + "headroom: 500\n"), tokenizer, LIMITS, PROFILES
    ).infeasible
    text = SWEEP.replace("requests: 16}", "requests: 16, concurrency: [1, 8]}")
    pool = {None: Limits(context_length=32_768, kv_tokens=33_000)}
    crowded = plan(parse_sweep(text), tokenizer, pool, PROFILES)
    assert {i.title for i in crowded.infeasible} == {f"{p}/short p4096 n1024 c8" for p in PROFILES}
    assert "8 at once x (prompt 4,096 + 1,024 to generate) = 40,960 is over the KV capacity of 33,000" in (
        crowded.infeasible[0].reason
    )


@pytest.mark.parametrize(
    ("cache", "radix", "fits"), [("shared", True, True), ("shared", False, False), ("unique", True, False)]
)
def test_a_shared_prefix_counts_once(tokenizer: Tokenizer, cache: str, radix: bool, fits: bool) -> None:
    text = SWEEP.replace("requests: 16}", f"requests: 16, concurrency: 8, cache: {cache}}}").replace(
        "profiles: ['tp*']\n", ""
    )
    # 8 x 5,120 = 40,960; three quarters of 4,096 are shared by all 8: some 21,500 less
    pool = Limits(context_length=32_768, kv_tokens=33_000, prefix_cache=radix)
    planned = plan(parse_sweep(text), tokenizer, {None: pool})
    (short,) = (c for c in planned.cells if c.workload == "short")
    assert planned.budgets[short.id].fits is fits
    assert (planned.budgets[short.id].shared_tokens > 2_900) == (cache == "shared" and radix)


def test_load_keeps_the_headroom_of_the_sweep(tokenizer_dir: Path, tmp_path: Path) -> None:
    from specrig.sim.testing import running_sim

    text = "name: n\nmodel: M\nheadroom: 96\nworkloads:\n  - {name: w, prompts: prose, prompt_tokens: [300, 400], "
    (tmp_path / "s.yml").write_text(text + "output_tokens: 8, requests: 1, cache: unique}\n")
    out = tmp_path / "run"
    with running_sim(model_path=tokenizer_dir, served_model_name="M", context_length=500) as server:
        base = ["load", str(tmp_path / "s.yml"), "--url", server.url]
        assert main([*base, "--tokenizer", str(tokenizer_dir), "--out", str(out)]) == 1
    rows = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows][1] == "skipped"
    assert rows[0]["state"] != "skipped"
    assert "400 + 8 to generate + 96 headroom = 504 is 4 over the context length 500" in rows[1]["reason"]


def test_a_profile_without_limits(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="tp1-ddtree-b15: its context length is not known"):
        plan(parse_sweep(SWEEP), tokenizer, {"tp1-autoregressive": Limits(context_length=32_768)}, PROFILES)


def test_a_prompt_that_cannot_be_built_is_named_and_the_rest_runs(tokenizer: Tokenizer) -> None:
    text = SWEEP.replace("4096", "[13, 4096]")
    planned = plan(parse_sweep(text), tokenizer, LIMITS, PROFILES)
    reasons = [i.reason for i in planned.infeasible if " p13 " in i.title]
    assert len(reasons) == 2
    assert reasons[0].startswith("prompt_tokens: 13 asked for prompts questions; the shortest has")
    assert len(planned.feasible) == 5


def test_a_server_with_another_tokenizer(tokenizer: Tokenizer) -> None:
    planned = plan(parse_sweep(SWEEP), tokenizer, LIMITS, PROFILES, server_count=lambda _messages, _tools: 4_100)
    assert len(planned.infeasible) == 6
    assert "the server counts 4,100 tokens for a prompt of 4,096" in planned.infeasible[0].reason
    assert not plan(
        parse_sweep(SWEEP.replace(", 31730", "")),
        tokenizer,
        LIMITS,
        PROFILES,
        server_count=lambda messages, tools: len(tokenizer.chat_ids(messages, tools=tools)),
    ).infeasible


def test_a_missing_file_is_bad_input(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "name: n\nmodel: M\nworkloads: [{name: w, prompts: own.jsonl, output_tokens: 8}]\n"
    limits = {None: Limits(context_length=60)}
    with pytest.raises(UsageError, match=r"own\.jsonl: cannot be read: No such file"):
        plan(parse_sweep(text), tokenizer, limits, source=tmp_path / "s.yml")
    (tmp_path / "own.jsonl").write_text('{"prompt": "short"}\n{"prompt": "' + "the " * 50 + '"}\n')
    planned = plan(parse_sweep(text), tokenizer, limits, source=tmp_path / "s.yml")
    # the longest row counts: 50 words, a space at the end and the template are more than a window of 60 less 7 takes
    assert [i.title for i in planned.infeasible] == ["w n8 c1"]


CLAIM = """\
name: incident
model: M
workloads:
  - {name: filler, prompts: repeat, prompt_tokens: [25000, 100000], output_tokens: 256, requests: 2,
     tokens_per_repetition: 77, phrase: "%s"}
"""


def test_a_claim_of_77_that_is_101(tokenizer: Tokenizer) -> None:
    phrase = " the" * 101
    assert tokenizer.count(phrase) == 101
    planned = plan(parse_sweep(CLAIM % phrase), tokenizer, {None: Limits(context_length=131_072)})
    first, second = (i.reason for i in planned.infeasible)
    assert "324 repetitions are 32,724 tokens, 25,000 were asked (101 tokens a repetition, 77 claimed)" in first
    assert "1,298 repetitions are 131,098 tokens, 100,000 were asked" in second
    honest = plan(parse_sweep(CLAIM % (" the" * 77)), tokenizer, {None: Limits(context_length=131_072)})
    assert not honest.infeasible


def test_interval_widths_of_the_design() -> None:
    assert quantile(0.975, 15) == pytest.approx(2.1314, abs=5e-5)
    assert ci_width(16) == pytest.approx(0.173, abs=0.001)
    assert ci_width(140) == pytest.approx(0.051, abs=0.001)
    assert ci_width(16, 0.1) == pytest.approx(math.exp(2.13145 * 0.1 / 4) - 1, rel=1e-4)


def test_quantiles_equal_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 7, 15, 100, 5_000):
        for p in (0.5, 0.6, 0.9, 0.975, 0.9995):
            assert quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9, abs=1e-9)
    with pytest.raises(ValueError, match=r"expected 0\.5"):
        quantile(1.0, 3)


def test_seconds_of_a_cell() -> None:
    pace = Pace(prefill_tokens_per_s=1_000, decode_tokens_per_s=50)
    text = SWEEP.replace("requests: 16", "requests: 16, concurrency: 8").replace("4096", "2000").replace("1024", "100")
    cell = expand(parse_sweep(text))[0]
    # warm-up 2 + 2; two waves of 8 x 2 + 2
    assert cell_seconds(cell, 2_000, pace) == pytest.approx(4 + 2 * 18)


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yml"
    path.write_text(SWEEP)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_command(capsys: pytest.CaptureFixture[str], sweep_file: Path, tokenizer_dir: Path) -> None:
    code, out, err = run(capsys, "plan", sweep_file, "--tokenizer", tokenizer_dir, "--context-length", 32_768)
    assert (code, err) == (0, "")
    assert "3 cells fit, 0 do not" in out
    assert "17 %" in out
    code, out, _ = run(capsys, "plan", sweep_file, "--tokenizer", tokenizer_dir, "--context-length", 32_000, "--json")
    value: dict[str, Any] = json.loads(out)
    assert code == 1
    assert not value["fits"]
    assert [(c["prompt_tokens"], c["fits"]) for c in value["cells"]] == [(4_096, True), (25_000, True), (31_730, False)]
    assert value["infeasible"][0]["cell"] == value["cells"][2]["id"]


def test_plan_command_with_profiles(
    capsys: pytest.CaptureFixture[str], sweep_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    profiles = tmp_path / "all.yml"
    table = {n: {"model": "M", "method": p.label, "context_length": 32_768} for n, p in PROFILES.items()}
    profiles.write_text(json.dumps({"other": 1, "sglang_server_profiles": table}))
    base = ("plan", sweep_file, "--tokenizer", tokenizer_dir, "--profiles", profiles)
    code, out, _ = run(capsys, *base)
    assert code == 1
    assert "tp1-ddtree-b15/long p31730 n1024 c1: prompt 31,730 + 1,024" in out
    assert "5 cells fit, 1 do not" in out
    code, out, _ = run(capsys, *base, "--only", "tp1-autoregressive")
    assert code == 0
    code, _, err = run(capsys, *base, "--only", "tp9")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the context length is not known; give --context-length, --profiles FILE, or --url of a server"),
        (("--context-length", "x"), "'x'; expected a number"),
        (("--context-length", "0"), "'0'; expected numbers above 0"),
        (("--profiles", "nowhere.yml"), "nowhere.yml: cannot be read: No such file"),
        (("--context-length", "9999", "--headroom", "-1"), "'-1'; expected numbers above 0"),
        (("--context-length", "9999", "--sd-log", "-1"), "'-1'; expected a number above 0"),
    ],
)
def test_plan_command_refuses(
    capsys: pytest.CaptureFixture[str],
    sweep_file: Path,
    tokenizer_dir: Path,
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    code, _, err = run(capsys, "plan", sweep_file, "--tokenizer", tokenizer_dir, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err


def test_budget_command(capsys: pytest.CaptureFixture[str], tokenizer_dir: Path) -> None:
    base = ("budget", "--tokenizer", tokenizer_dir, "--context-length", 32_768, "--max-tokens", 1_024)
    code, out, err = run(capsys, *base, "--prompt-tokens", 31_742)
    assert (code, err) == (0, "")
    assert "fits; with these tokens to generate the longest prompt is 31,742" in out
    code, out, _ = run(capsys, *base, "--prompt-tokens", 31_742, "--method", "ddtree-b15", "--json")
    value = json.loads(out)
    assert (code, value["fits"], value["outcome"]) == (1, False, "rejected")
    assert value["checks"][0]["limits"]["reserved_tokens"] == 16
    code, out, _ = run(capsys, *base, "--prompt-tokens", 31_700, "--headroom", 43)
    assert code == 1
    assert "31,700 + 1,024 to generate + 43 headroom = 32,767" in out


def test_budget_of_a_file(capsys: pytest.CaptureFixture[str], tokenizer_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text(" the" * 500)
    base = ("budget", "--context-length", 600, "--max-tokens", 10, "--prompt-file", text)
    code, out, _ = run(capsys, *base, "--tokenizer", tokenizer_dir)
    assert code == 0
    # 500 words and 12 of the template
    assert "has 512 tokens with the chat template" in out
    code, _, err = run(capsys, *base)
    assert (code, err.count("\n")) == (2, 1)
    assert "give --tokenizer" in err


def test_budget_of_the_incident(capsys: pytest.CaptureFixture[str], tokenizer_dir: Path, tmp_path: Path) -> None:
    base = ("budget", "--context-length", "32768,131072", "--prompt-tokens", "25000,30000,100000", "--max-tokens", 256)
    claim = ("--claimed-tokens-per-repetition", 77, "--question-tokens", 30)
    code, out, _ = run(capsys, *base, *claim, "--json")
    rows = json.loads(out)["rows"]
    assert [(r["asked"], r["repetitions"], r["claimed_tokens"]) for r in rows[:3]] == [
        (25_000, 324, 24_948),
        (30_000, 389, 29_953),
        (100_000, 1_298, 99_946),
    ]
    assert [r["fits"] for r in rows] == [True, True, False, True, True, True]
    assert code == 1
    phrase = tmp_path / "phrase.txt"
    phrase.write_text(" the" * 101)
    code, out, _ = run(capsys, *base, *claim, "--tokenizer", tokenizer_dir, "--phrase-file", phrase)
    assert code == 1
    for text in ("32,724", "33,010", "131,098", "131,384", "(101 tokens a repetition, 77 claimed)"):
        assert text in out
    phrase.write_text(" the" * 77)
    code, out, _ = run(
        capsys,
        *("budget", "--context-length", 131_072, "--prompt-tokens", "25000,30000,100000", "--max-tokens", 256),
        *(*claim, "--tokenizer", tokenizer_dir, "--phrase-file", phrase),
    )
    assert code == 0
    assert "99,946" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--max-tokens", "1"), "nothing to check; give --prompt-tokens or --prompt-file"),
        (("--max-tokens", "1", "--prompt-tokens", "5"), "the context length is not known; give --context-length"),
        (("--max-tokens", "0", "--prompt-tokens", "5"), "'0'; expected numbers above 0"),
        (("--max-tokens", "1", "--prompt-tokens", "5", "--context-length", "9", "--method", "X!"), "method: saw 'X!'"),
        (
            ("--max-tokens", "1", "--prompt-tokens", "5", "--context-length", "9", "--tokenizer", "/none"),
            "is not a folder",
        ),
        (
            (
                "--max-tokens",
                "1",
                "--prompt-tokens",
                "5",
                "--context-length",
                "9",
                "--claimed-tokens-per-repetition",
                "7",
            ),
            "--prompt-tokens: saw 5; expected at least one repetition of 7",
        ),
        (
            (
                *("--max-tokens", "1", "--prompt-tokens", "100000000", "--context-length", "9"),
                *("--claimed-tokens-per-repetition", "7"),
            ),
            "--prompt-tokens: saw 100,000,000; expected at most 2,000,000 to count",
        ),
    ],
)
def test_budget_command_refuses(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    code, _, err = run(capsys, "budget", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err


def test_budget_below_the_template(capsys: pytest.CaptureFixture[str], tokenizer_dir: Path) -> None:
    code, _, err = run(
        capsys,
        *("budget", "--tokenizer", tokenizer_dir, "--context-length", 100, "--prompt-tokens", 12, "--max-tokens", 1),
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "saw 12; expected above the chat template's own 12" in err


def test_limits_and_tokenizer_of_a_running_server(
    capsys: pytest.CaptureFixture[str], sweep_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    from specrig.sim.testing import running_sim

    other = tmp_path / "other"
    shutil.copytree(tokenizer_dir, other)
    config = other / "tokenizer_config.json"
    value = json.loads(config.read_text())
    value["chat_template"] = value["chat_template"].replace("<|im_start|>assistant", "<|im_start|>the assistant")
    config.write_text(json.dumps(value))
    with running_sim(model_path=tokenizer_dir, served_model_name="M", context_length=26_024) as server:
        base = ("--url", server.url, "--tokenizer", tokenizer_dir)
        # 25,000 + 1,024 = 26,024 fits the window, and is clipped by 2
        code, out, _ = run(capsys, "budget", *base, "--prompt-tokens", 25_000, "--max-tokens", 1_024, "--json")
        found = json.loads(out)
        assert (code, found["outcome"], found["effective_new_tokens"]) == (1, "clipped", 1_022)
        assert found["checks"][0]["limits"]["source"] == "server"
        code, out, _ = run(capsys, "plan", sweep_file, *base, "--json")
        assert code == 1
        assert [c["fits"] for c in json.loads(out)["cells"]] == [True, False, False]
        assert json.loads(out)["server"][-1].startswith("tokenizer: the same as the server's on a plain text (")
        shape = ("--prompt-tokens", 100, "--max-tokens", 10)
        for command in (("plan", sweep_file), ("budget", *shape)):
            code, out, err = run(capsys, *command, "--url", server.url, "--tokenizer", other)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert f"the server's tokenizer or chat template is not the one of {other}: of chat messages" in err
        code, out, _ = run(capsys, "budget", "--url", server.url, *shape)
        # without a tokenizer there is nothing to compare
        assert (code, "tokenizer:" in out) == (0, False)


def test_a_key_comes_from_the_environment_and_not_only_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sweep_file: Path, tokenizer_dir: Path
) -> None:
    from specrig.sim.testing import running_sim

    flags = {"served_model_name": "M", "context_length": 32_768, "api_key": "sk-secret"}
    with running_sim(model_path=tokenizer_dir, **flags) as server:
        base = ("--url", server.url, "--tokenizer", tokenizer_dir)
        asked = ("budget", *base, "--prompt-tokens", 100, "--max-tokens", 10)
        code, out, err = run(capsys, *asked)
        assert code != 0
        assert "401" in err
        monkeypatch.setenv("SPECRIG_API_KEY", "sk-secret")
        code, out, err = run(capsys, *asked)
        assert (code, err) == (0, "")
        code, planned, err = run(capsys, "plan", sweep_file, *base, "--json")
        assert (code, err) == (0, "")
        assert "sk-secret" not in out + planned
