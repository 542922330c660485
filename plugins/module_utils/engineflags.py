# SPDX-License-Identifier: Apache-2.0
"""Whether a release of SGLang takes a command line: renamed, removed, shortened and unknown options.  Pure.

SGLang's parser accepts the beginning of an option where only one option begins so. A shortened option therefore works
until a later release adds a second one: it is named before it breaks.
"""

from __future__ import annotations

import difflib
import os.path
import re

from . import engineoptions

# old name, new name, first release with the new one, what to know
RENAMED = (
    (
        "--cuda-graph-max-bs",
        "--cuda-graph-max-bs-decode",
        "0.5.14",
        "-prefill is its counterpart for the prefill phase",
    ),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode", "0.5.14", "-prefill is its counterpart for the prefill phase"),
    ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy", "0.5.14", ""),
    ("--disable-cuda-graph", "--cuda-graph-backend-decode disabled", "0.5.14", "-prefill disabled for that phase"),
    ("--piecewise-cuda-graph-max-tokens", "--cuda-graph-max-bs-prefill", "0.5.14", ""),
    ("--piecewise-cuda-graph-tokens", "--cuda-graph-bs-prefill", "0.5.14", ""),
    ("--disable-piecewise-cuda-graph", "--cuda-graph-backend-prefill disabled", "0.5.14", ""),
    ("--enable-breakable-cuda-graph", "--cuda-graph-backend-prefill breakable", "0.5.14", ""),
    ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size", "0.5.12", ""),
    ("--stream-output", "--incremental-streaming-output", "0.5.10", ""),
    ("--nsa-prefill-backend", "--dsa-prefill-backend", "0.5.13", ""),
    ("--nsa-decode-backend", "--dsa-decode-backend", "0.5.13", ""),
    ("--hybrid-kvcache-ratio", "--swa-full-tokens-ratio", "0.5.9", ""),
    ("--enable-dp-attention", "--attn-dp-size N", "0.5.22", "in place of --dp-size N --enable-dp-attention"),
)

# algorithm of --speculative-algorithm, first release
ALGORITHMS = {
    "EAGLE": "0.5.9",
    "EAGLE3": "0.5.9",
    "NEXTN": "0.5.9",
    "STANDALONE": "0.5.9",
    "NGRAM": "0.5.9",
    "DFLASH": "0.5.11",
    "FROZEN_KV_MTP": "0.5.12",
    "DSPARK": "0.5.16",
    "UNO": "0.5.20",
}

_RELEASE = re.compile(r"^v?(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?$")
_PIN = re.compile(r"^\s*sglang\s*(?:\[[^\]]*\])?\s*==\s*([^\s;,]+)")
_UNPINNED = re.compile(r"^\s*sglang\s*(?:\[[^\]]*\])?\s*(?:[<>~!].*)?$")
_WHEEL = re.compile(r"^sglang-([^-]+)-.*\.whl$")
_BOUND = re.compile(r"^(>=|<=|<|>|==)\s*(\S+)$")


def release(text):
    """``(0, 5, 12)`` of ``0.5.12`` or ``0.5.12.post1``; None for what is no release (a commit, a local version)."""
    match = _RELEASE.match(str(text or ""))
    return tuple(int(part) for part in match.groups()) if match else None


def surveyed(version):
    """Whether the options of this release are known, so that an option it lacks can be refused."""
    return version is not None and release(engineoptions.FIRST) <= version <= release(engineoptions.LAST)


def engine_release(engine):
    """Which release of SGLang an engine is: ``(version or None, whether it is upstream's own build)``.

    A pin (``sglang==0.5.23``) is upstream's. A wheel's name tells a version, not who built it. Of a branch, a folder
    and an engine that was there already nothing is known; the simulated engine has the options of the last release.
    """
    engine = engine or {}
    if engine.get("kind") == "sim":
        return engineoptions.LAST, False
    install = engine.get("install") or {}
    requirements = list(install.get("requirements") or [])
    for step in install.get("steps") or []:
        requirements += list(step.get("requirements") or []) if isinstance(step, dict) else []
    for requirement in requirements:
        text = str(requirement.get("text") if isinstance(requirement, dict) else requirement)
        pin = _PIN.match(text)
        wheel = _WHEEL.match(os.path.basename(text))
        if pin or wheel:
            version = (pin or wheel).group(1)
            return (version, bool(pin)) if release(version) else (None, False)
        if _UNPINNED.match(text) and release(engine.get("version")):
            return str(engine["version"]), True
    return None, False


def judge(engine, method, words):
    """What an engine makes of a command line: ``(problems, notes)``, a line each; problems keep it from starting.

    Args:
        engine: its row, with ``kind`` and ``install``.
        method: the profile's method, as ``dialects.resolve`` gives it.
        words: the arguments after the engine's command.
    """
    version, upstream = engine_release(engine)
    requires = method.get("requires")
    news = []
    if upstream and requires and satisfies(version, requires) is False:
        if requires != "branch" or release(version) <= release(engineoptions.LAST):
            return [_unmet(method, requires, version, words)], []
        news.append(
            "method {0} (dialect {1}) is in no release of SGLang up to {2}; whether {3} has it is not known".format(
                method["method"], method["dialect"], engineoptions.LAST, version
            )
        )
    rows = check(words, version, complete=upstream)
    problems, notes = ([row["message"] for row in rows if row["status"] == status] for status in ("fail", "note"))
    return problems, news + notes


def _unmet(method, requires, version, words):
    name = "method {0} (dialect {1})".format(method["method"], method["dialect"])
    if requires == "branch":
        known = options(version)
        lacking = [flag for flag in _flags(words) if known and flag not in known]
        return (
            "{0} is in no release of SGLang, and the engine is sglang {1}{2}; install {3} (an engine of its own in "
            "sglang_server_engines, with a git reference or a wheel), or choose another dialect".format(
                name,
                version,
                ", which has no " + lacking[0] if lacking else "",
                method.get("source") or "a build that has it",
            )
        )
    return "{0} needs sglang {1}, and the engine is {2}; install that, or choose another method".format(
        name, requires, version
    )


def satisfies(version, wanted):
    """Whether a release (text) meets ``>=0.5.11,<0.5.20``; None where it is no release. ``branch`` is met by none.

    Raises ValueError where ``wanted`` cannot be read.
    """
    wanted = str(wanted).strip()
    have = release(version)
    if wanted == "branch":
        return None if have is None else False
    met = True
    for part in wanted.split(","):
        match = _BOUND.match(part.strip())
        bound = release(match.group(2)) if match else None
        if bound is None:
            raise ValueError(wanted)
        if have is not None:
            sign = match.group(1)
            met = met and (
                (sign == ">=" and have >= bound)
                or (sign == "<=" and have <= bound)
                or (sign == "<" and have < bound)
                or (sign == ">" and have > bound)
                or (sign == "==" and have == bound)
            )
    return None if have is None else met


def options(version):
    """The options of a release, a set of ``--name``; empty where they are not known."""
    have = release(version)
    if not surveyed(have):
        return frozenset()
    found = set()
    for (first, last), names in engineoptions.SPANS.items():
        if release(first) <= have and (last is None or have <= release(last)):
            found.update("--" + name for name in names.split())
    return frozenset(found)


def span(name):
    """``[(first, last or None), ...]``: the surveyed releases that have an option; empty for an unknown one."""
    return sorted(
        ((first, last) for (first, last), names in engineoptions.SPANS.items() if name[2:] in names.split()),
        key=lambda pair: release(pair[0]),
    )


def _times(name):
    shown = []
    for first, last in span(name):
        begin = None if first == engineoptions.FIRST else first
        if begin and last:
            shown.append("from {0} to {1}".format(begin, last))
        elif last:
            shown.append("up to {0}".format(last))
        elif begin:
            shown.append("from {0} on".format(begin))
    return " and ".join(shown)


def check(words, version, complete=True):
    """What a release makes of the options among these words.

    Args:
        words: the arguments after the engine's command.
        version: the release as text; None where the engine is none (a branch) or not known.
        complete: False for a build that has options of its own: one that the release lacks is no mistake then.

    Returns:
        Rows ``{"status": "fail"|"note", "flag", "message"}``; none where everything is spelled as the release does.
    """
    have = release(version)
    known = options(version)
    rows = []
    for flag in _flags(words):
        renamed = next((row for row in RENAMED if row[0] == flag), None)
        reverse = next((row for row in RENAMED if row[1] == flag), None)
        if not known:
            newer = have is not None and have > release(engineoptions.LAST)
            if renamed and newer and flag not in options(engineoptions.LAST):
                rows.append(_row("fail", flag, _gone(renamed, version, frozenset())))
            elif renamed:
                rows.append(_row("note", flag, _unknown_release(renamed, version)))
        elif flag in known:
            if renamed and have >= release(renamed[2]):
                text = "{0} still works in sglang {1} and will not for long: since {3} it is {2}".format(
                    flag, version, renamed[1], renamed[2]
                )
                rows.append(_row("note", flag, text + _more(renamed)))
        elif renamed and have >= release(renamed[2]):
            rows.append(_row("fail", flag, _gone(renamed, version, known)))
        elif reverse and have < release(reverse[2]):
            text = "{0} is not there in sglang {1}, which calls it {2}; it was renamed in {3}".format(
                flag, version, reverse[0], reverse[2]
            )
            rows.append(_row("fail", flag, text))
        else:
            row = _unlisted(flag, version, known, complete)
            if row:
                rows.append(row)
    return rows + _algorithm(words, version, have)


def _algorithm(words, version, have):
    """Rows for the value of ``--speculative-algorithm``; names that are not built in may be registered by a plugin."""
    words = [str(word) for word in words]
    found = [word.split("=", 1)[1] for word in words if word.startswith("--speculative-algorithm=")]
    found += [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--speculative-algorithm"]
    rows = []
    for name in found:
        first = ALGORITHMS.get(name.upper())
        if first and surveyed(have) and have < release(first):
            text = "sglang {0} has no speculative algorithm {1}; it is there from {2} on".format(version, name, first)
            rows.append(_row("fail", "--speculative-algorithm", text))
        elif not first and surveyed(have):
            near = difflib.get_close_matches(name.upper(), sorted(ALGORITHMS), 1)
            text = "sglang {0} has no speculative algorithm {1} of its own{2}".format(
                version, name, "; did you mean {0}?".format(near[0]) if near else ": a plugin has to register it"
            )
            rows.append(_row("note", "--speculative-algorithm", text))
    return rows


def _gone(renamed, version, known):
    return "{0} is gone in sglang {1}{2}; since {3} it is {4}{5}: write that".format(
        renamed[0], version, _ambiguous(renamed[0], known), renamed[2], renamed[1], _more(renamed)
    )


def _unlisted(flag, version, known, complete):
    longer = sorted(name for name in known if name.startswith(flag))
    if len(longer) == 1:
        text = "{0} is short for {1} in sglang {2} and breaks with the next option that begins so; write it out".format(
            flag, longer[0], version
        )
        return _row("note", flag, text)
    if longer:
        return _row(
            "fail",
            flag,
            "{0} is ambiguous in sglang {1}{2}; write it out".format(flag, version, _ambiguous(flag, known)),
        )
    if not complete:
        return None
    times = _times(flag)
    if times:
        return _row("fail", flag, "sglang {0} has no {1}; it is there {2}".format(version, flag, times))
    near = difflib.get_close_matches(flag, sorted(known), 1, 0.75)
    text = "sglang {0} has no {1}{2}".format(version, flag, "; did you mean {0}?".format(near[0]) if near else "")
    return _row("fail", flag, text + ("" if near else "; correct extra_args, or name the engine that has it"))


def _flags(words):
    """The options among the words, each once, in order, without values."""
    seen = []
    for word in words:
        text = str(word)
        if text == "--":
            break
        if text.startswith("--"):
            flag = text.split("=", 1)[0]
            if flag not in seen:
                seen.append(flag)
    return seen


def _ambiguous(flag, known):
    longer = sorted(name for name in known if name.startswith(flag) and name != flag)
    if not longer:
        return ""
    shown = longer[:3] + (["..."] if len(longer) > 3 else [])
    return " (it could be {0})".format(" or ".join(shown)) if len(longer) > 1 else ""


def _more(renamed):
    return " ({0})".format(renamed[3]) if renamed[3] else ""


def _unknown_release(renamed, version):
    last = [last for _first, last in span(renamed[0])]
    gone = "" if not last or last[-1] is None else " and is gone after {0}".format(last[-1])
    which = "the release of this engine is not known" if version is None else "{0} is not known here".format(version)
    return "{0} is {1} since sglang {2}{3}{4}; {5}".format(
        renamed[0], renamed[1], renamed[2], gone, _more(renamed), which
    )


def _row(status, flag, message):
    return {"status": status, "flag": flag, "message": message}
