"""The content-addressed store: keys, blobs, entries, names, layers."""
