"""``specrig budget``: does one prompt and its answer fit a context window and a KV pool."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrig.engine.client import EngineClient
    from specrig.tokens.budget import Budget, Limits, Repetition
    from specrig.tokens.tokenizer import Tokenizer

_LARGEST_TEXT = 64 << 20


def _counts(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number, or several with commas") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers above 0")
    return values


def _count(text: str) -> int:
    values = _counts(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected one number")
    return values[0]


def _count_or_zero(text: str) -> int:
    return 0 if text.strip() == "0" else _count(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``specrig budget``."""
    add = parser.add_argument
    add("--tokenizer", metavar="DIR", help="the folder of the model's tokenizer; needed where text is counted")
    add("--context-length", type=_counts, metavar="N[,N]", help="the context window in tokens; several are compared")
    add("--kv-tokens", type=_count, metavar="K", help="capacity of the KV pool in tokens (max_total_num_tokens)")
    add("--method", metavar="M", help="such as autoregressive, dflash or ddtree-b15; sets the reserved draft tokens")
    add("--headroom", type=_count_or_zero, default=0, metavar="H", help="tokens to keep free on top (0)")
    add("--url", help="read the limits from this running server instead")
    add("--api-key", metavar="KEY", help="bearer token for --url (SPECRIG_API_KEY)")
    add("--prompt-tokens", type=_counts, metavar="P[,P]", help="prompt lengths, chat template included")
    add("--prompt-file", metavar="FILE", help="count the text of this file, with the chat template, instead")
    add("--thinking", action="store_true", help="count with the chat template's thinking on")
    add("--max-tokens", type=_count, required=True, metavar="N", help="tokens to generate")
    add("--concurrency", type=_count, default=1, metavar="C", help="requests in flight (1)")
    add("--max-running", type=_count, metavar="R", help="requests that the server runs at once")
    claimed = parser.add_argument_group("check a prompt made of a repeated phrase")
    add = claimed.add_argument
    add("--claimed-tokens-per-repetition", type=_count, metavar="T", help="what a repetition is believed to cost")
    add("--phrase-file", metavar="FILE", help="the phrase; specrig's own filler by default")
    add("--question-tokens", type=_count_or_zero, metavar="Q", help="tokens of question and template; else measured")
    add("--question", metavar="TEXT", help="the question that ends the prompt, to be measured")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 0 where everything fits, else 1."""
    from specrig.errors import UsageError
    from specrig.tokens import tokenizer as tokenizers

    if args.prompt_tokens is None and args.prompt_file is None:
        raise UsageError("nothing to check; give --prompt-tokens or --prompt-file")
    tokenizer = tokenizers.load(args.tokenizer) if args.tokenizer else None
    limits, notes = _limits(args, tokenizer)
    if args.claimed_tokens_per_repetition:
        return _repetitions(args, limits, tokenizer)
    lengths, more = _lengths(args, tokenizer)
    return _budgets(args, limits, lengths, [*more, *notes])


def ask_server(
    client: EngineClient, tokenizer: Tokenizer | None, thinking: bool, model: str | None = None
) -> tuple[Limits, list[str]]:
    """Return a running server's limits, and a line on each thing about it that matters to a budget.

    Raises:
        GateError: the server's tokenizer is not this one.
    """
    from specrig.engine.limits import read
    from specrig.engine.tokencheck import compare
    from specrig.errors import GateError

    report = read(client)
    notes = list(report.warnings)
    if tokenizer is not None:
        checked = compare(client, tokenizer, model=model or report.model or "default", thinking=thinking)
        if checked.ok is False:
            raise GateError(f"{client.base_url}: {checked.message}")
        notes.append(f"tokenizer: {checked.message}")
    return report.limits, notes


def _limits(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[list[Limits], list[str]]:
    """Return the limits to check against: the server's, or one for each context length given; and what to say of it."""
    import msgspec

    from specrig.errors import UsageError
    from specrig.model.profile import parse_method
    from specrig.tokens.budget import Limits
    from specrig.tokens.limits import method_numbers

    given: dict[str, Any] = {}
    if args.url and (args.context_length is not None or args.kv_tokens is not None):
        given["max_input"] = None  # it is of the server's own window and pool
    if args.method:
        given["reserved_tokens"], given["block"] = method_numbers(*parse_method(args.method))
    if args.kv_tokens is not None:
        given["kv_tokens"] = args.kv_tokens
    if args.max_running is not None:
        given["max_running"] = args.max_running
    if args.url:
        from specrig.engine.client import EngineClient

        with EngineClient(args.url, args.api_key or os.environ.get("SPECRIG_API_KEY")) as client:
            found, notes = ask_server(client, tokenizer, args.thinking)
        server = msgspec.structs.replace(found, **given)
        if args.context_length is None:
            return [server], notes
        return [msgspec.structs.replace(server, context_length=c) for c in args.context_length], notes
    if args.context_length is None:
        raise UsageError("the context length is not known; give --context-length, or --url of a running server")
    return [Limits(context_length=c, **given) for c in args.context_length], []


def _text(path: str) -> str:
    from pathlib import Path

    from specrig.errors import UsageError

    try:
        with Path(path).open("rb") as stream:
            data = stream.read(_LARGEST_TEXT + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > _LARGEST_TEXT:
        raise UsageError(f"{path}: over {_LARGEST_TEXT >> 20} MiB; expected a text that some context could hold")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8; save it as UTF-8") from None


def _lengths(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], list[str]]:
    from specrig.errors import UsageError

    notes: list[str] = []
    if args.prompt_file is None:
        if tokenizer is not None and tokenizer.has_template:
            around = len(tokenizer.chat_ids([{"role": "user", "content": ""}], args.thinking))
            notes.append(f"of the prompt, the chat template takes {around:,} tokens")
            if min(args.prompt_tokens) <= around:
                raise UsageError(
                    f"--prompt-tokens: saw {min(args.prompt_tokens)}; expected above the chat template's own {around}"
                )
        return args.prompt_tokens, notes
    if args.prompt_tokens is not None:
        raise UsageError("saw both --prompt-tokens and --prompt-file; give one")
    if tokenizer is None:
        raise UsageError("--prompt-file is counted by the model's tokenizer; give --tokenizer")
    text = _text(args.prompt_file)
    if not tokenizer.has_template:
        return (max(len(tokenizer.encode(text, special=True)), 1),), ["the tokenizer has no chat template: text alone"]
    count = len(tokenizer.chat_ids([{"role": "user", "content": text}], args.thinking))
    return (count,), [f"{args.prompt_file} has {count:,} tokens with the chat template"]


def _budgets(args: argparse.Namespace, limits: list[Limits], lengths: tuple[int, ...], notes: list[str]) -> int:
    import msgspec

    from specrig.tokens.budget import check

    found = [check(p, args.max_tokens, own, args.concurrency, args.headroom) for own in limits for p in lengths]
    fits = all(b.fits for b in found)
    if args.json:
        first = found[0]
        print(
            json.dumps(
                {
                    "fits": fits,
                    "problems": [p for b in found for p in b.problems],
                    "effective_new_tokens": first.effective_new_tokens if len(found) == 1 else None,
                    "outcome": first.outcome if len(found) == 1 else None,
                    "notes": notes,
                    "checks": msgspec.to_builtins(found),
                },
                indent=2,
            )
        )
        return 0 if fits else 1
    for budget in found:
        _show(budget)
    for note in notes:
        print(f"note: {note}")
    return 0 if fits else 1


def describe(limits: Limits) -> str:
    """Return the limits in words."""
    kv = "" if limits.kv_tokens is None else f", KV capacity {limits.kv_tokens:,}"
    reserved = f", {limits.reserved_tokens:,} reserved for drafts" if limits.reserved_tokens else ""
    running = "" if limits.max_running is None else f", {limits.max_running:,} at once"
    source = f" (from the {limits.source})" if limits.source == "server" else ""
    unknown = f"; not known: {', '.join(limits.unknown)}" if limits.unknown else ""
    return f"context {limits.context_length:,}{kv}{reserved}{running}{source}{unknown}"


def _show(budget: Budget) -> None:
    load = f", {budget.concurrency} at once" if (budget.concurrency or 1) > 1 else ""
    print(f"prompt {budget.prompt_tokens:,} + {budget.max_new_tokens:,} to generate{load}: {describe(budget.limits)}")
    longest = "no prompt fits" if budget.longest_prompt < 0 else f"the longest prompt is {budget.longest_prompt:,}"
    if budget.fits:
        print(f"  fits; with these tokens to generate {longest}")
        return
    for problem in budget.problems:
        print(f"  does not fit: {problem}")
    print(f"  with these tokens to generate {longest}")


def _repetitions(args: argparse.Namespace, limits: list[Limits], tokenizer: Tokenizer | None) -> int:
    import msgspec

    from specrig.errors import UsageError
    from specrig.model.sweep import MAX_TOKENS
    from specrig.tokens.budget import check_repetition, repetitions
    from specrig.tokens.prompts import PHRASE

    if args.prompt_tokens is None:
        raise UsageError("--claimed-tokens-per-repetition needs --prompt-tokens, the lengths wanted")
    claimed = args.claimed_tokens_per_repetition
    if min(args.prompt_tokens) < claimed:
        raise UsageError(
            f"--prompt-tokens: saw {min(args.prompt_tokens)}; expected at least one repetition of {claimed}"
        )
    if max(args.prompt_tokens) > MAX_TOKENS:
        raise UsageError(f"--prompt-tokens: saw {max(args.prompt_tokens):,}; expected at most {MAX_TOKENS:,} to count")
    phrase = _text(args.phrase_file) if args.phrase_file else PHRASE
    if not phrase.strip():
        raise UsageError(f"{args.phrase_file}: is blank; expected the phrase")
    question, how = _question(args, tokenizer)
    rows: list[Repetition] = []
    for own in limits:
        for asked in args.prompt_tokens:
            real = tokenizer.count(phrase * repetitions(asked, claimed)) if tokenizer else None
            row = check_repetition(
                asked,
                claimed,
                real,
                own,
                question_tokens=question,
                max_new_tokens=args.max_tokens,
                concurrency=args.concurrency,
                headroom=args.headroom,
            )
            rows.append(row)
    fits = all(r.fits for r in rows)
    if args.json:
        print(json.dumps({"fits": fits, "question": how, "rows": msgspec.to_builtins(rows)}, indent=2))
        return 0 if fits else 1
    head = ("asked", "repetitions", "claimed", "measured", "question", "generate", "total", "context", "")
    print(("{:>9} {:>11} {:>9} {:>9} {:>8} {:>8} {:>9} {:>9}  {}").format(*head).rstrip())
    for row in rows:
        measured = "-" if row.measured_tokens is None else f"{row.measured_tokens:,}"
        print(
            f"{row.asked:>9,} {row.repetitions:>11,} {row.claimed_tokens:>9,} {measured:>9} {row.question_tokens:>8,} "
            f"{args.max_tokens:>8,} {row.total_tokens:>9,} {row.budget.limits.context_length:>9,}  "
            f"{'fits' if row.fits else 'wrong length' if row.budget.fits else 'does not fit'}"
        )
    for row in rows:
        for problem in row.problems:
            print(f"{row.asked:,} against {row.budget.limits.context_length:,}: {problem}")
    print(f"note: {how}" + ("" if tokenizer else "; nothing was measured, give --tokenizer to check the claim"))
    return 0 if fits else 1


def _question(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[int, str]:
    """Return the tokens beside the phrase, and where that number comes from."""
    from specrig.errors import UsageError

    if args.question_tokens is not None:
        return args.question_tokens, f"{args.question_tokens:,} tokens for the question, as given"
    if tokenizer is None:
        if args.question:
            raise UsageError("--question is counted by the model's tokenizer; give --tokenizer, or --question-tokens")
        return 30, "30 tokens for the question are assumed"
    text = args.question or "What does the text above say, and how often does it say it?"
    if not tokenizer.has_template:
        return tokenizer.count(text), f"{tokenizer.count(text):,} tokens for the question, measured"
    count = len(tokenizer.chat_ids([{"role": "user", "content": text}], args.thinking))
    return count, f"{count:,} tokens for the question and the chat template, measured"
