"""dprob[m]: the gradient of row_scale, the sum of da * activation(z) over all columns."""

from fusekit.reference.gradients import Gradients
from fusekit.reference.meaning import Meaning
from fusekit.reference.measure import Expected

step = 7


def gradient(means: Meaning, gradients: Gradients) -> dict[str, Expected]:
    if gradients.columns is not None:
        return {}
    value, error = gradients.product
    value, error, limit = gradients.sums((value.T, error.T), [slice(None)])
    return {"dprob": Expected("f32", gradients.numbers, value.T, error.T, shape=gradients.shape[:1], limit=limit)}
