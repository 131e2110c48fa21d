"""Runs the DSL's compiled host function on the CPU and records the launches that it asks for.

The DSL compiles the host function to an object file that leaves CUDA entry points undefined. Here they are Python
callbacks: the object is linked against them by LLVM's MCJIT, the host function is called with random addresses, and
what it hands to the launch is copied out. No GPU, driver or C compiler takes part, and no address is ever read through.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusekit.abi import elf
from fusekit.abi.tensormap import TensorMap, encode, encoder_modes
from fusekit.compiler import dsl
from fusekit.compiler.cubin import parsed
from fusekit.errors import BuildError, ToolchainError, install

# cudaLaunchConfig_t: two dim3, dynamic shared memory, stream, attribute array and its length.
_CONFIG = struct.Struct("<6IQQQI")
# cudaLaunchAttribute: an id, padding, 64 bytes of value.
_ATTRIBUTE_BYTES = 72
_VALUE_AT = 8
# A fat binary's head: magic, version, size of the head, size of what follows it.
_FATBIN = struct.Struct("<I2xHQ")
_FATBIN_MAGIC = 0xBA55ED50
_LIBRARY = 0x1F5EC1B
_KERNEL = 0x1F5EC4E
_MULTIPROCESSOR_COUNT = 16
_SHARED_OPTIN = 97
# cudaDeviceAttr -> value, as on the H100 and the H200. Others the host code may not ask for.
_DEVICE_ATTRIBUTES = {_SHARED_OPTIN: 232448}
_KERNEL_SHARED_BYTES = 1
_INVALID_VALUE = 1
# Undefined symbols that LLVM finds by itself: the linker's own, and what it calls for plain copies.
_HARMLESS = frozenset({"_GLOBAL_OFFSET_TABLE_", "memcpy", "memmove", "memset"})


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch as the host function asked for it.

    parameters: the bytes of every kernel parameter, in order. launch_attributes: cudaLaunchAttributeID -> its 64 bytes.
    kernel_attributes: cudaFuncAttribute -> the value last set. dynamic_shared in bytes; stream is the handle passed.
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    stream: int
    launch_attributes: dict[int, bytes]
    kernel_attributes: dict[int, int]
    parameters: tuple[bytes, ...]


class HostFunction:
    """A host function, loaded. `call` it with packed arguments; each call gives the launches that it made.

    host_object: the DSL's object file. prefix: the function prefix it was made with. cubin: the kernels' bytes; the
    object must carry the same ones. sizes: by kernel symbol, the bytes of each parameter, in order.
    """

    def __init__(self, host_object: bytes, prefix: str, cubin: bytes, sizes: Mapping[str, Sequence[int]]) -> None:
        self._cubin = cubin
        self._sizes = dict(sizes)
        self._sm_count = 0
        self._symbols: dict[int, str] = {}  # of the kernels asked for, by handle
        self._kernel_attributes: dict[int, dict[int, int]] = {}
        self._launches: list[RecordedLaunch] = []
        self._failure: Exception | None = None
        self._callbacks = self._make_callbacks()  # referenced by the linked code: they live as long as this object
        file = parsed(host_object, "host object")
        self._refuse_unknown_symbols(file)
        self._engine = self._link(host_object)
        start = dsl.symbols_of(prefix)
        entries = [s.name for s in file.symbols if s.section and s.name.startswith(f"{start}{dsl.ENTRY}")]
        if len(entries) != 1:
            raise BuildError(
                f"host object: entry points {entries or 'none'}; there must be one; update fusekit for this DSL"
            )
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(self._address(entries[0]))
        self._library = ctypes.c_uint64(0)
        self._load(start)

    def call(self, arguments: Sequence[ctypes.Array[Any]], sm_count: int) -> tuple[RecordedLaunch, ...]:
        """Calls the function with `arguments`, one buffer each, on a device of `sm_count` multiprocessors."""
        self._sm_count = sm_count
        self._launches.clear()
        result = ctypes.c_int32(0)
        addresses = [ctypes.addressof(argument) for argument in arguments] + [ctypes.addressof(result)]
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._entry(ctypes.addressof(array), len(addresses))
        self._raise_failure()
        if result.value:
            raise BuildError(f"the DSL's host function returned CUDA error {result.value} on the recording driver")
        return tuple(self._launches)

    def _load(self, start: str) -> None:
        slot = ctypes.c_void_p(ctypes.addressof(self._library))
        result, device = ctypes.c_int32(0), ctypes.c_int32(0)
        addresses = ctypes.addressof(slot), ctypes.addressof(device), ctypes.addressof(result)
        for name, array in (
            ("cuda_init", (ctypes.c_void_p * 2)(addresses[0], addresses[2])),
            ("cuda_load_to_device", (ctypes.c_void_p * 3)(*addresses)),
        ):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address(start + name))(ctypes.addressof(array))
            self._raise_failure()
            if result.value:
                raise BuildError(f"the DSL's {name} returned CUDA error {result.value} on the recording driver")

    def _link(self, host_object: bytes) -> Any:
        try:
            import llvmlite.binding as llvm
        except ImportError as error:
            raise ToolchainError(
                f"llvmlite cannot be imported ({error}); the proof needs it; {install('build')}"
            ) from error
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # Symbols are process-wide in LLVM; they are bound for good when the object is finalised, a few lines below.
        for name, callback in self._callbacks.items():
            llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
        machine = llvm.Target.from_default_triple().create_target_machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(host_object))
        engine.finalize_object()
        return engine

    def _address(self, name: str) -> int:
        address: int = self._engine.get_function_address(name)
        if not address:
            raise BuildError(f"host object: no function {name}; this fusekit does not know the DSL that made it")
        return address

    def _refuse_unknown_symbols(self, file: elf.Elf) -> None:
        undefined = {s.name for s in file.symbols if s.is_global and not s.section and s.name}
        unknown = undefined - set(self._callbacks) - _HARMLESS
        if unknown:
            raise BuildError(
                f"host object: needs {', '.join(sorted(unknown))}, which the recording driver does not have; keep host"
                " code to layouts, tensor maps and one launch"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _make_callbacks(self) -> dict[str, Any]:
        functions: dict[str, tuple[int, Callable[..., None]]] = {
            "_cudaLibraryLoadData": (8, self._library_load),
            "_cudaLibraryGetKernel": (3, self._library_get_kernel),
            "_cudaGetDevice": (1, lambda out: _store_i32(out, 0)),
            "_cudaDeviceGetAttribute": (3, self._device_attribute),
            "_cudaFuncSetAttribute": (3, self._set_attribute),
            "_cudaKernelSetAttributeForDevice": (4, self._set_attribute),
            "_cuKernelGetAttribute": (4, self._get_attribute),
            "_cudaLaunchKernelEx": (3, self._launch),
            "_cuTensorMapEncodeTiled": (12, _encode),
            "cuda_dialect_assert_success": (1, _assert_success),
            "printf": (1, lambda _: None),  # no launch depends on a message
        }
        return {name: self._callback(count, function) for name, (count, function) in functions.items()}

    def _callback(self, count: int, function: Callable[..., None]) -> Any:
        def guarded(*arguments: int) -> int:
            # An exception cannot cross the compiled code: it is kept, the code sees an error, `call` raises it.
            try:
                function(*arguments)
            except Exception as error:
                self._failure = self._failure or error
                return _INVALID_VALUE
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *([ctypes.c_uint64] * count))(guarded)

    def _library_load(self, out: int, code: int, *_: int) -> None:
        if self._cubin not in ctypes.string_at(code, _image_bytes(code, len(self._cubin))):
            raise BuildError("the DSL's host function loads another cubin than the one compiled; compile again")
        _store_u64(out, _LIBRARY)

    def _library_get_kernel(self, out: int, library: int, name: int) -> None:
        if library != _LIBRARY:
            raise BuildError(f"the DSL's host function asks library {library:#x} for a kernel, which was never loaded")
        symbol = ctypes.string_at(name).decode()
        handle = next((handle for handle, known in self._symbols.items() if known == symbol), None)
        if handle is None:
            handle = _KERNEL + len(self._symbols)
            self._symbols[handle] = symbol
        _store_u64(out, handle)

    def _device_attribute(self, out: int, attribute: int, _device: int) -> None:
        attribute &= 0xFFFFFFFF
        if attribute == _MULTIPROCESSOR_COUNT and self._sm_count:
            _store_i32(out, self._sm_count)
        elif attribute in _DEVICE_ATTRIBUTES:
            _store_i32(out, _DEVICE_ATTRIBUTES[attribute])
        else:
            raise BuildError(
                f"the DSL's host function asks for device attribute {attribute}; a launch record cannot express it"
            )

    def _set_attribute(self, kernel: int, attribute: int, value: int, *_: int) -> None:
        self._kernel_attributes.setdefault(kernel, {})[attribute & 0xFFFFFFFF] = ctypes.c_int32(
            value & 0xFFFFFFFF
        ).value

    def _get_attribute(self, out: int, attribute: int, _kernel: int, _device: int) -> None:
        if attribute & 0xFFFFFFFF != _KERNEL_SHARED_BYTES:
            raise BuildError(
                f"the DSL's host function asks for kernel attribute {attribute & 0xFFFFFFFF}, which is not known here"
            )
        _store_i32(out, 0)

    def _launch(self, config: int, kernel: int, parameters: int) -> None:
        symbol = self._symbols.get(kernel)
        if symbol is None:
            raise BuildError(f"the DSL's host function launches kernel {kernel:#x}, which it never asked for")
        *extents, shared, stream, attributes, count = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
        values: dict[int, bytes] = {}
        for index in range(count):
            raw = ctypes.string_at(attributes + index * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
            values[int.from_bytes(raw[:4], "little")] = raw[_VALUE_AT:]
        if symbol not in self._sizes:
            raise BuildError(f"the DSL's host function launches {symbol}, which is no kernel of the launch record")
        sizes = self._sizes[symbol]
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        launch = RecordedLaunch(
            symbol=symbol,
            grid=(extents[0], extents[1], extents[2]),
            block=(extents[3], extents[4], extents[5]),
            dynamic_shared=shared,
            stream=stream,
            launch_attributes=values,
            kernel_attributes=dict(self._kernel_attributes.get(kernel, {})),
            parameters=tuple(ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)),
        )
        self._launches.append(launch)


def _image_bytes(code: int, cubin_bytes: int) -> int:
    """Bytes of the image at `code`: a fat binary has its own size, anything else is taken for the cubin."""
    magic, header, payload = _FATBIN.unpack(ctypes.string_at(code, _FATBIN.size))
    return header + payload if magic == _FATBIN_MAGIC else cubin_bytes


def _encode(out: int, dtype: int, rank: int, address: int, *rest: int) -> None:
    """As the driver: what it refuses, `encode` refuses in words."""
    dims, strides, box, steps, *modes = rest
    rank &= 0xFFFFFFFF
    arrays = [
        tuple((kind * count).from_address(at)) if count else ()
        for kind, count, at in (
            (ctypes.c_uint64, rank, dims), (ctypes.c_uint64, rank - 1, strides), (ctypes.c_uint32, rank, box),
            (ctypes.c_uint32, rank, steps),
        )
    ]  # fmt: skip
    fields: dict[str, Any] = dict(zip(("dims", "strides", "box", "element_strides"), arrays, strict=True))
    fields |= encoder_modes(*(mode & 0xFFFFFFFF for mode in (dtype, *modes)))
    encoded = encode(TensorMap(address=address, **fields))
    ctypes.memmove(out, encoded, len(encoded))


def _assert_success(error: int) -> None:
    if error & 0xFFFFFFFF:
        raise BuildError(f"the DSL's host function stops at CUDA error {error & 0xFFFFFFFF}")


def _store_i32(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _store_u64(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value
