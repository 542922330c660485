"""Waiting for an absolute moment, to some ten microseconds: the loop's own timers count in milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Deadline:
    """One pending call at an absolute `time.monotonic` moment, by a timerfd.

    Args:
        loop: the running loop.
        callback: called once for each `at`, as close after the moment as the machine allows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._armed = False
        loop.add_reader(self._descriptor, self._fired)

    def at(self, moment: float) -> None:
        """Call back at `moment`; a moment in the past calls back in the loop's next turn."""
        nanoseconds = max(1, int(moment * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000))
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        self._armed = True

    def _fired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        if self._armed:
            self._armed = False
            self._callback()

    def close(self) -> None:
        """Forget the pending call."""
        self._armed = False
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


_OFFSET = time.time() - time.monotonic()


def unix(moment: float) -> float:
    """The wall-clock time of a `time.monotonic` moment, by one offset for the life of the process."""
    return moment + _OFFSET
