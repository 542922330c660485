"""The user's own prompts: one JSON object a line, in the shapes that data sets of conversations come in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.errors import UsageError
from specrig.tokens.tokenizer import Message

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    "tool": "tool",
}
_MAX_ROWS = 10_000
_UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""What SPEED-Bench holds in place of a text that its own preparation has yet to fetch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a file.

    Attributes:
        messages: the conversation up to its last request.
        ends: of each request that the line can make, how many of the messages it sends; the answers between are those
            of the file. A list of `turns` has no answers, so only its first can be sent.
        single: which of the requests is made where only one is: the last of `messages`, which are a request as they
            stand; else the first, as the other tools do.
        turns: requests that the line holds, those without an answer before them too.
        tools: the functions that the messages may call, where the line names some.
        category: the line's own.
    """

    messages: tuple[Message, ...]
    ends: tuple[int, ...] = (1,)
    single: int = 0
    turns: int = 1
    tools: tuple[Mapping[str, Any], ...] | None = None
    category: str | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether the chat template has to know tools."""
        return self.tools is not None or any(m["role"] == "tool" or "tool_calls" in m for m in self.messages)


def read_jsonl(path: Path) -> tuple[Row, ...]:
    """Return the lines of a .jsonl file, at most the first 10,000.

    A line is an object with one of: `messages` (OpenAI, with tools and calls), `conversations` (ShareGPT), `turns` (a
    list of texts: MT-Bench, SPEED-Bench), `prompt`, `question`, `instruction` (with `input`) or `text`.

    Raises:
        UsageError: the file or a line cannot be used, with its line number.
    """
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(itertools.islice(lines, _MAX_ROWS), 1):
                if line.strip():
                    rows.append(_row(line, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 ({error.reason}); save it as UTF-8") from None
    if not rows:
        raise UsageError(f"{path}: holds no line; expected one JSON object a line")
    return tuple(rows)


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{place}: is not JSON; expected one object a line") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: is not an object; expected one with messages, conversations, turns or prompt")
    if "\\ud" in line.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{place}: holds half a character (a surrogate without its pair); write it whole, or leave the row out"
            ) from None
    if _UNFETCHED in line:
        raise UsageError(f"{place}: holds a placeholder for its text; fetch the data with the data set's own script")
    category = row["category"] if isinstance(row.get("category"), str) else None
    listed = row.get("messages", row.get("conversations"))
    if isinstance(listed, list):
        return _conversation(listed, row, place, category)
    turns = row.get("turns")
    if isinstance(turns, list):
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise UsageError(f"{place}: turns is not a list of texts")
        return Row(messages=({"role": "user", "content": turns[0]},), turns=len(turns), category=category)
    for key in ("prompt", "question", "instruction", "text"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
            return Row(messages=({"role": "user", "content": text},), category=category)
    raise UsageError(f"{place}: has none of messages, conversations, turns, prompt, question, instruction, text")


def _conversation(listed: Sequence[Any], row: Mapping[str, Any], place: str, category: str | None) -> Row:
    openai = "messages" in row
    messages = [_message(item, place) for item in listed]
    if not openai:  # shared conversations may begin in their middle
        messages = list(itertools.dropwhile(lambda m: m["role"] in ("assistant", "tool"), messages))
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.insert(0, {"role": "system", "content": row["system"]})
    asked = [
        at + 1
        for at, message in enumerate(messages)
        if message["role"] in ("user", "tool") and (at + 1 == len(messages) or messages[at + 1]["role"] == "assistant")
    ]
    ends = [end for end in asked if any(m["role"] == "user" for m in messages[:end])]
    if not ends:
        raise UsageError(f"{place}: holds no message of the user that waits for an answer")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UsageError(f"{place}: tools is not a list of objects")
    return Row(
        messages=tuple(messages[: ends[-1]]),
        ends=tuple(ends),
        single=len(ends) - 1 if openai else 0,
        turns=len(ends),
        tools=tuple(tools) if tools else None,
        category=category,
    )


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, dict):
        raise UsageError(f"{place}: a message is not an object")
    said = item.get("role", item.get("from"))
    role = _ROLES.get(str(said))
    if role is None:
        raise UsageError(f"{place}: a message of the role {said!r}; expected system, user, assistant or tool")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):
        content = _joined(content, place)
    calls = item.get("tool_calls") if role == "assistant" else None
    if calls and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise UsageError(f"{place}: tool_calls without a function's name and arguments")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UsageError(f"{place}: a message of the {role} without text")
    message: dict[str, object] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    return message


def _joined(parts: Sequence[Any], place: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"{place}: a message with a part of type {kind!r}; expected text only")
        texts.append(part["text"])
    return "\n".join(texts)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )
