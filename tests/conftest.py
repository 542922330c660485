"""Fixtures that every suite shares."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def samples() -> Path:
    """Recorded outputs of real machines and servers."""
    return REPOSITORY / "tests" / "samples"


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    """A folder with the real Qwen tokenizer and a chat template, built once and kept between runs."""
    from specrig.ops.lab.model import CHAT_TEMPLATE, build_tokenizer

    cache = REPOSITORY / ".cache" / "tests"
    folder = cache / "tokenizer"
    if not (folder / "tokenizer_config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / "tokenizer"
            build_tokenizer(built)
            try:
                built.rename(folder)
            except OSError:
                if not (folder / "tokenizer_config.json").is_file():
                    raise
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if config["chat_template"] != CHAT_TEMPLATE:  # kept since before the template was changed
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as new:
            json.dump({**config, "chat_template": CHAT_TEMPLATE}, new)
        Path(new.name).replace(folder / "tokenizer_config.json")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _tokenizers_read_once() -> Iterator[None]:
    """Commands that tests run in this process parse the same tokenizer once: half a second each otherwise."""
    from specrig.tokens import tokenizer

    read, kept = tokenizer._fast, {}

    def once(raw: bytes, file: Path) -> object:
        key = hashlib.sha256(raw).digest()
        if key not in kept:
            kept[key] = read(raw, file)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_fast", once)
        yield


@pytest.fixture(autouse=True)
def _own_journal(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the journal of the machine it runs on."""
    if "SPECRIG_JOURNAL" not in os.environ:
        monkeypatch.setenv("SPECRIG_JOURNAL", str(tmp_path_factory.getbasetemp() / "journal.jsonl"))


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[[Callable[[Path], None]], None]:
    """Measure and compare in a fresh folder; where that fails, once more.

    For comparisons of measured times with the engine's own: another process of a busy machine may hold the client's CPU
    for longer than the tolerance. A measurement that is wrong is wrong both times.
    """

    def measure(attempt: Callable[[Path], None]) -> None:
        for name in ("first", "again"):
            folder = tmp_path / name
            folder.mkdir()
            try:
                return attempt(folder)
            except AssertionError as disturbed:
                if name == "again":
                    raise
                print(f"measured again, the first time came out as: {disturbed}")
        return None

    return measure
