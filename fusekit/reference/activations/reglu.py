"""max(g, 0), the gate of reglu."""

from fusekit.reference.activations.relu import function, slope

__all__ = ["function", "slope"]
