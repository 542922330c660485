"""When requests are due: every load shape against figures worked out by hand, and traces with their lengths."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.cli import main
from specrig.errors import UsageError
from specrig.load.arrivals import densest_rate, due_times
from specrig.model.cell import Cell, expand
from specrig.model.sweep import parse_sweep
from specrig.sim.testing import running_sim
from specrig.tokens.trace import Row, longest, read_trace, rows_of

HEAD = "name: t\nmodel: M\nworkloads:\n"


def cell(**more: Any) -> Cell:
    workload = {"name": "w", "prompts": "questions", "output_tokens": 8, **more}
    (made,) = expand(parse_sweep(HEAD + f"  - {json.dumps(workload)}\n"))
    return made


def due(**more: Any) -> list[float]:
    found = due_times(cell(**more))
    assert found is not None
    return found


def test_closed_and_constant() -> None:
    assert due_times(cell(requests=4)) is None
    assert due(arrival="constant", requests=4, rate=2) == [0.0, 0.5, 1.0, 1.5]


def test_bursts_keep_the_mean_rate() -> None:
    assert due(arrival="burst", burst=3, requests=7, rate=6) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


def test_a_ramp_follows_the_integral_of_its_rate() -> None:
    # from 1 to 3 a second, 5 requests: T = 2 * 4 / 4 = 2 s; t + t^2 / 2 = i
    expected = [0, math.sqrt(3) - 1, math.sqrt(5) - 1, math.sqrt(7) - 1, 2.0]
    assert due(arrival="ramp", requests=5, rate=1, rate_to=3) == pytest.approx(expected)
    assert due(arrival="ramp", requests=5, rate=3, rate_to=1) == pytest.approx([2 - t for t in reversed(expected)])
    assert due(arrival="ramp", requests=3, rate=2, rate_to=2) == [0.0, 0.5, 1.0]
    assert due(arrival="ramp", requests=1, rate=2, rate_to=9) == [0.0]


@pytest.mark.parametrize(
    ("more", "variation"), [({"arrival": "poisson"}, 1.0), ({"arrival": "gamma", "burstiness": 0.25}, 2.0)]
)
def test_random_gaps_have_their_mean_and_spread(more: dict[str, Any], variation: float) -> None:
    moments = due(requests=20001, rate=5, **more)
    assert moments == due(requests=20001, rate=5, **more)
    assert moments != due_times(replaced(cell(requests=20001, rate=5, **more), seed=8))
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    # mean 1/5 s; the coefficient of variation of a gamma is 1 / sqrt(shape); both within four standard errors
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.03 * variation)
    assert spread / mean == pytest.approx(variation, rel=0.06)


def replaced(made: Cell, **more: Any) -> Cell:
    import msgspec

    return msgspec.structs.replace(made, **more)


@given(st.integers(1, 300), st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_a_ramp_ascends_and_ends_when_it_should(requests: int, first: float, last: float) -> None:
    moments = due(arrival="ramp", requests=requests, rate=first, rate_to=last)
    assert moments[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(moments))
    assert moments[-1] == pytest.approx(2 * (requests - 1) / (first + last), rel=1e-6)


def test_the_densest_rate() -> None:
    assert densest_rate(cell(arrival="ramp", rate=1, rate_to=3), [0, 1]) == 3
    assert densest_rate(cell(arrival="trace", trace="t.jsonl"), [3.0, 1.0, 2.0]) == 1.0
    assert densest_rate(cell(arrival="trace", trace="t.jsonl"), [1.0, 1.0]) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"arrival": "constant"}, "'rate' is missing"),
        ({"arrival": "constant", "rate": 0}, "rate"),
        ({"arrival": "gamma", "rate": 1}, "'burstiness' is missing"),
        ({"arrival": "burst", "rate": 1}, "'burst' is missing"),
        ({"arrival": "ramp", "rate": 1}, "'rate_to' is missing"),
        ({"arrival": "trace"}, "'trace' is missing"),
        ({"arrival": "trace", "trace": "x.txt"}, ".jsonl or .csv"),
        ({"arrival": "trace", "trace": "x.csv", "rate": 2}, "no rate, as arrival is trace"),
        ({"arrival": "trace", "trace": "x.csv", "output_tokens": [4, 8]}, "lists of lengths with a trace"),
        ({"burst": 3}, "saw it with arrival closed; expected it with burst only"),
        ({"arrival": "poisson", "rate": 1, "ramp_s": 3}, "expected it with closed only"),
        ({"arrival": "sometimes"}, "sometimes"),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        cell(**more)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ids_of_cells_without_the_new_keys_stay() -> None:
    names = {"ramp_s", "burstiness", "burst", "rate_to", "trace", "trace_speed"}
    assert names.isdisjoint(k for k, v in vars_of(cell()).items() if v is not None)
    assert cell(ramp_s=2.0).id != cell().id


def vars_of(made: Cell) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(made)  # type: ignore[no-any-return]


MOONCAKE = """\
{"timestamp": 3000, "input_length": 400, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 300, "output_length": 7}

{"timestamp": 1500.5, "input_length": 200, "output_length": 6}
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def test_traces_are_read_in_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    found = read_trace(tmp_path / "m.jsonl", 3)
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in found] == [
        (0.0, 300, 7),
        (0.5005, 200, 6),
        (2.0, 400, 5),
    ]
    (tmp_path / "a.csv").write_text(AZURE)
    first, second = read_trace(tmp_path / "a.csv", 2)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    (tmp_path / "s.jsonl").write_text('{"at_s": 5}\n{"at_s": 7.5, "output_tokens": 3}\n')
    assert read_trace(tmp_path / "s.jsonl", 2) == (Row(at_s=0.0), Row(at_s=2.5, output_tokens=3))


def test_a_trace_is_replayed_at_its_speed_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    asked = cell(arrival="trace", trace="m.jsonl", requests=3, prompt_tokens=500, trace_speed=2)
    rows = rows_of(asked, tmp_path)
    assert due_times(asked, rows) == [0.0, 0.25025, 1.0]
    assert longest(rows).prompt_tokens == 400
    (tmp_path / "s.jsonl").write_text('{"at_s": 5}\n{"at_s": 7.5, "output_tokens": 3}\n')
    bare = rows_of(cell(arrival="trace", trace="s.jsonl", requests=2, prompt_tokens=64), tmp_path)
    assert [(row.prompt_tokens, row.output_tokens) for row in bare] == [(64, 8), (64, 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MOONCAKE, "has 400 prompt_tokens; expected at most the workload's 350"),
        ('{"timestamp": 1}\n', "has 1 rows; expected at least the 3 requests"),
        ("[1]\n", "expected one JSON object a line"),
        ('{"timestamp": "soon"}\n', "has no time"),
        ('{"timestamp": 1, "input_length": 0}\n', "input_length is 0; expected a number of tokens"),
        ('{"timestamp": 1, "output_length": "many"}\n', "output_length is 'many'"),
        ('{"timestamp": NaN}\n', "expected one JSON object"),
        ("\xff", "m.jsonl"),
    ],
)
def test_traces_that_are_none(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        rows_of(cell(arrival="trace", trace="m.jsonl", requests=3, prompt_tokens=350), tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("traces")
    for name in ("t.jsonl", "t.csv"):
        (folder / name).write_bytes(data)
        said = ""
        try:
            read_trace(folder / name, 1)
        except UsageError as error:
            said = str(error)
        assert "\n" not in said


def test_shapes_against_an_engine(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Each request of a trace has its own lengths; a ramped closed loop reaches its concurrency step by step."""
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    (tmp_path / "s.yml").write_text(
        "name: t\nmodel: Qwen3.6-27B\nworkloads:\n"
        "  - {name: replay, prompts: prose, prompt_tokens: 512, output_tokens: 16, arrival: trace, trace: m.jsonl,"
        " trace_speed: 4, requests: 3}\n"
        "  - {name: burst, prompts: questions, prompt_tokens: 256, output_tokens: 8, arrival: burst, burst: 4,"
        " rate: 16, requests: 8}\n"
        "  - {name: steps, prompts: questions, prompt_tokens: 256, output_tokens: 64, concurrency: 4, ramp_s: 1.2,"
        " requests: 12}\n"
    )
    with running_sim(model_path=tokenizer_dir, served_model_name="Qwen3.6-27B", sim_time_scale=0.5) as sim:
        command = ["load", str(tmp_path / "s.yml"), "--url", sim.url, "--tokenizer", str(tokenizer_dir)]
        main([*command, "--out", str(tmp_path / "run")])
        warm = [row["prompt_tokens"] for row in sim.truth() if row["rid"].startswith("warmup-")]
    assert warm == [400, 256, 256, 256, 256]  # the longest; a burst of four, the shape of the last cell
    by_workload = lines(tmp_path / "run")
    # A busy machine may cost a cell its validity, but no request.
    late = {"client kept up", "requests left when due"}
    broken = [check for row in by_workload["cells"] for check in row["checks"] if check["ok"] is False]
    assert {check["rule"] for check in broken} <= late, broken
    assert {row["ok"] == row["requests"] > 0 for row in by_workload["cells"]} == {True}
    cells = {row["workload"]: row for row in by_workload["cells"]}
    replay = sorted((r for r in by_workload["requests"] if r["cell"] == cells["replay"]["cell"]), key=order)
    assert [(r["prompt_tokens"], r["output_tokens"]) for r in replay] == [(300, 7), (200, 6), (400, 5)]
    assert [r["scheduled_s"] - replay[0]["scheduled_s"] for r in replay] == pytest.approx([0, 0.125125, 0.5], abs=1e-5)
    burst = sorted((r for r in by_workload["requests"] if r["cell"] == cells["burst"]["cell"]), key=order)
    assert [round(r["scheduled_s"] - burst[0]["scheduled_s"], 5) for r in burst] == [0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25]
    steps = sorted((r for r in by_workload["requests"] if r["cell"] == cells["steps"]["cell"]), key=sent)
    # the second, third and fourth worker may begin at 0.3, 0.6 and 0.9 s
    begun = steps[0]["sent_s"]
    assert sum(r["sent_s"] - begun < 0.29 and r["finished_s"] - begun > 0.29 for r in steps) <= 1
    assert any(sum(o["sent_s"] <= r["sent_s"] < o["finished_s"] for o in steps) == 4 for r in steps)


order: Callable[[dict[str, Any]], int] = lambda row: row["index"]  # noqa: E731
sent: Callable[[dict[str, Any]], float] = lambda row: row["sent_s"]  # noqa: E731


def lines(run: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        for name in ("cells", "requests")
    }


def test_a_trace_that_does_not_fit_is_planned_as_such(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    (tmp_path / "s.yml").write_text(
        "name: t\nmodel: Qwen3.6-27B\nworkloads:\n  - {name: replay, prompts: prose, prompt_tokens: 512,"
        " output_tokens: 16, arrival: trace, trace: m.jsonl, requests: 3}\n"
    )
    command = ["plan", str(tmp_path / "s.yml"), "--tokenizer", str(tokenizer_dir), "--json", "--context-length"]
    assert main([*command, "407"]) == 0  # 400 + 5 <= C - 2; the largest of each together would be 400 + 7
    assert json.loads(capsys.readouterr().out)["infeasible"] == []
    assert main([*command, "406"]) == 1
    (tmp_path / "m.jsonl").unlink()
    assert main([*command, "407"]) == 2
