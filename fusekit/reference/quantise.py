"""The definition of quantise, in NumPy: FP8 values and scales, bit for bit. Rules: ``fusekit/plan/quantise.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.quantise import (
    AMAX,
    BF16,
    F32,
    LARGEST,
    LEAST,
    MX_LARGEST,
    MX_SIDE,
    MXFP8,
    ROW,
    ROWS,
    SIDE,
    SIGNS,
    SQUARE,
    SWIZZLED,
    WIDE,
)  # fmt: skip
from fusekit.reference.formats import Array, bits, held, poisoned, values
from fusekit.reference.formats import decode as decode_bf16
from fusekit.reference.formats import encode as encode_bf16
from fusekit.reference.fp8 import encode, padded_starts
from fusekit.reference.inputs import group_sizes, offsets_of

if TYPE_CHECKING:
    from fusekit.spec.quantise import QuantiseSpec

# What a spec may leave out.
USUAL = {"dtype": BF16, "transpose_blocks": ROWS, "rows": True, "groups": True, "gather": False, "topk": 0}
Shapes = dict[str, tuple[tuple[int, ...], str]]


def scale_of(a: NDArray[np.float32], rule: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(scales, reciprocals) of blocks whose largest |v| is ``a``; where that is infinite, 1."""
    a = np.asarray(a, dtype=np.float32)
    with np.errstate(all="ignore"):
        if rule == F32:
            scale = (np.maximum(a, np.float32(LEAST)) / np.float32(LARGEST)).astype(np.float32)
            inverse = (np.float32(1) / scale).astype(np.float32)
            plain = np.isinf(a)
        else:
            ratio = a * (np.float32(1) / np.float32(LARGEST))
            exponent = ((ratio.view(np.uint32).astype(np.int64) + 0x7FFFFF) >> 23) - 127
            exponent = np.clip(exponent, -126, 126)
            scale, inverse = np.exp2(exponent).astype(np.float32), np.exp2(-exponent).astype(np.float32)
            plain = np.isinf(a) | (a == 0)
    one = np.float32(1)
    return np.where(plain, one, scale), np.where(plain, one, inverse)


def blocks(v: NDArray[np.float32], down: int, across: int, rule: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """FP8 values [R, C] of ``v`` [R, C], and the scale of each block of ``down`` x ``across``."""
    rows, columns = v.shape
    tall, wide = -(-rows // down), -(-columns // across)
    padded = np.zeros((tall * down, wide * across), np.float32)
    padded[:rows, :columns] = v
    tiles = padded.reshape(tall, down, wide, across)
    with np.errstate(all="ignore"):
        a = np.nanmax(np.where(np.isnan(tiles), np.float32(0), np.abs(tiles)), axis=(1, 3), initial=0)
        scale, inverse = scale_of(a, rule)
        scaled = (tiles * inverse[:, None, :, None]).astype(np.float32)
    return encode(scaled.reshape(padded.shape)[:rows, :columns], "e4m3"), scale


def quantise(spec: QuantiseSpec | Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs of ``spec``, whole buffers; elements that are not written hold all ones."""
    keys = _canonical(spec)
    rule = keys["scales"]
    if keys["blocks"] == SQUARE:
        w = _numbers(keys, inputs["w"])
        result = _squares(keys, w if keys["groups"] else w[None])
        return result if keys["groups"] else {name: array[0] for name, array in result.items()}
    x = _numbers(keys, inputs["x"])
    if keys["gather"]:
        index = np.asarray(inputs["index"])
        there = (index >= 0) & (index < len(x))
        x = np.where(there[:, None], x[np.where(there, index, 0)] if len(x) else np.float32(0), np.float32(0))
    if keys["out"] == ROW:
        fp8, scale = blocks(x, 1, max(x.shape[1], 1), rule)
        return {"x_q": fp8, "x_s": scale[:, 0]}
    if keys["out"] == MXFP8:
        return _mx(keys, x)
    if keys["out"] == AMAX:
        return _largest(keys, x, np.asarray(inputs["offsets"]))
    if keys["topk"]:
        return _copies(keys, x, np.asarray(inputs["inverse"]))
    rows, columns = x.shape
    ends = np.asarray(inputs["offsets"] if keys["transpose"] and keys["groups"] else [rows])
    starts, last = padded_starts(ends), int(ends[-1])
    shapes = quantise_output_shapes(keys, E=ends.size, M=rows, K=columns)
    wanted = {name: _ones(shape, dtype) for name, (shape, dtype) in shapes.items()}
    if keys["rows"]:
        fp8, scale = blocks(x[:last], 1, SIDE, rule)
        wanted["x_q"][:last], wanted["x_s"][:, :last] = fp8, scale.T
    if not keys["transpose"]:
        return wanted
    for group, end in enumerate(ends):
        begin = int(ends[group - 1]) if group else 0
        if end > begin or not keys["groups"]:
            start, stop = starts[group], max(starts[group + 1], starts[group] + SIDE)
            turned = np.zeros((columns, stop - start), np.float32)
            turned[:, : end - begin] = x[begin:end].T
            fp8, scale = blocks(turned, SIDE if keys["transpose_blocks"] == SQUARE else 1, SIDE, rule)
            wanted["x_t"][:, start:stop] = fp8
            wanted["x_ts"][start // SIDE : stop // SIDE] = scale.T
    return wanted


def _copies(keys: Mapping[str, Any], x: NDArray[np.float32], inverse: Array) -> dict[str, Array]:
    """FP8 values of rows of x, each at the rows of x_q that ``inverse`` [T, topk] names; x_q has as many as that."""
    shapes = quantise_output_shapes(keys, M=inverse.size, K=x.shape[1])
    wanted = {name: _ones(shape, dtype) for name, (shape, dtype) in shapes.items()}
    fp8, scale = blocks(x, 1, SIDE, keys["scales"])
    token, choice = np.nonzero((inverse >= 0) & (inverse < inverse.size))
    rows = inverse[token, choice]
    wanted["x_q"][rows], wanted["x_s"][:, rows] = fp8[token], scale[token].T
    return wanted


def _numbers(keys: Mapping[str, Any], given: Any) -> NDArray[np.float32]:
    """The values to quantise: bf16, or float32 rounded to it."""
    if keys["dtype"] == WIDE:
        given = encode_bf16(np.asarray(given, np.float32), BF16)
    return np.asarray(values(given, BF16), np.float32)


def _squares(keys: Mapping[str, Any], w: NDArray[np.float32]) -> dict[str, Array]:
    experts = [blocks(each, SIDE, SIDE, keys["scales"]) for each in w]
    fp8, scale = (np.stack(arrays) for arrays in zip(*experts, strict=True))
    wanted = {"w_q": fp8, "w_s": scale} if keys["rows"] else {}
    if keys["transpose"]:
        turned = {"w_t": fp8, "w_ts": scale}
        wanted |= {name: np.ascontiguousarray(array.transpose(0, 2, 1)) for name, array in turned.items()}
    return wanted


def mx_blocks(v: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """MXFP8 values of ``v`` [R, C] in blocks of 32 along its rows, and the scales' bytes [R, 4 ceil(C / 128)]."""
    rows, columns = v.shape
    padded = np.zeros((rows, -(-columns // SIDE) * SIDE), np.float32)
    padded[:, :columns] = v
    tiles = padded.reshape(rows, padded.shape[1] // MX_SIDE, MX_SIDE)
    with np.errstate(all="ignore"):
        a = np.nanmax(np.where(np.isnan(tiles), np.float32(0), np.abs(tiles)), axis=2, initial=0)
        ratio = (a * (np.float32(1) / np.float32(LARGEST))).astype(np.float32)
        byte = np.minimum((ratio.view(np.uint32).astype(np.int64) + 0x7FFFFF) >> 23, MX_LARGEST)
        scaled = (tiles * np.ldexp(np.float32(1), 127 - byte).astype(np.float32)[:, :, None]).astype(np.float32)
    return encode(scaled.reshape(padded.shape)[:, :columns], "e4m3"), byte.astype(np.uint8)


def swizzled(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scales [R, 4 n] of rows, R a multiple of 128, as their atoms lie; the shape stays."""
    rows, blocks_of = scales.shape
    atoms = scales.reshape(rows // SIDE, 4, 32, blocks_of // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(atoms).reshape(scales.shape)


def _mx(keys: Mapping[str, Any], x: NDArray[np.float32]) -> dict[str, Array]:
    rows = x.shape[0]
    padded = np.zeros((-(-rows // SIDE) * SIDE, x.shape[1]), np.float32)
    padded[:rows] = x
    layout = swizzled if keys["scale_layout"] == SWIZZLED else None
    fp8, scale = mx_blocks(padded)
    if layout is None:
        scale[rows:] = 0xFF  # not written
    wanted = {"x_q": fp8[:rows], "x_s": layout(scale) if layout else scale}
    if keys["transpose"]:
        wide = np.zeros((-(-x.shape[1] // SIDE) * SIDE, padded.shape[0]), np.float32)
        wide[: x.shape[1]] = padded.T
        fp8, scale = mx_blocks(wide)
        wanted["x_t"] = np.ascontiguousarray(fp8.T[:rows, : x.shape[1]])
        wanted["x_ts"] = layout(scale) if layout else np.ascontiguousarray(scale.T)
    return wanted


def rotated(v: NDArray[np.float32]) -> NDArray[np.float32]:
    """R v of each run of 16 rows of ``v`` [T, C], the last one filled with zeros: in float32, four times too large."""
    runs = np.zeros((-(-v.shape[0] // len(SIGNS)) * len(SIGNS), v.shape[1]), np.float32)
    runs[: v.shape[0]] = v
    runs = runs.reshape(-1, len(SIGNS), v.shape[1]) * np.array(SIGNS, np.float32)[:, None]
    step = 1
    while step < len(SIGNS):
        pairs = runs.reshape(len(runs), len(SIGNS) // (2 * step), 2, step, v.shape[1])
        with np.errstate(all="ignore"):
            runs = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        runs = runs.reshape(-1, len(SIGNS), v.shape[1])
        step *= 2
    return runs


def _largest(keys: Mapping[str, Any], x: NDArray[np.float32], ends: NDArray[Any]) -> dict[str, Array]:
    parts = [x[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    with np.errstate(all="ignore"):
        wanted = {"x_amax": np.array([_most(part) for part in parts], np.float32)}
        if keys["rht_amax"]:
            most = np.array([_most(rotated(part)) for part in parts], np.float32) * np.float32(0.25)
            wanted["x_rht_amax"] = decode_bf16(encode_bf16(most, "bf16"), "bf16")
    return wanted


def _most(v: NDArray[np.float32]) -> np.float32:
    """The largest |v|; a NaN does not count."""
    largest: np.float32 = np.max(np.where(np.isnan(v), np.float32(0), np.abs(v)), initial=np.float32(0))
    return largest


def _ones(shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == "f32":
        return np.full(shape, 2**32 - 1, np.uint32).view(np.float32)
    return np.full(shape, 0xFF, np.uint8)


def quantise_inputs(
    spec: QuantiseSpec | Mapping[str, Any],
    *,
    M: int,  # noqa: N803 - the dims' own names
    K: int,  # noqa: N803
    E: int = 1,  # noqa: N803
    T: int = 0,  # noqa: N803
    seed: int = 0,
    sizes: Array | list[int] | tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Every input by its argument name: numbers of many sizes, uneven groups. T: the rows of an x that is gathered, or
    has topk; 0 for M, or M / topk.
    """
    keys = _canonical(spec)
    kind = held(keys["dtype"])
    if keys["blocks"] == SQUARE:
        return {"w": bits((E, M, K) if keys["groups"] else (M, K), keys["dtype"], seed + 1).view(kind)}
    tokens = (T or M // max(keys["topk"], 1)) if keys["gather"] or keys["topk"] else M
    inputs: dict[str, Any] = {"x": bits((tokens, K), keys["dtype"], seed + 1).view(kind)}
    if keys["gather"]:
        inputs["index"] = np.random.default_rng(seed).integers(-1, tokens, M, dtype=np.int32)
    if keys["topk"]:
        inverse = np.random.default_rng(seed).permutation(tokens * keys["topk"]).astype(np.int32)
        inverse[::11], inverse[5::13] = -1, inverse.size
        inputs["inverse"] = inverse.reshape(tokens, keys["topk"])
    if keys["out"] == AMAX or (keys["transpose"] and keys["groups"] and keys["out"] != MXFP8):
        inputs["offsets"] = offsets_of(group_sizes(M, E, seed) if sizes is None else sizes)
    return inputs


def quantise_output_shapes(
    spec: QuantiseSpec | Mapping[str, Any],
    *,
    M: int,  # noqa: N803
    K: int,  # noqa: N803
    E: int = 1,  # noqa: N803
) -> Shapes:
    """Each output's shape and dtype; transposed tensors of groups have room for M + 127 E tokens."""
    keys = _canonical(spec)
    wide = -(-K // SIDE)
    if keys["blocks"] == SQUARE:
        tall = -(-M // SIDE)
        every = (E,) if keys["groups"] else ()
        shapes: Shapes = {"w_q": ((*every, M, K), "e4m3"), "w_s": ((*every, tall, wide), "f32")}
        turned: Shapes = {"w_t": ((*every, K, M), "e4m3"), "w_ts": ((*every, wide, tall), "f32")}
        return (shapes if keys["rows"] else {}) | (turned if keys["transpose"] else {})
    if keys["out"] == ROW:
        return {"x_q": ((M, K), "e4m3"), "x_s": ((M,), "f32")}
    if keys["out"] == AMAX:
        return dict.fromkeys(("x_amax", *(["x_rht_amax"] if keys["rht_amax"] else [])), ((E,), "f32"))
    if keys["out"] == MXFP8:
        tall = -(-M // SIDE)
        shapes = {"x_q": ((M, K), "e4m3"), "x_s": ((tall * SIDE, wide * 4), "e8m0")}
        if keys["transpose"]:
            blocks_of = (wide * SIDE, tall * 4)
            turn = 1 if keys["scale_layout"] == SWIZZLED else -1
            shapes |= {"x_t": ((M, K), "e4m3"), "x_ts": (blocks_of[::turn], "e8m0")}
        return shapes
    shapes = {"x_q": ((M, K), "e4m3"), "x_s": ((wide, M), "f32")} if keys["rows"] else {}
    if keys["transpose"]:
        room = -(-(M + (SIDE - 1) * E) // SIDE) * SIDE if keys["groups"] else max(-(-M // SIDE), 1) * SIDE
        shapes |= {
            "x_t": ((K, room), "e4m3"),
            "x_ts": ((room // SIDE, wide if keys["transpose_blocks"] == SQUARE else K), "f32"),
        }
    return shapes


def quantise_check(
    spec: QuantiseSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> list[str]:
    """Differences from ``quantise`` in any bit, and writes to what should stay; one line each."""
    problems = []
    for name, want in quantise(spec, inputs).items():
        got = np.asarray(outputs[name]).view(f"u{want.itemsize}")
        wrong = got != want.view(f"u{want.itemsize}")
        if wrong.any():
            place = tuple(int(index) for index in np.argwhere(wrong)[0])
            strays = int((wrong & poisoned(want)).sum())
            problems.append(
                f"{name}: {int(wrong.sum())} of {want.size} elements differ ({strays} that nothing writes), the first"
                f" at {place}: {got[place]:#x} for {want.view(got.dtype)[place]:#x}"
            )
    return problems


def _canonical(spec: QuantiseSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    return {**USUAL, **(spec if isinstance(spec, Mapping) else spec.canonical())}
