"""SGLang's Qwen3, as its registry finds it in an external package."""

from sglang.srt.models.qwen3 import Qwen3ForCausalLM as EntryClass

__all__ = ["EntryClass"]
