"""dbias[e]: the sum of a group's rows of dz, before dz is rounded. That of a weight gradient is summed beside dw."""

import numpy as np

from fusekit.reference.gradients import Gradients
from fusekit.reference.meaning import Meaning
from fusekit.reference.measure import Expected

step = 8


def gradient(means: Meaning, made: Gradients) -> dict[str, Expected]:
    if made.rows is not None:
        return {}
    groups = [slice(start, end) for start, end in zip([0, *made.ends[:-1]], made.ends, strict=True)]
    value, error, limit = made.sums(made.dz, groups)
    shape = (len(groups), made.shape[1]) if means.grouped else made.shape[1:]
    return {"dbias": Expected("f32", np.arange(len(groups)), value, error, made.z_columns, shape=shape, limit=limit)}
