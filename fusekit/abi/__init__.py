"""The launch record: everything a launcher must know about a cubin, as data."""
