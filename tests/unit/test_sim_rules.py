"""The simulated engine's pure parts: limits, devices, faults, the prefix cache, step times, acceptance, text."""

from __future__ import annotations

import argparse
import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.errors import UsageError
from specrig.sim import devices, faults, physics
from specrig.sim.cache import BLOCK, PrefixCache
from specrig.sim.config import Config, build
from specrig.sim.flags import add_server_arguments, add_simulation_arguments
from specrig.sim.limits import Refused, judge
from specrig.sim.ranks import titles
from specrig.sim.text import Answer, Detokenizer, vocabulary


def config(folder: Path, *flags: str) -> Config:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_server_arguments(parser)
    add_simulation_arguments(parser)
    return build(parser.parse_args(["--model-path", str(folder), "--sim-no-devices", *flags]))


DDTREE = (
    "--speculative-algorithm",
    "DDTREE",
    "--speculative-draft-model-path",
    "/draft",
    "--speculative-ddtree-budget",
)
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "/draft")


class TestLimits:
    """C = 32768 and a large pool, by hand from the published rules."""

    @pytest.mark.parametrize(
        ("prompt", "new", "reserved", "expected"),
        [
            (32761, 5, 0, 5),  # the longest prompt that the scheduler takes
            (32761, 7, 0, 5),  # P + N = 32768 is accepted and silently clipped to 32766
            (32510, 256, 0, 256),
            (32510, 258, 0, 256),
            (32496, 256, 16, 256),  # DDTree b15: P + N <= 32752
        ],
    )
    def test_taken(self, prompt: int, new: int, reserved: int, expected: int) -> None:
        verdict = judge(prompt, new, 32768, 2_000_000, reserved)
        assert verdict.abort is None
        assert verdict.new_tokens == expected
        assert verdict.keep == prompt

    def test_input_longer_than_context(self) -> None:
        with pytest.raises(Refused) as refused:
            judge(33012, 256, 32768, 2_000_000)
        assert str(refused.value) == (
            "The input (33012 tokens) is longer than the model's context length (32768 tokens)."
        )

    def test_total_longer_than_context(self) -> None:
        with pytest.raises(Refused) as refused:
            judge(32744, 256, 32768, 2_000_000)
        assert str(refused.value) == (
            "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested a total "
            "of 33000 tokens: 32744 tokens from the input messages and 256 tokens for the completion. Please reduce "
            "the number of tokens in the input messages or the completion to fit within the limit."
        )

    def test_reserved_tokens_count(self) -> None:
        assert judge(32496, 256, 32768, 2_000_000, 16).new_tokens == 256
        with pytest.raises(Refused):
            judge(32497, 256, 32768, 2_000_000, 16)

    def test_pool_smaller_than_context_aborts(self) -> None:
        verdict = judge(59995, 10, 262144, 60000)
        assert verdict.abort == (
            "Input length (59995 tokens) exceeds the maximum allowed length (59994 tokens). Use a shorter input or "
            "enable --allow-auto-truncate."
        )
        assert judge(59993, 10, 262144, 60000).new_tokens == 5

    def test_auto_truncate_cuts_without_a_word(self) -> None:
        verdict = judge(40000, 256, 32768, 2_000_000, truncate=True)
        assert verdict.abort is None
        assert verdict.keep == 32761
        assert verdict.new_tokens == 1

    @given(
        prompt=st.integers(1, 5000),
        new=st.integers(0, 5000),
        context=st.integers(64, 4000),
        pool=st.integers(64, 6000),
        reserved=st.integers(0, 40),
    )
    def test_fits_means_untouched(self, prompt: int, new: int, context: int, pool: int, reserved: int) -> None:
        """The published summary of the rules, stated on its own, against the rules applied in order."""
        small = min(context, pool)
        fits = (
            prompt + reserved < context
            and prompt + reserved + new <= context
            and prompt <= small - 7
            and prompt + new <= small - 2
        )
        try:
            verdict = judge(prompt, new, context, pool, reserved)
        except Refused:
            assert not fits
        else:
            assert (verdict.abort is None and verdict.new_tokens == new) == fits


class TestDevices:
    GPUS = tuple(
        devices.Gpu(bus, minor, f"GPU-{minor}00")
        for bus, minor in (("0000:06:00.0", 1), ("0000:27:00.0", 0), ("0000:a2:00.0", 3))
    )

    @pytest.mark.parametrize(
        ("setting", "minors"),
        [
            (None, [1, 0, 3]),
            ("0,1", [1, 0]),
            ("2,0", [3, 1]),
            ("GPU-000", [0]),
            ("0,7,1", [1]),  # the list ends before its first entry that names no GPU
            ("", []),
            ("-1", []),
            ("0,0", []),
        ],
    )
    def test_visible(self, setting: str | None, minors: list[int]) -> None:
        assert [gpu.minor for gpu in devices.visible(self.GPUS, setting)] == minors

    def test_a_container_counts_the_gpus_it_has_a_node_of(self) -> None:
        there = devices.present(self.GPUS, lambda path: path != "/dev/nvidia0")
        assert [gpu.minor for gpu in there] == [1, 3]

    def test_information(self, samples: Path) -> None:
        text = (samples / "proc" / "gpus_information_01_a10g.txt").read_text()
        gpu = devices.parse_information(text, "0000:00:1e.0")
        assert gpu.bus_id == "0000:00:1e.0"
        assert gpu.minor == 3

    @pytest.fixture
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Two GPUs whose minors are not in bus order; nodes are made by the test."""
        for bus, minor in (("0000:06:00.0", 1), ("0000:27:00.0", 0)):
            folder = tmp_path / "gpus" / bus
            folder.mkdir(parents=True)
            (folder / "information").write_text(
                f"Model: \t\t X\nGPU UUID: \t GPU-{minor}\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"
            )
        (tmp_path / "dev").mkdir()
        monkeypatch.setattr(devices, "DEV", str(tmp_path / "dev"))
        monkeypatch.setattr(devices, "PROC_GPUS", str(tmp_path / "gpus"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return tmp_path / "dev"

    @staticmethod
    def node(folder: Path, name: str, major: int = 511, minor: int = 250) -> None:
        """A node with no driver behind it: opening it gives ENXIO where the kernel lets us make one."""
        try:
            os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        except PermissionError:
            pytest.skip("making a device node needs root")

    def test_opens_by_bus_order_and_keeps_the_node(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
            self.node(machine, name)
        try:
            os.close(os.open(machine / "nvidia0", os.O_RDWR))
        except OSError as error:
            if error.errno != 6:
                pytest.skip(f"opening a node without driver gives {error.strerror} here, not ENXIO")
        path, descriptor = devices.open_gpu(0)
        assert path == str(machine / "nvidia1")
        assert str(Path(f"/proc/self/fd/{descriptor}").readlink()) == path
        os.close(descriptor)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        path, descriptor = devices.open_gpu(0)
        os.close(descriptor)
        assert path == str(machine / "nvidia0")
        with pytest.raises(devices.DeviceError, match=r"invalid device ordinal \[device 1, but 1 visible"):
            devices.open_gpu(1)

    def test_no_control_node(self, machine: Path) -> None:
        with pytest.raises(devices.DeviceError, match=r"No CUDA GPUs are available.*nvidiactl: ENOENT"):
            devices.open_gpu(0)

    def test_denied_node(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def denied(path: str, flags: int, *rest: int) -> int:
            if str(path).endswith("nvidia-uvm"):
                raise PermissionError(1, "Operation not permitted")
            if str(path).endswith("nvidiactl"):
                raise OSError(6, "No such device or address")
            return real(path, flags, *rest)

        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(devices.DeviceError, match=r"CUDA unknown error.*nvidia-uvm: EPERM"):
            devices.open_gpu(0)

    def test_a_regular_file_is_no_device(self, machine: Path) -> None:
        (machine / "nvidiactl").touch()
        with pytest.raises(devices.DeviceError, match="regular file"):
            devices.open_gpu(0)


class TestFaults:
    def test_parse(self) -> None:
        found = faults.parse(["stall", "eof-without-done=9@3", "eof-without-done=2@5"])
        stall = found.get("stall")
        assert stall is not None
        assert stall.number == faults.FAULTS["stall"].default
        assert found.get("eof-without-done", 4) is None
        third, fifth = found.get("eof-without-done", 3), found.get("eof-without-done", 5)
        assert third is not None
        assert fifth is not None
        assert (third.number, fifth.number) == (9.0, 2.0)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("stal", "did you mean stall"),
            ("stall=x", "takes a number; got 'x'"),
            ("hang=3", "takes no argument"),
            ("stall@0", "expected a number from 1"),
        ],
    )
    def test_refused(self, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            faults.parse([text])

    def test_every_fault_has_one_line(self) -> None:
        lines = faults.table().splitlines()
        assert len(lines) == len(faults.FAULTS)
        assert all(kind.text and "\n" not in kind.text for kind in faults.FAULTS.values())


class TestCache:
    def test_prefix_in_blocks(self) -> None:
        cache = PrefixCache(10_000)
        ids = list(range(1000))
        assert cache.match(ids) == 0
        cache.insert(ids)
        assert cache.match(ids) == 1000 // BLOCK * BLOCK
        assert cache.match([*ids[:100], 5, *ids[100:]]) == 100 // BLOCK * BLOCK
        assert cache.match([9, *ids]) == 0

    def test_one_token_is_always_computed(self) -> None:
        cache = PrefixCache(10_000)
        ids = list(range(4 * BLOCK))
        cache.insert(ids)
        assert cache.match(ids) == 4 * BLOCK - 1

    def test_end_goes_before_beginning(self) -> None:
        cache = PrefixCache(4 * BLOCK)
        ids = list(range(6 * BLOCK))
        cache.insert(ids)
        assert cache.tokens == 4 * BLOCK
        assert cache.match(ids) == 4 * BLOCK


class TestConfig:
    def test_ddtree(self, tokenizer_dir: Path) -> None:
        method = config(tokenizer_dir, *DDTREE, "15").method
        assert (method.label, method.verified, method.depth, method.reserved) == ("ddtree-b15", 16, 15, 16)
        small = config(tokenizer_dir, *DDTREE, "8").method
        assert (small.label, small.verified, small.depth, small.reserved) == ("ddtree-b8", 9, 8, 9)

    def test_dflash(self, tokenizer_dir: Path) -> None:
        method = config(tokenizer_dir, *DFLASH, "--speculative-num-draft-tokens", "16").method
        assert (method.label, method.verified, method.depth, method.reserved) == ("dflash", 16, 15, 0)
        assert config(tokenizer_dir, *DFLASH).effective_running == 48

    def test_eagle_reserves(self, tokenizer_dir: Path) -> None:
        flags = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "5", "--speculative-eagle-topk", "4"]
        flags += ["--speculative-num-draft-tokens", "8"]
        assert config(tokenizer_dir, *flags).method.reserved == 20

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--speculative-algorithm", "DFLASH"], "requires --speculative-draft-model-path"),
            ([*DFLASH, "--pp-size", "2"], "pp_size 1"),
            ([*DFLASH, "--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "16"], "equal"),
            ([*DDTREE, "0"], "node budget"),
            (["--context-length", "999999999"], "greater than the derived context_length"),
            (["--tp-size", "1", "--sim-weights-gib", "200"], "Not enough memory"),
            (["--sim-time-scale", "0"], "expected more than 0"),
            (["--port", "99999"], "expected a number up to 65535"),
            (["--port", "-1"], "expected a number up to 65535"),
        ],
    )
    def test_refused(self, tokenizer_dir: Path, flags: Sequence[str], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            config(tokenizer_dir, *flags)

    def test_mamba_slots_cap_concurrency(self, tokenizer_dir: Path) -> None:
        capped = config(tokenizer_dir, "--max-running-requests", "48", "--max-mamba-cache-size", "47")
        assert (capped.max_running, capped.effective_running) == (48, 9)

    def test_gpu_ids(self, tokenizer_dir: Path) -> None:
        parser = argparse.ArgumentParser()
        add_server_arguments(parser)
        add_simulation_arguments(parser)
        flags = ["--model-path", str(tokenizer_dir), "--tp-size", "4", "--base-gpu-id", "1", "--gpu-id-step", "2"]
        assert build(parser.parse_args(flags)).gpu_ids == [1, 3, 5, 7]

    def test_flags_as_sglang(self, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        parser = argparse.ArgumentParser()
        add_server_arguments(parser)
        args = parser.parse_args(["--model", str(tokenizer_dir), "--tp", "8", "--watchdog-t", "60"])
        assert (args.tp_size, args.watchdog_timeout) == (8, 60)
        with pytest.raises(SystemExit):
            parser.parse_args(["--cuda-graph-max-bs", "8"])
        assert "ambiguous option: --cuda-graph-max-bs could match" in capsys.readouterr().err
        assert parser.parse_known_args(["--mamba-scheduler-strategy", "auto"])[1] == [
            "--mamba-scheduler-strategy",
            "auto",
        ]

    def test_every_dialect_is_taken(self, tokenizer_dir: Path) -> None:
        from specrig.facts import dialects

        seen = set()
        for method, row in dialects.TABLE.items():
            for dialect in row["dialects"]:
                needs = row["dialects"][dialect].get("needs", [])
                budget = 15 if "budget" in needs else None
                found = dialects.resolve(method, budget, {method: dialect})
                flags = [flag.replace("{draft_model}", "/draft") for flag in found["flags"]]
                env = {key: value for key, value in found["env"].items() if value is not None}
                with pytest.MonkeyPatch.context() as patch:
                    for key, value in env.items():
                        patch.setenv(key, str(value))
                    mine = config(tokenizer_dir, *flags).method
                seen.add(mine.name)
                assert mine.reserved == found["reserved_tokens"], (method, dialect)
                assert mine.depth == found["tree_depth"], (method, dialect)
                if budget is not None:
                    assert mine.label == found["label"]
        assert {"autoregressive", "dflash", "ddtree"} <= seen

    def test_a_rendered_command_line_is_taken(self, tokenizer_dir: Path) -> None:
        from specrig.facts import dialects

        profile = {
            "model": "Qwen3.6-27B",
            "tp": 4,
            "method": "ddtree",
            "budget": 15,
            "context_length": 131072,
            "port": 31001,
            "draft_model": "/srv/models/draft",
        }
        rendered = dialects.command(profile, str(tokenizer_dir), "0.0.0.0")
        made = config(tokenizer_dir, *rendered)
        assert (made.tp_size, made.context_length, made.port) == (4, 131072, 31001)
        assert (made.method.label, made.model_name) == ("ddtree-b15", "Qwen3.6-27B")

    def test_titles(self) -> None:
        assert titles(1) == ["sglang::scheduler"]
        assert titles(2) == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"]


class TestPhysics:
    """Published magnitudes, with the acceptance averaged over 200 prompts."""

    @staticmethod
    def speed(made: Config, concurrency: int = 1, context: int = 1024) -> float:
        step = physics.StepTimes(made).decode_exact([context] * concurrency)
        total, count = 0, 0
        for prompt in range(200):
            chain = physics.base_acceptance(1, str(prompt), periodic=False)
            probability = physics.acceptance(made.method, chain, context)
            generator = random.Random(prompt)
            total += sum(1 + physics.accepted(generator, probability, made.method.depth) for _ in range(50))
            count += 50
        return total / count / step

    def test_magnitudes(self, tokenizer_dir: Path) -> None:
        base = self.speed(config(tokenizer_dir))
        assert 25 < base < 30
        chain = self.speed(config(tokenizer_dir, *DFLASH)) / base
        assert 4.3 < chain < 5.5
        trees = {budget: self.speed(config(tokenizer_dir, *DDTREE, str(budget))) / base for budget in (4, 15, 63)}
        assert 5.0 < trees[15] < 6.5
        assert trees[15] > trees[4]
        assert trees[15] > trees[63]

    def test_speculation_pays_less_under_load(self, tokenizer_dir: Path) -> None:
        chain = config(tokenizer_dir, *DFLASH)
        ratio = self.speed(chain, 32) / self.speed(config(tokenizer_dir), 32)
        assert 1.0 < ratio < 2.0

    def test_tensor_parallel(self, tokenizer_dir: Path) -> None:
        one, four, eight = (self.speed(config(tokenizer_dir, "--tp-size", str(tp))) for tp in (1, 4, 8))
        assert one < four < eight < 8 * one

    def test_launches_differ_a_little(self, tokenizer_dir: Path) -> None:
        factors = [
            physics.StepTimes(config(tokenizer_dir, "--random-seed", str(seed))).launch_factor for seed in range(40)
        ]
        assert len(set(factors)) == 40
        assert 0.98 < min(factors) < max(factors) < 1.02
        again = physics.StepTimes(config(tokenizer_dir, "--random-seed", "7")).launch_factor
        assert again == factors[7]

    @pytest.mark.parametrize("method", [(), DFLASH, (*DDTREE, "31")])
    def test_a_scale_too_small_is_raised_alike_for_all_methods(
        self, tokenizer_dir: Path, method: Sequence[str]
    ) -> None:
        """At TP 4: 51.8 GiB * 0.68 ms / 4 + 1.6 + 128 * 0.028 + 0.27 / 4 + 0.051 * 1.024 / 4 = 14.07 ms a step."""
        asked = ["--tp-size", "4", "--sim-time-scale", "0.2", *method]
        assert physics.true_to_scale(config(tokenizer_dir, *asked)).time_scale == pytest.approx(5.25 / 14.07, rel=1e-3)
        fast = config(tokenizer_dir, *asked, "--sim-allow-fast")
        assert physics.true_to_scale(fast).time_scale == 0.2
        slow = config(tokenizer_dir, "--sim-time-scale", "0.2")
        assert physics.true_to_scale(slow).time_scale == 0.2

    @given(st.floats(0.01, 0.99), st.integers(0, 40), st.integers(0, 2**32))
    def test_accepted_never_above_depth(self, probability: float, depth: int, seed: int) -> None:
        assert 0 <= physics.accepted(random.Random(seed), probability, depth) <= depth

    def test_accepted_mean(self) -> None:
        """p (1 - p^d) / (1 - p) for p = 0.8, d = 15: 0.8 * 0.96482 / 0.2 = 3.859."""
        generator = random.Random(3)
        mean = sum(physics.accepted(generator, 0.8, 15) for _ in range(40_000)) / 40_000
        assert mean == pytest.approx(3.859, abs=0.06)


class _Letters:
    """A codec of one id a byte."""

    eos_ids = frozenset([300])

    def encode(self, text: str) -> list[int]:
        return [300] if text == "<|im_end|>" else list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return bytes(one for one in ids if one < 256).decode("utf-8", "replace")


class TestText:
    def test_same_prompt_same_words(self) -> None:
        words = vocabulary(_Letters())
        first, again, other = (Answer(words, key, 500) for key in ("a", "a", "b"))
        took = [first.token(index) for index in range(400)]
        assert took == [again.token(index) for index in range(400)]
        assert took != [other.token(index) for index in range(400)]

    def test_end_of_sequence_then_repetition(self) -> None:
        answer = Answer(vocabulary(_Letters()), "x", 100)
        end = answer.eos_index
        ids = [answer.token(index) for index in range(end + 60)]
        assert ids.index(300) == end
        assert _Letters().decode(ids[end + 1 :]).startswith(" and so on and so on")

    def test_divergence_changes_what_follows_only(self) -> None:
        words = vocabulary(_Letters())
        plain, changed = Answer(words, "k", 10_000), Answer(words, "k", 10_000)
        changed.token(300)
        changed.diverge(100, "tree")
        left = [plain.token(index) for index in range(300)]
        right = [changed.token(index) for index in range(300)]
        assert left[:100] == right[:100]
        assert left != right

    @given(st.text(min_size=1, max_size=40), st.integers(1, 7))
    def test_detokenizer_gives_all_text_at_any_cut(self, text: str, size: int) -> None:
        codec = _Letters()
        detokenizer = Detokenizer(codec.decode)
        ids = codec.encode(text) if text != "<|im_end|>" else [65]
        pieces = [
            detokenizer.push(ids[start : start + size], final=start + size >= len(ids))
            for start in range(0, len(ids), size)
        ]
        assert "".join(pieces) == codec.decode(ids)
        assert all("�" not in piece for piece in pieces[:-1]) or "�" in text
