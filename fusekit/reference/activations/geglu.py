"""gelu(g), the gate of geglu."""

from fusekit.reference.activations.gelu import function, slope

__all__ = ["function", "slope"]
