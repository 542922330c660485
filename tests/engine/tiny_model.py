"""Write a Qwen3 of a few million random weights that a CPU serves: config, safetensors, the real Qwen tokenizer.

    python tests/engine/tiny_model.py FOLDER

The weights are noise of a fixed seed, so that the same text comes out everywhere. Input and output embeddings are not
tied (tied ones repeat the last token), ids beyond the vocabulary and special tokens cannot be the likeliest, and the
end of an answer is made likely enough that some answers end by themselves.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specrig.ops.lab.model import build_tokenizer

NAME = "tiny-qwen3"
FORMAT = 3
"""Version of what is written; part of the cache's key."""
SEED = 20261201
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 128, 4, 2, 32
POSITIONS = 8192
END = "<|im_end|>"
END_SCALE = 1.5
"""Standard deviation of the end token's output weights, others' being 1: one step in some hundreds ends an answer."""


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, as its 16 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _tensors(vocabulary: int, usable: int, specials: list[int], end: int) -> Iterator[tuple[str, np.ndarray]]:
    random = np.random.default_rng(SEED)

    def noise(*shape: int, scale: float | None = None) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(scale or shape[-1] ** -0.5)

    yield "model.embed_tokens.weight", noise(vocabulary, HIDDEN, scale=1.0)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", np.ones(HIDDEN)
        yield f"{layer}.self_attn.q_proj.weight", noise(HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", noise(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", noise(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.q_norm.weight", np.ones(HEAD_DIM)
        yield f"{layer}.self_attn.k_norm.weight", np.ones(HEAD_DIM)
        yield f"{layer}.self_attn.o_proj.weight", noise(HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.post_attention_layernorm.weight", np.ones(HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", noise(INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", noise(INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", noise(HIDDEN, INNER)
    yield "model.norm.weight", np.ones(HIDDEN)
    head = noise(vocabulary, HIDDEN, scale=1.0)
    ending = head[end] * END_SCALE
    head[[*specials, *range(usable, vocabulary)]] = 0
    head[end] = ending
    yield "lm_head.weight", head


def _write(path: Path, tensors: list[tuple[str, np.ndarray]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "weights": "random, made by specrig"}}
    offset = 0
    for name, values in tensors:
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors:
            out.write(values.tobytes())


def build(folder: Path) -> None:
    """Write the whole model folder, MANIFEST.sha256 included."""
    build_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {row["content"]: row["id"] for row in tokenizer["added_tokens"]}
    usable = 1 + max([*tokenizer["model"]["vocab"].values(), *added.values()])
    vocabulary = -(-usable // 64) * 64
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": added["<|endoftext|>"],
        "eos_token_id": added[END],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000,
        "specrig_synthetic_weights": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "5.19.0",
        "use_cache": True,
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = _tensors(vocabulary, usable, sorted(added.values()), added[END])
    _write(folder / "model.safetensors", [(name, _bfloat16(np.asarray(values))) for name, values in tensors])
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "MANIFEST.sha256"
    ]
    (folder / "MANIFEST.sha256").write_text("".join(lines))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
