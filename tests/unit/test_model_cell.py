"""Cells: what multiplies, what the id covers, what may be compared."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from specrig.errors import UsageError
from specrig.model.cell import Cell, cell_id, expand, match_key, prompt_key, select
from specrig.model.profile import Profile, parse_profiles
from specrig.model.sweep import parse_sweep

SWEEP = """\
name: decoding
model: M
profiles: ['tp1-*', 'tp4-*']
workloads:
  - {name: decode, prompts: questions, prompt_tokens: [4096, 25000], output_tokens: [64, 1024], read_at: [64, 256],
     concurrency: [1, 8]}
  - {name: long, profiles: ['tp4-*'], prompts: prose, prompt_tokens: 100000, output_tokens: 256, requests: 8}
"""


def profiles() -> dict[str, Profile]:
    table: dict[str, dict[str, Any]] = {"chat": {"model": "M", "tp": 2, "serve": True}}
    for tp, context in ((1, 32768), (4, 131072)):
        for method, budget in (("autoregressive", None), ("ddtree", 15)):
            name = f"tp{tp}-{method}"
            table[name] = {"model": "M", "tp": tp, "method": method, "budget": budget, "context_length": context}
    return parse_profiles(table)


def test_lists_multiply() -> None:
    cells = expand(parse_sweep(SWEEP), profiles())
    # decode: 2 prompts x 2 lengths x 2 loads x 4 profiles; long: 2 profiles
    assert len(cells) == 2 * 2 * 2 * 4 + 2
    assert len({c.id for c in cells}) == len(cells)
    assert {c.profile for c in cells if c.workload == "long"} == {"tp4-autoregressive", "tp4-ddtree"}
    assert {c.method for c in cells} == {"autoregressive", "ddtree-b15"}


def test_shorter_lengths_are_read_only_where_they_fit() -> None:
    cells = expand(parse_sweep(SWEEP))
    assert {(c.output_tokens, c.read_at) for c in cells if c.workload == "decode"} == {(64, (64,)), (1024, (64, 256))}


def test_without_profiles_there_is_one_arm() -> None:
    cells = expand(parse_sweep(SWEEP))
    assert len(cells) == 8 + 1
    assert {(c.profile, c.method, c.tp) for c in cells} == {(None, None, None)}


def test_ids_never_change() -> None:
    canonical = b'{"concurrency":8,"prompt_tokens":4096,"workload":"decode"}'
    expected = hashlib.sha256(canonical).hexdigest()[:12]
    assert expected == "ffb75ebd37a8"
    assert cell_id({"workload": "decode", "prompt_tokens": 4096, "concurrency": 8, "rate": None, "id": "x"}) == expected


def test_the_definition_of_a_cell_by_hand() -> None:
    text = "name: n\nmodel: M\nworkloads: [{name: w, prompts: prose, prompt_tokens: 64, output_tokens: 8}]\n"
    canonical = (
        b'{"api":"sglang","arrival":"closed","cache":"flush","concurrency":1,"model":"M","output_tokens":8,'
        b'"prompt_tokens":64,"prompts":"prose","read_at":[],"requests":16,"sampling":{"temperature":0.0,"thinking":false},'
        b'"seed":1,"stop":"length","workload":"w"}'
    )
    (cell,) = expand(parse_sweep(text))
    assert cell.id == hashlib.sha256(canonical).hexdigest()[:12] == "25af5263d13c"


def test_what_an_id_covers() -> None:
    base = {c.id for c in expand(parse_sweep(SWEEP), profiles())}
    same = SWEEP.replace("name: decoding", "name: other\ntimeouts: {idle_s: 5}\nlaunches: 9\nmargin: 0.1")
    assert {c.id for c in expand(parse_sweep(same), profiles())} == base
    moved = {n: msgspec.structs.replace(p, gpus=(4, 5, 6, 7), port=31000) for n, p in profiles().items()}
    assert {c.id for c in expand(parse_sweep(SWEEP), moved)} == base
    for change in ("seed: 2", "sampling: {temperature: 0.5}", "api: openai-chat"):
        other = {c.id for c in expand(parse_sweep(f"{change}\n{SWEEP}"), profiles())}
        assert not other & base, change
    longer = {n: msgspec.structs.replace(p, context_length=65536) for n, p in profiles().items()}
    assert not {c.id for c in expand(parse_sweep(SWEEP), longer)} & base


def test_methods_match_at_equal_tp_length_and_load() -> None:
    cells = expand(parse_sweep(SWEEP), profiles())
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(match_key(cell), []).append(cell)
    assert {len(g) for g in groups.values()} == {2}
    for group in groups.values():
        assert len({prompt_key(c) for c in group}) == 1
        assert {c.method for c in group} == {"autoregressive", "ddtree-b15"}


def test_a_glob_that_names_nothing() -> None:
    bad = SWEEP.replace("'tp1-*'", "'tp2-*'")
    with pytest.raises(UsageError, match=r"^\$\.profiles: 'tp2-\*' matches no profile; expected one of chat, tp1-"):
        expand(parse_sweep(bad), profiles())
    outside = SWEEP.replace("profiles: ['tp1-*', 'tp4-*']", "profiles: ['tp1-*']")
    with pytest.raises(
        UsageError, match=r"^\$\.workloads\[1\]\.profiles: saw tp4-\*; expected some of the sweep's own"
    ):
        expand(parse_sweep(outside), profiles())


def test_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^\$\.model: saw 'Other'; expected 'M', which tp1-autoregressive serves"):
        expand(parse_sweep(SWEEP.replace("model: M", "model: Other")), profiles())


def test_left_out_profiles_means_those_that_do_not_serve() -> None:
    text = "name: n\nmodel: M\nworkloads: [{name: w, prompts: prose, prompt_tokens: 64, output_tokens: 8}]\n"
    assert [c.profile for c in expand(parse_sweep(text), profiles())] == [n for n in profiles() if n != "chat"]


def test_select() -> None:
    cells = expand(parse_sweep(SWEEP), profiles())
    assert select(cells, []) == cells
    assert {c.profile for c in select(cells, ["tp4-*"])} == {"tp4-autoregressive", "tp4-ddtree"}
    assert {c.workload for c in select(cells, ["long"])} == {"long"}
    assert select(cells, [cells[3].id]) == [cells[3]]
    assert len(select(cells, ["tp1-ddtree/decode", "long"])) == 8 + 2
    with pytest.raises(UsageError, match=r"^--only 'tp9' names no cell; expected a glob over tp1-auto"):
        select(cells, ["tp9"])


def test_a_cell_survives_json() -> None:
    cells = expand(parse_sweep(SWEEP), profiles())
    assert msgspec.json.decode(msgspec.json.encode(cells), type=list[Cell]) == cells


def test_title_and_requests() -> None:
    workload = "{name: a, prompts: agentic, prompt_tokens: 4096, output_tokens: 8, turns: 5, requests: 3}"
    text = f"name: n\nmodel: M\nworkloads: [{workload}]\n"
    (cell,) = expand(parse_sweep(text))
    assert cell.total_requests == 15
    assert cell.title == "a p4096 n8 c1"
    assert expand(parse_sweep(SWEEP), profiles())[-1].title == "tp4-ddtree/long p100000 n256 c1"
