"""What the server counts and caches of the prompts that it is sent, by the engine's own report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.sim.testing import running_sim
from specrig.tokens import corpus

MODEL = "Qwen3.6-27B"
CONVERSATION = {
    "conversations": [
        {"from": "human", "value": "Name a bird."},
        {"from": "gpt", "value": "The wren."},
        {"from": "human", "value": "And another?"},
    ]
}


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("api", ["sglang", "openai-chat"])
@pytest.mark.parametrize("thinking", ["false", "true"])
def test_sessions_are_counted_the_same_by_the_server(
    tmp_path: Path, tokenizer_dir: Path, api: str, thinking: str
) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    (tmp_path / "s.yml").write_text(
        f"name: t\nmodel: {MODEL}\napi: {api}\nsampling: {{thinking: {thinking}}}\nworkloads:\n"
        "  - {name: agent, prompts: agentic, prompt_tokens: 1500, output_tokens: 4, requests: 2, turns: 3}\n"
        "  - {name: file, prompts: own.jsonl, prompt_tokens: 300, output_tokens: 4, requests: 2, turns: 2}\n"
        "  - {name: unique, prompts: prose, prompt_tokens: 200, output_tokens: 4, requests: 4, cache: unique}\n"
        "  - {name: shared, prompts: prose, prompt_tokens: 800, output_tokens: 4, requests: 4, cache: shared}\n"
    )
    out = tmp_path / "run"
    flags = {"enable_cache_report": True}
    command = ["load", str(tmp_path / "s.yml"), "--tokenizer", str(tokenizer_dir), "--out", str(out)]
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.05, **flags) as sim:
        main([*command, "--url", sim.url])
        truth = {row["rid"]: row for row in sim.truth()}
    records = rows(out, "requests")
    assert [record["error"] for record in records] == [None] * (6 + 4 + 4 + 4)
    for record in records:
        assert record["prompt_tokens"] == record["prompt_tokens_asked"] == truth[record["rid"]]["prompt_tokens"]
    names = {cell["cell"]: cell["workload"] for cell in rows(out, "cells")}
    lengths: dict[str, list[int]] = {}
    for record in records:
        lengths.setdefault(names[record["cell"]], []).append(record["prompt_tokens"])
    assert lengths["agent"] == [500, 1000, 1500] * 2
    assert lengths["file"][1::2] == [300, 300]
    assert set(lengths["unique"]) == {200}
    for record in records:
        if record["turn"]:  # all but the end of the turn before is in the server's cache
            assert record["cached_tokens"] > 0
        if names[record["cell"]] == "unique":
            assert record["cached_tokens"] < 64
        if names[record["cell"]] == "shared" and record["index"]:
            assert record["cached_tokens"] > 500
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["corpora"]) == {*corpus.hashes(), "own.jsonl"}
    assert manifest["corpora"]["prose"] == corpus.corpus("prose").sha256
    assert manifest["prompts"] == [
        "agentic: tools, calls and results are written by the chat template",
        "own.jsonl: 1 rows are sent as sessions of 2 turns with their recorded answers; 0 rows with fewer are left out",
    ]


def test_the_server_is_given_the_tools(tokenizer_dir: Path) -> None:
    from specrig.engine.client import EngineClient
    from specrig.tokens.prompts import PromptFactory
    from specrig.tokens.tokenizer import load

    prompt = PromptFactory(load(tokenizer_dir), "agentic", 900, turns=2).session(0)[-1]
    with (
        running_sim(model_path=tokenizer_dir, served_model_name=MODEL) as sim,
        EngineClient(sim.url) as client,
    ):
        told = {"enable_thinking": False}
        assert client.tokenize(messages=prompt.messages, tools=prompt.tools, chat_template_kwargs=told) == prompt.ids
        assert len(client.tokenize(messages=prompt.messages, chat_template_kwargs=told)) < 900
        # SGLang gives the template a tool's fields in its own form: what was left out is null
        plain = [{"type": "function", "function": dict(tool["function"])} for tool in prompt.tools or ()]
        assert client.tokenize(messages=prompt.messages, tools=plain, chat_template_kwargs=told) == prompt.ids
