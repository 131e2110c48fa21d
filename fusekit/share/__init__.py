"""Moving kernels between stores: remotes (`push`, `pull`), bundles, downloads, and locks.

This package reads from one store and writes to another, or to a file, with all the checks of a store. See
docs/remotes.md.
"""
