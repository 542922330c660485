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


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größe <&>", "parameters": {"b": 1, "a": [2]}}}]
TEMPLATES = {
    "thinking is a switch": TURNS + PROMPT + "{% if not enable_thinking %}<think></think>{% endif %}",
    "thinking adds to the generation prompt": TURNS + PROMPT + "{% if enable_thinking %}<think>think{% endif %}",
    "thinking is on unless turned off": TURNS
    + "{% if enable_thinking is defined and enable_thinking is false %}/no{% endif %}",
    "thinking is ignored": TURNS + PROMPT,
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    + TURNS,
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "a macro": "{% macro turn(m) %}[{{ m.role }}] {{ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "json": "{{ messages | tojson(ensure_ascii=False, indent=2) }}{{ messages | tojson(ensure_ascii=True) }}"
    "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}" + TURNS,
    "bos and a date": "{{ bos_token }}{{ strftime_now('%d %b %Y') }}" + TURNS,
    "generation tags": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "trimmed blocks": "{% for m in messages %}\n    {% if true %}\n {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tokens that are not set": "[{{ pad_token }}|{{ image_token }}|{{ documents }}]" + TURNS,
}
TALK = [
    {"role": "system", "content": " Be <brief> & 'kind' "},
    {"role": "user", "content": "Hi {{ x }}"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_equal_transformers(tmp_path: Path, name: str, thinking: bool, tools: Any) -> None:
    transformers = pytest.importorskip("transformers")
    more = {"extra_special_tokens": {"image_token": "</s>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = small(tmp_path / "t", chat_template=TEMPLATES[name], **more)
    ours = tokenizers.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    options = {"tools": tools, "add_generation_prompt": True, "enable_thinking": thinking}
    assert ours.render(TALK, thinking, tools=tools) == theirs.apply_chat_template(TALK, tokenize=False, **options)
    ids = theirs.apply_chat_template(TALK, tokenize=True, **options)["input_ids"]
    assert ours.chat_ids(TALK, thinking, tools=tools) == ids


def test_the_length_of_an_encoding_is_not_its_tokens(ours: Tokenizer, theirs: Any) -> None:
    """apply_chat_template(tokenize=True) gives a mapping in transformers 5, whose length is its number of keys."""
    found = theirs.apply_chat_template(MESSAGES[1], tokenize=True, add_generation_prompt=True, enable_thinking=False)
    count = len(ours.chat_ids(MESSAGES[1]))
    assert len(found["input_ids"]) == count
    assert len(found) < count


@pytest.mark.parametrize("place", ["list", "files", "default only", "no default"])
def test_named_templates_equal_transformers(tmp_path: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    named = {"tool_use": "T" + TEMPLATES["tools"], "default": "D" + TURNS, "rag": "R"}
    if place == "default only":
        del named["tool_use"]
    if place == "no default":
        del named["default"]
    rows = [{"name": name, "template": text} for name, text in named.items()]
    more = {} if place == "files" else {"chat_template": rows}
    folder = small(tmp_path / "t", tokenizer_class="PreTrainedTokenizerFast", **more)
    if place == "files":
        (folder / "chat_template.jinja").write_text(named.pop("default"))
        (folder / "additional_chat_templates").mkdir()
        for name, text in named.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    ours = tokenizers.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for tools in (None, TOOLS):
        if place == "no default" and tools is None:
            with pytest.raises(ValueError, match="no default"):
                theirs.apply_chat_template(TALK, tokenize=False)
            with pytest.raises(UsageError, match="has a chat template for tools only"):
                ours.render(TALK)
            continue
        assert ours.render(TALK, tools=tools) == theirs.apply_chat_template(
            TALK, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    alone = tokenizers.load(small(tmp_path / "alone", chat_template="D" + TURNS))
    assert (ours.revision == alone.revision) == (place == "default only")


@pytest.mark.parametrize("begins", [True, False])
def test_plain_text_begins_as_in_transformers(tmp_path: Path, begins: bool) -> None:
    """Without a template a prompt is plain text, and what is put around it is the post-processor's to say."""
    transformers = pytest.importorskip("transformers")
    folder = small(tmp_path / "t", tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True)
    if begins:
        file = json.loads((folder / "tokenizer.json").read_text())
        file["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [95], "tokens": ["<s>"]}},
        }
        (folder / "tokenizer.json").write_text(json.dumps(file))
    base = tokenizers.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert not base.has_template
    assert base.encode("ab", special=True) == theirs("ab")["input_ids"] == [95, 65, 66][0 if begins else 1 :]
    assert base.encode("ab") == theirs("ab", add_special_tokens=False)["input_ids"] == [65, 66]


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
