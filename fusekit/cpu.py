"""Layers on the CPU: each launch is its definition, on tensors of PyTorch, NumPy or JAX in host memory.

    layer = fusekit.open_library().layer("qwen3-30b-a3b/moe", device="cpu")
    layer.forward(x=x, router=router, w1=w1, w2=w2, y=y, scratch=scratch)

For tests of a model on a machine without a GPU: products are in float64, and each buffer is rounded as the kernels
round it. Checks of arguments and memory are those on a GPU.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, NotBuiltError, UsageError, install, some
from fusekit.layers import Layer, LayerOptions, record_of
from fusekit.layers.arguments import token_count
from fusekit.layers.memory import Slice
from fusekit.plan.arch import DEFAULT
from fusekit.plan.layer import Options, program
from fusekit.plan.layer.record import unproved
from fusekit.runtime.recent import Recent
from fusekit.runtime.streams import stream_handle

if TYPE_CHECKING:
    from fusekit.layers.passes import Pass
    from fusekit.library import Library

try:
    import numpy as np

    from fusekit.reference import layer as definition
    from fusekit.reference.formats import held
    from fusekit.reference.steps import compute
except ImportError as error:
    raise UsageError(f"layers on the CPU need NumPy ({error}); {install('check')}") from error

ALIGNMENT = 16  # bytes, as NumPy aligns arrays
_BF16 = "V2"  # bf16 among NumPy's types: two opaque bytes
_KEPT = 64


def cpu_layer(library: Library, name: str) -> CpuLayer:
    """The layer `name` on the CPU: of a spec file `FILE.toml/NAME`, of the store, or of the packaged spec files.

    Raises UsageError if none of them has the layer, or NumPy is missing; ArgumentError for a layer over ranks.
    """
    options = None
    if ".toml" not in name:
        try:
            options = Options(**record_of(library.store, name).options)
        except NotBuiltError:
            pass
        except TypeError as error:
            raise UsageError(
                f"{name} was built by another version of fusekit, whose definition this one does not know: {error};"
                " build it again with this one"
            ) from None
    options = options or _of_spec(name)
    if options.ranks > 1:
        raise ArgumentError(
            f"{name} is over {options.ranks} ranks, and a layer on the CPU is of one process; set ranks = 1 in its"
            " table for tests, or open it on GPUs",
            argument="device",
        )
    _announce()
    return CpuLayer(options)


def _of_spec(name: str) -> Options:
    """The options in the table of a spec file. Raises UsageError, SpecError."""
    from fusekit.spec.catalog import specs_of, targets

    specs = specs_of(targets((name,), archs=(DEFAULT.name,)))  # an architecture changes no definition
    options: list[Options] = [layer for spec in specs if (layer := getattr(spec, "layer", None)) is not None]
    layers = {f"{layer.file}/{layer.name}": layer for layer in options}
    if len(layers) == 1:
        return options[0]
    if layers:
        raise UsageError(f"'{name}' is several layers: {some([*layers])}; name one")
    raise UsageError(f"'{name}' is a kernel, and not a layer; on the CPU there are layers alone")


def defined(options: Options, x: Any, tensors: Mapping[str, Any]) -> Any:
    """y [T, H] of a layer by its definition, in float64 without any rounding. x, tensors: arrays of NumPy, as the
    layer's options have them.
    """
    if options.b_major == "n":
        tensors = {name: each.swapaxes(-1, -2) if name in ("w1", "w2") else each for name, each in tensors.items()}
    return definition.forward(definition.Layer.of(options), x, tensors)[0]


@cache
def _announce() -> None:
    """Warns, once in a process."""
    text = 'layers with device="cpu" compute their definition in float64: for tests, and slow'
    warnings.warn(text, RuntimeWarning, stacklevel=4)


class CpuLayer(Layer):
    """The layer of `options`, whose launches compute their definition. It has no kernels, and ignores streams."""

    on_cpu = True
    _shares = False
    _compiles = False
    _alignment = ALIGNMENT

    def __init__(self, options: Options) -> None:
        self.record = unproved(options, DEFAULT.name, lambda part, tokens: part)
        self.name, self.options = self.record.name, LayerOptions(self.record.options)
        self._parts = program(options).parts
        devices = SimpleNamespace(driver=SimpleNamespace(annotate=None), current=lambda: 0)
        self._library: Any = SimpleNamespace(devices=devices)
        self._kernels: Any = SimpleNamespace(plans=Recent(_KEPT))
        self._device = None
        self._moving = Recent(_KEPT)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return "cpu", self.record.key

    def load(self, tokens: int | None = None, *, devices: Iterable[int] = ()) -> None:
        """Checks `tokens`: there is nothing to load."""
        if tokens is not None:
            token_count(self.options, tokens)

    def kernel_name(self, part: str, tokens: int) -> str:
        """Raises ArgumentError: there are no kernels on the CPU."""
        raise ArgumentError(f'{self.name} has no kernels: it was opened with device="cpu"; open it without')

    def set_variant(self, part: str, variant: str) -> None:
        """Raises ArgumentError."""
        self.kernel_name(part, 0)

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False, sm_count: int | None = None,
    ) -> None:  # fmt: skip
        stream_handle(stream)
        given = self._placed(which, kept, scratch, arguments)
        super()._call(which, *given, 0, cluster_margin, in_place, sm_count)

    def _bind(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], cluster_margin: int | None = None,
        in_place: bool = False, sm_count: int | None = None,
    ) -> Pass:  # fmt: skip
        given = self._placed(which, kept, scratch, arguments)
        return super()._bind(which, *given, cluster_margin, in_place, sm_count)

    def _placed(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        written = self.arguments(which)[1].keys()
        tensors = {name: host_tensor(tensor, name, name in written) for name, tensor in arguments.items()}
        return host_tensor(kept, "kept", True), host_tensor(scratch, "scratch", True), tensors

    def _refuse_capture(self, which: str, arguments: Mapping[str, Any], stream: int) -> None:
        """There is nothing to load, and nothing captures."""

    def _kernel(self, part: str, dims: Mapping[str, int]) -> Any:
        keys = self._parts[part]
        return SimpleNamespace(name=f"{self.name}.{part}", bind=lambda **given: Formula(keys, dims, given))


class Formula:
    """A launch of a part of a `CpuLayer`, as a bound kernel's. keys: the part's table."""

    def __init__(self, keys: Mapping[str, Any], dims: Mapping[str, int], given: dict[str, Any]) -> None:
        for setting in ("cluster_margin", "sm_count"):  # of a GPU
            given.pop(setting, None)
        self._keys, self._dims, self._given = keys, dims, given

    @property
    def addresses(self) -> dict[str, int]:
        """The tensors' addresses by argument."""
        return {name: tensor.data_ptr() for name, tensor in self._given.items()}

    def place(self, addresses: Iterable[int]) -> None:
        """Moves the tensors."""
        self._given = {
            name: Slice(address, tensor.shape, tensor.dtype, tensor.device, tensor.stride())
            for (name, tensor), address in zip(self._given.items(), addresses, strict=True)
        }

    def __call__(self, stream: int) -> None:
        arrays = {name: array_of(tensor) for name, tensor in self._given.items()}
        compute(self._keys, arrays, {name: _dtype(tensor) for name, tensor in self._given.items()}, self._dims)


class HostTensor(Slice):
    """A tensor in host memory, which it keeps alive, as one of "device" 0."""

    __slots__ = ("base",)

    def __init__(self, base: Any, *slice_: Any) -> None:
        super().__init__(*slice_)
        self.base = base


def host_tensor(tensor: Any, name: str, written: bool) -> Any:
    """A tensor of PyTorch, NumPy or JAX as launches read it; a `Slice` and None stay. Raises ArgumentError."""
    if tensor is None or isinstance(tensor, Slice):
        return tensor
    device = getattr(tensor, "device", None)
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
        if getattr(device, "type", None) != "cpu":
            raise _elsewhere(name, device)
        return HostTensor(tensor, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, 0, tuple(tensor.stride()))
    if not hasattr(tensor, "__array_interface__") and getattr(device, "platform", "") != "cpu":
        if hasattr(tensor, "__cuda_array_interface__") or hasattr(tensor, "__dlpack_device__"):
            raise _elsewhere(name, device)
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__}; it must be a tensor of PyTorch, or an array of NumPy or JAX, in host"
            " memory",
            argument=name,
        )
    array = np.asarray(tensor)
    if written and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only, and the layer writes to it; give a writable array", argument=name)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        raise ArgumentError(
            f"{name} has strides of {array.strides} bytes; give np.ascontiguousarray({name})", argument=name
        )
    strides = tuple(stride // array.itemsize for stride in array.strides)
    dtype = "bf16" if array.dtype.str[1:] == _BF16 else array.dtype.name
    return HostTensor(array, array.ctypes.data, array.shape, dtype, 0, strides)


def _elsewhere(name: str, device: Any) -> ArgumentError:
    return ArgumentError(
        f'{name} is on {device}; the layer was opened with device="cpu", and takes tensors in host memory; open it'
        " without for those of a GPU",
        argument=name,
    )


def _dtype(tensor: Any) -> str:
    from fusekit.runtime.tensors import describe

    return describe((tensor.dtype, tensor.shape, tensor.stride(), tensor.device), "tensor").dtype


def array_of(tensor: Any) -> Any:
    """The memory of a tensor, as `fusekit.reference` holds its type."""
    dtype = held(_dtype(tensor))
    shape, strides = tensor.shape, tensor.stride()
    if not prod(shape):
        return np.empty(shape, dtype)
    span = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.ndarray(shape, dtype, memory, strides=[stride * dtype.itemsize for stride in strides])
