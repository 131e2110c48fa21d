"""Chooses the variant of a kernel for a problem; data in, data out."""

from fusekit.choice.model import cost, rank

__all__ = ["cost", "rank"]
