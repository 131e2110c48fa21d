"""The recording driver on host objects made here, so that it meets host code that no kernel of ours has."""

import ctypes

import pytest

from fusekit.compiler.recorder import HostFunction
from fusekit.errors import BuildError, FusekitError

llvm = pytest.importorskip("llvmlite.binding", reason="llvmlite (extra `build`) is not installed")

CUBIN = b"\x7fELF a cubin of no kernel"
# The host function's shape in the DSL: init loads the library, load_to_device gets the kernel, the entry launches it.
HOST = """
@image = private constant [{size} x i8] c"{image}"
@name = private constant [7 x i8] c"kernel\\00"
@library = internal global ptr null
@kernel = internal global i64 0
declare i32 @_cudaLibraryLoadData(ptr, ptr, ptr, ptr, i32, ptr, ptr, i32)
declare i32 @_cudaLibraryGetKernel(ptr, i64, ptr)
declare i32 @_cudaDeviceGetAttribute(ptr, i32, i32)
declare i32 @_cudaKernelSetAttributeForDevice(i64, i32, i32, i32)
declare i32 @_cudaLaunchKernelEx(ptr, i64, ptr)
declare i32 @unknown_function(i32)

define void @_mlir_t_cuda_init(ptr %a) {{
  %slot = load ptr, ptr %a
  %out = load ptr, ptr %slot
  %r = call i32 @_cudaLibraryLoadData(ptr %out, ptr @image, ptr null, ptr null, i32 0, ptr null, ptr null, i32 0)
  %at = getelementptr ptr, ptr %a, i32 1
  %result = load ptr, ptr %at
  store i32 %r, ptr %result
  ret void
}}

define void @_mlir_t_cuda_load_to_device(ptr %a) {{
  %slot = load ptr, ptr %a
  %where = load ptr, ptr %slot
  %library = load i64, ptr %where
  %r = call i32 @_cudaLibraryGetKernel(ptr @kernel, i64 %library, ptr @name)
  %at = getelementptr ptr, ptr %a, i32 2
  %result = load ptr, ptr %at
  store i32 %r, ptr %result
  ret void
}}

define internal i32 @launch(ptr %parameters, i32 %grid) {{
  %config = alloca [16 x i32], align 8
  store [16 x i32] [i32 0, i32 2, i32 3, i32 32, i32 1, i32 1, i32 4096, i32 0, i32 7, i32 0, i32 0, i32 0, i32 0,
                    i32 0, i32 0, i32 0], ptr %config
  store i32 %grid, ptr %config
  %kernel = load i64, ptr @kernel
  %r = call i32 @_cudaLaunchKernelEx(ptr %config, i64 %kernel, ptr %parameters)
  ret i32 %r
}}

define void @_mlir_t__mlir_ciface_host(ptr %args, i32 %count) {{
  %value = alloca i32
  store i32 5, ptr %value
  %last = sub i32 %count, 1
  %at = getelementptr ptr, ptr %args, i32 %last
  %result = load ptr, ptr %at
{body}
  store i32 %r, ptr %result
  ret void
}}
"""
LAUNCH = "  %n = load i32, ptr %value\n  %r = call i32 @launch(ptr %args, i32 %n)"
ASK = "  %q{i} = call i32 @_cudaDeviceGetAttribute(ptr %value, i32 {number}, i32 0)\n"


def host_object(body: str, image: bytes = CUBIN) -> bytes:
    text = HOST.format(body=body, size=len(image), image="".join(f"\\{byte:02x}" for byte in image))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    return machine.emit_object(llvm.parse_assembly(text))


def load(body: str, **options) -> HostFunction:
    return HostFunction(host_object(body, **options), "t", CUBIN, {"kernel": [4]})


def number(value: int):
    return ctypes.create_string_buffer(value.to_bytes(4, "little"), 8)


def test_a_launch_is_recorded_whole():
    (launch,) = load(LAUNCH).call([number(1234)], sm_count=132)
    assert (launch.symbol, launch.grid, launch.block) == ("kernel", (5, 2, 3), (32, 1, 1))
    assert (launch.dynamic_shared, launch.stream) == (4096, 7)
    assert launch.parameters == ((1234).to_bytes(4, "little"),)
    assert launch.launch_attributes == {}


def test_every_launch_is_recorded_in_order():
    twice = LAUNCH + "\n  %m = add i32 %n, 1\n  %r2 = call i32 @launch(ptr %args, i32 %m)"
    launches = load(twice).call([number(7)], sm_count=132)
    assert [launch.grid[0] for launch in launches] == [5, 6]
    assert load("  %r = add i32 0, 0").call([number(0)], sm_count=132) == ()


def test_a_kernel_of_unknown_parameters_is_refused():
    with pytest.raises(BuildError, match="launches kernel, which is no kernel of the launch record"):
        HostFunction(host_object(LAUNCH), "t", CUBIN, {"other": [4]}).call([number(0)], sm_count=132)


def test_the_multiprocessor_count_is_what_the_call_says():
    host = load(ASK.format(i=0, number=16) + LAUNCH)
    assert [host.call([number(0)], sm_count=count)[0].grid[0] for count in (132, 78, 1)] == [132, 78, 1]


def test_the_shared_memory_of_a_block_is_known():
    assert load(ASK.format(i=0, number=97) + LAUNCH).call([number(0)], sm_count=132)[0].grid[0] == 232448


def test_two_host_functions_do_not_disturb_each_other():
    first, second = load(LAUNCH), load(ASK.format(i=0, number=16) + LAUNCH)
    assert second.call([number(0)], sm_count=9)[0].grid[0] == 9
    assert first.call([number(0)], sm_count=9)[0].grid[0] == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ASK.format(i=0, number=13) + LAUNCH, "asks for device attribute 13; a launch record cannot express it"),
        ("  %r = add i32 0, 9", "returned CUDA error 9"),
        (
            "  %r = call i32 @unknown_function(i32 1)",
            "needs unknown_function, which the recording driver does not have",
        ),
        (
            "  %r = call i32 @_cudaLaunchKernelEx(ptr null, i64 1, ptr null)",
            "launches kernel 0x1, which it never asked for",
        ),
    ],
)
def test_host_code_that_no_record_can_replace_is_refused(body, message):
    with pytest.raises(BuildError, match=message):
        load(body).call([number(0)], sm_count=132)


def test_attributes_set_on_the_kernel_are_seen():
    body = (
        "  %k = load i64, ptr @kernel\n"
        "  %s = call i32 @_cudaKernelSetAttributeForDevice(i64 %k, i32 9, i32 50, i32 0)\n"
    )
    assert load(body + LAUNCH).call([number(0)], sm_count=132)[0].kernel_attributes == {9: 50}


def test_another_cubin_is_refused():
    with pytest.raises(BuildError, match="loads another cubin than the one compiled"):
        load(LAUNCH, image=CUBIN[:-1] + b"!")


@pytest.mark.parametrize("data", [b"", b"MZ not an object", b"\x7fELF\x02\x01" + bytes(20)])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(BuildError, match="host object"):
        HostFunction(data, "t", CUBIN, {})


def test_an_object_of_another_prefix_is_refused():
    with pytest.raises(FusekitError, match="entry points none"):
        HostFunction(host_object(LAUNCH), "other", CUBIN, {"kernel": [4]})
