"""max(z, 0)."""


def value(m, z):
    """max(z, 0)."""
    return m.maximum(z, m.Float32(0.0))


def derivative(m, z):
    """0 at 0 and below."""
    return value(m, z), m.where_at_most(-z, m.Float32(-m.MIN_POSITIVE), m.Float32(1.0))
