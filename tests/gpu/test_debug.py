"""FUSEKIT_DEBUG=1 with a kernel that breaks its context, in a process of its own."""

import os
import subprocess
import sys

NAME = "identity@128x128-c1x1"
BREAK = """
import sys
import numpy as np
import fusekit
from fusekit.runtime import DeviceArray
from fusekit.runtime.tensors import Slice

library = fusekit.open_library()
kernel = library.load(sys.argv[1])
x, w = (DeviceArray(library.devices, shape, "bf16") for shape in ((300, 256), (5, 128, 256)))
offsets, y = (DeviceArray(library.devices, *each) for each in (((5,), "i32"), ((300, 128), "bf16")))
for array in (x, w):
    array.fill(0)
offsets.upload(np.array([60, 120, 180, 240, 300], np.int32))
kernel(x=x, w=w, offsets=offsets, y=y)
print("right")
try:
    kernel(x=x, w=w, offsets=offsets, y=Slice(1 << 20, (300, 128), "bf16", 0))  # no memory is there
except fusekit.DriverError as error:
    print(error)
"""


def test_the_launch_that_breaks_the_context_is_named(gpu, specs):
    name = gpu.kernel(specs[NAME]).name
    environment = os.environ | {"FUSEKIT_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BREAK, name], capture_output=True, text=True, check=False, env=environment
    )
    right, error, title, *last = done.stdout.splitlines()
    assert right == "right", done.stderr
    assert error.startswith(f"{name} on x bf16[300, 256], w bf16[5, 128, 256], y bf16[300, 128], offsets i32[5], grid ")
    assert "failed: CUDA_ERROR_" in error
    assert title.startswith("The last launches")
    assert len(last) == 2
