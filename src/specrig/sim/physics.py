"""How long a step takes and how many draft tokens it accepts: a model with published magnitudes, not a measurement.

Times are simulated seconds of a 27B bf16 model on RTX PRO 6000 Blackwell cards without NVLink. The constants are chosen
so that autoregressive decoding at TP 1 gives about 27 tokens a second, a draft chain of 16 about 5x that at
concurrency 1 and about 1.5x at 32, and a draft tree peaks at a medium budget.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence

from specrig.sim.config import Config, Method

WEIGHT_READ_S_PER_GIB = 0.68e-3
"""One GiB of weights at 1.79 TB/s and 88 % of it."""
STEP_OVERHEAD_S = 1.6e-3
ALL_REDUCES = 128
ALL_REDUCE_S = {1: 0.0, 2: 20e-6, 4: 28e-6, 8: 48e-6}
"""One small all-reduce over PCIe by group size; two a layer, 64 layers."""
TOKEN_COMPUTE_S = 0.27e-3
"""Compute of one token in a decode or verify batch on one GPU."""
KV_READ_S_PER_TOKEN = 5.1e-8
"""Reading the KV cache of one context token on one GPU."""
PREFILL_TOKENS_PER_S = 4700.0
PREFILL_HALF_LENGTH = 150_000
"""Context length at which attention has doubled the cost of a prefilled token."""


def digest(*parts: object) -> int:
    """A 64-bit number that depends on all parts and on nothing else."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def prompt_digest(ids: Sequence[int]) -> str:
    """What names a prompt: a hash of its ids."""
    import array

    return hashlib.blake2b(array.array("I", ids).tobytes(), digest_size=8).hexdigest()


def _all_reduce_s(tp_size: int) -> float:
    return ALL_REDUCE_S.get(tp_size, 6e-6 * tp_size) * ALL_REDUCES


def baseline_step_s(config: Config) -> float:
    """An autoregressive decode step of one request at 1k context on as many GPUs, whatever the method: simulated s."""
    weights = config.weights_gib * WEIGHT_READ_S_PER_GIB / config.tp_size
    memory = KV_READ_S_PER_TOKEN * 1024 / config.tp_size
    return weights + STEP_OVERHEAD_S + _all_reduce_s(config.tp_size) + TOKEN_COMPUTE_S / config.tp_size + memory


def true_to_scale(config: Config) -> Config:
    """The server with its time scale raised, where needed, so that no decode step is held at the shortest wall time.

    The scale depends on the number of GPUs and not on the method, so methods stay comparable.
    """
    least = config.min_step_s * 1.05 / baseline_step_s(config)
    return dataclasses.replace(config, time_scale=least) if config.time_scale < least else config


class StepTimes:
    """Step durations of one server, in simulated seconds.

    Every launch draws its own speed once (spread ``jitter``), every step its own noise (spread ``noise``).
    """

    def __init__(self, config: Config) -> None:
        self._method = config.method
        self._spec = config.spec_on
        self._tp = config.tp_size
        self._weights_s = config.weights_gib * WEIGHT_READ_S_PER_GIB / config.tp_size
        self._noise = config.noise
        self._random = random.Random(digest("steps", config.seed, config.launch_seed))
        self.launch_factor = math.exp(
            random.Random(digest("launch", config.seed, config.launch_seed)).gauss(0.0, config.jitter)
        )
        slow = config.faults.get("slow")
        if slow is not None:
            self.launch_factor *= 1 + slow.number / 100
        drift = config.faults.get("drift")
        self._drift_per_s = drift.number / 100 / 60 if drift is not None else 0.0

    def decode_exact(self, contexts: Sequence[int]) -> float:
        """One decode or verify step over requests with these context lengths, without launch speed and noise."""
        method = self._method
        tokens = len(contexts) * (method.verified if self._spec else 1)
        base = self._weights_s + STEP_OVERHEAD_S + _all_reduce_s(self._tp)
        compute = TOKEN_COMPUTE_S * tokens / self._tp
        memory = KV_READ_S_PER_TOKEN * sum(contexts) / self._tp
        return base + compute + memory + (self._draft_s(len(contexts)) if self._spec else 0.0)

    def _draft_s(self, requests: int) -> float:
        method = self._method
        if method.name == "ngram":
            return 0.4e-3
        if method.name == "ddtree":
            return 3.2e-3 / math.sqrt(self._tp) + 1.2e-3 + 0.055e-3 * method.verified + 0.02e-3 * requests
        if method.name == "dflash":
            return 3.0e-3 / math.sqrt(self._tp) + 0.02e-3 * requests
        return 2.2e-3 * max(1, method.depth) / math.sqrt(self._tp)

    def _vary(self, duration: float) -> float:
        return duration * self.launch_factor * math.exp(self._random.gauss(0.0, self._noise))

    def decode(self, contexts: Sequence[int], elapsed_s: float = 0.0) -> float:
        """One decode step as this launch takes it, `elapsed_s` simulated seconds after its start."""
        return self._vary(self.decode_exact(contexts)) * (1 + self._drift_per_s * elapsed_s)

    def prefill_exact(self, tokens: int, start: int) -> float:
        """Prefill `tokens` tokens of a prompt whose first `start` are done, without launch speed and noise."""
        speed = PREFILL_TOKENS_PER_S * math.pow(self._tp, 0.8)
        attention = 1 + (start + tokens / 2) / PREFILL_HALF_LENGTH
        delay = 1.08 if self._spec and self._method.name in ("dflash", "ddtree") else 1.0
        fixed = STEP_OVERHEAD_S + _all_reduce_s(self._tp) + 0.3 * self._weights_s
        return fixed + tokens * attention * delay / speed

    def prefill(self, tokens: int, start: int) -> float:
        """One prefill chunk as this launch takes it."""
        return self._vary(self.prefill_exact(tokens, start))


TREE_GAIN = 0.25
TREE_SCALE = 12.0
AFTER_EOS = 0.985
"""Probability of acceptance a position in text after the end-of-sequence token, which only repeats itself."""


def base_acceptance(seed: int, prompt: str, periodic: bool) -> float:
    """Probability that a chain's next draft token is right, for one prompt at short context.

    Mean about 0.84 with a spread of 0.04 over prompts; a prompt that repeats itself is easier.
    """
    draw = random.Random(digest("difficulty", seed, prompt)).gauss(0.0, 1.0)
    value = 0.84 + 0.04 * max(-2.5, min(2.5, draw))
    return min(0.96, value + 0.08) if periodic else value


def acceptance(method: Method, chain: float, context: int) -> float:
    """Probability of acceptance a position: falls with context, rises with the tree's budget."""
    chain = max(0.3, chain - 0.018 * max(0.0, math.log2(max(context, 1) / 1024)))
    if method.budget is not None:
        return chain + (1 - chain) * TREE_GAIN * (1 - math.exp(-method.budget / TREE_SCALE))
    if method.name in ("eagle", "eagle3", "nextn", "standalone", "frozen_kv_mtp"):
        return chain * 0.92
    return chain * 0.55 if method.name == "ngram" else chain


def accepted(generator: random.Random, probability: float, depth: int) -> int:
    """Draft tokens accepted in one verify step: geometric, cut at the depth."""
    if depth <= 0 or probability <= 0:
        return 0
    if probability >= 1:
        return depth
    return min(depth, int(math.log(1.0 - generator.random()) / math.log(probability)))
