"""Launches looked at; docs/benchmarks.md says how to use it."""
