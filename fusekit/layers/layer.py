"""A layer on a device: what its passes take, how much memory they need, and their launches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_pass import LayerBuffer
from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import ArgumentError
from fusekit.layers.arguments import gradient_names, token_count
from fusekit.layers.kernels import LayerKernels
from fusekit.layers.launching import MOVING_KEPT, Arguments, Launching
from fusekit.layers.options import LayerOptions
from fusekit.layers.passes import BACKWARD, FORWARD, INFERENCE, PASSES, QUANTISE, Pass, Sizes
from fusekit.runtime.devices import ordinal_of
from fusekit.runtime.recent import Recent

if TYPE_CHECKING:
    from fusekit.library import Library


class Layer(Launching):
    """The layer of a record in the store of `library`, for one architecture.

    `options` describe it, and `record` is what is launched. `inputs(pass)` and `outputs(pass)` are what the caller
    gives, with shapes in the dims "T" (tokens) and "M" (rows). A kernel is loaded when a pass first needs it. A layer
    with a recipe has a fourth pass, "quantise", which makes FP8 values of the weights for the others.
    """

    on_cpu = False
    _shares = True  # kernels and plans with equal layers
    _compiles = True

    def __init__(self, library: Library, record: LayerRecord, device: int | None = None) -> None:
        self.name, self._library, self.record = record.name, library, record
        self._device = None if device is None else ordinal_of(device)
        self.options = LayerOptions(record.options)
        self._kernels = LayerKernels(library, record, self._device)
        if self._shares:
            self._kernels = library.layer_kernels.setdefault(self._identity, self._kernels)
        self._moving, self._idle = Recent(MOVING_KEPT), {}

    def __repr__(self) -> str:
        return f"<Layer {self.name}: {len(self.record.parts)} kernels>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # a copy of a module launches the same kernels, into the same windows

    @property
    def _identity(self) -> tuple[Any, ...]:
        return id(self._library), self.record.key, self._device

    def inputs(self, which: str) -> dict[str, LayerBuffer]:
        """The inputs of a pass by name.

        Parameters
        ----------
        which : str
            "forward", "inference", "backward" or "quantise".

        Returns
        -------
        dict[str, LayerBuffer]
            Empty if the layer does not have the pass.

        Raises
        ------
        ArgumentError
            For another name.
        """
        return dict(self._arguments(which)[0])

    def outputs(self, which: str) -> dict[str, LayerBuffer]:
        """The outputs of a pass by name; see `inputs`."""
        return dict(self._arguments(which)[1])

    def _arguments(self, which: str) -> Arguments:
        if which not in PASSES:
            raise ArgumentError(f"there is no pass {which!r}; the passes are {', '.join(PASSES)}")
        return self.arguments(which)

    def sizes(self, tokens: int, gradients: Collection[str] | None = None, *, in_place: bool = False) -> Sizes:
        """The bytes of memory that passes need, for any choice of outputs. Loads nothing, and needs no GPU.

        Parameters
        ----------
        tokens : int
            The most tokens of a pass.
        gradients : collection of str, optional
            The outputs that every backward pass will be given, all contiguous. Less scratch memory is needed then,
            because outputs serve as scratch memory until they are written.
        in_place : bool
            As for `bind_backward`.

        Raises
        ------
        ArgumentError
        """
        count = token_count(self.options, tokens)
        asked = None if gradients is None else gradient_names(self, gradients)
        limits = self._limits()
        forward, inference = (self.record.most_scratch(which, count, limits=limits) for which in (FORWARD, INFERENCE))
        backward = self.record.most_scratch(BACKWARD, count, asked, in_place=in_place, limits=limits)
        dims = self.dims(count)
        fp8 = sum(buffer.bytes(dims) for buffer in self.outputs(QUANTISE).values())
        return Sizes(self.record.kept(dims)[1], forward, inference, backward, fp8_weights=fp8)

    def _limits(self) -> dict[str, int]:
        """Variables of the record besides T."""
        return {}

    def bind_forward(
        self, *, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None,
        sm_count: int | None = None, **arguments: Any,
    ) -> Pass:  # fmt: skip
        """Binds the forward pass to the caller's memory.

        Parameters
        ----------
        kept : tensor, optional
            Device memory of `sizes(tokens).kept` bytes, of any dtype, aligned to 128 bytes. Without it, the pass is
            the inference pass, which keeps nothing for a backward pass.
        scratch : tensor, optional
            Device memory of `sizes(tokens).forward` (or `inference`) bytes, likewise.
        cluster_margin : int, optional
            Clusters of SMs that each GEMM leaves to other kernels. Default: the spec's, which is 0.
        sm_count : int, optional
            The SMs that the grids of the GEMMs are made for. Default: those of the stream, which are all of the
            device's, or those of its green context.
        **arguments : tensor
            `inputs` and `outputs` by name, with their shapes and dtypes. An output may be left out.

        Returns
        -------
        Pass

        Raises
        ------
        ArgumentError
            Names the argument. Loading a kernel raises what `Library.load` raises.
        """
        which = FORWARD if kept is not None else INFERENCE
        return self._bind(which, kept, scratch, arguments, cluster_margin, sm_count=sm_count)

    def bind_backward(
        self, *, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None, in_place: bool = False,
        sm_count: int | None = None, **arguments: Any,
    ) -> Pass:  # fmt: skip
        """Binds the backward pass, which follows a forward pass with the same `kept`; see `bind_forward`.

        Parameters
        ----------
        kept, scratch, cluster_margin, sm_count
            As for `bind_forward`; `scratch` has `sizes(tokens).backward` bytes.
        in_place : bool
            Overwrite `kept`, such as z by dz, which saves scratch memory. Each forward pass then allows one backward
            pass.
        **arguments : tensor
            `inputs("backward")` and `outputs("backward")` by name. An output that is left out is not computed. An
            output that accumulates holds the sum so far.

        Returns
        -------
        Pass

        Raises
        ------
        ArgumentError
        """
        return self._bind(BACKWARD, kept, scratch, arguments, cluster_margin, in_place, sm_count)

    def bind_quantise(self, **arguments: Any) -> Pass:
        """Binds the pass that quantises the weights of a layer with a recipe: w1 to w1_q, w1_s, w1_t, w1_ts, and so on.

        Launch it after each change of the weights, such as a step of the optimiser. The other passes read its outputs.

        Parameters
        ----------
        **arguments : tensor
            `inputs("quantise")` and `outputs("quantise")` by name. A weight may be left out with all its outputs.

        Returns
        -------
        Pass

        Raises
        ------
        ArgumentError
        """
        return self._bind(QUANTISE, None, None, arguments)

    def quantise(self, *, stream: Any = None, **arguments: Any) -> None:
        """Queues the quantise pass on `stream`, without binding it first; otherwise as `bind_quantise`."""
        self._call(QUANTISE, None, None, arguments, stream)

    def forward(
        self, *, stream: Any = None, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None,
        sm_count: int | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Queues a forward pass on `stream`, without binding it first; otherwise as `bind_forward`."""
        which = FORWARD if kept is not None else INFERENCE
        self._call(which, kept, scratch, arguments, stream, cluster_margin, sm_count=sm_count)

    def backward(
        self, *, stream: Any = None, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None,
        in_place: bool = False, sm_count: int | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Queues a backward pass on `stream`, without binding it first; otherwise as `bind_backward`."""
        self._call(BACKWARD, kept, scratch, arguments, stream, cluster_margin, in_place, sm_count)

    def load(self, tokens: int | None = None, *, devices: Iterable[int] = ()) -> None:
        """Loads every kernel now: the first call would, and the capture of a CUDA graph cannot.

        Parameters
        ----------
        tokens : int, optional
            The tokens that variants are chosen for. Default: the spec's.
        devices : iterable of int
            Ordinals of further devices to load the kernels on. Otherwise the first launch there loads them.

        Raises
        ------
        ArgumentError
            Loading a kernel raises what `Library.load` raises.
        """
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise ArgumentError(f"devices = {devices!r}; it must be ordinals, such as [0, 1]", argument="devices")
        ordinals = [ordinal_of(device) for device in devices]
        for which in self.record.passes:
            count = self.options.tokens if tokens is None else token_count(self.options, tokens)
            plan = self._plan(which, count, set(self.outputs(which)))
            for device in ordinals:
                for _, kernel in plan.steps:
                    kernel.prepare(device)

    def current_device(self) -> int:
        """The ordinal of the device of this thread's current context; 0 without one."""
        return self._library.devices.current()

    def set_variant(self, part: str, variant: str) -> None:
        """Uses this variant of a part from now on, for any number of tokens. Bound passes stay as they are."""
        self._kernels = self._kernels.with_variant(part, variant)
        self._moving.clear()
        self._idle.clear()

    def kernel_name(self, part: str, tokens: int) -> str:
        """The full name of a part's kernel for so many tokens; "" where it is not launched. Raises ArgumentError."""
        if part not in self.record.parts:
            raise ArgumentError(f"{self.name} has no part {part!r}; its parts are {', '.join(self.record.parts)}")
        return self._kernels.name(part, self._chosen_for(token_count(self.options, tokens)))
