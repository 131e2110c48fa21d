"""Calls what the DSL compiled, what the cache stored, and what it loaded, against a stand-in for the driver.

Run with the paths of the stand-in and of an empty folder.
"""

import ctypes
import sys
from pathlib import Path

import cutlass
import numpy as np
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.base_dsl.cache_helpers import JitCacheDict
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

from fusekit.cute import replaced
from tests.cute import kernels
from tests.cute.rig import Rig


def dynamic(tensor):
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic()


def launched(driver, folder):
    """What programs do with compiled functions, and what it led to."""
    x, y, long = (np.zeros(count, np.float32) for count in (1000, 1000, 5000))
    names = {x.ctypes.data: "x", y.ctypes.data: "y", long.ctypes.data: "long"}
    seen = []

    def note(what):
        values = driver.last_launch()[:12]
        seen.append((what, driver.launches() - before, values[:8], [names[at] for at in values[8:10]], values[10:]))

    before = driver.launches()
    function = cute.compile(
        kernels.scale, dynamic(x), dynamic(y), cutlass.Float32(1.0), cutlass.Int64(1), 128, CUstream(0)
    )
    function(dynamic(long), dynamic(y), 3.0, 1 << 40, CUstream(77))
    note("64 bits, another shape")
    function(x=dynamic(x), y=dynamic(y), a=cutlass.Float32(4.0), n=7, stream=CUstream(3))
    note("keywords")
    function(x, y, 5.0, -7, CUstream(3))
    note("arrays")
    function.to(0)(dynamic(y), dynamic(x), 6.0, 7, CUstream(3))
    note("an executor")
    try:
        function(dynamic(x), dynamic(y), 3.0)
    except Exception as error:
        assert "Missing required arguments" in str(error)
        seen.append(str(error))
    two = cute.compile(kernels.twice, dynamic(x), dynamic(y))
    two(dynamic(x), dynamic(y))
    note("defaults, two launches")
    for count in range(2):
        kernels.twice(dynamic(x), dynamic(y))
        note(f"a call without cute.compile: {count}")
    function.export_to_c(str(folder), "exported")
    seen += [(folder / name).read_bytes() for name in ("exported.o", "exported.h")]
    seen += [sorted(function.kernel_info), function.function_name, function.artifacts, str(function.ir_module)]
    return seen, type(function).__qualname__, isinstance(function, CudaDialectJitCompiledFunction)


def main(library, folder):
    driver = ctypes.CDLL(library)
    driver.last_launch.restype = ctypes.POINTER(ctypes.c_uint64)
    CudaDialectJitCompiledFunction.num_devices = 1
    BaseDSL.get_shared_libs = lambda self: [library]
    replaced._NEUTRAL |= {"tests", "__main__"}

    def work():
        CuTeDSL._get_dsl().jit_cache = JitCacheDict()
        return launched(driver, folder)

    rig, expected = Rig(folder / "store", folder / "report"), work()
    # A call without cute.compile has the IR of one with it, and is looked up once in a process.
    for counts in ((1, 2), (3, 0)):
        assert rig.run(work) == (counts, expected)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
