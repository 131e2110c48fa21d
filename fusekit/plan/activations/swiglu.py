"""g * sigmoid(alpha g) * (u + up_offset)."""

GATED = SLOPED = True


def value(m, gate, up, scalars):
    """g * sigmoid(alpha g) * (u + up_offset)."""
    gate, up = m.clamp(gate, up, scalars)
    return gate * m.sigmoid(gate, scalars.exponent) * (up + scalars.up_offset)


def derivative(m, gate, up, scalars):
    """Value and partial derivatives of g s(alpha g) (u + up_offset)."""
    g, u = m.clamp(gate, up, scalars)
    s = m.sigmoid(g, scalars.exponent)
    value, shifted = g * s, u + scalars.up_offset
    by_gate = shifted * (s + scalars.alpha * value * (m.Float32(1.0) - s))
    return value * shifted, *m.unclamped(gate, up, by_gate, value, scalars)
