"""Sweeps are read strictly: every mistake is one line with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.model.sweep import Sampling, Sweep, load_sweep, parse_sweep

DESIGN = """\
name: decoding
model: Qwen3.6-27B
api: sglang
profiles: ['tp1-*', 'tp4-*']
baseline: autoregressive
launches: 3
sampling: {temperature: 0, thinking: false}
workloads:
  - {name: decode, prompts: questions, prompt_tokens: [4096, 25000], output_tokens: 1024,
     read_at: [64, 256, 1024], concurrency: [1, 8], requests: 16, cache: flush}
  - {name: long, profiles: ['tp4-*'], prompts: prose, prompt_tokens: [30000, 100000], output_tokens: 256,
     concurrency: 1, requests: 8}
timeouts: {first_token_s: 120, idle_s: 30, request_s: 3600}
"""

SMALL = """\
name: s
model: m
workloads:
  - {name: a, prompts: prose, prompt_tokens: 100, output_tokens: 8}
  - {name: b, prompts: prose, prompt_tokens: 100, output_tokens: 8, %s}
"""


def error_of(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_sweep(text)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_the_sweep_of_the_design() -> None:
    sweep = parse_sweep(DESIGN)
    assert (sweep.name, sweep.model, sweep.api, sweep.baseline) == (
        "decoding",
        "Qwen3.6-27B",
        "sglang",
        "autoregressive",
    )
    assert sweep.profiles == ("tp1-*", "tp4-*")
    assert sweep.launches == 3
    assert sweep.sampling == Sampling(temperature=0.0, thinking=False)
    decode, long = sweep.workloads
    assert decode.prompt_tokens == (4096, 25000)
    assert decode.output_tokens == (1024,)
    assert decode.read_at == (64, 256, 1024)
    assert decode.concurrency == (1, 8)
    assert (long.name, long.profiles, long.prompts, long.requests) == ("long", ("tp4-*",), "prose", 8)
    assert sweep.timeouts.request_s == 3600


def test_what_is_left_out() -> None:
    sweep = parse_sweep(SMALL % "cache: unique")
    assert (sweep.api, sweep.profiles, sweep.launches, sweep.seed, sweep.margin) == ("sglang", None, 3, 1, 0.02)
    first, second = sweep.workloads
    assert (first.concurrency, first.requests, first.cache, first.arrival, first.stop) == (
        (1,),
        16,
        "flush",
        "closed",
        "length",
    )
    assert second.cache == "unique"


def test_a_scalar_stands_for_a_list() -> None:
    one = parse_sweep(SMALL % "concurrency: 4")
    many = parse_sweep(SMALL % "concurrency: [4]")
    assert one == many


def test_agentic_and_natural_and_open_loop() -> None:
    text = """\
name: s
model: m
workloads:
  - {name: agent, prompts: agentic, prompt_tokens: 4096, output_tokens: 64, requests: 4, tool_s: 0.5}
  - {name: own, prompts: questions, output_tokens: 512, stop: natural}
  - {name: rate, prompts: prose, prompt_tokens: 64, output_tokens: 8, arrival: poisson, rate: [1, 2.5]}
"""
    agent, own, rate = parse_sweep(text).workloads
    assert (agent.turns, agent.tool_s) == (4, 0.5)
    session = text.replace("agentic, prompt_tokens: 4096", "own.jsonl, turns: 2")
    assert parse_sweep(session).workloads[0].turns == 2
    assert "openai-completions" in error_of(session.replace("model: m", "model: m\napi: openai-completions"))
    assert "saw tool_s without turns; expected both" in error_of(session.replace("turns: 2, ", ""))
    assert "a turn waits for the one before" in error_of(
        session.replace("requests: 4", "requests: 4, arrival: poisson, rate: 1")
    )
    assert (own.prompt_tokens, own.stop) == ((None,), "natural")
    assert (rate.rate, rate.concurrency) == ((1.0, 2.5), (None,))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("concurrency: lots", "$.workloads[1].concurrency: saw the text 'lots'; expected a whole number from 1 to"),
        ("concurrency: [1, 0]", "$.workloads[1].concurrency[1]: saw 0; expected a whole number from 1 to"),
        ("concurrency: [1, 1]", "$.workloads[1].concurrency[1]: saw 1; expected every value once"),
        ("concurrency: []", "$.workloads[1].concurrency: saw the list []; expected at least one value"),
        ("concurrency: true", "$.workloads[1].concurrency: saw true; expected a whole number"),
        ("concurrency: 1.5", "$.workloads[1].concurrency: saw 1.5; expected a whole number"),
        ("concurrency: 1:30", "$.workloads[1].concurrency: saw the text '1:30'; expected a whole number"),
        ("concurrency: 010", "$.workloads[1].concurrency: saw the text '010'; expected a whole number"),
        ("concurrency: null", "$.workloads[1].concurrency: saw nothing (null); expected a whole number"),
        ("concurrency: 32", "$.workloads[1].concurrency: saw 32; expected at most the cell's 16 requests"),
        ("concurency: 1", "$.workloads[1]: unknown key 'concurency'; did you mean concurrency?"),
        ("xyzzy: 1", "$.workloads[1]: unknown key 'xyzzy'; expected one of name, prompts"),
        ("read_at: 9", "$.workloads[1].read_at[0]: saw 9; expected at most the 8 tokens that are generated"),
        ("rate: 3", "$.workloads[1].rate: saw 3; expected no rate, as arrival is closed"),
        ("arrival: poisson", "$.workloads[1]: the key 'rate' is missing; expected requests a second, for poisson"),
        ("arrival: poisson, rate: 0", "$.workloads[1].rate: saw 0; expected a number above 0"),
        ("arrival: poisson, rate: .inf", "$.workloads[1].rate: saw inf; expected a number above 0"),
        ("arrival: poisson, rate: .nan", "$.workloads[1].rate: saw nan; expected a number above 0"),
        ("cache: warm", "$.workloads[1].cache: saw the text 'warm'; expected one of flush, unique, shared"),
        ("stop: off", "$.workloads[1].stop: saw the text 'off'; expected one of length, natural"),
        ("turns: 3", "$.workloads[1]: saw turns or tool_s with prompts prose; expected them with agentic or a ."),
        ("phrase: x", "$.workloads[1]: saw phrase or tokens_per_repetition with prompts prose; expected repeat"),
        ("profiles: [x]", "$.workloads[1].profiles: saw the list ['x']; expected no profiles here"),
        (
            "requests: 99999999999999999999",
            "$.workloads[1].requests: saw 99999999999999999999; expected a whole number",
        ),
        ("requests: {a: 1}", "$.workloads[1].requests: saw a mapping with the keys 'a'; expected a whole number"),
    ],
)
def test_wrong_values(more: str, expected: str) -> None:
    assert error_of(SMALL % more).startswith(f"sweep: {expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "sweep: is empty; expected a sweep with name, model and workloads"),
        ("# nothing\n---\n", "sweep: is empty"),
        ("[]\n", "sweep: $: saw the list []; expected a mapping"),
        ("just words\n", "sweep: $: saw the text 'just words'; expected a mapping"),
        ("name: a\n\tmodel: b\n", "sweep: line 2, column 1: a tab is used for indentation; YAML wants spaces"),
        ("name: a\nname: b\n", "sweep: line 2, column 1: the key 'name' is there twice; keep one"),
        ("name: a\n---\nname: b\n", "sweep: line 2, column 1: a second document (---) begins here"),
        ("? [a, b]\n: 1\n", "sweep: line 1, column 3: a list or mapping is used as a key"),
        ("name: !!python/object:os.system x\n", "sweep: line 1, column 7: could not determine a constructor"),
        ("name: *nope\n", "sweep: line 1, column 7: found undefined alias 'nope'"),
        ("name: 'x\n", "sweep: line 2, column 1: found unexpected end of stream"),
        ("name: a\x00b\n", "sweep: not readable as YAML: unacceptable character"),
        ("a: " + "[" * 200 + "]" * 200 + "\n", "sweep: line 1, column 43: nested more than 40 levels deep"),
        ("name: 5\nmodel: m\nworkloads: []\n", "sweep: $.name: saw 5; expected text (in quotes where it looks like"),
        ("name: no\nmodel: m\n", "sweep: $: the key 'workloads' is missing; expected a list of workloads"),
        ("name: a/b\nmodel: m\nworkloads: []\n", "sweep: $.name: saw the text 'a/b'; expected letters, digits"),
        ("name: a\nmodel: m\nworkloads: []\n", "sweep: $.workloads: saw the list []; expected a list with at least"),
        (
            "name: a\nmodel: m\nworkloads: {a: 1}\n",
            "sweep: $.workloads: saw a mapping with the keys 'a'; expected a list",
        ),
        (
            "name: a\nmodel: m\nbaseline: 'DDTree!'\nworkloads: []\n",
            "sweep: $.baseline: saw the text 'DDTree!'; expected a m",
        ),
        (
            "name: a\nmodel: m\nmargin: 90%\nworkloads: []\n",
            "sweep: $.margin: saw 0.9; expected a number from 0 to 0.5",
        ),
        (
            "name: a\nmodel: m\nsampling: {thinking: 'no'}\nworkloads: []\n",
            "sweep: $.sampling.thinking: saw the text 'no'; expected true or false",
        ),
    ],
)
def test_yaml_traps(text: str, expected: str) -> None:
    assert error_of(text).startswith(expected)


def test_two_workloads_of_one_name() -> None:
    assert "$.workloads[1].name: saw the text 'a'; expected a name that no other" in error_of(
        (SMALL % "cache: flush").replace("name: b", "name: a")
    )


def test_aliases_that_multiply_are_cheap() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert "unknown key" in error_of("\n".join(lines) + "\n")
    lines[0] = lines[0].replace("a0:", "name:", 1)
    assert error_of("model: m\nworkloads: []\n" + lines[0] + "\n").startswith("sweep: $.name: saw a list of 9")


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "s.yml"
    good.write_bytes(b"\xef\xbb\xbf" + DESIGN.encode())
    assert load_sweep(good) == parse_sweep(DESIGN) == load_sweep(DESIGN)
    for name, data, expected in (
        ("latin.yml", b"name: caf\xe9\n", "byte 9 is not UTF-8; save the file as UTF-8"),
        ("wide.yml", "name: a".encode("utf-16"), "byte 0 is not UTF-8; it looks like UTF-16; save"),
        ("huge.yml", b"#" * 1_000_001, "1000001 bytes; expected a YAML file of at most 1000000 bytes"),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UsageError) as caught:
            load_sweep(path)
        assert str(caught.value).startswith(f"{path}: {expected}")
    with pytest.raises(UsageError, match="No such file"):
        load_sweep(tmp_path / "none.yml")
    with pytest.raises(UsageError, match="is a folder; expected a YAML file"):
        load_sweep(tmp_path)


def test_as_dict_is_plain() -> None:
    value = parse_sweep(DESIGN).as_dict()
    assert value["profiles"] == ["tp1-*", "tp4-*"]
    assert isinstance(value["workloads"], list)


@given(st.text(alphabet=st.sampled_from("name:model-workloads[]{}&*!|>'\"#%@`,? \n\t0123456789.~é\x00\ufeff")))
def test_any_text_is_a_sweep_or_one_line(text: str) -> None:
    try:
        assert isinstance(parse_sweep(text), Sweep)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["prompts", "prompt_tokens", "output_tokens", "concurrency", "requests", "arrival", "rate", "stop"]
        ),
        LEAF,
    )
)
def test_any_workload_is_read_or_one_line(more: dict[str, object]) -> None:
    import yaml

    value = {"name": "s", "model": "m", "workloads": [{"name": "w", **more}]}
    try:
        parse_sweep(yaml.safe_dump(value, allow_unicode=True))
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert str(error).startswith("sweep: ")  # noqa: PT017
