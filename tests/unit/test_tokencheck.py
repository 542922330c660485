"""Tokenizers that are not the server's are told by two small requests, before anything is measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.engine.tokencheck import MESSAGES, TEXT, compare
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.tokenizer import Tokenizer


class Served:
    """A server that tokenizes as SGLang does."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool = True) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.asked: list[str] = []

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "default",
    ) -> list[int]:
        self.asked.append(model)
        assert tools is None
        if messages is None:
            assert prompt is not None
            return self.tokenizer.encode(prompt, special=True)
        if not self.chat:
            raise EngineError("prompt: Field required", status=400, kind="bad-request")
        return self.tokenizer.chat_ids(messages, bool((chat_template_kwargs or {}).get("enable_thinking")))


@pytest.fixture(scope="module")
def ours(tokenizer_dir: Path) -> Tokenizer:
    return tokenizers.load(tokenizer_dir)


def without_nfc(file: dict[str, Any]) -> None:
    file["normalizer"] = None


def without_a_token(file: dict[str, Any]) -> None:
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] != "<|vision_start|>"]


def stripping(file: dict[str, Any]) -> None:
    next(token for token in file["added_tokens"] if token["content"] == "<|endoftext|>")["lstrip"] = True


def without_the_last_merges(file: dict[str, Any]) -> None:
    file["model"]["merges"] = file["model"]["merges"][:30_000]


def with_bos(file: dict[str, Any]) -> None:
    end = next(token for token in file["added_tokens"] if token["content"] == "<|endoftext|>")
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }


@pytest.mark.parametrize("change", [without_nfc, without_a_token, stripping, without_the_last_merges, with_bos])
def test_another_tokenizer(
    ours: Tokenizer, tokenizer_dir: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tokenizer_dir, folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    change(file)
    (folder / "tokenizer.json").write_text(json.dumps(file))
    server = Served(tokenizers.load(folder))
    found = compare(server, ours, model="M")
    theirs = server.tokenizer.encode(TEXT, special=True)
    mine = ours.encode(TEXT, special=True)
    first = next(i for i in range(len(mine)) if mine[i] != theirs[i])
    assert found.ok is False
    assert found.message.startswith(
        f"the server's tokenizer or chat template is not the one of {tokenizer_dir}: of a plain text the server makes "
        f"{len(theirs):,} tokens, the folder {len(mine):,}; the first difference is token {first:,}, near "
    )
    assert repr(ours.decode(mine[max(first - 4, 0) : first + 4])) in found.message
    assert "\n" not in found.message
    assert server.asked == ["M"]
    assert compare(server, server.tokenizer).ok  # with its own BOS and tokens it is the same


THINKS = "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def with_template(tokenizer_dir: Path, folder: Path, template: str | None) -> Tokenizer:
    shutil.copytree(tokenizer_dir, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizers.load(folder)


@pytest.mark.parametrize(
    ("mine", "theirs", "thinking", "ok"),
    [
        (PLAIN + THINKS, PLAIN + THINKS, True, True),
        (PLAIN + THINKS, PLAIN + THINKS, False, True),
        (PLAIN, PLAIN + THINKS, False, False),
        (PLAIN + THINKS, PLAIN + "<think>\n{{ '' }}", True, True),  # it thinks always; as asked for, that is the same
        (PLAIN + THINKS, PLAIN + "<think>\n{{ '' }}", False, False),
        (PLAIN, PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"), False, False),
        (PLAIN, "{{ bos_token }}" + PLAIN, False, True),  # Qwen has no BOS
        (PLAIN, "<|endoftext|>" + PLAIN, False, False),
    ],
)
def test_another_chat_template(
    tokenizer_dir: Path, tmp_path: Path, mine: str, theirs: str, thinking: bool, ok: bool
) -> None:
    own = with_template(tokenizer_dir, tmp_path / "mine", mine)
    server = Served(with_template(tokenizer_dir, tmp_path / "theirs", theirs))
    found = compare(server, own, thinking=thinking)
    assert found.ok is ok
    what = f"chat messages with thinking {'on' if thinking else 'off'}"
    count = len(own.chat_ids(MESSAGES, thinking))
    if ok:
        plain = len(own.encode(TEXT, special=True))
        assert found.message == (
            f"the same as the server's on a plain text ({plain:,} tokens) and {what} ({count:,} tokens)"
        )
    else:
        other = len(server.tokenizer.chat_ids(MESSAGES, thinking))
        assert f"of {what} the server makes {other:,} tokens, the folder {count:,}; the first" in found.message
    assert len(server.asked) == 2


def test_templates_without_a_system_message_and_none(tokenizer_dir: Path, tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    own = with_template(tokenizer_dir, tmp_path / "mine", refuses + PLAIN)
    assert compare(Served(own), own).ok
    base = with_template(tokenizer_dir, tmp_path / "base", None)
    found = compare(Served(base), base)
    assert (found.ok, found.message[-29:]) == (True, "; no chat template to compare")


def test_servers_that_cannot_say(ours: Tokenizer) -> None:
    old = compare(Served(ours, chat=False), ours)
    assert old.ok
    assert old.message.endswith("; its chat template is not known: prompt: Field required")

    class Without(Served):
        def tokenize(self, *_args: Any, **_kwargs: Any) -> list[int]:
            raise EngineError("404", status=404, kind="not-found")

    found = compare(Without(ours), ours)
    assert (found.ok, found.message) == (None, "the server's tokenizer is not known: it has no /tokenize")


SWEEP = """\
name: n
model: M
workloads:
  - {name: w, prompts: prose, prompt_tokens: 64, output_tokens: 4, requests: 1, cache: unique}
"""


def test_load_asks_before_it_measures(
    tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrig.sim.testing import running_sim

    sweep = tmp_path / "sweep.yml"
    sweep.write_text(SWEEP)
    other = tmp_path / "other"
    with_template(tokenizer_dir, other, PLAIN.replace("assistant", "the assistant"))

    def load(name: str, tokenizer: Path) -> tuple[int, Path]:
        base = ["load", str(sweep), "--url", server.url, "--out", str(tmp_path / name)]
        return main([*base, "--tokenizer", str(tokenizer)]), tmp_path / name

    with running_sim(model_path=tokenizer_dir, served_model_name="M", context_length=4_096) as server:
        code, run = load("wrong", other)
        err = capsys.readouterr().err
        assert code == 1
        assert f"the server's tokenizer or chat template is not the one of {other}" in err
        assert "nothing was measured" in err
        assert not (run / "requests.jsonl").exists() or not (run / "requests.jsonl").read_text()
        code, run = load("right", tokenizer_dir)
        assert code == 0
        (launch,) = json.loads((run / "manifest.json").read_text())["launches"]
        assert launch["tokenizer_check"]["ok"] is True

        def missing(*_args: Any, **_kwargs: Any) -> list[int]:
            raise EngineError("404", status=404, kind="not-found")

        monkeypatch.setattr(EngineClient, "tokenize", missing)
        code, run = load("unknown", tokenizer_dir)
        assert code == 0
        (launch,) = json.loads((run / "manifest.json").read_text())["launches"]
        assert launch["tokenizer_check"] == {
            "ok": None,
            "message": "the server's tokenizer is not known: it has no /tokenize",
        }
