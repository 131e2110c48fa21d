"""A layer from plain ctypes, over its C export: Python without fusekit, or any language that calls C.

fusekit export --lang c build layer/moe --prefix moe
gcc -std=c11 -O2 -shared -fPIC build/moe.c -ldl -o build/moe.so
python examples/layer_ctypes.py build/moe.so
"""

import sys
from ctypes import CDLL, Structure, byref, c_char, c_int, c_int32, c_int64, c_size_t, c_ushort, c_void_p

TENSORS = {"x": 1000 * 512, "router": 8 * 512, "w1": 8 * 512 * 512, "w2": 8 * 512 * 256, "y": 1000 * 512}  # elements
fields = [(name, kind) for each in TENSORS for name, kind in ((each, c_void_p), (f"{each}_stride0", c_int64))]
fields = [("tokens", c_int64), *fields, ("scratch", c_void_p), ("scratch_bytes", c_size_t), ("settings", c_int32 * 3)]
Args = type("Args", (Structure,), {"_fields_": fields})  # moe_layer_moe_inference_args; a stride of 0: no padding
Error = type("Error", (Structure,), {"_fields_": [("status", c_int), ("cuda", c_int), ("text", c_char * 320)]})
moe, error, driver, layer = CDLL(sys.argv[1]), Error(), c_void_p(), c_void_p()
sizes = (c_size_t * 4)()  # bytes of kept, and of scratch memory: forward, inference, backward
_ = moe.moe_driver_open(byref(driver), byref(error)) and sys.exit(error.text.decode())
_ = moe.moe_layer_moe_load(driver, 0, byref(layer), byref(error)) and sys.exit(error.text.decode())
_ = moe.moe_layer_moe_sizes(layer, c_int64(1000), None, sizes, byref(error)) and sys.exit(error.text.decode())
cuda, context, y = CDLL("libcuda.so.1"), c_void_p(), (c_ushort * 4)()
assert cuda.cuDevicePrimaryCtxRetain(byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
args = Args(tokens=1000, scratch_bytes=sizes[2])
for name, count in {**TENSORS, "scratch": sizes[2] // 2}.items():
    data = c_void_p()
    assert cuda.cuMemAlloc_v2(byref(data), c_size_t(2 * count)) == 0
    assert cuda.cuMemsetD16_v2(data, c_ushort(0x3C00), c_size_t(count)) == 0  # bf16 values 2**-7
    setattr(args, name, data.value)
_ = moe.moe_layer_moe_inference(layer, byref(args), None, byref(error)) and sys.exit(error.text.decode())
assert cuda.cuMemcpyDtoH_v2(y, c_void_p(args.y), c_size_t(8)) == 0  # which waits for the launches
print("y begins with", [hex(bits) for bits in y])
