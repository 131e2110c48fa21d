"""dbias[e]: the sum of a group's rows of dz, before rounding; after rounding if its transpose is quantised. That of
a weight gradient is summed with dw.
"""

import numpy as np

from fusekit.reference.gradients import Gradients
from fusekit.reference.meaning import Meaning
from fusekit.reference.measure import Expected

step = 8
ROUNDED = 2.0**-8  # of a number, at most, that is rounded to bf16


def gradient(means: Meaning, gradients: Gradients) -> dict[str, Expected]:
    if gradients.rows is not None:
        return {}
    groups = [slice(start, end) for start, end in zip([0, *gradients.ends[:-1]], gradients.ends, strict=True)]
    stored = ROUNDED * means.quant.transpose
    dz, slack = gradients.dz
    value, error, limit = gradients.sums((dz, slack + stored * np.abs(dz)), groups)
    shape = (len(groups), gradients.shape[1]) if means.grouped else gradients.shape[1:]
    limit = max(limit, stored)
    return {
        "dbias": Expected("f32", np.arange(len(groups)), value, error, gradients.z_columns, shape=shape, limit=limit)
    }
