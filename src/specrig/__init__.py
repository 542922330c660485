"""specrig: recover a multi-GPU SGLang host and benchmark speculative decoding on it."""

__version__ = "0.1.0"
