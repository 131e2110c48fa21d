"""Which memory a kernel reads and writes, by its PTX."""

import pytest

from fusekit.compiler.ptx import accesses

READ, WRITTEN, BOTH = (True, False), (False, True), (True, True)
KERNEL = """
.visible .entry other(.param .u64 other_param_0) { ld.param.b64 %rd1, [other_param_0]; st.global.b32 [%rd1], 0; ret; }

.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .align 8 .b8 kernel_param_1[16],
	.param .u64 kernel_param_2
)
.reqntid 256, 1, 1
{
	.reg .b64 	%rd<9>;
	// begin inline asm
	BODY
	// end inline asm
}
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("ld.param.b64 %rd1, [kernel_param_2]; ld.global.nc.v2.b32 {%r1, %r2}, [%rd1+16];", {(2, 0): READ}),
        ("ld.param.b64 %rd1, [kernel_param_2];\n\t.loc 1 2 3\n\tst.b32 [%rd1], %r1;", {(2, 0): WRITTEN}),
        ("ld.param.b64 %rd1, [kernel_param_2]; @%p1 red.global.add.f32 [%rd1], %f1;", {(2, 0): BOTH}),
        ("ld.param.b64 %rd1, [kernel_param_2]; st.shared.b32 [%rd1], %r1;", {}),
        (  # a struct of two pointers, as one vector
            "ld.param.v2.b64 {%rd1, %rd2}, [kernel_param_1]; ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd2], %r1;",
            {(1, 0): READ, (1, 8): WRITTEN},
        ),
        (  # an address moves on, in a loop that uses it before
            "ld.param.b64 %rd3, [kernel_param_1+8]; $L: st.global.b32 [%rd4], 0;"
            " mad.wide.s32 %rd4, %r1, 4, %rd3; bra $L;",
            {(1, 8): WRITTEN},
        ),
        (  # what lies in memory is no parameter, and a value that is written is no address
            "ld.param.b64 %rd1, [kernel_param_2]; ld.param.b64 %rd2, [kernel_param_1]; ld.global.b64 %rd3, [%rd1];"
            " st.global.b64 [%rd3], %rd2; st.global.b64 [%rd2], %rd1;",
            {(2, 0): READ, (1, 0): WRITTEN},
        ),
        (
            "mov.b64 %rd1, kernel_param_0; cvta.param.u64 %rd2, %rd1; ld.param.b64 %rd3, [kernel_param_2];"
            " cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            " [%r1], [%rd2, {%rd3, %r2}], [%r3];",
            {(0, 0): READ},
        ),
        (
            "mov.b64 %rd1, kernel_param_0;"
            " cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];",
            {(0, 0): WRITTEN},
        ),
        (
            "mov.b64 %rd1, kernel_param_0;"
            " cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r1, %r2}], [%r3];",
            {(0, 0): BOTH},
        ),
        ("ld.param.b64 %rd1, [kernel_param_2]; cp.async.cg.shared.global [%r1], [%rd1], 16;", {(2, 0): READ}),
    ],
)  # fmt: skip
def test_what_a_kernel_reads_and_writes(body, found):
    assert accesses(KERNEL.replace("BODY", body), "kernel") == found


def test_what_is_not_seen_is_an_error():
    body = "ld.param.b64 %rd1, [kernel_param_2]; st.param.b64 [param0], %rd1; call.uni helper, (param0);"
    with pytest.raises(ValueError, match="passes an address to a function"):
        accesses(KERNEL.replace("BODY", body), "kernel")
    with pytest.raises(ValueError, match="no PTX of absent"):
        accesses(KERNEL, "absent")
