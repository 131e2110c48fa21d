"""z * sigmoid(z)."""


def value(m, z):
    """z * sigmoid(z)."""
    return z * m.sigmoid(z)


def derivative(m, z):
    """s + z s (1 - s), s the sigmoid."""
    s = m.sigmoid(z)
    value = z * s
    return value, s + value * (m.Float32(1.0) - s)
