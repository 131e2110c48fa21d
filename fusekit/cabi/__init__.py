"""C and C++ launchers: a header and a source file that load and launch stored kernels with nothing but the driver.

`generate` writes them from launch records and cubins. The launcher proper is the C in this folder, the same for every
kernel. Records are read in place, in a flat form of 64-bit words that has one definition; an export has them and the
cubins as arrays, and for each kernel, and each pass of a layer, a structure of arguments and typed functions over it,
and a bundle has them in a member of its own. Nothing of fusekit is needed to compile or run the result.
"""

from fusekit.cabi.generate import Exported, ExportedLayer, Function, generate, generate_loader, generate_tvm_ffi

__all__ = ["Exported", "ExportedLayer", "Function", "generate", "generate_loader", "generate_tvm_ffi"]
