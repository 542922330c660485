"""Tokenizers and chat templates of other shapes than Qwen's, small and made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specrig.tokens import corpus
from specrig.tokens.tokenizer import Tokenizer, load

SHAPES = ("metaspace", "bytes", "wordpiece", "words", "characters", "unigram")
TEMPLATES = {
    "strips": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "no-system": (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('only user and assistant') }}{% endif %}"
        "<turn>{{ m.role }}\n{{ m.content }}</turn>\n{% endfor %}<turn>assistant\n"
    ),
    "alternates": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
        "{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "thinks": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
        "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
    ),
    "none": None,
}
"""Chat templates: that strip their contents, refuse system messages, need alternating roles, think, or none at all."""


def build(folder: Path, shape: str, template: str | None) -> Tokenizer:
    """Write a tokenizer of a shape with one of the TEMPLATES, and load it.

    metaspace: byte-pair merges over words with a prefix space, BOS put before a text. bytes: byte-level with a prefix
    space, EOS put behind. wordpiece: lower-cased words in pieces, [CLS] and [SEP] around, unknown words one token.
    words: whole words, most of them unknown. characters: one token each. unigram: a likelihood model over metaspace.
    """
    text = corpus.corpus("prose").text(0, 120_000)
    special = ["<unk>", "<s>", "</s>", "<|end|>", "<turn>", "</turn>"]
    trained = [text[at : at + 2000] for at in range(0, len(text), 2000)]
    if shape == "metaspace":
        rust = Rust(models.BPE(unk_token="<unk>"))
        rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        rust.decoder = decoders.Metaspace(prepend_scheme="first")
        rust.train_from_iterator(trained, trainers.BpeTrainer(vocab_size=700, special_tokens=special))
    elif shape == "bytes":
        rust = Rust(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        rust.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        rust.train_from_iterator(
            trained, trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
        )
    elif shape == "wordpiece":
        rust = Rust(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=12))
        rust.normalizer = normalizers.BertNormalizer(lowercase=True)
        rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        rust.train_from_iterator(trained, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special))
    elif shape == "words":
        rust = Rust(models.WordLevel(unk_token="<unk>"))
        rust.pre_tokenizer = pre_tokenizers.Whitespace()
        rust.train_from_iterator(trained, trainers.WordLevelTrainer(vocab_size=300, special_tokens=special))
    elif shape == "characters":
        letters = sorted({*text, *map(chr, range(32, 127)), "\n"})
        rust = Rust(models.BPE(vocab={c: i for i, c in enumerate([*special, *letters])}, merges=[], unk_token="<unk>"))
        rust.decoder = decoders.Fuse()
        rust.add_special_tokens(special)
    else:
        rust = Rust(models.Unigram())
        rust.normalizer = normalizers.NFKC()
        rust.pre_tokenizer = pre_tokenizers.Metaspace()
        rust.decoder = decoders.Metaspace()
        rust.train_from_iterator(
            trained, trainers.UnigramTrainer(vocab_size=600, special_tokens=special, unk_token="<unk>")
        )
    around = {
        "metaspace": "<s> $A",
        "unigram": "<s> $A",
        "bytes": "$A </s>",
        "wordpiece": "<s> $A </s>",
    }
    if shape in around:
        rust.post_processor = processors.TemplateProcessing(
            single=around[shape], special_tokens=[(t, rust.token_to_id(t)) for t in ("<s>", "</s>")]
        )
    folder.mkdir(parents=True)
    rust.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if template is not None and (chosen := TEMPLATES[template]) is not None:
        config["chat_template"] = chosen
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load(folder)
