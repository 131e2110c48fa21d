"""Reads launch records out of the DSL's host code.

A CuTe DSL host function computes grids, tensor maps and kernel parameters in machine code. The DSL also gives it as a
module in MLIR's LLVM dialect. `read` executes that on symbols (`machine`), turns every machine word that a launch is
given into an integer term over the arguments (`lower`, `terms`), takes the fields of tensor maps out of their words
(`maps`), and writes a launch record (`expressions`, `reader`). What must hold so that no word overflows becomes a
constraint of the record. Whatever no record can express is a BuildError with the place in the host code.

Nothing is guessed from sample values. The proof (`fusekit.compiler.prove`) then holds the record against the machine
code.
"""

from fusekit.compiler.hostcode.reader import read

__all__ = ["read"]
