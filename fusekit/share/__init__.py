"""What moves kernels between stores: remotes (`push`, `pull`), bundles, downloads, and cache manifests.

A store keeps kernels and checks them; what is here reads from one store and writes to another, or to a file, and checks
on the way all that a store checks. See docs/remotes.md.
"""
