"""Make a cell's requests: one after another in each slot of a closed loop, when they are due in an open one.

Worker processes do this too, so nothing here may need a tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from specrig.load.api import Decoder, make_decoder
from specrig.load.stream import StreamClient, Timeouts, clock, uncollected

_LEAD_S = 0.05
_CUT_OFF = ("first_token_timeout", "idle_timeout", "request_timeout", "aborted")


@dataclass(kw_only=True)
class Item:
    """One request to make.

    Attributes:
        index: its number in the cell.
        rid: the request's id, to abort it by.
        payload: the whole HTTP request.
    """

    index: int
    rid: str
    payload: bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a cell's requests are made, by one process or by several.

    Attributes:
        api: as in :func:`specrig.load.api.make_decoder`.
        abort_path: where the server takes ``{"rid": ...}`` to abort a request; null where it has no such path.
        timeouts: of each request.
        slots: how many requests at once, over all processes; null = no limit (open loops only).
        due: seconds after the origin at which each session is due; null for a closed loop.
        ramp_s: a closed loop's slots begin one after another over this time.
        tool_s: wait before each later turn of a session.
    """

    api: str
    abort_path: str | None
    timeouts: Timeouts
    slots: int | None
    due: Sequence[float] | None
    ramp_s: float | None
    tool_s: float | None

    def origin(self) -> float:
        """The moment that due times count from, a moment ahead."""
        return clock() + (_LEAD_S if self.due is not None else 0.0)


@dataclass(frozen=True, kw_only=True)
class Done:
    """One request that ended; times are readings of the monotonic clock, null = not known.

    Attributes:
        index: of its :class:`Item`.
        due: when it should have left.
        tool_s: the wait that came before it.
        sent: when its bytes were written.
        status, error, message: as in :class:`specrig.load.stream.Exchange`; ``error`` may be ``worker``, too.
        decoder: what its answer said.
    """

    index: int
    due: float | None
    tool_s: float | None
    sent: float | None
    status: int | None
    error: str | None
    message: str | None
    decoder: Decoder


async def drive(
    plan: Plan,
    sessions: Sequence[Sequence[Item]],
    client: StreamClient,
    origin: float,
    slots: Sequence[int],
    following: Callable[[], int | None],
    give: Callable[[Done], None],
    stop: asyncio.Event,
    over: Callable[[], bool],
    count_text: Callable[[str], int] | None = None,
) -> None:
    """Make requests until none is left.

    Args:
        plan: how.
        sessions: all sessions of the cell; a lone request is a session of one.
        client: its connections are open.
        origin: from :meth:`Plan.origin`.
        slots: which of the plan's slots are this process's; how many is what counts in an open loop.
        following: the number of the next session, null where none is left; asked when a slot is free.
        give: called with each request that ended.
        stop: set to end at once; the client's streams are aborted by whoever sets it.
        over: true when no further request may be made.
        count_text: for the decoders, where a tokenizer is at hand.
    """

    async def one(item: Item, due: float, tool_s: float | None) -> None:
        decoder = make_decoder(plan.api, count_text)
        exchange = await client.exchange(item.payload, decoder, plan.timeouts)
        if plan.abort_path is not None and exchange.error in _CUT_OFF:
            await client.request("POST", plan.abort_path, msgspec.json.encode({"rid": item.rid}), timeout_s=2.0)
        give(
            Done(
                index=item.index,
                due=due,
                tool_s=tool_s,
                sent=exchange.sent,
                status=exchange.status,
                error=exchange.error,
                message=exchange.message,
                decoder=decoder,
            )
        )

    async def session(number: int, due: float | None) -> None:
        for turn, item in enumerate(sessions[number]):
            tool_s = plan.tool_s if turn else None
            if tool_s:
                await pause(stop, tool_s)
            if over():
                return
            await one(item, clock() if due is None or turn else due, tool_s)

    async def slot(number: int) -> None:
        if number and plan.ramp_s and plan.slots:
            await pause(stop, origin + number * plan.ramp_s / plan.slots - clock())
        while not over() and (chosen := following()) is not None:
            await session(chosen, None)

    with uncollected():
        async with asyncio.TaskGroup() as group:
            if plan.due is None:
                for number in slots:
                    group.create_task(slot(number))
                return
            free = asyncio.Semaphore(len(slots)) if plan.slots is not None else None
            while True:
                if free is not None:
                    await free.acquire()
                if over() or (chosen := following()) is None:
                    return
                moment = origin + plan.due[chosen]
                while not over() and (left := moment - clock()) > 0:
                    await asyncio.sleep(min(left, 0.25))
                if over():
                    return
                task = group.create_task(session(chosen, moment))
                if free is not None:
                    task.add_done_callback(lambda _, free=free: free.release())  # type: ignore[misc]


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or until the cell is stopped."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
