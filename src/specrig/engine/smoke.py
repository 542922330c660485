"""Budget and smoke gates: what a server can hold, then a short request and one of the real shape, before any benchmark.

``python -m specrig.engine.smoke --url URL --tokenizer DIR --prompt-tokens P --max-tokens N --json`` asks one server;
``--cases FILE`` (``-`` = standard input) asks several at the same time, one request at a time each. Prints
``{"rows": [gate rows]}``; exit code 0 = all passed, 1 = a gate did not, 2 = usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.engine.limits import from_info
from specrig.errors import SpecrigError, UsageError
from specrig.facts import serverinfo
from specrig.tokens import budget

SHORT_TEXT = "The capital of France is"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the smoke gate.

    Attributes:
        profile: whose server it is.
        url: the server.
        model: the served model name, None = not compared.
        tokenizer: the model's folder; needed where ``prompt_tokens`` is given.
        label: ``short`` or ``full shape``, for the message.
        prompt_tokens: exact prompt length, None = a few words.
        max_tokens: tokens to generate, exactly.
        context_length: what the profile configured, None = not compared.
        tp: ranks that the profile configured, None = not compared.
        speculative: whether the profile speculates, None = not compared.
        draft_tokens, block_size, reserved_tokens: the method's numbers, None = only what the server says.
        concurrency: requests at once that the shape must fit with.
        headroom: tokens to keep free, over and above.
        timeout_s: limit of the request.
        api_key: sent as a bearer token.
        expect: what the server has to say of itself (`serverinfo.expected`), None = only what stands above.
        env: the environment of the server's process, None = not known.
    """

    profile: str
    url: str
    max_tokens: int
    model: str | None = None
    tokenizer: str | None = None
    label: str = "full shape"
    prompt_tokens: int | None = None
    context_length: int | None = None
    tp: int | None = None
    speculative: bool | None = None
    draft_tokens: int | None = None
    block_size: int | None = None
    reserved_tokens: int | None = None
    concurrency: int = 1
    headroom: int = 0
    timeout_s: float = 600.0
    api_key: str | None = None
    expect: dict[str, Any] | None = None
    env: dict[str, str] | None = None


def gate(name: str, case: Case, status: str, seen: Any, expected: Any, message: str) -> dict[str, Any]:
    """A gate row."""
    return {
        "gate": name,
        "subject": case.profile,
        "status": status,
        "seen": seen,
        "expected": expected,
        "message": message,
    }


def limits_of(case: Case, limits: budget.Limits) -> budget.Limits:
    """The server's limits, with the larger of its own and the method's reserved tokens and block."""
    return msgspec.structs.replace(
        limits,
        reserved_tokens=_larger(limits.reserved_tokens, case.reserved_tokens),
        block=_larger(limits.block, case.block_size),
    )


def _larger(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def budget_row(case: Case, limits: budget.Limits) -> dict[str, Any]:
    """The budget gate: does this shape fit, by the rules of the engine, into what the server really has?"""
    if limits.auto_truncate:
        return gate(
            "budget",
            case,
            "fail",
            {"auto_truncate": True},
            {"auto_truncate": False},
            "the server runs with --allow-auto-truncate and cuts long prompts silently; start it without",
        )
    if case.context_length is not None and limits.context_length != case.context_length:
        return gate(
            "budget",
            case,
            "fail",
            {"context_length": limits.context_length},
            {"context_length": case.context_length},
            f"the server's window is {limits.context_length} tokens, the profile says {case.context_length}; "
            "start it by recover.yml, or correct context_length",
        )
    prompt_tokens = case.prompt_tokens if case.prompt_tokens is not None else 16
    verdict = budget.check(prompt_tokens, case.max_tokens, limits, case.concurrency, case.headroom)
    shape = f"{prompt_tokens} prompt + {case.max_tokens} new tokens"
    seen = msgspec.to_builtins(limits)
    expected = {"prompt_tokens": prompt_tokens, "max_tokens": case.max_tokens, "concurrency": case.concurrency}
    if verdict.fits:
        return gate("budget", case, "pass", seen, expected, f"{case.label}: {shape} fit")
    return gate("budget", case, "fail", seen, expected, f"{case.label}: " + "; ".join(verdict.problems))


def answer_row(case: Case, answer: Mapping[str, Any], seconds: float, prompt_tokens: int | None) -> dict[str, Any]:
    """The smoke gate: does the answer have the tokens asked for, and was it drafted as the profile says?

    Args:
        case: what was asked.
        answer: the server's answer.
        seconds: wall time of the request.
        prompt_tokens: the prompt's length where it is known.
    """
    meta = answer.get("meta_info")
    usage = answer.get("usage")
    counts: Mapping[str, Any] = meta if isinstance(meta, Mapping) else usage if isinstance(usage, Mapping) else {}
    verify_steps = meta.get("spec_verify_ct") if isinstance(meta, Mapping) else None
    seen = {
        "completion_tokens": counts.get("completion_tokens"),
        "prompt_tokens": counts.get("prompt_tokens"),
        "verify_steps": verify_steps,
        "seconds": round(seconds, 3),
    }
    expected = {"completion_tokens": case.max_tokens, "prompt_tokens": prompt_tokens, "speculative": case.speculative}
    problems = []
    if seen["completion_tokens"] is None:
        problems.append("the answer holds no token counts")
    elif seen["completion_tokens"] != case.max_tokens:
        problems.append(f"{seen['completion_tokens']} tokens came, {case.max_tokens} were asked for")
    if prompt_tokens is not None and seen["prompt_tokens"] not in (None, prompt_tokens):
        problems.append(f"the server counts {seen['prompt_tokens']} prompt tokens, {prompt_tokens} were sent")
    if isinstance(meta, Mapping) and case.speculative is True and not verify_steps:
        problems.append("no verify step was made, so speculation is off although the profile asks for it")
    if case.speculative is False and verify_steps:
        problems.append(f"{verify_steps} verify steps were made, but the profile is autoregressive")
    if problems:
        return gate("smoke", case, "fail", seen, expected, f"{case.label}: " + "; ".join(problems))
    return gate("smoke", case, "pass", seen, expected, f"{case.label}: {case.max_tokens} tokens in {seconds:.2f} s")


def server_rows(
    case: Case,
    info: dict[str, Any] | None,
    models: Sequence[dict[str, Any]],
    model_info: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows for what the server says of itself against the profile.

    Args:
        case: any case of the profile.
        info: ``/server_info``, None where the server has none.
        models: the rows of ``/v1/models``.
        model_info: ``/model_info``, None where the server has none.

    Returns:
        What failed in one row, what is not told in one, and one that passed where nothing failed.
    """
    expect = case.expect
    if expect is None:
        # a server asked by hand: what was given on the command line
        expect = {"profile": case.profile, "model": case.model, "tp": case.tp, "speculative": case.speculative}
        expect["draft_tokens"] = case.draft_tokens
        found = serverinfo.compare(expect, info, list(models), model_info, None)
        found = [row for row in found if row["check"] in ("model", "tp", "method", "draft tokens")]
    else:
        found = serverinfo.compare(expect, info, list(models), model_info, case.env)
    rows: list[dict[str, Any]] = serverinfo.condense(found)
    return rows


def told_by(client: EngineClient) -> tuple[dict[str, Any] | None, list[dict[str, Any]], dict[str, Any] | None]:
    """``/server_info``, the rows of ``/v1/models`` and ``/model_info``, each by its new or its old name.

    Raises:
        EngineError: a call failed other than for there being no such endpoint.
    """

    def ask(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return call()
        except EngineError as error:
            if error.kind != "not-found":
                raise
            return None

    return ask(client.server_info), client.models(), ask(client.model_info)


def _prompt(case: Case, tokenizers: dict[str, Any]) -> list[int] | None:
    if case.prompt_tokens is None:
        return None
    from specrig.tokens.prompts import PromptFactory

    if case.tokenizer is None:
        raise UsageError(
            f"{case.profile}: a prompt of {case.prompt_tokens} tokens needs --tokenizer, the model's folder"
        )
    return PromptFactory(tokenizers[case.tokenizer], "prose", case.prompt_tokens, seed=1, cache="unique").build(0).ids


def _length(models: Sequence[dict[str, Any]]) -> int | None:
    """The effective context length in the rows of ``/v1/models``."""
    found = (row.get("max_model_len") for row in models)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def ask(cases: Sequence[Case], tokenizers: dict[str, Any]) -> list[dict[str, Any]]:
    """All gates of one server, one request after the other.

    Returns:
        Gate rows, in the order of the cases; a server that can't be reached gives one failed row.
    """
    rows: list[dict[str, Any]] = []
    first = cases[0]
    with EngineClient(first.url, first.api_key) as client:
        try:
            info, models, model_info = told_by(client)
            rows += server_rows(first, info, models, model_info)
            report = from_info(info or {}, _length(models), first.env)
        except SpecrigError as error:
            return [gate("smoke", first, "fail", None, None, str(error))]
        for case in cases:
            row = budget_row(case, limits_of(case, report.limits))
            rows.append(row)
            if row["status"] != "pass":
                continue
            begun = time.monotonic()
            try:
                ids = _prompt(case, tokenizers)
                answer = client.generate(
                    text=SHORT_TEXT if ids is None else None,
                    input_ids=ids,
                    max_new_tokens=case.max_tokens,
                    timeout_s=case.timeout_s,
                    model=case.model or "default",
                )
            except EngineError as error:
                rows.append(gate("smoke", case, "fail", {"status": error.status}, None, f"{case.label}: {error}"))
                continue
            except SpecrigError as error:
                rows.append(gate("smoke", case, "fail", None, None, f"{case.label}: {error}"))
                continue
            rows.append(answer_row(case, answer, time.monotonic() - begun, None if ids is None else len(ids)))
    return rows


def run(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Ask all servers at the same time; each is asked one thing at a time, so that the check is no load of its own."""
    by_server: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        by_server.setdefault((case.profile, case.url), []).append(case)
    tokenizers: dict[str, Any] = {}
    for case in cases:
        if case.prompt_tokens is not None and case.tokenizer is not None and case.tokenizer not in tokenizers:
            from specrig.tokens.tokenizer import load

            tokenizers[case.tokenizer] = load(case.tokenizer)
    if not by_server:
        return []
    with ThreadPoolExecutor(max_workers=len(by_server)) as pool:
        rows = pool.map(lambda group: ask(group, tokenizers), by_server.values())
        return [row for group in rows for row in group]


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.cases is not None:
        data = sys.stdin.buffer.read() if args.cases == "-" else Path(args.cases).read_bytes()
        try:
            return msgspec.json.decode(data, type=list[Case])
        except msgspec.MsgspecError as error:
            raise UsageError(f"--cases {args.cases}: {error}; expected a JSON list of cases") from error
    if args.url is None or args.max_tokens is None:
        raise UsageError("give --url and --max-tokens, or --cases FILE")
    return [
        Case(
            profile=args.profile or args.url,
            url=args.url,
            tokenizer=args.tokenizer,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m specrig.engine.smoke", description="Budget and smoke gates.")
    parser.add_argument("--url", help="the server")
    parser.add_argument("--profile", help="name for the rows (the URL)")
    parser.add_argument("--tokenizer", metavar="DIR", help="the model's folder, for a prompt of an exact length")
    parser.add_argument("--prompt-tokens", type=int, metavar="P", help="exact prompt length (a few words)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate, exactly")
    parser.add_argument("--cases", metavar="FILE", help="JSON list of cases; - is standard input")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        rows = run(_cases(args))
    except (SpecrigError, OSError) as error:
        print(f"smoke: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, SpecrigError) else 2
    if args.json:
        sys.stdout.write(msgspec.json.encode({"rows": rows}).decode() + "\n")
    else:
        for row in rows:
            print(f"{row['status']:7} {row['gate']:7} {row['subject']}: {row['message']}")
    return 0 if all(row["status"] == "pass" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
