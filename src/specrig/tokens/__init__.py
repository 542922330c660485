"""Tokenizer, exact prompts and the token budget."""
