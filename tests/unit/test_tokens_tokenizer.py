"""Ids and templates equal those of transformers, on the real Qwen vocabulary and on templates that use its names."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from specrig.errors import UsageError
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.tokenizer import Tokenizer

MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Grüße, 你好 👋🏽\n\n\tdef f(x):  # tab"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|> c"},
        {"role": "tool", "content": "{'x': 1}"},
        {"role": "user", "content": "  spaces  \r\n and 1234567890 digits"},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def ours(tokenizer_dir: Path) -> Tokenizer:
    return tokenizers.load(tokenizer_dir)


@pytest.fixture(scope="module")
def theirs(tokenizer_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_chat_ids_equal_transformers(
    ours: Tokenizer, theirs: Any, messages: list[dict[str, Any]], thinking: bool, prompt: bool
) -> None:
    expected = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=prompt, enable_thinking=thinking
    )["input_ids"]
    assert ours.chat_ids(messages, thinking=thinking, add_generation_prompt=prompt) == expected


def test_tools_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, "x<>&'"]}}}]
    expected = theirs.apply_chat_template(MESSAGES[1], tools=tools, add_generation_prompt=True)["input_ids"]
    assert ours.chat_ids(MESSAGES[1], thinking=True, tools=tools) == expected


def test_text_equals_transformers(ours: Tokenizer, theirs: Any) -> None:
    rng = random.Random(5)
    alphabet = "abc XYZ.,\n\t  '’éß你😀́0123<|im_start|>_-/\\\r"
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(60)))
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.spans(text)[0] == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_spans_cover_the_text(ours: Tokenizer) -> None:
    ids, ends = ours.spans("Hello there, Wörld!")
    assert len(ids) == len(ends)
    assert ends == sorted(ends)
    assert ends[-1] == len("Hello there, Wörld!")


def test_eos_and_revision(ours: Tokenizer, tokenizer_dir: Path, tmp_path: Path) -> None:
    end, text_end = ours.encode("<|im_end|>"), ours.encode("<|endoftext|>")
    assert len(end) == len(text_end) == 1
    assert end[0] in ours.eos_ids
    assert len(ours.revision) == 64
    copy = tmp_path / "t"
    shutil.copytree(tokenizer_dir, copy)
    assert tokenizers.load(copy).revision == ours.revision
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    changed = tokenizers.load(copy)
    assert changed.revision != ours.revision
    assert changed.render(MESSAGES[0]) == "What is 2 + 2?"


def small(folder: Path, **config: Any) -> Path:
    """A tokenizer of single characters."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {chr(c): c - 32 for c in range(32, 127)}
    rust = Rust(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rust.decoder = decoders.Fuse()
    rust.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}))
    return folder


TEMPLATE = """\
{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'x' %}{{ raise_exception('no role x') }}{% endif %}
    {% generation %}[{{ m | tojson(indent=2) }}]{% endgeneration %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{% endfor %}{{ strftime_now('%Y') }}{{ eos_token }}"""


def test_the_names_that_templates_use(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = small(tmp_path / "t", chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    ours = tokenizers.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    messages = [
        {"role": "user", "content": "<a & 'b'> é"},
        {"role": "user", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert '"3"' not in ours.render(messages)
    with pytest.raises(UsageError, match="the chat template refuses these messages: no role x"):
        ours.render([{"role": "x", "content": ""}])
    assert ours.eos_ids == {96}


def test_a_template_is_sandboxed(tmp_path: Path) -> None:
    folder = small(tmp_path / "t", chat_template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(UsageError, match="refuses these messages"):
        tokenizers.load(folder).render([])


def test_no_template(tmp_path: Path) -> None:
    base = tokenizers.load(small(tmp_path / "t"))
    assert not base.has_template
    assert base.decode(base.encode("plain text")) == "plain text"
    with pytest.raises(UsageError, match="has no chat template; expected one, or an API without chat"):
        base.chat_ids([{"role": "user", "content": "x"}])


def test_one_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert tokenizers.load(small(tmp_path / "t", chat_template=named)).render([]) == "D"


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    folder = small(tmp_path / "t")
    file = folder / "tokenizer.json"
    value = json.loads(file.read_text())
    value["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(value))
    assert tokenizers.load(folder).count("twelve chars") == 12


def test_a_tokenizer_of_another_kind_is_read_by_the_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import models, pre_tokenizers

    rust = Rust(models.WordLevel(vocab={"a": 0, "b": 1, "?": 2}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "t").mkdir()
    rust.save(str(tmp_path / "t" / "tokenizer.json"))
    assert tokenizers.load(tmp_path / "t").encode("a b c") == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        (None, "", "has no tokenizer.json; expected the folder of a model"),
        ("tokenizer.json", "{}", "is no tokenizer: "),
        ("tokenizer.json", "not json", "is no tokenizer: "),
        ("tokenizer_config.json", "{", "is not JSON: "),
    ],
)
def test_folders_without_a_tokenizer(tmp_path: Path, name: str | None, data: str, expected: str) -> None:
    if name is not None:
        (tmp_path / name).write_text(data)
    with pytest.raises(UsageError) as caught:
        tokenizers.load(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a folder; expected one with a tokenizer\.json"):
        tokenizers.load(tmp_path / "none")
