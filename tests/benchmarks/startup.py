"""From the start of a process to its first result: fusekit from a warm store, and a bare cuda-python script.

    python tests/benchmarks/run.py startup NAME [--rows M] [--rounds 9]

The bare script is written out for the same cubin, launch and sizes: it knows every number beforehand and does nothing
but the driver calls. Prints one JSON document with the median seconds of both, and their quotient.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    TensorMapParameter,
    evaluate,
)
from fusekit.bench.timing import median
from fusekit.dtypes import DTYPES
from fusekit.errors import UsageError
from fusekit.library import open_library
from fusekit.runtime import Kernel

OURS = """
import fusekit
library = fusekit.open_library()
kernel = library.load({name!r})
from fusekit.runtime import DeviceArray
arrays = {{name: DeviceArray(library.devices, shape, dtype) for name, shape, dtype in {tensors!r}}}
for array in arrays.values():
    array.fill(0)
arrays["offsets"].upload({offsets!r}) if "offsets" in arrays else None
kernel(**arrays)
result = arrays[{output!r}].download(0, 16)
print("done", flush=True)
"""

BARE = """
import ctypes, struct
from cuda.bindings import driver as cuda
def check(result):
    assert not result[0], result[0]
    return result[1] if len(result) == 2 else result[1:]
check(cuda.cuInit(0))
device = check(cuda.cuDeviceGet(0))
check(cuda.cuCtxPushCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
library = check(cuda.cuLibraryLoadData(open({cubin!r}, "rb").read(), None, None, 0, None, None, 0))
kernel = check(cuda.cuLibraryGetKernel(library, {symbol!r}))
shared = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
check(cuda.cuKernelSetAttribute(shared, {shared}, kernel, device))
function = check(cuda.cuKernelGetFunction(kernel))
arrays = {{}}
for name, size in {sizes!r}:
    arrays[name] = int(check(cuda.cuMemAlloc(size)))
    check(cuda.cuMemsetD8(arrays[name], 0, size))
if "offsets" in arrays:
    check(cuda.cuMemcpyHtoD(arrays["offsets"], {offsets!r}, len({offsets!r})))
kept = []
def tensor_map(name, dtype, dims, strides, box, steps, swizzle):
    made = check(cuda.cuTensorMapEncodeTiled(
        getattr(cuda.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_" + dtype), len(dims), arrays[name],
        [cuda.cuuint64_t(value) for value in dims], [cuda.cuuint64_t(value) for value in strides],
        [cuda.cuuint32_t(value) for value in box], [cuda.cuuint32_t(value) for value in steps],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_" + swizzle),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    kept.append(made)
    return made.getPtr()
def scalar(data):
    kept.append(ctypes.create_string_buffer(data, len(data)))
    return ctypes.addressof(kept[-1])
parameters = [{parameters}]
pointers = (ctypes.c_void_p * len(parameters))(*parameters)
config = cuda.CUlaunchConfig()
config.gridDimX, config.gridDimY, config.gridDimZ = {grid!r}
config.blockDimX, config.blockDimY, config.blockDimZ = {block!r}
config.sharedMemBytes = {shared}
cluster = cuda.CUlaunchAttribute()
cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = {cluster!r}
config.attrs, config.numAttrs = [cluster], 1
check(cuda.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
result = bytearray(16)
view = (ctypes.c_char * 16).from_buffer(result)
check(cuda.cuMemcpyDtoH(ctypes.addressof(view), arrays[{output!r}], 16))
print("done", flush=True)
"""


def scripts(kernel: Kernel, rows: int, sm_count: int, cubin: Path) -> dict[str, str]:
    """The two programs, for a kernel without workspace and its spec's problem with `rows` rows."""
    problem = kernel.spec.get("problem")
    record: LaunchRecord = kernel.record
    if not problem or record.workspace != 0:
        raise UsageError(f"{kernel.name}: choose a kernel whose spec names a problem and which needs no workspace")
    gated = kernel.spec["glu_layout"] != "none"
    env = {"E": problem["E"], "M": rows, "K": problem["K"], "N": problem["N"], "I": problem["N"] // (2 if gated else 1)}
    shapes = {tensor.name: tuple(evaluate(extent, env) for extent in tensor.shape) for tensor in record.tensors}
    sizes = []
    for tensor in record.tensors:
        step = 1
        for index in reversed(range(tensor.rank)):
            env[tensor.stride_variable(index)] = step
            step *= shapes[tensor.name][index]
        sizes.append((tensor.name, step * tensor.itemsize))
    env |= {"sm_count": sm_count, "cluster_margin": kernel.margin}
    offsets = b"".join((rows * (group + 1) // env["E"]).to_bytes(4, "little") for group in range(env["E"]))
    common = {
        "offsets": offsets, "output": next(tensor.name for tensor in record.tensors if tensor.written),
    }  # fmt: skip
    ordered = sorted(record.parameters, key=lambda parameter: parameter.offset)
    return {
        "fusekit": OURS.format(
            name=kernel.name, tensors=[(tensor.name, shapes[tensor.name], tensor.dtype) for tensor in record.tensors],
            **common,
        ),
        "bare": BARE.format(
            cubin=str(cubin), symbol=record.symbol.encode(), shared=record.dynamic_shared, sizes=sizes,
            parameters=", ".join(_parameter(kernel, parameter, env) for parameter in ordered),
            grid=tuple(evaluate(extent, env) for extent in record.grid), block=record.block, cluster=record.cluster,
            **common,
        ),
    }  # fmt: skip


def _parameter(kernel: Kernel, parameter: Any, env: dict[str, int]) -> str:
    if isinstance(parameter, TensorMapParameter):
        dims = [evaluate(dim, env) for dim in parameter.dims]
        strides = [evaluate(stride, env) for stride in parameter.strides]
        return (
            f"tensor_map({parameter.argument!r}, {DTYPES[parameter.dtype].tensor_map!r}, {dims}, {strides},"
            f" {list(parameter.box)}, {list(parameter.element_strides)}, {parameter.swizzle.upper()!r})"
        )
    if isinstance(parameter, PointerParameter):
        return f"scalar(struct.pack('<Q', arrays[{parameter.argument!r}]))"
    if isinstance(parameter, IntegerParameter):
        return f"scalar(({evaluate(parameter.value, env)}).to_bytes({parameter.size}, 'little', signed=True))"
    assert isinstance(parameter, FloatParameter)
    return f"scalar(struct.pack('<f', float({str(kernel.defaults[parameter.argument])!r})))"


def seconds(program: str) -> float:
    """From the start of the process to the line that says it has its result."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if line != "done\n" or process.returncode:
        raise UsageError(f"a program ended with {process.returncode} instead of a result")
    return seconds


def measure(name: str, rows: int, rounds: int) -> dict[str, Any]:
    """The document that the module prints."""
    library = open_library()
    kernel = library.load(name)
    stored = library.store.load(library.find(name).key)
    assert stored is not None
    device = library.devices.get(kernel.device)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(stored[1])
        programs = scripts(kernel, rows, device.sm_count, cubin)
        kernel.unload()
        times: dict[str, list[float]] = {"fusekit": [], "bare": []}
        for index in range(rounds + 1):  # the first round only warms the file cache
            for who, program in programs.items():
                took = seconds(program)
                if index:
                    times[who].append(took)
    medians = {who: round(median(values), 4) for who, values in times.items()}
    return {
        "name": kernel.name, "device": device.name, "rows": rows, "seconds": medians,
        "quotient": round(medians["fusekit"] / medians["bare"], 3),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Process start to first result.")
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    json.dump(measure(given.name, given.rows, given.rounds), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0
