"""z Phi(z), Phi the normal distribution; or its tanh form."""

from __future__ import annotations

import math

import numpy as np

from fusekit.reference.formats import Array
from fusekit.reference.mathematics import erfc, sigmoid
from fusekit.spec import Activation


def function(z: Array, activation: Activation) -> Array:
    if activation.approximate == "tanh":
        # 0.5 (1 + tanh t) = sigmoid(2t), which keeps its digits where tanh is near -1.
        return z * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))
    return 0.5 * z * erfc(-z * math.sqrt(0.5))


def slope(z: Array, activation: Activation) -> Array:
    if activation.approximate == "tanh":
        scale = 2.0 * math.sqrt(2.0 / math.pi)
        t = scale * (z + 0.044715 * z**3)
        s = sigmoid(t)
        return s + z * s * sigmoid(-t) * scale * (1.0 + 3 * 0.044715 * z**2)
    return 0.5 * erfc(-z * math.sqrt(0.5)) + z * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
