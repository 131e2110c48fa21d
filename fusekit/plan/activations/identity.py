"""z."""


def value(m, z):
    """z."""
    return z
