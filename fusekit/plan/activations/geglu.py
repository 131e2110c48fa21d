"""gelu(g) * (u + up_offset)."""

from functools import partial

from fusekit.plan.activations import gelu

GATED = True


def value(plain, m, gate, up, scalars):
    """plain(g) * (u + up_offset)."""
    gate, up = m.clamp(gate, up, scalars)
    return plain(m, gate) * (up + scalars.up_offset)


def derivative(plain, m, gate, up, scalars):
    """Partial derivatives of plain(g) (u + up_offset); plain: the derivative of the gate's function."""
    return m.gated_derivative(partial(plain, m), gate, up, scalars)


approximations = {
    form: (partial(value, plain), partial(derivative, slope)) for form, (plain, slope) in gelu.approximations.items()
}
