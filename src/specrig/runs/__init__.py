"""The run folder: append, resume, lock, manifest."""
