"""The model's tokenizer and chat template, without transformers where a tokenizer.json is there.

transformers takes more than a second to import; the tests show that ids and templates here equal its own.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from specrig.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, object]


class Backend(Protocol):
    """What turns text into ids and back."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text."""

    def spans(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids, and for each the end of its text in characters."""

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids."""

    def id_of(self, token: str) -> int | None:
        """Return the id of one token's text."""


class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        path: the model folder.
        revision: SHA-256 over tokenizer and template; equal for equal behaviour.
        eos_ids: the ids that end a generation.
        has_template: False for a base model; `chat_ids` then raises.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        path: Path,
        revision: str = "unknown",
        eos_ids: Iterable[int] = (),
        template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._texts = {False: template, True: tool_template or template}
        self._templates: dict[str, Template] = {}
        self._special_tokens = dict(special_tokens or {})
        self.path = path
        self.revision = revision
        self.eos_ids = frozenset(eos_ids)
        self.has_template = template is not None or tool_template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; `special` adds what the tokenizer puts around a text (BOS)."""
        return self._backend.encode(text, special)

    def spans(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and for each the character at which its part of the text ends."""
        return self._backend.spans(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids."""
        return self._backend.decode(ids, skip_special)

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self.encode(text))

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Return the text that the chat template makes of the messages.

        As servers do, the arguments of tool calls are given to it as objects, and a message without content as "".

        Raises:
            UsageError: there is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        text = self._texts[tools is not None]
        if text is None:
            kind = "has a chat template for tools only" if self.has_template else "has no chat template"
            raise UsageError(f"{self.path}: {kind}; expected one, or an API without chat (completions)")
        try:
            if text not in self._templates:
                self._templates[text] = _compile(text)
            return self._templates[text].render(
                messages=[_plain(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{self.path}: the chat template refuses these messages: {error}") from None

    def chat_ids(
        self,
        messages: Sequence[Message],
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Return the ids of the messages after the chat template, as the server's own chat route makes them."""
        return self.encode(self.render(messages, thinking, add_generation_prompt, tools))


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        UsageError: the folder holds no tokenizer that can be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"--tokenizer {folder}: is not a folder; expected one with a tokenizer.json")
    config = _json(folder / "tokenizer_config.json")
    template, tool_template = _templates(folder, config)
    file = folder / "tokenizer.json"
    if file.is_file():
        raw = file.read_bytes()
        backend: Backend = _fast(raw, file)
    else:
        backend, raw = _transformers(folder)
    revision = hashlib.sha256(raw)
    revision.update(b"\0" + (template or "").encode())
    if tool_template is not None:
        revision.update(b"\0" + tool_template.encode())
    return Tokenizer(
        backend,
        path=folder,
        revision=revision.hexdigest(),
        eos_ids=_eos(folder, config, backend),
        template=template,
        tool_template=tool_template,
        special_tokens=_special_tokens(folder, config),
    )


def _no_text(text: str) -> UsageError:
    at = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), 0)
    return UsageError(f"a text is no Unicode at {text[at : at + 20]!r}: expected UTF-8 without half characters")


class _Rust:
    """The tokenizers library."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def encode(self, text: str, special: bool) -> list[int]:
        # encode_batch_fast leaves the character offsets out, which doubles the speed
        try:
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except TypeError:
            raise _no_text(text) from None

    def spans(self, text: str) -> tuple[list[int], list[int]]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError:
            raise _no_text(text) from None
        return encoding.ids, [end for _, end in encoding.offsets]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class _Bpe(msgspec.Struct):
    """The part of tokenizer.json that is large: read typed, it loads in half the time that the library takes."""

    type: str
    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _Added(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _File(msgspec.Struct):
    model: _Bpe
    added_tokens: list[_Added] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def _fast(raw: bytes, file: Path) -> _Rust:
    import tokenizers

    quick = _quick(raw)
    if quick is not None:
        return quick
    try:
        return _Rust(tokenizers.Tokenizer.from_buffer(raw))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise UsageError(f"{file}: is no tokenizer: {str(error).splitlines()[0]}") from None


def _quick(raw: bytes) -> _Rust | None:
    """Return the tokenizer of a byte-pair file built part by part, or None where the file is of another kind."""
    import tokenizers

    collecting = gc.isenabled()
    gc.disable()  # half a million fresh objects, none of them garbage
    try:
        file = msgspec.json.decode(raw, type=_File)
        bpe = file.model
        if bpe.type != "BPE":
            return None
        options = {"dropout": bpe.dropout, "unk_token": bpe.unk_token, "end_of_word_suffix": bpe.end_of_word_suffix}
        options["continuing_subword_prefix"] = bpe.continuing_subword_prefix
        model = tokenizers.models.BPE(
            vocab=bpe.vocab,
            merges=bpe.merges,
            fuse_unk=bpe.fuse_unk,
            byte_fallback=bpe.byte_fallback,
            ignore_merges=bpe.ignore_merges,
            **{k: v for k, v in options.items() if v is not None},
        )
        shell = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": file.normalizer,
            "pre_tokenizer": file.pre_tokenizer,
            "post_processor": file.post_processor,
            "decoder": file.decoder,
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
        parts = tokenizers.Tokenizer.from_str(json.dumps(shell))
        tokenizer = tokenizers.Tokenizer(model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(parts, part)) is not None:
                setattr(tokenizer, part, value)
        for token in file.added_tokens:
            added = tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([added])
            if tokenizer.token_to_id(token.content) != token.id:
                return None
    except Exception:  # any surprise: the library reads the whole file itself, and says what is wrong with it
        return None
    finally:
        if collecting:
            gc.enable()
    return _Rust(tokenizer)


class _Slow:
    """A tokenizer that only transformers can read."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def spans(self, text: str) -> tuple[list[int], list[int]]:
        ids = self.encode(text, False)
        if getattr(self._tokenizer, "is_fast", False):
            whole = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return ids, [end for _, end in whole["offset_mapping"]]
        ends, position = [], 0
        for one in ids:
            position = min(position + len(self._tokenizer.decode([one])), len(text))
            ends.append(position)
        return ids, ends

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return None if found is None or found == self._tokenizer.unk_token_id else found


def _transformers(folder: Path) -> tuple[_Slow, bytes]:
    names = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json", "spiece.model")
    files = [folder / n for n in names if (folder / n).is_file()]
    if not files:
        raise UsageError(f"--tokenizer {folder}: has no tokenizer.json; expected the folder of a model")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            f"--tokenizer {folder}: has no tokenizer.json; its kind needs transformers: pip install specrig[tokenizer]"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # it raises what its many tokenizers raise
        raise UsageError(f"--tokenizer {folder}: transformers cannot read it: {str(error).splitlines()[0]}") from None
    return _Slow(tokenizer), b"".join(f.read_bytes() for f in files)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"{file}: is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the chat template and the one for messages with tools, from where transformers looks, in its order.

    The second is None where there is one for all.
    """
    template = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    named = {"default": template}
    if isinstance(template, list):
        named = {str(row.get("name")): row.get("template") for row in template if isinstance(row, dict)}
    single, more = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if single.is_file() or more:
        named = {file.stem: file.read_text(encoding="utf-8") for file in more}
    if single.is_file():
        named["default"] = single.read_text(encoding="utf-8")
    default, tools = named.get("default"), named.get("tool_use")
    return default if isinstance(default, str) else None, tools if isinstance(tools, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    merged = {**_json(folder / "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    extra = merged.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **{n: merged.get(n) for n in names}}
    return {n: text for n, value in named.items() if (text := _token_text(value)) is not None}


def _eos(folder: Path, config: Mapping[str, Any], backend: Backend) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    token = _special_tokens(folder, config).get("eos_token")
    if token is not None and (one := backend.id_of(token)) is not None:
        found.add(one)
    return found


def _plain(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message if message.get("content") is not None else {**message, "content": ""}
    return {**message, "content": message.get("content") or "", "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _compile(text: str) -> Template:
    """Compile a chat template the way transformers does: sandboxed, blocks trimmed, with the few names it adds."""
    from datetime import datetime

    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's part for training; here it is its own body."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, **more: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
    environment.globals["strftime_now"] = now
    return environment.from_string(text)
