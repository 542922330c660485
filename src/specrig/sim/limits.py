"""The rules by which SGLang takes, refuses or silently shortens a request, and its words for it."""

from __future__ import annotations

from dataclasses import dataclass


class Refused(Exception):
    """A request that the tokenizer process refuses before it is scheduled.

    Attributes:
        kind: OpenAI routes show it as the error's type.
    """

    def __init__(self, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Verdict:
    """What becomes of a request that was not refused.

    Attributes:
        keep: leading prompt tokens that are kept (fewer than given only with auto-truncate).
        new_tokens: tokens that will be generated at most.
        abort: the scheduler's words where it gives the request up; None where it runs.
    """

    keep: int
    new_tokens: int
    abort: str | None = None


def judge(
    prompt: int,
    max_new: int | None,
    context: int,
    kv_tokens: int,
    reserved: int = 0,
    *,
    truncate: bool = False,
    page: int = 1,
) -> Verdict:
    """Apply the rules in SGLang's order.

    Args:
        prompt: P, tokens of the prompt.
        max_new: N, tokens asked for; None fills what is left.
        context: C, the context length.
        kv_tokens: K, tokens of the KV pool.
        reserved: R, draft tokens taken off the window.
        truncate: the server runs with --allow-auto-truncate.
        page: tokens of one KV page; a prompt takes whole ones, and one more is kept free.

    Raises:
        Refused: P + R >= C, or P + R + N > C.
    """
    counted = prompt + reserved
    limit = min(context, kv_tokens)
    if counted >= context:
        if not truncate:
            raise Refused(f"The input ({counted} tokens) is longer than the model's context length ({context} tokens).")
        prompt = max(1, context - reserved - 1)
        counted = prompt + reserved
    if max_new is not None and counted + max_new > context:
        if not truncate:
            raise Refused(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {counted + max_new} tokens: {counted} tokens from the input messages and {max_new} tokens "
                "for the completion. Please reduce the number of tokens in the input messages or the completion to "
                "fit within the limit."
            )
        max_new = max(0, context - counted)
    longest = limit - 6
    if prompt >= longest:
        if not truncate:
            return Verdict(
                keep=prompt,
                new_tokens=0,
                abort=f"Input length ({prompt} tokens) exceeds the maximum allowed length ({longest} tokens). Use a "
                "shorter input or enable --allow-auto-truncate.",
            )
        prompt = longest - 1
    pool = kv_tokens - -(-prompt // page) * page - page - 1
    room = max(0, min(limit - 2 - prompt, pool, context - prompt - reserved))
    return Verdict(keep=prompt, new_tokens=room if max_new is None else min(max_new, room))
