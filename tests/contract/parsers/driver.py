"""Run in an interpreter of its own: parse command lines with one SGLang version's real parser.

The first line of standard input is ``{"paths": [...], "absent": [...]}``, and the answer to it ``{"options": {...}}``.
Every further line is a list of command lines, ``[[word, ...], ...]``, answered by a list. An answer is
``{"error": text}``, or ``{"shortened": [words that are only the beginning of an option], "algorithm": null or the error
of the engine's own look-up, "values": {...}}``.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Collection
from typing import Any


class Refused(Exception):
    """The parser does not take it."""


class Parser(argparse.ArgumentParser):
    """The parser, with an exception where it would end the process."""

    def error(self, message: str) -> Any:
        raise Refused(message)

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        raise Refused(message or f"exit {status}")


def described(action: argparse.Action) -> list[Any]:
    """What of an option a command line depends on."""
    choices = sorted(map(str, action.choices)) if action.choices is not None else None
    kind = getattr(action.type, "__name__", None) if action.type is not None else None
    return [action.dest, type(action).__name__, kind, action.nargs if action.nargs != 0 else None, choices]


def answer(parser: Parser, known: Collection[str], algorithms: Any, words: list[str]) -> dict[str, Any]:
    """What the parser makes of one command line."""
    try:
        parsed = parser.parse_args(words)
    except Refused as refusal:
        return {"error": str(refusal)}
    algorithm = None
    try:
        # Releases before 0.5.19 resolve this alias of EAGLE when they check the arguments together.
        name = parsed.speculative_algorithm
        algorithms.from_string("EAGLE" if name == "NEXTN" else name)
    except ValueError as error:
        algorithm = str(error)
    spelled = [word.partition("=")[0] for word in words if word.startswith("--")]
    return {
        "shortened": [word for word in spelled if word not in known],
        "algorithm": algorithm,
        "values": {name: value for name, value in vars(parsed).items() if value != parser.get_default(name)},
    }


def main() -> None:
    """Answer line by line until standard input ends."""
    asked = json.loads(sys.stdin.readline())
    sys.path[:0] = asked["paths"]
    import stand_in

    stand_in.install(asked["absent"])
    out = sys.stdout
    sys.stdout = io.StringIO()
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    parser = Parser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    known = {spelled: action for action in parser._actions for spelled in action.option_strings}
    print(json.dumps({"options": {name: described(known[name]) for name in sorted(known)}}), file=out, flush=True)
    for line in sys.stdin:
        answers = [answer(parser, known, SpeculativeAlgorithm, words) for words in json.loads(line)]
        print(json.dumps(answers, default=str), file=out, flush=True)


main()
