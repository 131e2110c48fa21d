"""A layer from plain ctypes, over its C export: Python without fusekit, or any language that calls C.

fusekit export --lang c build layer/moe --prefix moe
gcc -std=c11 -O2 -shared -fPIC build/moe.c -ldl -o build/moe.so
python examples/layer_ctypes.py build/moe.so
"""

import ctypes
import sys
from ctypes import byref, c_char, c_int, c_int32, c_int64, c_size_t, c_void_p


class Error(ctypes.Structure):
    _fields_ = (("status", c_int), ("cuda", c_int), ("text", c_char * 320))


class Args(ctypes.Structure):  # moe_layer_moe_inference_args: after each tensor the stride of its rows, 0: no padding
    _fields_ = (
        ("tokens", c_int64), *((name, kind) for tensor in ("x", "router", "w1", "w2", "y")
        for name, kind in ((tensor, c_void_p), (f"{tensor}_stride0", c_int64))),
        ("scratch", c_void_p), ("scratch_bytes", c_size_t), ("settings", c_int32 * 3),
    )  # fmt: skip


moe, error, tokens = ctypes.CDLL(sys.argv[1]), Error(), 1000


def check(status: int) -> None:
    if status:
        sys.exit(error.text.decode())


driver, layer, sizes = c_void_p(), c_void_p(), (c_size_t * 4)()  # kept, forward, inference, backward
check(moe.moe_driver_open(byref(driver), byref(error)))
check(moe.moe_layer_moe_load(driver, 0, byref(layer), byref(error)))
check(moe.moe_layer_moe_sizes(layer, c_int64(tokens), None, sizes, byref(error)))

cuda, context = ctypes.CDLL("libcuda.so.1"), c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0


def tensor(count: int, bits: int) -> int:
    """bf16 values, all the same, in device memory."""
    data = c_void_p()
    assert cuda.cuMemAlloc_v2(byref(data), c_size_t(2 * count)) == 0
    assert cuda.cuMemsetD16_v2(data, ctypes.c_ushort(bits), c_size_t(count)) == 0
    return data.value


args = Args(tokens=tokens, x=tensor(tokens * 512, 0x3F80), router=tensor(8 * 512, 0), w1=tensor(8 * 512 * 512, 0x3C00),
            w2=tensor(8 * 512 * 256, 0x3C00), y=tensor(tokens * 512, 0), scratch=tensor(sizes[2], 0),
            scratch_bytes=sizes[2])  # fmt: skip
check(moe.moe_layer_moe_inference(layer, byref(args), None, byref(error)))
y = (ctypes.c_ushort * 4)()
assert cuda.cuMemcpyDtoH_v2(y, c_void_p(args.y), c_size_t(8)) == 0  # which waits for the launches
print("y begins with", [hex(bits) for bits in y])
