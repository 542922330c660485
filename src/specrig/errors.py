"""The errors a user sees: each is one line that says what was seen, what was expected and what to do."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text without the characters that would steer a terminal, such as a server's own words may have."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


class SpecrigError(Exception):
    """Base of the errors that end a command with one line on standard error."""

    exit_code = 1


class UsageError(SpecrigError):
    """Bad input: a flag, a file or an environment that the command cannot work with (exit code 2)."""

    exit_code = 2


class GateError(SpecrigError):
    """A check ran and failed: a gate, a regression, a cell that does not fit (exit code 1)."""

    exit_code = 1
