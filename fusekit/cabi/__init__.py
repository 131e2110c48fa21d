"""C and C++ launchers: a header and a source file that load and launch stored kernels with nothing but the driver.

`generate` writes them from launch records and cubins. The launcher proper is the C in this folder, the same for every
kernel; the records become constant tables, the cubins arrays, and each kernel gets a structure of arguments and typed
functions over them. Nothing of fusekit is needed to compile or run the result.

==========  ==================================================================
module      its job
==========  ==================================================================
generate    puts the two files together, with kernels in them or the loader of bundles; checks prefix and names
tables      a launch record as C constants
wrappers    the typed face of one kernel
identifiers C names for kernels and arguments
*.h, *.c    the launcher, in the order of `generate.PARTS`; the loader of bundles, in that of `LOADER_PARTS`
==========  ==================================================================
"""

from fusekit.cabi.generate import Exported, generate, generate_loader

__all__ = ["Exported", "generate", "generate_loader"]
