# SPDX-License-Identifier: Apache-2.0
"""Which servers can start at once, and which have to wait until another has let go of their GPUs.  Pure."""

from __future__ import annotations


def gpus_of(process):
    """GPUs, as the guest counts, that a server's environment gives it; None where that can't be told."""
    environ = (process or {}).get("environ")
    words = (environ or {}).get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return None
    parts = [word.strip() for word in words.split(",") if word.strip()]
    return {int(word) for word in parts} if all(word.isdigit() for word in parts) else None


def order(wanted, held, leaving):
    """Splits what is to be started by whether its GPUs are free.

    Args:
        wanted: profile to the GPUs that it is to have, of all that are to be started or restarted.
        held: profile to the GPUs that its server has now (None = unknown, then it may be any), of those that run.
        leaving: names of running profiles that are stopped for good.

    Returns:
        ``(at once, first, later)``, lists of names: those to start or restart straight away; those of ``wanted`` that
        have to be stopped first, since another is to have a GPU of theirs; those to start when all of ``first`` and
        ``leaving`` have stopped.
    """
    going = [name for name in held if name in wanted or name in leaving]

    def takes_from(name):
        return [
            other for other in going if other != name and (held[other] is None or set(held[other]) & set(wanted[name]))
        ]

    givers = {other for name in wanted for other in takes_from(name)}
    first = [name for name in wanted if name in givers]
    later = [name for name in wanted if name in first or takes_from(name)]
    return [name for name in wanted if name not in later], first, later
