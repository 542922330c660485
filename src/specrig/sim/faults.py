"""Faults on demand: what servers and networks were seen to do to a benchmark, each with a name.

``NAME[=ARG][@N]``: ARG is the number that the help line names, ``@N`` limits the fault to the N-th request (from 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specrig.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """One entry of the table.

    Attributes:
        text: one line of help; ARG is the argument.
        default: the argument where none is given; None where the fault takes none.
    """

    text: str
    default: float | str | None = None


FAULTS: dict[str, Kind] = {
    # streams
    "early-role-chunk": Kind("chat: the role-only chunk leaves on arrival, long before the first token"),
    "usage-missing": Kind("OpenAI routes: no usage, though it was asked for"),
    "usage-final-only": Kind("OpenAI routes: usage at the end alone, though it was asked for with every chunk"),
    "error-in-stream": Kind("after ARG tokens an error event inside HTTP 200, then [DONE]", 4.0),
    "eof-without-done": Kind("after ARG tokens the stream ends cleanly, with no terminal event", 4.0),
    "reset": Kind("after ARG tokens the connection is reset", 4.0),
    "done-missing": Kind("the finish reason comes, [DONE] does not; the stream ends"),
    "keepalive-comments": Kind("comment lines before and between the events, ARG at a time", 1.0),
    "split-utf8": Kind("text full of multi-byte characters; every packet is cut inside one, ARG ms apart", 2.0),
    "sse-variants": Kind("events with CRLF, no space after the colon, event and id fields: all legal"),
    "stall": Kind("the stream stalls for good after ARG tokens, the connection stays open", 4.0),
    "pause": Kind("the stream pauses once for ARG s in the middle", 1.0),
    "kv-abort": Kind("after ARG tokens a chunk with finish_reason abort: the KV pool is full", 4.0),
    "coalesce": Kind("ARG verify steps arrive as one chunk", 4.0),
    "first-chunk": Kind("the first chunk is held until it has ARG tokens", 5.0),
    "hang": Kind("the request is accepted and never answered"),
    "http-400": Kind("the request is answered with HTTP 400 and the route's own words"),
    "http-500": Kind("the request is answered with HTTP 500 and a text"),
    "http-503": Kind("the request is answered with HTTP 503 and no body"),
    # counts
    "short-completion": Kind("generation ends after ARG tokens with finish_reason stop, under ignore_eos too", 8.0),
    "silent-cap": Kind("max_new_tokens is cut to ARG without a word (finish_reason length)", 16.0),
    "reasoning-overcount": Kind("reasoning_tokens is completion_tokens + 1"),
    "count-off": Kind("completion_tokens is ARG more than the ids that were sent", 3.0),
    "prompt-count-off": Kind("prompt_tokens is ARG more than the prompt has", 1.0),
    "accept-over-bound": Kind("the reported acceptance is above what a draft block can hold"),
    # state
    "slow-first-request": Kind("the first request after start or flush takes ARG simulated s more", 5.0),
    "spec-off": Kind("speculation is silently off: the flags say on, no verify step happens"),
    "spec-on": Kind("a baseline reports verify steps, as with flags left over from another arm"),
    "concurrency-cap": Kind("only ARG requests run at once; max_running_requests says otherwise", 1.0),
    "hidden-cap": Kind("only ARG requests run at once, and no report of the server's says so", 1.0),
    "flush-refused": Kind("flush_cache always answers 400"),
    "flush-kept": Kind("flush_cache answers 200 and keeps the cache"),
    "stale-server": Kind("the server answers for another model, ARG", "stale-model"),
    "wrong-gpus": Kind("every rank opens the GPU ARG places after the one it was given", 1.0),
    "diverge": Kind("greedy output leaves the baseline's with ARG probability a token", 0.01),
    "drift": Kind("every decode step gets ARG % slower a minute (simulated)", 10.0),
    "slow": Kind("every step takes ARG % longer", 10.0),
    # processes
    "rank-dies": Kind("a rank dies ARG wall s after start", 1.0),
    "dies-at-first-request": Kind("healthy until the first request, which kills a rank"),
    "never-ready": Kind("the server listens and loads for ever (503)"),
}


@dataclass(frozen=True)
class Fault:
    """A fault that was asked for: its argument and, where limited, the number of the request it strikes."""

    name: str
    arg: float | str | None
    only: int | None = None

    @property
    def number(self) -> float:
        """The argument as a number."""
        assert isinstance(self.arg, float)
        return self.arg


class Faults:
    """The faults of one server."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._by_name: dict[str, list[Fault]] = {}
        for fault in faults:
            self._by_name.setdefault(fault.name, []).append(fault)

    def __iter__(self) -> Iterator[Fault]:
        return (fault for faults in self._by_name.values() for fault in faults)

    def get(self, name: str, request: int | None = None) -> Fault | None:
        """The fault of that name, or None where it was not asked for or not for this request (counted from 1)."""
        for fault in self._by_name.get(name, ()):
            if fault.only is None or request is None or fault.only == request:
                return fault
        return None


def parse(texts: Iterable[str]) -> Faults:
    """Read ``NAME[=ARG][@N]``.

    Raises:
        UsageError: an unknown name or an argument that is not a number.
    """
    found = []
    for text in texts:
        head, _, at = text.partition("@")
        name, equals, given = head.partition("=")
        kind = FAULTS.get(name)
        if kind is None:
            import difflib

            near = difflib.get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {near[0]}?" if near else "specrig sim --list-faults names them all"
            raise UsageError(f"no fault {name!r}; {hint}")
        arg = kind.default
        if equals:
            if arg is None:
                raise UsageError(f"the fault {name} takes no argument; got {given!r}")
            if isinstance(arg, float):
                try:
                    arg = float(given)
                except ValueError:
                    arg = math.nan
                if not math.isfinite(arg):
                    raise UsageError(f"the fault {name} takes a number; got {given!r}")
            else:
                arg = given
        only = None
        if at:
            if not at.isdecimal() or int(at) < 1:
                raise UsageError(f"the fault {text!r} names request {at!r}; expected a number from 1")
            only = int(at)
        found.append(Fault(name, arg, only))
    return Faults(found)


def table() -> str:
    """All faults, one a line."""
    lines = []
    for name, kind in FAULTS.items():
        default = kind.default
        shown = "" if default is None else f"={default:g}" if isinstance(default, float) else f"={default}"
        lines.append(f"{name + shown:<28} {kind.text}")
    return "\n".join(lines)
