"""A layer whose kernels are their formulas in float64, on host memory: everything else is the layer's own."""

import ctypes
from types import SimpleNamespace

import numpy as np

from fusekit.dtypes import DTYPES
from fusekit.layers import Layer
from fusekit.layers.memory import Slice
from fusekit.plan.layer import program
from fusekit.reference import codes, decode, encode, held
from fusekit.runtime.recent import Recent
from tests.plan import layer_meaning
from tests.plan.test_layer_program import options

ALIGNMENT = 64  # of memory that XLA and PyTorch give on the CPU; set fusekit.layers.memory.ALIGNMENT to it


class HostLayer(Layer):
    """The layer of `options`. passes: each one's name, tokens, and outputs asked for; launched: the parts that ran, in
    order, with their streams; in_place: that of each backward pass. It takes tensors of PyTorch on the CPU, and what
    else has an address on "device" 0.
    """

    def __init__(self, options):
        self.name, self.options, self.program = f"{options.file}/{options.name}", options, program(options)
        driver = SimpleNamespace(annotate=None)
        self._library = SimpleNamespace(devices=SimpleNamespace(driver=driver, current=lambda: 0))
        self._arch = self._device = None
        self._records = {}
        self._moving = Recent(128)
        self._kernels = SimpleNamespace(plans=Recent(64))
        self.passes, self.launched, self.loaded, self.margins, self.in_place = [], [], [], [], []

    def load(self, tokens=None, *, devices=()):
        self.loaded.append(tokens)
        self.prepared = list(devices)

    def _call(self, which, kept, scratch, arguments, stream, cluster_margin=None, in_place=False):
        arguments = {name: placed(tensor) for name, tensor in arguments.items()}
        kept, scratch = placed(kept), placed(scratch)
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
        super()._call(which, kept, scratch, arguments, stream, cluster_margin, in_place)

    def _refuse_capture(self, which, arguments, stream):
        """There is no driver to ask."""

    def _kernel(self, part, dims):
        return SimpleNamespace(bind=lambda **given: Launched(self, part, dims, given))


class Launched:
    """A launch of a part of a `HostLayer`, as a bound kernel's."""

    def __init__(self, layer, part, dims, given):
        given.pop("cluster_margin", None)
        self.layer, self.part, self.dims, self.given = layer, part, dims, given

    @property
    def addresses(self):
        return {name: tensor.data_ptr() for name, tensor in self.given.items()}

    def place(self, addresses):
        self.given = moved(self.given, addresses)

    def __call__(self, stream):
        compute(self.layer.program.parts[self.part], self.given, self.dims)
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
    arrays = {name: array(tensor) for name, tensor in tensors.items()}
    with np.errstate(all="ignore"):  # of memory that nothing has written yet
        given = {name: wide(each, tensors[name].dtype) for name, each in arrays.items()}
        outputs = layer_meaning.OPERATIONS[keys["op"]](keys, given, dims)
        change(outputs)
        for name, values in outputs.items():
            if name not in arrays or values is None:
                continue
            if keys.get("accumulate") and name in ("dw", "dbias"):
                values = values + given[name]
            put(tensors[name], values)


def put(tensor, values):
    """Writes float64 or int64 into the tensor, rounded."""
    dtype = tensor.dtype
    if dtype == "e4m3":
        array(tensor)[...] = codes.encode(values, dtype)
        return
    array(tensor)[...] = encode(values, dtype) if dtype in ("bf16", "fp16") else values.astype(held(dtype))


def taken(tensor):
    """The tensor in float64 or int64."""
    return wide(array(tensor), tensor.dtype)


def wide(values, dtype):
    """float64 or int64; of codes what they are worth without their scales."""
    if dtype == "e4m3":
        return codes.decode(values, dtype).astype(np.float64)
    values = decode(values, dtype) if dtype in ("bf16", "fp16") else values
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float64)


def array(tensor):
    """The tensor's memory, as NumPy holds it."""
    size = int(np.prod(tensor.shape)) * DTYPES[tensor.dtype].bytes
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else bytearray()
    return np.frombuffer(memory, held(tensor.dtype)).reshape(tensor.shape)


def bytes_of(tensor):
    return array(Slice(tensor.data_ptr(), (array(tensor).nbytes,), "u8", 0))


def placed(tensor):
    """A tensor of PyTorch on the CPU as one of "device" 0; what is of a device stays."""
    if tensor is None or isinstance(getattr(tensor, "device", None), int):
        return tensor
    assert tensor.is_contiguous(), tensor
    dtype = {DTYPES[name].framework: name for name in ("bf16", "fp16", "f32", "i32", "u8", "e4m3")}
    kind = str(tensor.dtype).rpartition(".")[2]
    return Slice(tensor.data_ptr(), tuple(tensor.shape), dtype.get(kind, kind), 0)
