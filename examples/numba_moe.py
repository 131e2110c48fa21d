"""Numba: a stored kernel between two Numba kernels on one stream. bf16 is carried in arrays of uint16."""

import numpy as np
from numba import cuda

import fusekit
from fusekit.interop.views import as_dtype

E, M, K, I = 8, 1000, 512, 768
kernel = fusekit.open_library().load("quickstart/moe-fc1")


@cuda.jit
def negate(bits):
    """Flips the sign bit of every bf16."""
    index = cuda.grid(1)
    if index < bits.size:
        bits[index // K, index % K] ^= 0x8000


@cuda.jit
def widen(bits, values):
    """bf16 to float32, through the bits."""
    index = cuda.grid(1)
    if index < bits.size:
        values[index // I, index % I] = np.uint32(bits[index // I, index % I]) << np.uint32(16)


def to_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


generator = np.random.default_rng(0)
x, w = to_bf16(generator.standard_normal((M, K))), to_bf16(generator.standard_normal((E, 2 * I, K)) / K**0.5)
ends = [100, 100, 350, 351, 600, 800, 999, 1000]

stream = cuda.stream()
x_device = cuda.to_device(x, stream=stream)
w_device = cuda.to_device(w, stream=stream)
offsets = cuda.to_device(np.array(ends, np.int32), stream=stream)
y = cuda.device_array((M, I), np.uint16, stream=stream)
wide = cuda.device_array((M, I), np.uint32, stream=stream)

negate[(x.size + 255) // 256, 256, stream](x_device)
kernel(
    x=as_dtype(x_device, "bf16"), w=as_dtype(w_device, "bf16"), offsets=offsets, y=as_dtype(y, "bf16"), stream=stream
)
widen[(M * I + 255) // 256, 256, stream](y, wide)
result = wide.copy_to_host(stream=stream)
stream.synchronize()

results, start = [], 0
for weight, end in zip(from_bf16(w), ends, strict=True):
    z = -from_bf16(x[start:end]) @ weight.T
    results.append(z[:, :I] / (1 + np.exp(-z[:, :I])) * z[:, I:])
    start = end
wanted = np.concatenate(results)
error = float(np.linalg.norm(result.view(np.float32) - wanted) / np.linalg.norm(wanted))
print(f"numba: relative error {error:.2e}")
assert error < 4e-3
