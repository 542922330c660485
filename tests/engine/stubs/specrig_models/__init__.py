"""The one architecture that is served here, by SGLang's own class: with it, the other 250 need not be imported.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package, and SGLang then leaves its own list of models until it is needed.
"""
