"""What an agentic session is made of: an agent's task, its tools, and its scripted calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrig.errors import UsageError
from specrig.tokens.tokenizer import Message, Tokenizer

Tools = Sequence[Mapping[str, Any]]

SYSTEM = (
    "You are a careful engineer who works in steps. In each step you either call one tool or give the final answer."
)
SPELLED = " Tools: read_file(path), search(text), run(command). A call is one line of JSON in <tool_call> tags."
"""What is added where the chat template has no tools of its own."""


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    """One definition, with the fields that SGLang gives a template, in its order, so that both see the same text."""
    return {
        "type": "function",
        "function": {
            "description": description,
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
            "strict": False,
        },
        "defer_loading": None,
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _tool("read_file", "Return the text of one file of the project.", "path"),
    _tool("search", "Return the lines of the project that hold a text.", "text"),
    _tool("run", "Run a command in the project and return its output.", "command"),
)
TASKS = (
    "The nightly job fails now and then. Find out why from the sources and propose the smallest safe change.",
    "Find where this project reads its settings, and describe how a setting reaches the code that uses it.",
    "A user reports that a command hangs at its end. Read what is relevant and explain the cause.",
    "Review this module for mistakes in how it handles errors, and propose a patch for the worst one.",
    "Find out which parts of this module are safe to call from several threads, and prove it from the code.",
)
STEPS = (
    ("I will look at the file that the task is about first.", "read_file", {"path": "src/main.py"}),
    ("The entry point hands the work on, so I read the function it calls.", "read_file", {"path": "src/core.py"}),
    ("I want to see who else calls this before I judge it.", "search", {"text": "def "}),
    (
        "That leaves the error path. I will run the tests that cover it.",
        "run",
        {"command": "python -m unittest -v"},
    ),
    ("One of the assumptions is still unproven; this should settle it.", "read_file", {"path": "src/errors.py"}),
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a chat template takes a session.

    Attributes:
        tools: it shows definitions, calls and results. Else the calls and results are plain text of the assistant and
            the user, which every template takes.
        system: it takes a system message; else the user's first message begins with that text.
    """

    tools: bool
    system: bool

    @property
    def note(self) -> str:
        """How the session is written, for the plan."""
        if self.tools:
            return "tools, calls and results are written by the chat template"
        return "the chat template knows no tools: calls and results are text of the assistant and the user"


def style_of(tokenizer: Tokenizer, thinking: bool) -> Style:
    """Return how the tokenizer's chat template takes tools and system messages, by trying."""
    user: Message = {"role": "user", "content": "specrig-task"}
    called = {"path": "specrig-argument"}
    messages = [
        user,
        {"role": "assistant", "content": "I look.", "tool_calls": [_call("read_file", called, 1)]},
        {"role": "tool", "tool_call_id": _id(1), "content": "specrig-result"},
    ]
    expected = (TOOLS[0]["function"]["description"], "specrig-task", *called.values(), "specrig-result")
    system: Message = {"role": "system", "content": "specrig-system"}
    return Style(
        tools=_shows(tokenizer, thinking, messages, TOOLS, expected),
        system=_shows(tokenizer, thinking, [system, user], None, ("specrig-system", "specrig-task")),
    )


def _shows(
    tokenizer: Tokenizer, thinking: bool, messages: Sequence[Message], tools: Tools | None, expected: Sequence[str]
) -> bool:
    try:
        text = tokenizer.render(messages, thinking, tools=tools)
    except UsageError:
        return False
    return all(part in text for part in expected)


def tools(mark: str) -> Tools:
    """Return the definitions, the first with the session's mark: some templates print them before any message."""
    first = TOOLS[0]
    function = {**first["function"], "description": f"{mark}{first['function']['description']}"}
    return ({**first, "function": function}, *TOOLS[1:])


def opening(style: Style, mark: str, text: str) -> tuple[Message, ...]:
    """Return the first messages of a session: what the agent is, after the session's mark, and the task."""
    system = f"{mark}{SYSTEM}{'' if style.tools else SPELLED}"
    if not style.system:
        return ({"role": "user", "content": f"{system}\n\n{text}"},)
    return ({"role": "system", "content": system}, {"role": "user", "content": text})


def called(style: Style, step: int, turn: int) -> Message:
    """Return the assistant's call of a step; `turn` gives it its id."""
    said, name, arguments = STEPS[step % len(STEPS)]
    if style.tools:
        return {"role": "assistant", "content": said, "tool_calls": [_call(name, arguments, turn)]}
    line = json.dumps({"name": name, "arguments": arguments})
    return {"role": "assistant", "content": f"{said}\n<tool_call>\n{line}\n</tool_call>"}


def result(style: Style, step: int, turn: int, text: str) -> Message:
    """Return the result of that call."""
    if style.tools:
        return {"role": "tool", "tool_call_id": _id(turn), "content": text}
    return {"role": "user", "content": f"Output of {STEPS[step % len(STEPS)][1]}:\n\n{text}"}


def _id(turn: int) -> str:
    return f"call{turn:05d}"  # nine letters and digits, as some templates demand


def _call(name: str, arguments: Mapping[str, str], turn: int) -> dict[str, Any]:
    return {"id": _id(turn), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
