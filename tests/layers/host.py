"""A layer whose kernels are their formulas in float64, on host memory: everything else is the layer's own."""

import numpy as np

from fusekit.cpu import CpuLayer, array_of, host_tensor
from fusekit.layers.memory import Slice
from fusekit.reference import steps
from fusekit.runtime.recent import Recent
from tests.plan import layer_meaning
from tests.plan.test_layer_program import options

ALIGNMENT = 64  # of memory that XLA and PyTorch give on the CPU; set fusekit.layers.memory.ALIGNMENT to it


class HostLayer(CpuLayer):
    """The layer of `options`. passes: each one's name, tokens, and outputs asked for; launched: the parts that ran, in
    order, with their streams; in_place: that of each backward pass. What has an address is on "device" 0, and memory is
    aligned as that of a GPU.
    """

    on_cpu = False  # it takes streams
    _alignment = None

    def __init__(self, options):
        super().__init__(options)
        self._moving = Recent(128)
        self.passes, self.launched, self.loaded, self.margins, self.in_place = [], [], [], [], []

    def load(self, tokens=None, *, devices=()):
        self.loaded.append(tokens)
        self.prepared = list(devices)

    @property
    def _identity(self):
        return id(self), self.name

    def _call(self, which, kept, scratch, arguments, stream, cluster_margin=None, in_place=False, sm_count=None):
        kept, scratch, arguments = self._placed(which, kept, scratch, arguments)
        if scratch is not None:
            bytes_of(scratch)[...] = 0xFF
        if kept is not None and which == "forward":
            bytes_of(kept)[...] = 0  # those between its buffers, so that PyTorch's checks can compare the whole
        given = {name for name, tensor in arguments.items() if tensor is not None}
        lead = {"backward": "dy", "quantise": None}.get(which, "x")
        tokens = arguments[lead].shape[0] if lead else 0
        self.passes.append((which, tokens, frozenset(given & self.outputs(which).keys())))
        self.margins.append((which, cluster_margin))
        if which == "backward":
            self.in_place.append(in_place)
        super(CpuLayer, self)._call(which, kept, scratch, arguments, stream, cluster_margin, in_place, sm_count)

    def _kernel(self, part, dims):
        kernel = super()._kernel(part, dims)
        bind = kernel.bind
        kernel.bind = lambda **given: Launched(self, part, bind(**given))
        return kernel


class Launched:
    """A launch of a part of a `HostLayer`, which notes it."""

    def __init__(self, layer, part, launch):
        self.layer, self.part, self.launch = layer, part, launch
        self.place = launch.place

    @property
    def addresses(self):
        return self.launch.addresses

    def __call__(self, stream):
        self.launch(stream)
        self.layer.launched.append((self.part, stream))


def moved(given, addresses):
    """Tensors of these shapes at other addresses."""
    return {
        name: Slice(address, tensor.shape, tensor.dtype, tensor.device, tensor.stride())
        for (name, tensor), address in zip(given.items(), addresses, strict=True)
    }


def host(**said):
    """That of `options`; in float32 by default."""
    return HostLayer(options(**{"dtype": "f32", **said}))


def compute(keys, tensors, dims, change=lambda outputs: None):
    """What the kernel with the table `keys` writes into its tensors. change: given the results by name, unrounded."""
    with np.errstate(all="ignore"):  # of memory that nothing has written yet
        given = {name: taken(tensor) for name, tensor in tensors.items()}
        outputs = layer_meaning.OPERATIONS[keys["op"]](keys, given, dims)
        change(outputs)
        for name, values in outputs.items():
            if name in tensors and values is not None:
                added = keys.get("accumulate") and name in ("dw", "dbias")
                put(tensors[name], values + given[name] if added else values)


def put(tensor, values):
    """Writes float64 or int64 into the tensor, rounded."""
    array_of(tensor)[...] = steps.rounded(values, tensor.dtype)


def taken(tensor):
    """The tensor in float64 or int64."""
    return steps.wide(array_of(tensor), tensor.dtype)


def bytes_of(tensor):
    return array_of(Slice(tensor.data_ptr(), (array_of(tensor).nbytes,), "u8", 0))


def placed(tensor):
    """A tensor of PyTorch on the CPU as one of "device" 0; what is of a device stays."""
    return host_tensor(tensor, "tensor", False)
