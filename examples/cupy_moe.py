"""CuPy: a stored kernel on arrays and a stream of CuPy's. bf16 is carried in arrays of uint16."""

import cupy

import fusekit
from fusekit.interop.views import as_dtype

E, M, K, I = 8, 1000, 512, 768
kernel = fusekit.open_library().load("quickstart/moe-fc1")


def to_bf16(values):
    """float32 rounded to nearest, ties to even."""
    bits = values.view(cupy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(cupy.uint16)


def from_bf16(bits):
    return (bits.astype(cupy.uint32) << 16).view(cupy.float32)


stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    generator = cupy.random.default_rng(0)
    x = to_bf16(generator.standard_normal((M, K), dtype=cupy.float32))
    w = to_bf16(generator.standard_normal((E, 2 * I, K), dtype=cupy.float32) / cupy.float32(K**0.5))
    ends = [100, 100, 350, 351, 600, 800, 999, 1000]
    offsets = cupy.array(ends, dtype=cupy.int32)
    y = cupy.full((M, I), 0xFFFF, dtype=cupy.uint16)
    kernel(x=as_dtype(x, "bf16"), w=as_dtype(w, "bf16"), offsets=offsets, y=as_dtype(y, "bf16"), stream=stream)
    result = from_bf16(y)
    results, start = [], 0
    for weight, end in zip(from_bf16(w), ends, strict=True):
        z = from_bf16(x[start:end]).astype(cupy.float64) @ weight.astype(cupy.float64).T
        results.append(z[:, :I] / (1 + cupy.exp(-z[:, :I])) * z[:, I:])
        start = end
    wanted = cupy.concatenate(results)
    error = float(cupy.linalg.norm(result - wanted) / cupy.linalg.norm(wanted))
stream.synchronize()
print(f"cupy: relative error {error:.2e}")
assert error < 4e-3
