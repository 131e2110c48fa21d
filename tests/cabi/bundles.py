"""Bundles of kernels made for the tests, and the C loader over them, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from fusekit.abi import PeersArgument, TensorArgument, evaluate
from fusekit.cabi import Exported
from fusekit.dtypes import DTYPES
from fusekit.share.loader import export_bundle
from fusekit.share.selection import select
from fusekit.store import Entry, NameRecord, Store, key_fields, key_of
from fusekit.store.keys import sha256

from .launcher import OK, Error
from .recorder import Recorder


def entry_of(kernel: Exported, launch: Mapping[str, Any] | None = None, cubin: bytes | None = None) -> Entry:
    """What a build would say of `kernel`. launch: another launch record than its own, as JSON; cubin: another one."""
    arch, cubin = kernel.record.arch, kernel.cubin if cubin is None else cubin
    fields = key_fields(
        device_spec={"kernel": kernel.name, "arch": arch},
        arch=arch,
        toolchain={"nvidia-cutlass-dsl": "4.8.1"},
        options=f"--gpu-arch={arch} with é and 𝄞",
        sources={"kernels/gemm.py": sha256(b"source")},
    )
    return Entry(
        key=key_of(fields), fields=fields, cubin_sha256=sha256(cubin), cubin_bytes=len(cubin),
        launch=kernel.record.to_json() if launch is None else launch, resources={"registers": 168},
        proof={"launches": 8}, toolchain={"nvidia-cutlass-dsl": "4.8.1"}, seconds=1.5,
    )  # fmt: skip


def name_of(kernel: Exported, entry: Entry) -> NameRecord:
    return NameRecord(kernel.name, kernel.record.arch, entry.key, {"op": "grouped-gemm"}, kernel.defaults)


def publish(store: Store, kernel: Exported) -> None:
    """`kernel` as a build would publish it."""
    entry = entry_of(kernel)
    store.publish(entry, kernel.cubin)
    store.publish_name(name_of(kernel, entry))


def bundle_of(folder: Path, kernels: Sequence[Exported]) -> Path:
    """A bundle of these kernels, through a store in `folder`."""
    store = Store(folder / "store")
    for kernel in kernels:
        publish(store, kernel)
    export_bundle(store, select(store), folder / "kernels.tar")
    return folder / "kernels.tar"


class Tensor(Structure):
    _fields_ = (
        ("name", c_char_p), ("data", c_void_p), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
        ("rank", c_int), ("dtype", c_int),
    )  # fmt: skip


class Scalar(Structure):
    _fields_ = (("name", c_char_p), ("value", c_double))


class Arguments(Structure):
    _fields_ = (
        ("tensors", POINTER(Tensor)), ("scalars", POINTER(Scalar)), ("tensor_count", c_int), ("scalar_count", c_int),
        ("has_cluster_margin", c_int32), ("cluster_margin", c_int32), ("has_priority", c_int32), ("priority", c_int32),
    )  # fmt: skip


class Argument(Structure):
    _fields_ = (
        ("name", c_char_p), ("dtype", c_int), ("rank", c_int), ("written", c_int), ("alignment", c_int),
        ("has_default", c_int), ("default_value", c_double),
    )  # fmt: skip


def tensor(name: str, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    extents = (c_int64 * max(len(shape), 1))(*shape)
    steps = None if strides is None else (c_int64 * max(len(strides), 1))(*strides)
    return Tensor(name.encode(), address, extents, steps, len(shape), DTYPES[dtype].number)


def arguments(tensors: Sequence[Tensor], scalars: Mapping[str, float] | None = None, **extra: int) -> Arguments:
    given = [Scalar(name.encode(), value) for name, value in (scalars or {}).items()]
    passed = Arguments((Tensor * max(len(tensors), 1))(*tensors), (Scalar * max(len(given), 1))(*given), len(tensors),
                     len(given))  # fmt: skip
    for name, value in extra.items():
        setattr(passed, name, value)
    return passed


class Loader:
    """The functions of an exported loader."""

    def __init__(self, shared: Path, prefix: str = "demo") -> None:
        self._library = ctypes.CDLL(str(shared))
        self._prefix = prefix
        self.error = Error()

    def function(self, name: str, *types: Any, result: Any = c_int) -> Any:
        actual = getattr(self._library, f"{self._prefix}_{name}")
        actual.argtypes, actual.restype = types, result
        return actual

    def open(self, source: Path | bytes) -> tuple[int, c_void_p]:
        """Status and bundle; a file by its path, memory by its bytes."""
        bundle = c_void_p()
        if isinstance(source, bytes):
            call = self.function("bundle_open_bytes", c_char_p, c_size_t, POINTER(c_void_p), POINTER(Error))
            return call(source, len(source), byref(bundle), byref(self.error)), bundle
        call = self.function("bundle_open", c_char_p, POINTER(c_void_p), POINTER(Error))
        return call(str(source).encode(), byref(bundle), byref(self.error)), bundle

    def verify(self, bundle: c_void_p) -> int:
        status: int = self.function("bundle_verify", c_void_p, POINTER(Error))(bundle, byref(self.error))
        return status

    def names(self, bundle: c_void_p) -> list[tuple[str, str]]:
        texts = [self.function(f"bundle_{what}", c_void_p, c_size_t, result=c_char_p) for what in ("name", "arch")]
        count = self.function("bundle_count", c_void_p, result=c_size_t)(bundle)
        assert texts[0](bundle, count) is None
        return [tuple(text(bundle, index).decode() for text in texts) for index in range(count)]  # type: ignore[misc]

    def digest(self, bundle: c_void_p) -> str:
        result: bytes = self.function("bundle_digest", c_void_p, result=c_char_p)(bundle)
        return result.decode()

    def close(self, bundle: c_void_p) -> None:
        self.function("bundle_close", c_void_p, result=None)(bundle)


class BundleLauncher:
    """One kernel of a bundle over a `Recorder`: what `Launcher` is for an export."""

    def __init__(
        self, shared: Path, bundle: Path | bytes, kernel: Exported, prefix: str = "demo",
        recorder: Recorder | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        self.record = kernel.record
        self.recorder = Recorder(self.record) if recorder is None else recorder
        self.loader = Loader(shared, prefix)
        self.error = self.loader.error
        self.function = self.loader.function
        self.name = kernel.name if name is None else name
        self.bundle = bundle
        self.driver, self.kernel = c_void_p(), c_void_p()

    def load(self, device: int = 0) -> int:
        types = type(self.recorder.lookup), c_void_p, POINTER(c_void_p), POINTER(Error)
        opened = self.function("driver_open_with", *types)
        status: int = opened(self.recorder.lookup, None, byref(self.driver), byref(self.error))
        if status == OK:
            status, bundle = self.loader.open(self.bundle)
        if status == OK:
            types = c_void_p, c_void_p, c_char_p, c_int, POINTER(c_void_p), POINTER(Error)
            loaded = self.function("kernel_load", *types)
            status = loaded(self.driver, bundle, self.name.encode(), device, byref(self.kernel), byref(self.error))
            self.loader.close(bundle)  # the kernel does not need it any more
        return status

    def arguments(self, values: Mapping[str, int], floats: Mapping[str, float], **extra: int) -> Arguments:
        """The call for an argument set of the proof: `values` by the names that expressions use."""
        tensors, scalars = [], dict(floats)
        for argument in self.record.arguments:
            if isinstance(argument, TensorArgument):
                shape = [evaluate(extent, values) for extent in argument.shape]
                strides = [values[argument.stride_variable(index)] for index in range(argument.rank)]
                tensors.append(
                    tensor(argument.name, values[f"{argument.name}.address"], argument.dtype, shape, strides)
                )
            elif isinstance(argument, PeersArgument):
                tensors += [
                    tensor(item.name, values[f"{item.name}.address"], "u8", [], []) for item in argument.tensors
                ]
            elif argument.name in values:
                scalars[argument.name] = values[argument.name]
        given = {"has_cluster_margin": 1, "cluster_margin": values.get("cluster_margin", 0), **extra}
        return arguments(tensors[::-1], scalars, **given)  # the order is the caller's

    def launch(self, args: Arguments, stream: int = 0, kernel: Any = None) -> int:
        call = self.function("kernel_launch", c_void_p, POINTER(Arguments), c_void_p, POINTER(Error))
        status: int = call(self.kernel if kernel is None else kernel, byref(args), stream, byref(self.error))
        return status

    def bind(self, args: Arguments) -> tuple[int, c_void_p]:
        call = self.function("kernel_bind", c_void_p, POINTER(Arguments), POINTER(c_void_p), POINTER(Error))
        bound = c_void_p()
        return call(self.kernel, byref(args), byref(bound), byref(self.error)), bound

    def run(self, bound: c_void_p, stream: int) -> int:
        status: int = self.function("launch_run", c_void_p, c_void_p, POINTER(Error))(bound, stream, byref(self.error))
        return status

    def free(self, bound: c_void_p) -> None:
        self.function("launch_free", c_void_p, result=None)(bound)

    def described(self) -> list[Argument]:
        """What the kernel says of its arguments."""
        call = self.function("kernel_argument", c_void_p, c_int, result=POINTER(Argument))
        result = []
        while argument := call(self.kernel, len(result)):
            result.append(argument.contents)
        return result

    def unload(self) -> int:
        status: int = self.function("kernel_unload", c_void_p, POINTER(Error))(self.kernel, byref(self.error))
        self.function("driver_close", c_void_p, result=None)(self.driver)
        return status
