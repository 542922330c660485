"""The measured load client: one cell at a time against a running server."""
