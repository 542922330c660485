"""A simulated server in a process of its own, for tests and benchmarks of what talks to one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunningSim:
    """A server that is ready.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
        truth_path: its ground truth, a JSON line a request.
        pid: of the main process.
        ranks: ``{title, pid, node}`` of each child.
        process: to signal it or to wait for it.
    """

    url: str
    truth_path: Path
    pid: int
    ranks: list[dict[str, Any]]
    process: subprocess.Popen[str] = field(repr=False)

    @property
    def port(self) -> int:
        """The port."""
        return int(self.url.rpartition(":")[2])

    def truth(self, *, at_least: int = 0, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The rows written so far, in order of their end; waits until there are `at_least` so many."""
        until = time.monotonic() + timeout_s
        while True:
            rows: list[dict[str, Any]] = []
            if self.truth_path.exists():
                rows = [json.loads(line) for line in self.truth_path.read_text().splitlines() if line]
            if len(rows) >= at_least or time.monotonic() > until:
                return rows
            time.sleep(0.01)

    def truth_of(self, rid: str) -> dict[str, Any]:
        """The row of one request; waits a moment for it."""
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            for row in self.truth():
                if row["rid"] == rid:
                    return row
            time.sleep(0.01)
        raise KeyError(f"the truth has no request {rid}")


_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of one token a byte, with a chat template: a server with it starts in half the time.

    Args:
        folder: made if it is not there.

    Returns:
        The folder.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    made.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Keyword flags as a command line: ``tp_size=4`` is ``--tp-size 4``, True a bare flag, a list repeats it."""
    line: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif isinstance(value, list | tuple):
            for one in value:
                line += [flag, str(one)]
        elif value is not None and value is not False:
            line += [flag, str(value)]
    return line


@contextlib.contextmanager
def running_sim(
    *,
    model_path: str | Path,
    env: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
    timeout_s: float = 30.0,
    wait: bool = True,
    **flags: Any,
) -> Iterator[RunningSim]:
    """Run ``specrig sim`` on a free port, without devices, and stop it at the end.

    Args:
        model_path: a folder with a tokenizer.
        env: added to the environment.
        extra: more arguments as they are.
        timeout_s: until it must be ready.
        wait: False yields as soon as it listens is not known: only for servers that never get ready (needs ``port``).
        **flags: SGLang's flags and the simulation's, such as ``tp_size=4, sim_fault=["stall=8"], sim_seed=1``.

    Yields:
        The running server.

    Raises:
        RuntimeError: it did not get ready; the text has its output.
    """
    with tempfile.TemporaryDirectory(prefix="specrig-sim-") as scratch:
        truth = Path(flags.pop("sim_truth", Path(scratch) / "truth.jsonl"))
        given: dict[str, Any] = {"port": 0, "host": "127.0.0.1", "sim_no_devices": True, **flags}
        command = [sys.executable, "-m", "specrig.sim", "--model-path", str(model_path), "--sim-truth", str(truth)]
        command += [*arguments(given), *extra, "--json"]
        if guard := shutil.which("setpriv"):  # it goes with this process, also where that is killed
            command = [guard, "--pdeathsig", "KILL", *command]
        output = Path(scratch) / "output"
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(env or {})},
            )
        try:
            ready = _await_ready(process, output, timeout_s) if wait else {"port": given["port"], "ranks": []}
            yield RunningSim(
                url=f"http://127.0.0.1:{ready['port']}",
                truth_path=truth,
                pid=process.pid,
                ranks=ready["ranks"],
                process=process,
            )
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _await_ready(process: subprocess.Popen[str], output: Path, timeout_s: float) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    while True:
        text = output.read_text()
        for line in text.splitlines():
            if line.startswith('{"event": "ready"'):
                ready: dict[str, Any] = json.loads(line)
                return ready
        if process.poll() is not None:
            raise RuntimeError(f"specrig sim ended with {process.returncode} before it was ready: {text[-2000:]}")
        if time.monotonic() > until:
            raise RuntimeError(f"specrig sim was not ready in {timeout_s:g} s: {text[-2000:]}")
        time.sleep(0.01)
