"""The first example without PyTorch: NumPy on the host, fusekit's own arrays on the GPU."""

import numpy as np

import fusekit
from fusekit.reference import decode, encode  # bf16 in arrays of uint16
from fusekit.runtime import DeviceArray

E, M, H, I = 8, 1000, 512, 768
ends = [100, 100, 350, 351, 600, 800, 999, 1000]

library = fusekit.open_library()
kernel = library.load("quickstart/moe-fc1")


def on_gpu(values: np.ndarray, dtype: str) -> DeviceArray:
    array = DeviceArray(library.devices, values.shape, dtype)
    array.upload(values)
    return array


random = np.random.default_rng(0)
x = encode(random.standard_normal((M, H)), "bf16")
w = encode(random.standard_normal((E, 2 * I, H)) / H**0.5, "bf16")
y = DeviceArray(library.devices, (M, I), "bf16")
tensors = {"x": on_gpu(x, "bf16"), "w": on_gpu(w, "bf16"), "offsets": on_gpu(np.array(ends, np.int32), "i32"), "y": y}
kernel(**tensors)
result = decode(np.frombuffer(y.download(), np.uint16).reshape(M, I), "bf16")  # waits for the GPU

for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
    gate, up = np.split(decode(x[begin:end], "bf16") @ decode(w[expert], "bf16").T, 2, axis=1)
    np.testing.assert_allclose(result[begin:end], gate / (1 + np.exp(-gate)) * up, rtol=1e-2, atol=1e-2)
print("right")
