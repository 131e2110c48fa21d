"""An MoE layer in Transformer Engine's recipe Float8BlockScaling, in NumPy and ml_dtypes: the yardstick of errors.

As its modules do it on Hopper: e4m3 forward and backward; blocks of 1 x 128 of activations and gradients, of 128 x 128
of weights; a weight gradient multiplies 1 x 128 by 1 x 128 along the tokens; scales are powers of two; products are
summed in float32 and stored in bf16, before the activation too. Sources: TransformerEngine,
transformer_engine/common/recipe/recipe_common.cuh (the scale) and transformer_engine/common/recipe/__init__.py.
"""

import ml_dtypes
import numpy as np

from fusekit.reference import activations, layouts
from fusekit.reference.layer import groups

SIDE = 128
LARGEST = np.float32(448)


def bf16(v):
    """v rounded to bf16, in float64."""
    return np.asarray(v, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def scale_of(a):
    """What numbers are multiplied by, float32: the largest power of two that leaves `a` within e4m3."""
    with np.errstate(divide="ignore"):
        scale = LARGEST / a.astype(np.float32)
    scale = np.where(np.isinf(scale), np.finfo(np.float32).max, scale).astype(np.float32)
    scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(a == 0, np.float32(1), scale)


def quantised(v, down, across):
    """What the FP8 values of v [R, C] are worth, with a scale for each block of `down` by `across`."""
    v = bf16(v).astype(np.float32)
    tall, wide = -(-v.shape[0] // down), -(-v.shape[1] // across)
    tiles = np.zeros((tall * down, wide * across), np.float32)
    tiles[: v.shape[0], : v.shape[1]] = v
    tiles = tiles.reshape(tall, down, wide, across)
    scale = scale_of(np.abs(tiles).max(axis=(1, 3)))[:, None, :, None]
    fp8 = np.clip(tiles * scale, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    worth = fp8.astype(np.float64) / scale
    return worth.reshape(tall * down, wide * across)[: v.shape[0], : v.shape[1]]


def layer(activation, glu_layout, tensors, kept, dy):
    """y, dx, dw1 and dw2 of experts with given choices. tensors, kept: as in fusekit.reference.layer; dy [T, H]."""
    tokens, hidden = kept.x.shape
    got = {"y": np.zeros((tokens, hidden)), "dx": np.zeros((tokens, hidden)), "dw1": [], "dw2": []}
    prob = np.empty(kept.token.size)
    prob[kept.inverse.reshape(-1)] = kept.weights.reshape(-1)
    for expert, group in enumerate(groups(kept)):
        token, p = kept.token[group], prob[group, None]
        x, w1, w2 = kept.x[token], tensors["w1"][expert], tensors["w2"][expert]
        q1, q2 = quantised(w1, SIDE, SIDE), quantised(w2, SIDE, SIDE)
        z = bf16(quantised(x, 1, SIDE) @ q1.T)
        a, slopes = activations.derivative(activation, glu_layout, z)
        a = bf16(a)
        o = bf16(quantised(a, 1, SIDE) @ q2.T)
        back = bf16(p * dy[token])
        da = bf16(quantised(back, 1, SIDE) @ q2)
        dz = bf16(layouts.join(da * slopes[0], da * slopes[1], glu_layout))
        dx = bf16(quantised(dz, 1, SIDE) @ q1)
        np.add.at(got["y"], token, p * o)
        np.add.at(got["dx"], token, dx)
        along = {name: quantised(v, SIDE, 1) for name, v in (("x", x), ("a", a), ("back", back), ("dz", dz))}
        got["dw1"].append(bf16(along["dz"].T @ along["x"]))
        got["dw2"].append(bf16(along["back"].T @ along["a"]))
    return {name: bf16(v) if name in ("y", "dx") else np.stack(v) for name, v in got.items()}


def error(found, want):
    """The relative error in Frobenius norm."""
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))
