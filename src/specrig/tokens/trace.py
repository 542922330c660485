"""Recorded traces: when requests came, and how long they were."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specrig.errors import UsageError
from specrig.model.cell import Cell


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request of a trace: seconds after its first one, and the lengths that it names (None: it names none)."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def rows_of(cell: Cell, base: Path | None) -> tuple[Row, ...]:
    """The requests of a cell that replays a trace, each with the lengths it will have; none of other cells.

    Args:
        cell: its `prompt_tokens` and `output_tokens` are the largest that a row may name, and what a row has that names
            none.
        base: the folder that the trace's path is relative to.

    Raises:
        UsageError: the trace cannot be read, has fewer rows than the cell has requests, or a row is longer.
    """
    if cell.trace is None:
        return ()
    path = (base or Path()) / cell.trace
    found = []
    for row in read_trace(path, cell.requests):
        for name, value, most in (
            ("prompt_tokens", row.prompt_tokens, cell.prompt_tokens),
            ("output_tokens", row.output_tokens, cell.output_tokens),
        ):
            if value is not None and most is not None and value > most:
                raise UsageError(
                    f"{path}: the request at {row.at_s:g} s has {value:,} {name}; expected at most the workload's "
                    f"{most:,}: raise it, or shorten the trace"
                )
        found.append(
            Row(
                at_s=row.at_s,
                prompt_tokens=row.prompt_tokens or cell.prompt_tokens,
                output_tokens=row.output_tokens or cell.output_tokens,
            )
        )
    return tuple(found)


def longest(rows: Sequence[Row]) -> Row:
    """The row that needs the most of a context window."""
    return max(rows, key=lambda row: (row.prompt_tokens or 0) + (row.output_tokens or 0))


_TIMES = {"at_s": 1.0, "timestamp": 1e-3}
_PROMPTS = ("prompt_tokens", "input_length", "ContextTokens")
_OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")


def read_trace(path: Path, requests: int) -> tuple[Row, ...]:
    """The first rows of a recorded trace, in order of time, the first at 0.

    Args:
        path: a .jsonl file with ``at_s`` (seconds) or ``timestamp`` (milliseconds) and, where known,
            ``prompt_tokens`` or ``input_length`` and ``output_tokens`` or ``output_length`` a row; or a .csv file with
            the columns TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
        requests: how many rows.

    Raises:
        UsageError: the file or a row cannot be read, or there are fewer rows.
    """
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            if path.suffix == ".csv":
                rows = [_row(row, f"{path}:{n}") for n, row in enumerate(csv.DictReader(handle), 2)]
            else:
                rows = [
                    _row(_object(line, f"{path}:{n}"), f"{path}:{n}")
                    for n, line in enumerate(handle, 1)
                    if line.strip()
                ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot read the trace: {reason}; expected a .jsonl or .csv file") from error
    if len(rows) < requests:
        raise UsageError(f"{path}: has {len(rows)} rows; expected at least the {requests} requests of the workload")
    rows = sorted(rows, key=lambda row: row.at_s)[:requests]
    return tuple(
        Row(at_s=row.at_s - rows[0].at_s, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
        for row in rows
    )


def _object(line: str, place: str) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        raise UsageError(f"{place}: {line.strip()[:60]!r}; expected one JSON object a line") from None


def _row(row: Mapping[str, object], place: str) -> Row:
    return Row(
        at_s=_time(row, place), prompt_tokens=_length(row, _PROMPTS, place), output_tokens=_length(row, _OUTPUTS, place)
    )


def _time(row: Mapping[str, object], place: str) -> float:
    for name, factor in _TIMES.items():
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value * factor
    moment = row.get("TIMESTAMP")
    if isinstance(moment, str):
        try:
            found = datetime.datetime.fromisoformat(moment)
        except ValueError:
            raise UsageError(f"{place}: TIMESTAMP {moment!r}; expected a date and time") from None
        return (found.replace(tzinfo=None) - datetime.datetime(1970, 1, 1)).total_seconds()
    raise UsageError(f"{place}: has no time; expected at_s in seconds, timestamp in milliseconds, or TIMESTAMP")


def _length(row: Mapping[str, object], names: tuple[str, ...], place: str) -> int | None:
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1 or isinstance(value, bool):
            raise UsageError(f"{place}: {name} is {value!r}; expected a number of tokens, 1 or more")
        return number
    return None
