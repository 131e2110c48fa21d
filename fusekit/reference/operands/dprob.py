"""dprob[m]: the gradient of row_scale, the sum of da * activation(z) over all columns."""

from fusekit.reference.gradients import Gradients
from fusekit.reference.meaning import Meaning
from fusekit.reference.measure import Expected

step = 7


def gradient(means: Meaning, made: Gradients) -> dict[str, Expected]:
    if made.columns is not None:
        return {}
    value, error = made.product
    value, error, limit = made.sums((value.T, error.T), [slice(None)])
    return {"dprob": Expected("f32", made.numbers, value.T, error.T, shape=made.shape[:1], limit=limit)}
