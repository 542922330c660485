"""What a load and its worker processes tell each other: pickled messages, each after its length, over a socket pair.

Both ends are the same user's, of the same program: the socket pair is inherited and has no name.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specrig.load.slots import Plan

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Share:
    """One worker's part of a cell.

    Attributes:
        plan: how its requests are made.
        sessions: all of the cell's requests: index, rid, and where in the payloads' file they begin and end.
        slots: which of the plan's slots are this worker's.
        own: the sessions that are this worker's alone; null where the next one is taken from the shared cursor.
        connections: to open beforehand.
    """

    plan: Plan
    sessions: Sequence[Sequence[tuple[int, str, int, int]]]
    slots: Sequence[int]
    own: Sequence[int] | None
    connections: int


def send(writer: asyncio.StreamWriter, *message: Any) -> None:
    """Send a message; one to a process that has gone is lost."""
    if not writer.is_closing():
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        writer.write(_LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """The next message; null where the other process has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message
