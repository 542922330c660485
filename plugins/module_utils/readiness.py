# SPDX-License-Identifier: Apache-2.0
"""Words for what a starting server does: how it ended, how far it is, and why it is no longer waited for.  Pure."""

from __future__ import annotations

import re
import signal

QUIET_S = 120
"""A server whose log says nothing for longer than this is said to hang, not to load."""

# SGLang logs its arguments at each start, as a call's or as a dictionary's.
_KEY = re.compile(r"""((?:api_key|password|hf_token)["']?\s*[=:]\s*)(["'])(?:\\.|(?!\2).)+\2""")


def masked(text):
    """A line of a server's log without the keys and passwords among its arguments."""
    return _KEY.sub(r"\1\2****\2", text)


def end_text(state):
    """How a unit's main process ended, from ``systemctl show``: ``exited with status 1``.

    Args:
        state: ``Result``, ``ExecMainCode`` (1 exited, 2 killed, 3 dumped core), ``ExecMainStatus``.
    """
    result = state.get("Result") or ""
    code, status = _number(state.get("ExecMainCode")), _number(state.get("ExecMainStatus"))
    if result == "oom-kill":
        return "the kernel killed it for want of memory (OOM): give the guest more, or lower what the profile takes"
    if result == "timeout":
        return "it did not do what systemd asked within its time limit"
    if result == "resources":
        return "systemd could not set it up (a missing file or user?)"
    if result == "watchdog":
        return "its watchdog ended it"
    if code in (2, 3) or result in ("signal", "core-dump"):
        return "killed by {0}{1}".format(_signal(status), ", with a core" if code == 3 else "")
    if result == "start-limit-hit":
        return "its starts are used up"
    if status is None:
        return "no exit status is known"
    if status in _SYSTEMD_STATUS:
        return "exited with status {0} ({1})".format(status, _SYSTEMD_STATUS[status])
    return "exited with status {0}".format(status)


_SYSTEMD_STATUS = {
    200: "its working directory is missing",
    202: "a descriptor could not be set up",
    203: "its program could not be run: missing, or not executable",
    205: "a resource limit could not be set",
    214: "its scheduling could not be set",
    216: "its group does not exist",
    217: "its user does not exist",
    218: "its capabilities could not be set",
    226: "its mounts could not be set up",
    228: "its system call filter could not be set",
    238: "its state folder could not be made",
    239: "its cache folder could not be made",
    242: "its NUMA policy was refused",
}


def _number(text):
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def _signal(number):
    try:
        return "{0} ({1})".format(signal.Signals(number).name, number)
    except (TypeError, ValueError):
        return "a signal" if number is None else "signal {0}".format(number)


def ended(unit, state, asked, seen_restarts=None, holder=None):
    """The line for a unit that ended while it was waited for, or None where it lives.

    Args:
        unit: the unit's name.
        state: ``systemctl show`` of it.
        asked: how many completions were sent to it by now.
        seen_restarts: ``NRestarts`` when the wait began.
        holder: whoever else holds its port, as text.
    """
    active, sub = state.get("ActiveState"), state.get("SubState")
    restarts = _number(state.get("NRestarts")) or 0
    down = active in ("failed", "inactive")
    again = sub == "auto-restart" or (seen_restarts is not None and state.get("NRestarts") != seen_restarts)
    if not down and not again:
        return None
    how = "ended while it started"
    if asked:
        how = "ended at its first request, having said that it was ready"
    elif down:
        how = "is {0}".format(active)
    # The exit status that systemd tells is the new start's.
    anew = not down and sub != "auto-restart"
    text = "{0} {1}: {2}".format(unit, how, "systemd has started it again since" if anew else end_text(state))
    if active == "failed" and (restarts or state.get("Result") == "start-limit-hit"):
        text += "; it was started {0} times and its restart limit is reached".format(restarts + 1)
    elif sub == "auto-restart" and restarts:
        text += "; systemd has started it {0} times".format(restarts + 1)
    if holder:
        text += "; its port is held by " + holder
    return text


def failed_text(unit):
    """How a unit came to be failed, from a row of serving_look: ``exited with status 1, 4 starts``."""
    state = {"Result": unit.get("result"), "ExecMainCode": unit.get("exit_code")}
    text = end_text(dict(state, ExecMainStatus=unit.get("exit_status")))
    restarts = unit.get("restarts") or 0
    if restarts:
        text += "; it was started {0} times and its restart limit is reached".format(restarts + 1)
    return text


def holder_text(holders):
    """Whoever holds a port: ``pid 812 (python3 -m http.server, user root, squatter.service)``."""
    shown = []
    for one in holders:
        about = [one.get("command") or "command unknown"]
        about.append("user {0}".format(one.get("user") or "unknown"))
        if one.get("unit"):
            about.append(one["unit"])
        shown.append("pid {0} ({1})".format(one["pid"], ", ".join(about)))
    return " and ".join(shown)


def progress(seen, log):
    """How far a server is: what it answers, and the last line of its log with its age.

    Args:
        seen: why it is not ready yet.
        log: its last log lines as ``(age in s or None, text)``, the last one last.
    """
    if not log:
        return seen + "; its log is empty"
    age, text = log[-1]
    said = "the last line of its log"
    if age is not None:
        said += " is {0:.0f} s old".format(age)
    return "{0}; {1}: {2}".format(seen, said, " ".join(text.split())[:160])


def late(limit, seconds, seen, log, asked):
    """The line for a server that was waited for long enough.

    Args:
        limit: its start timeout.
        seconds: since its start.
        seen: why it is not ready.
        log: as in ``progress``.
        asked: completions that were sent.
    """
    age = log[-1][0] if log else None
    text = "no completion within its start timeout of {0:g} s ({1:.0f} s since its start): {2}".format(
        limit, seconds, progress(seen, log)
    )
    if asked:
        return text + "; it takes requests and does not answer them: it hangs, a longer timeout will not help"
    if age is not None and age > QUIET_S:
        return text + "; so long without a word, it hangs rather than loads"
    return text + (
        "; if it only needs longer, raise start_timeout_s of the profile (or sglang_server_start_timeout_s for all)"
    )


def short(asked, got, finish):
    """The line for a completion with another number of tokens than asked for."""
    text = "its first completion has {0} tokens, expected {1}".format(got, asked)
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if isinstance(got, int) and got < asked:
        if kind == "stop":
            return text + "; it ended with a stop although ignore_eos was sent: the server drops that parameter"
        if kind == "abort":
            return text + "; it was aborted: the KV pool may be too small (--mem-fraction-static)"
        return text + (
            "; something caps its answers: SGLANG_MAX_NEW_TOKENS_LIMIT, or a context_length that is far too small"
        )
    return text + "; its counts can't be trusted"
