"""Run in an interpreter of its own: parse command lines with one SGLang version's real parser.

Reads ``{"paths": [...], "absent": [...], "lines": [[word, ...], ...]}`` on standard input and prints
``{"options": {...}, "answers": [...]}``. An answer is ``{"error": text}``, or ``{"shortened": [words that are only the
beginning of an option], "algorithm": null or the error of the engine's own look-up, "values": {...}}``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
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


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    sys.path[:0] = asked["paths"]
    import stand_in

    stand_in.install(asked["absent"])
    out = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        parser = Parser(prog="sglang")
        ServerArgs.add_cli_args(parser)
        known = {spelled: action for action in parser._actions for spelled in action.option_strings}
        answers = []
        for words in asked["lines"]:
            try:
                parsed = parser.parse_args(words)
            except Refused as refusal:
                answers.append({"error": str(refusal)})
                continue
            algorithm = None
            try:
                # Releases before 0.5.19 resolve this alias of EAGLE when they check the arguments together.
                name = parsed.speculative_algorithm
                SpeculativeAlgorithm.from_string("EAGLE" if name == "NEXTN" else name)
            except ValueError as error:
                algorithm = str(error)
            spelled = [word.partition("=")[0] for word in words if word.startswith("--")]
            answers.append(
                {
                    "shortened": [word for word in spelled if word not in known],
                    "algorithm": algorithm,
                    "values": {
                        name: value for name, value in vars(parsed).items() if value != parser.get_default(name)
                    },
                }
            )
    options = {spelled: described(action) for spelled, action in sorted(known.items())}
    json.dump({"options": options, "answers": answers}, out, default=str)


main()
