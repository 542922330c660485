"""The three HTTP APIs: what a request's body is, and what its stream's events mean.

A decoder turns events into the trace of one request: ``t[i]`` the moment chunk i arrived, ``k[i]`` how many new tokens
it brought. Tokens are taken from the server's running count where it gives one; chunks are never counted as tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from specrig.engine.errors import message as error_message

API_PATHS = {"sglang": "/generate", "openai-chat": "/v1/chat/completions", "openai-completions": "/v1/completions"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One completion to ask for.

    Attributes:
        max_tokens: how many tokens to generate.
        ids: the prompt as token ids, after the chat template.
        messages: the prompt as chat messages; what openai-chat sends.
        tools: the functions that the messages may call; openai-chat sends them too.
        text: the prompt as text; what openai-completions sends when ids are not taken.
        ignore_eos: generate exactly ``max_tokens`` tokens.
        temperature: 0 is greedy.
        sampling: further sampling parameters by SGLang's names.
        thinking: whether the chat template turns thinking on.
        seed: for sampling, where the server takes one.
        rid: the request's id, ours to abort it by.
    """

    max_tokens: int
    ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool = False
    rid: str = ""


def request_body(api: str, model: str, ask: Ask) -> bytes:
    """Write the JSON body of a streamed request.

    Args:
        api: ``sglang``, ``openai-chat`` or ``openai-completions``.
        model: the served name.
        ask: what to ask for.

    Returns:
        The body.

    Raises:
        ValueError: the ask lacks the form of prompt that the API takes, or the API is unknown.
    """
    sampling = dict(ask.sampling)
    if api == "sglang":
        if ask.ids is None:
            raise ValueError("the native API is asked with token ids")
        body: dict[str, Any] = {
            "rid": ask.rid,
            "input_ids": list(ask.ids),
            "sampling_params": {
                "max_new_tokens": ask.max_tokens,
                "temperature": ask.temperature,
                "ignore_eos": ask.ignore_eos,
                **sampling,
            },
            "stream": True,
        }
    elif api in ("openai-chat", "openai-completions"):
        body = {
            "model": model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "ignore_eos": ask.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "rid": ask.rid,
            **sampling,
        }
        if api == "openai-chat":
            if ask.messages is None:
                raise ValueError("the chat API is asked with messages")
            body["messages"] = list(ask.messages)
            if ask.tools:
                body["tools"] = list(ask.tools)
            body["chat_template_kwargs"] = {"enable_thinking": ask.thinking}
            body["return_spec_tokens_details"] = True
        else:
            prompt = list(ask.ids) if ask.ids is not None else ask.text
            if prompt is None:
                raise ValueError("the completions API is asked with token ids or text")
            body["prompt"] = prompt
            body["return_spec_tokens_details"] = True
    else:
        raise ValueError(f"unknown api {api!r}")
    return msgspec.json.encode(body)


class _Spec(msgspec.Struct, gc=False):
    """The speculation counters under the names of every SGLang generation."""

    spec_verify_ct: int | None = None
    spec_num_correct_drafts: int | None = None
    spec_accepted_drafts: int | None = None
    spec_accept_token_num: int | None = None
    spec_accept_length: float | None = None

    @property
    def correct(self) -> int | None:
        for value in (self.spec_num_correct_drafts, self.spec_accepted_drafts, self.spec_accept_token_num):
            if value is not None:
                return value
        return None


class _Meta(_Spec, gc=False):
    id: str | None = None
    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    queue_time: float | None = None


class _Native(msgspec.Struct, gc=False):
    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Any = None


class _LightMeta(msgspec.Struct, gc=False):
    completion_tokens: int | None = None
    finish_reason: Any = None


class _LightNative(msgspec.Struct, gc=False):
    """What is needed of a cumulative event in mid-stream; its text and ids are skipped, not built."""

    meta_info: _LightMeta | None = None
    error: Any = None


class _LightPiece(_LightNative, gc=False):
    """What is needed of an incremental event in mid-stream."""

    text: str | None = None
    output_ids: list[int] | None = None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _SglExt(msgspec.Struct, gc=False):
    spec_tokens_details: _Spec | None = None


class _OpenAi(msgspec.Struct, gc=False):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _SglExt | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


class Decoder:
    """The trace of one streamed answer.

    Attributes:
        t: when each token-carrying chunk arrived.
        k: how many new tokens it brought.
        terminal: the terminal event (``[DONE]``) was seen.
        finish_reason: the server's, null until it gave one.
        error: one of ``server_error``, ``abort``, ``protocol``; null while all is well.
        message: the server's own words with an error.
        token_source: ``server`` (its running count), ``ids`` or ``tokenizer``; ``unknown`` where nothing could count,
            and every ``k`` is then 0.
        trace_source: where ``k`` came from: ``server``, ``ids`` or ``tokenizer``, or ``characters``: a total shared by
            the length of the texts.
    """

    def __init__(self, count_text: Callable[[str], int] | None = None) -> None:
        """Start before the first event.

        Args:
            count_text: counts a text's tokens, for servers that give no count.
        """
        self.t: list[float] = []
        self.k: list[int] = []
        self.terminal = False
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.message: str | None = None
        self.token_source = "server"
        self.trace_source = "server"
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.verify_steps: int | None = None
        self.correct_drafts: int | None = None
        self.server_accept_length: float | None = None
        self.queue_s: float | None = None
        self.server_id: str | None = None
        self.first_answer_t: float | None = None
        self.last_event_t: float | None = None
        self.events = 0
        self._count_text = count_text
        self._tokens = 0

    @property
    def output_tokens(self) -> int:
        """How many tokens came, so far."""
        return self._tokens

    @property
    def output_ids(self) -> list[int] | None:
        """The generated ids, where the API gives them."""
        return None

    @property
    def text(self) -> str | None:
        """The generated answer, where it was kept."""
        return None

    @property
    def reasoning_text(self) -> str | None:
        """The generated reasoning, where the API separates it."""
        return None

    def feed(self, event: bytes, t: float) -> None:
        """Take one event.

        Args:
            event: its data.
            t: when the bytes that completed it arrived.
        """
        self.events += 1
        self.last_event_t = t
        if self.terminal or self.error == "protocol":
            return
        if event == b"[DONE]":
            self.terminal = True
            return
        try:
            self._event(event, t)
        except (msgspec.DecodeError, RecursionError) as problem:
            if self.error is None:
                self.error = "protocol"
                self.message = f"event {self.events} is not what the API sends ({problem}): {_cut(event)}"

    def _event(self, event: bytes, t: float) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Settle what only the whole stream tells; called after the last event."""

    def recount(self, count_text: Callable[[str], int]) -> None:
        """Settle again with a tokenizer, where the process that read the stream had none.

        Args:
            count_text: counts a text's tokens.
        """
        self._count_text = count_text
        self.finish()

    def _count(self, total: int, t: float) -> None:
        new = total - self._tokens
        if new > 0:
            self._tokens = total
            self.t.append(t)
            self.k.append(new)
        elif new < 0 and self.error is None:
            self.error = "protocol"
            self.message = f"the server's running count fell from {self._tokens} to {total} tokens"

    def _fail(self, kind: str, message: str) -> None:
        if self.error is None:
            self.error = kind
            self.message = message


def _cut(data: bytes, size: int = 200) -> str:
    text = data[: size + 1].decode(errors="replace")
    return text if len(text) <= size else text[:size] + "..."


class NativeDecoder(Decoder):
    """SGLang's /generate, cumulative or incremental; which of the two shows in the stream itself."""

    _light = msgspec.json.Decoder(_LightNative)
    _piece = msgspec.json.Decoder(_LightPiece)
    _full = msgspec.json.Decoder(_Native)

    def __init__(self, count_text: Callable[[str], int] | None = None) -> None:
        super().__init__(count_text)
        self._cumulative: bool | None = None
        self._ids: list[int] = []
        self._text: list[str] = []

    @property
    def output_ids(self) -> list[int] | None:
        """The generated ids."""
        return self._ids

    @property
    def text(self) -> str | None:
        """The generated text."""
        return "".join(self._text)

    def _event(self, event: bytes, t: float) -> None:
        if self._cumulative is not None:  # neither the first event nor, as seen below, the last
            light = self._light.decode(event) if self._cumulative else self._piece.decode(event)
            meta = light.meta_info
            if light.error is None and meta is not None and meta.finish_reason is None:
                total = meta.completion_tokens
                if total is not None:
                    if isinstance(light, _LightPiece):
                        self._ids += light.output_ids or ()
                        self._text.append(light.text or "")
                    self._count(total, t)
                    return
        self._whole(self._full.decode(event), t)

    def _whole(self, event: _Native, t: float) -> None:
        if event.error is not None:
            self._fail("server_error", error_message(None, {"error": event.error}))
            return
        meta = event.meta_info
        if meta is None:
            self._fail("protocol", "an event without meta_info")
            return
        ids = event.output_ids or []
        total = meta.completion_tokens
        if self._cumulative is None and self._tokens and ids:
            seen = len(self._ids)
            self._cumulative = len(ids) >= seen and ids[:seen] == self._ids and (total is None or len(ids) == total)
        if self._cumulative:
            self._ids = ids
            self._text = [event.text or ""]
        else:
            self._ids.extend(ids)
            self._text.append(event.text or "")
        if total is None:
            total = len(self._ids)
            self.token_source = self.trace_source = "ids"
        self._count(total, t)
        self.prompt_tokens = meta.prompt_tokens
        self.cached_tokens = meta.cached_tokens
        self.server_id = meta.id
        if meta.queue_time is not None:
            self.queue_s = meta.queue_time
        reason = meta.finish_reason
        if reason is None:
            return
        if isinstance(reason, Mapping):
            self.finish_reason = str(reason.get("type"))
            if self.finish_reason == "abort":
                self._fail("abort", str(reason.get("message") or "the server aborted the request"))
        else:
            self.finish_reason = str(reason)
        self.verify_steps = meta.spec_verify_ct
        self.correct_drafts = meta.correct
        self.server_accept_length = meta.spec_accept_length


class OpenAiDecoder(Decoder):
    """The OpenAI routes: chat completions and completions.

    Where the server sends usage with every chunk, its count is the trace. Where usage comes at the end only, the
    total is the server's and the chunks share it by the tokenizer's count of their texts, or by their characters where
    there is no tokenizer. Where no usage comes at all, the tokenizer counts, and ``token_source`` says so: nothing that
    was merely requested is ever credited.
    """

    _decode = msgspec.json.Decoder(_OpenAi)

    def __init__(self, count_text: Callable[[str], int] | None = None) -> None:
        super().__init__(count_text)
        self._pieces: list[tuple[float, str]] = []
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._usage: _Usage | None = None
        self._running = False
        self._text_route = False

    @property
    def text(self) -> str | None:
        """The generated answer, without reasoning."""
        return "".join(self._answer)

    @property
    def reasoning_text(self) -> str | None:
        """The generated reasoning; none on the completions route."""
        return None if self._text_route else "".join(self._reasoning)

    def _event(self, event: bytes, t: float) -> None:
        body = self._decode.decode(event)
        if body.error is not None:
            self._fail("server_error", error_message(None, {"error": body.error}))
            return
        if body.object == "error":
            self._fail("server_error", body.message or _cut(event))
            return
        self.server_id = body.id or self.server_id
        usage = body.usage
        role_only = False
        for choice in body.choices:
            piece = ""
            if choice.delta is not None:
                delta = choice.delta
                reasoning = delta.reasoning_content or delta.reasoning or ""
                answer = delta.content or ""
                if delta.tool_calls:
                    answer += msgspec.json.encode(delta.tool_calls).decode()
                if reasoning:
                    self._reasoning.append(reasoning)
                piece = reasoning + answer
                role_only = delta.role is not None and not piece and not self._pieces
            else:
                self._text_route = True
                answer = piece = choice.text or ""
            if answer:
                if self.first_answer_t is None:
                    self.first_answer_t = t
                self._answer.append(answer)
            if piece:
                self._pieces.append((t, piece))
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                if choice.finish_reason in ("abort", "error"):
                    self._fail("abort", f"the server ended the stream with finish_reason {choice.finish_reason}")
        if usage is not None:
            self._usage = usage
            if body.choices and usage.completion_tokens is not None and not role_only:
                self._running = True
                self._count(usage.completion_tokens, t)
        if body.sglext is not None and body.sglext.spec_tokens_details is not None:
            spec = body.sglext.spec_tokens_details
            self.verify_steps = spec.spec_verify_ct
            self.correct_drafts = spec.correct
            self.server_accept_length = spec.spec_accept_length

    @property
    def output_tokens(self) -> int:
        """How many tokens came; before the end of a stream without running counts, how many pieces of text."""
        return self._tokens or len(self._pieces)

    def finish(self) -> None:
        """Settle the total and the trace from the final usage or the tokenizer; without both they stay unknown."""
        usage = self._usage
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if self._running:
            total = usage.completion_tokens if usage is not None else None
            if total is not None and total != self._tokens:
                if 0 < self._tokens < total and self.t:
                    # tokens that the server counted after the last chunk with content
                    self.k[-1] += total - self._tokens
                    self._tokens = total
                else:
                    self._fail("protocol", f"usage says {total} tokens, the running count {self._tokens}")
            return
        total = usage.completion_tokens if usage is not None else None
        count = self._count_text
        self.trace_source = "characters" if count is None else "tokenizer"
        if total is None:
            if count is None:
                self.token_source = self.trace_source = "unknown"
                self.t, self.k = [t for t, _ in self._pieces], [0] * len(self._pieces)
                return
            self.token_source = "tokenizer"
            total = count("".join(piece for _, piece in self._pieces))
        counts = [(count or len)(piece) for _, piece in self._pieces]
        if self._pieces and total:
            self.t, self.k = _share(total, [t for t, _ in self._pieces], counts)
        self._tokens = total


def _share(total: int, times: list[float], counts: list[int]) -> tuple[list[float], list[int]]:
    """Share a known total over chunks in proportion to their texts' token counts.

    Args:
        total: the tokens of all chunks together.
        times: each chunk's arrival.
        counts: each chunk's own count, which need not add up to the total.

    Returns:
        The times and whole counts of the chunks that got at least one token; the counts add up to the total.
    """
    weight = sum(counts) or len(counts)
    if not sum(counts):
        counts = [1] * len(counts)
    t: list[float] = []
    k: list[int] = []
    run = given = 0
    for moment, count in zip(times, counts, strict=True):
        run += count
        due = round(total * run / weight)
        if due > given:
            t.append(moment)
            k.append(due - given)
            given = due
    return t, k


def make_decoder(api: str, count_text: Callable[[str], int] | None = None) -> Decoder:
    """The decoder of an API.

    Args:
        api: ``sglang``, ``openai-chat`` or ``openai-completions``.
        count_text: counts a text's tokens, for servers that give no count.

    Returns:
        A fresh decoder.
    """
    return NativeDecoder(count_text) if api == "sglang" else OpenAiDecoder(count_text)
