"""What a sweep, profile, cell, record and manifest are; no I/O but reading a sweep."""
