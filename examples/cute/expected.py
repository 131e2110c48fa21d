"""What the kernels should compute, for `fusekit run --check --reference expected:silu_add`."""

import numpy as np


def silu_add(x, residual, scale):
    return scale * x / (1 + np.exp(-scale * x)) + residual
