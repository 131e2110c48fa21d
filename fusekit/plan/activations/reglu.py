"""max(g, 0) * (u + up_offset)."""

from fusekit.plan.activations import relu

GATED = True


def value(m, gate, up, scalars):
    """max(g, 0) * (u + up_offset)."""
    gate, up = m.clamp(gate, up, scalars)
    return relu.value(m, gate) * (up + scalars.up_offset)


def derivative(m, gate, up, scalars):
    """Value and partial derivatives of max(g, 0) (u + up_offset)."""
    return m.gated_derivative(lambda g: relu.derivative(m, g), gate, up, scalars)
