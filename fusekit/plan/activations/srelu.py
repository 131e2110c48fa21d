"""max(z, 0)^2."""

from fusekit.plan.activations import relu


def value(m, z):
    """max(z, 0)^2."""
    positive = relu.value(m, z)
    return positive * positive


def derivative(m, z):
    """2 max(z, 0)."""
    positive = relu.value(m, z)
    return positive * positive, m.Float32(2.0) * positive
