"""Extents past 2**31 elements: outputs, weights, rows of x, and strides; only chosen rows are compared."""

import numpy as np
import pytest

from fusekit import reference
from fusekit.reference.formats import decode, encode

from .cases import multiple_of_n
from .device import View

CHUNK = 1 << 28  # bytes looked through at a time
TAIL = 4096  # bytes after the output that must stay as they are


def rows_of(memory, rows, width, stride=None):
    """The given rows of a 16-bit matrix in device memory, as uint16 [rows, width]."""
    stride = stride or width
    data = [np.frombuffer(memory.download(int(row) * stride * 2, width * 2), np.uint16) for row in rows]
    return np.stack(data)


def judge(spec, inputs, rows, got):
    """Messages for the outputs whose chosen rows are wrong; ``got`` holds those rows, output by output."""
    wanted = reference.expected(spec, inputs, rows)
    results = [reference.measure(name, got[name], want) for name, want in wanted.items()]
    return [str(result) for result in results if not result.ok]


def poison_in(memory, start, stop):
    """How many 16-bit elements of bytes start..stop hold the poison."""
    count = 0
    for begin in range(start, stop, CHUNK):
        data = np.frombuffer(memory.download(begin, min(CHUNK, stop - begin)), np.uint16)
        count += np.count_nonzero(data == reference.POISON)
    return count


@pytest.mark.parametrize(
    "name",
    [
        "identity@128x192-c1x1",
        "swiglu-interleaved@128x192-c2x1",
        "swiglu-concat-cooperative@256x192-c2x1",
        "identity-n@256x192-c1x2",
        "dense@128x192-c2x1",
    ],
)
def test_outputs(gpu, specs, name):
    spec, k = specs[name], 64
    n = 2**15 + multiple_of_n(spec)
    rows = 2**31 // n + 1000
    spare = 300 if spec.op == "grouped-gemm" else 0
    owned = rows - spare
    sizes = (5, 0, owned // 2, owned - owned // 2 - 5) if spec.op == "grouped-gemm" else (owned,)
    inputs = reference.make_inputs(spec, E=len(sizes), M=rows, N=n, K=k, sizes=sizes, spare=spare)
    arguments = {key: place(gpu, spec, key, value) for key, value in inputs.items()}
    shapes = reference.output_shapes(spec, M=rows, N=n)
    memory = {}
    for output, (shape, dtype) in shapes.items():
        memory[output] = gpu.array(shape[0] * shape[1] * 2 + TAIL, 0xFF)
        arguments[output] = View(memory[output], 0, dtype, shape)
    assert max(shape[0] * shape[1] for shape, _ in shapes.values()) > 2**31

    gpu.kernel(spec)(**arguments)
    gpu.finish(f"{name} with {rows} x {n} outputs")

    # The rows on either side of 2**31 bytes, 2**32 bytes and 2**31 elements are where 32-bit arithmetic would wrap.
    seams = [seam // n + step for seam in (2**30, 2**31) for step in (-1, 0, 1)]
    ends = reference.sample_rows(reference.offsets_of(sizes), 40)
    chosen = np.unique([row for row in [*seams, *ends.tolist()] if 0 <= row < owned])
    got = {output: rows_of(memory[output], chosen, shape[1]) for output, (shape, _) in shapes.items()}
    result = judge(spec, inputs, chosen, got)
    for output, (shape, _) in shapes.items():
        end = owned * shape[1] * 2
        if missing := poison_in(memory[output], 0, end):
            result.append(f"{output}: {missing} elements not written")
        beyond = memory[output].nbytes - end
        if (strays := beyond // 2 - poison_in(memory[output], end, memory[output].nbytes)) > 0:
            result.append(f"{output}: {strays} elements written beyond row {owned}")
        memory[output].free()
    assert not result, "\n".join(result)


def test_outputs_of_a_backward_activation(gpu, specs):
    """More than 2**31 elements of z and of dz; z repeats itself every few thousand rows."""
    spec, n, k = specs["dswiglu-concat@128x128-c2x1"], 2**14 + 8, 64
    width = 2 * n
    rows = 2**31 // width + 1000
    owned = rows - 300
    sizes = (5, 0, owned // 2, owned - owned // 2 - 5)
    ends = np.cumsum(sizes)
    pattern = 4099
    inputs = reference.make_inputs(spec, E=len(sizes), M=pattern, N=n, K=k)
    saved, x = inputs.pop("preactivation"), np.resize(inputs.pop("x"), (rows, k))
    scale = np.resize(inputs.pop("row_scale"), rows)
    inputs |= {"offsets": reference.offsets_of(sizes), "x": x, "row_scale": scale}
    arguments = {key: place(gpu, spec, key, value) for key, value in inputs.items()}
    z = gpu.array(rows * width * 2)
    for start in range(0, rows, pattern):
        gpu.write(z, start * width * 2, saved[: min(pattern, rows - start)])
    arguments["preactivation"] = View(z, 0, spec.dtype, (rows, width))
    shapes = reference.output_shapes(spec, M=rows, N=n)
    assert shapes["dz"] == ((rows, width), spec.dtype)
    memory = {}
    for output, (shape, dtype) in shapes.items():
        memory[output] = gpu.array(shape[0] * shape[1] * 2 + TAIL, 0xFF)
        arguments[output] = View(memory[output], 0, dtype, shape)

    gpu.kernel(spec)(**arguments)
    gpu.finish(f"{spec.full_name} with {rows} x {width} outputs")

    seams = [seam // width + step for seam in (2**30, 2**31) for step in (-1, 0, 1)]
    chosen = np.unique([*(row for row in seams if row < owned), *reference.sample_rows(ends, 40)])
    few = {
        "w": inputs["w"],
        "x": x[chosen],
        "row_scale": scale[chosen],
        "preactivation": saved[chosen % pattern],
        "offsets": np.searchsorted(chosen, ends).astype(np.int32),
    }
    got = {output: rows_of(memory[output], chosen, shape[1]) for output, (shape, _) in shapes.items()}
    result = judge(spec, few, None, got)
    for output, (shape, _) in shapes.items():
        end = owned * shape[1] * 2
        if missing := poison_in(memory[output], 0, end):
            result.append(f"{output}: {missing} elements not written")
        if poison_in(memory[output], end, memory[output].nbytes) != (memory[output].nbytes - end) // 2:
            result.append(f"{output}: written beyond row {owned}")
        memory[output].free()
    z.free()
    assert not result, "\n".join(result)


@pytest.mark.parametrize("name", ["identity@128x128-c1x1", "identity-n@128x192-c1x2"])
def test_weights(gpu, specs, name):
    """The first and the last group alone have rows; all other weights are NaN."""
    spec, groups, n, k = specs[name], 33, 8192, 8192
    assert groups * n * k > 2**31
    sizes = (40,) + (0,) * (groups - 2) + (30,)
    small = reference.make_inputs(spec, E=2, M=70, N=n, K=k, sizes=(40, 30))
    matrix = n * k * 2
    memory = gpu.array(groups * matrix, 0xFF)
    gpu.write(memory, 0, small["w"][0])
    gpu.write(memory, (groups - 1) * matrix, small["w"][1])
    shape = (groups, n, k) if spec.b_major == "k" else (groups, k, n)
    offsets = reference.offsets_of(sizes)
    given = {"x": small["x"], "offsets": offsets}
    if spec.operands["bias"]:
        given["bias"] = np.repeat(small["bias"][:1], groups, axis=0)
        given["bias"][-1] = small["bias"][1]
    y = gpu.array(70 * n * 2, 0xFF)
    arguments = {key: place(gpu, spec, key, value) for key, value in given.items()}
    gpu.kernel(spec)(**arguments, w=View(memory, 0, spec.dtype, shape), y=View(y, 0, spec.out_dtype, (70, n)))
    gpu.finish(f"{name} with {groups} x {n} x {k} weights")
    rows = np.array([0, 17, 39, 40, 55, 69])
    memory.free()
    assert not judge(spec, small, rows, {"y": rows_of(y, rows, n)})


def test_rows_of_x(gpu, specs):
    """Rows beyond 2**31 elements of x; those before are one number throughout."""
    spec, k, n = specs["identity@128x128-c1x1"], 8192, 8
    rows = 2**31 // k + 3000
    small = reference.make_inputs(spec, E=2, M=600, N=n, K=k, sizes=(300, 300))
    memory = gpu.array(rows * k * 2, 0x3C)
    gpu.write(memory, (rows - 600) * k * 2, small["x"])
    y = gpu.array(rows * n * 2, 0xFF)
    arguments = {
        "x": View(memory, 0, spec.dtype, (rows, k)),
        "w": place(gpu, spec, "w", small["w"]),
        "offsets": place(gpu, spec, "offsets", np.array([rows - 300, rows], np.int32)),
        "y": View(y, 0, spec.out_dtype, (rows, n)),
    }
    gpu.kernel(spec)(**arguments)
    gpu.finish(f"{spec.full_name} with {rows} x {k} inputs")
    memory.free()
    written = np.frombuffer(y.download(), np.uint16).reshape(rows, n)
    actual = judge(spec, small, np.arange(600), {"y": written[-600:]})
    constant = {"x": np.full((1, k), 0x3C3C, np.uint16), "w": small["w"][:1], "offsets": np.array([1], np.int32)}
    want = encode(reference.gemm(spec, constant)["y"], spec.out_dtype)
    actual += judge(spec, constant, [0], {"y": written[:1]})
    assert not actual, "\n".join(actual)
    assert (written[:-600] == written[0]).all(), f"rows of equal numbers differ; each should be about {want}"


def test_strides(gpu, specs):
    """Rows of x, y and preactivation 2**20 elements apart: addresses pass 2**31 elements with few rows."""
    spec, n, k, stride, rows = specs["swiglu-interleaved@128x160-c2x1"], 336, 72, 2**20 + 8, 2300
    assert rows * stride > 2**31
    inputs = reference.make_inputs(spec, E=3, M=rows, N=n, K=k, sizes=(1000, 0, 1290), spare=10)
    arguments = {key: place(gpu, spec, key, value) for key, value in inputs.items() if key != "x"}
    far = gpu.array(rows * stride * 2, 0xFF)
    for row in range(rows - 10):
        gpu.write(far, row * stride * 2, inputs["x"][row])
    arguments["x"] = View(far, 0, spec.dtype, (rows, k), (stride, 1))
    shapes = reference.output_shapes(spec, M=rows, N=n)
    memory = {name: gpu.array(rows * stride * 2, 0xFF) for name in shapes}
    for name, (shape, dtype) in shapes.items():
        arguments[name] = View(memory[name], 0, dtype, shape, (stride, 1))
    gpu.kernel(spec)(**arguments)
    gpu.finish(f"{spec.full_name} with row strides of {stride}")
    owned = np.arange(rows - 10)
    got = {name: rows_of(memory[name], owned, shape[1] + 64, stride) for name, (shape, _) in shapes.items()}
    result = judge(spec, inputs, owned, {name: got[name][:, : shape[1]] for name, (shape, _) in shapes.items()})
    for name, (shape, _) in shapes.items():
        if (got[name][:, shape[1] :] != reference.POISON).any():
            result.append(f"{name}: written past the end of a row")
        if (rows_of(memory[name], np.arange(rows - 10, rows), shape[1], stride) != reference.POISON).any():
            result.append(f"{name}: spare rows written")
        memory[name].free()
    far.free()
    assert not result, "\n".join(result)


def test_weight_gradients(gpu, specs):
    """More than 2**31 elements of dw; every one is written, those of empty groups with zeros."""
    spec, groups, n, k = specs["wgrad-dynamic@128x192-c1x2-dynamic"], 33, 8192, 8192
    assert groups * n * k > 2**31
    sizes = (40, *(0,) * (groups - 3), 65, 30)
    inputs = reference.make_inputs(spec, E=groups, M=135, N=n, K=k, sizes=sizes)
    arguments = {key: place(gpu, spec, key, value) for key, value in inputs.items()}
    dw = gpu.array(groups * n * k * 2 + TAIL, 0xFF)
    gpu.kernel(spec)(**arguments, dw=View(dw, 0, spec.out_dtype, (groups, n, k)))
    gpu.finish(f"{spec.full_name} with {groups} x {n} x {k} weights")
    # Rows on either side of 2**31 and 2**32 bytes and of 2**31 elements, and of each group with rows.
    seams = [seam // k + step for seam in (2**30, 2**31) for step in (-1, 0, 1)]
    rows = np.unique([*seams, *(group * n + row for group in (0, 1, 31, 32) for row in (0, 1, n - 1))])
    result = judge(spec, inputs, rows, {"dw": rows_of(dw, rows, k)})
    if missing := poison_in(dw, 0, dw.nbytes - TAIL):
        result.append(f"dw: {missing} elements not written")
    if poison_in(dw, dw.nbytes - TAIL, dw.nbytes) != TAIL // 2:
        result.append("dw: written past its end")
    dw.free()
    assert not result, "\n".join(result)


def test_rows_of_a_weight_gradient(gpu, specs):
    """Rows beyond 2**31 elements of x; those before are one number throughout."""
    spec, k, n = specs["wgrad@128x128-c1x1"], 8192, 8
    rows = 2**31 // k + 3000
    small = reference.make_inputs(spec, E=2, M=600, N=n, K=k, sizes=(333, 267))
    memory = gpu.array(rows * k * 2, 0x3C)
    gpu.write(memory, (rows - 600) * k * 2, small["x"])
    thin = gpu.array(rows * n * 2, 0x3C)
    gpu.write(thin, (rows - 600) * n * 2, small["dy"])
    dw = gpu.array(3 * n * k * 2, 0xFF)
    gpu.kernel(spec)(
        x=View(memory, 0, spec.dtype, (rows, k)),
        dy=View(thin, 0, spec.dtype, (rows, n)),
        offsets=place(gpu, spec, "offsets", np.array([rows - 600, rows - 267, rows], np.int32)),
        dw=View(dw, 0, spec.out_dtype, (3, n, k)),
    )
    gpu.finish(f"{spec.full_name} with {rows} x {k} inputs")
    memory.free()
    written = np.frombuffer(dw.download(), np.uint16).reshape(3, n, k)
    actual = judge(spec, small, None, {"dw": written[1:].reshape(-1, k)})
    number = decode(np.array([0x3C3C], np.uint16), spec.dtype).astype(np.float64)[0]
    want = encode(np.array([number**2 * (rows - 600)]), spec.out_dtype)
    assert not actual, "\n".join(actual)
    assert (written[0] == written[0, 0, 0]).all()
    got = decode(written[0, 0, :1], spec.out_dtype)
    assert np.isclose(got, decode(want, spec.out_dtype), rtol=2e-2), f"sums of equal products are {got}, not {want}"


def place(gpu, spec, name, value):
    """A compact array as a view in device memory; a number as it is."""
    if isinstance(value, float):
        return value
    memory = gpu.array(max(value.nbytes, 16))
    if value.nbytes:
        gpu.write(memory, 0, value)
    dtype = {"offsets": "i32", "alpha": "f32", "row_scale": "f32"}.get(name, spec.dtype)
    return View(memory, 0, dtype, value.shape)
