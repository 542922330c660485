"""The simulated engine: SGLang's HTTP API with a known truth."""
