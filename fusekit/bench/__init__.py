"""Launches looked at; benchmarks.md, beside this file, says how to use it."""
