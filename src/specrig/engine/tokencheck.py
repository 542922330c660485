"""Whether the tokenizer that prompts are built with is the server's: both make ids of the same texts.

It costs two small requests. The texts are chosen so that tokenizers that are not the same differ on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from specrig.engine.errors import EngineError
from specrig.errors import UsageError
from specrig.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrig.engine.client import EngineClient

TEXT = (
    "Hello world, it's THE naïve Cafe\u0301 vs. Caf\u00e9; \uff21\uff22\uff23 \ufb01ne \u2460\u00bd \ud55c\uae00 "
    "\u1112\u1161\u11ab 你好，世界 Привет नमस्ते \u0627\u0644\u0633\u0644\u0627\u0645 👋🏽👩\u200d👩\u200d👧\n"
    "  two  spaces,\ta tab\t\ttwo,\u00a0no-break,\u3000wide,\u200bnone\r\n\n\n   \n"
    "1234567890 3.14159 1,000,000 0x7fff 1e-9 v2.0.1\n"
    "def f(x: int) -> str:\n    return f\"{x!r:>8}\"  # don't, I'LL, we've\n\tif (a<=b&&c!=d){++i;}\n"
    "<|im_start|>user\nx<|im_end|>\n<|endoftext|><think>\n\n</think><tool_call>{}</tool_call><|vision_start|>"
    "<s>[INST]y[/INST]</s><|begin_of_text|><|start_header_id|>z<|eot_id|><bos><start_of_turn>w<end_of_turn>"
    "<|user|>v<|end|><|channel|> "
)
"""Unicode forms, whitespace, digits, code, and special tokens of several families as text."""

MESSAGES: tuple[dict[str, str], ...] = (
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "It is 4, as always.\n"},
    {"role": "user", "content": "Et en français\u00a0: «\u00a0quatre\u00a0»? \n"},
)


class TokenizerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        ok: the ids are the same; False = they differ; None = the server could not be asked.
        message: one line, which texts were compared, or which differs and where.
    """

    ok: bool | None
    message: str


def compare(
    server: EngineClient, tokenizer: Tokenizer, *, model: str = "default", thinking: bool = False
) -> TokenizerCheck:
    """Have the server count a text, and chat messages with this thinking, and compare its ids with the tokenizer's.

    Args:
        server: its control client.
        tokenizer: what prompts are built with.
        model: the served model's name.
        thinking: as requests will be sent.
    """
    try:
        theirs = server.tokenize(TEXT, model=model)
    except EngineError as error:
        why = "it has no /tokenize" if error.kind == "not-found" else str(error)
        return TokenizerCheck(ok=None, message=f"the server's tokenizer is not known: {why}")
    ours = tokenizer.encode(TEXT, special=True)
    if ours != theirs:
        return _different("a plain text", ours, theirs, tokenizer)
    compared = f"a plain text ({len(ours):,} tokens)"
    what = f"chat messages with thinking {'on' if thinking else 'off'}"
    messages = _taken(tokenizer, thinking)
    if messages is None:
        return TokenizerCheck(ok=True, message=f"the same as the server's on {compared}; no chat template to compare")
    try:
        theirs = server.tokenize(messages=messages, chat_template_kwargs={"enable_thinking": thinking}, model=model)
    except EngineError as error:
        return TokenizerCheck(
            ok=True,
            message=f"the same as the server's on {compared}; its chat template is not known: {error}",
        )
    ours = tokenizer.chat_ids(messages, thinking)
    if ours != theirs:
        return _different(what, ours, theirs, tokenizer)
    return TokenizerCheck(ok=True, message=f"the same as the server's on {compared} and {what} ({len(ours):,} tokens)")


def _taken(tokenizer: Tokenizer, thinking: bool) -> Sequence[Mapping[str, str]] | None:
    """The messages, without the system's where the template takes none; None where it takes no messages at all."""
    for messages in (MESSAGES, MESSAGES[1:]):
        try:
            tokenizer.render(messages, thinking)
        except UsageError:
            continue
        return messages
    return None


def _different(what: str, ours: Sequence[int], theirs: Sequence[int], tokenizer: Tokenizer) -> TokenizerCheck:
    pairs = zip(ours, theirs, strict=False)
    first = next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(ours), len(theirs)))
    near = tokenizer.decode(ours[max(first - 4, 0) : first + 4])
    return TokenizerCheck(
        ok=False,
        message=(
            f"the server's tokenizer or chat template is not the one of {tokenizer.path}: of {what} the server "
            f"makes {len(theirs):,} tokens, the folder {len(ours):,}; the first difference is token {first:,}, near "
            f"{near!r}; give --tokenizer the folder that the server serves"
        ),
    )
