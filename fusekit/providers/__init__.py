"""Kernels of other packages, as sources of `op = "extern"` specs; one module a package, imported by itself alone.

Each function takes JSON values (a spec's `params`) and returns what `cute.compile` takes: `(function, args, kwargs)`,
with fake arguments. Nothing of the packages is copied here: the functions call the packages' own compile functions
and stop them at `cute.compile`.
"""
