"""The private parts of the CuTe DSL that device code uses; compiler/dsl.py has those of the host."""

from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cutlass_dsl import dsl_user_op, extract_mlir_values, new_from_mlir_values

__all__ = [
    "descriptor_address",
    "dsl_user_op",
    "extract_mlir_values",
    "inline_i32",
    "new_from_mlir_values",
]


@dsl_user_op
def descriptor_address(atom, *, loc=None, ip=None):
    """Generic address of the tensor map inside a TMA copy atom that is a kernel parameter."""
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return cute_nvgpu.get_tma_desc_addr(pointer, executable, loc=loc, ip=ip)


def inline_i32(text: str, constraints: str, operands, loc, ip):
    """What inline PTX with memory effects, in LLVM's notation, gives as $0: a 32-bit integer.

    operands: numbers of the DSL. For texts that cute.arch.inline_ptx cannot have.
    """
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
