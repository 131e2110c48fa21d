"""Forward and backward of a mixture-of-experts layer without any framework: memory, tensors, launches, results."""

import numpy as np

import fusekit
from fusekit.runtime import DeviceArray

T = 1000
library = fusekit.open_library()
layer = library.layer("layer/moe")
sizes = layer.sizes(T)  # bytes, before anything is allocated
print(f"kept {sizes.kept} bytes, scratch {sizes.scratch} bytes")

# Any tensors of a framework will do, and any memory; these are fusekit's own.
dims, rng = layer.dims(T), np.random.default_rng(0)
tensors = {
    name: DeviceArray(library.devices, buffer.extents(dims), buffer.dtype)
    for which in ("forward", "backward")
    for name, buffer in (layer.inputs(which) | layer.outputs(which)).items()
}
for name, spread in {"x": 1, "dy": 1, "router": 512**-0.5, "w1": 512**-0.5, "w2": 256**-0.5}.items():
    numbers = spread * rng.standard_normal(tensors[name].shape, dtype=np.float32)
    tensors[name].upload((numbers.view(np.uint32) >> 16).astype(np.uint16))  # bf16 is the upper half of a float32
kept = DeviceArray(library.devices, (sizes.kept,), "u8")
scratch = DeviceArray(library.devices, (sizes.scratch,), "u8")


def of(which):
    """The arguments of a pass."""
    return {name: tensors[name] for name in (*layer.inputs(which), *layer.outputs(which))}


forward = layer.bind_forward(kept=kept, scratch=scratch, **of("forward"))
backward = layer.bind_backward(kept=kept, scratch=scratch, **of("backward"))
forward()  # queues its launches on a stream; the default one here
backward()

for name in ("y", "dx", "dw1", "dw2", "drouter"):
    bits = np.frombuffer(tensors[name].download(), np.uint16)
    numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(numbers).all(), name
    assert numbers.any(), name
print("done")
