"""A layer whose kernels are their formulas, on host memory: everything else is the layer's own."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from fusekit.dtypes import DTYPES
from fusekit.layers import Layer
from fusekit.plan.layer import program
from tests.plan import layer_meaning


class HostLayer(Layer):
    """The layer of `options`; `launched` are the parts that ran, in order, with their streams."""

    def __init__(self, options):
        self.name, self.options, self.program = "layers/moe", options, program(options)
        self._library = SimpleNamespace(devices=SimpleNamespace(driver=None, current=lambda: 0))
        self._plans, self.launched, self.loaded = {}, [], []

    def load(self, tokens=None):
        self.loaded.append(tokens)

    def _kernel(self, part, dims):
        keys = self.program.parts[part]
        written = {
            name for steps in self.program.steps.values() for step in steps if step.part == part for name in step.writes
        }

        def run(*, stream, **given):
            arrays = {name: array(tensor) for name, tensor in given.items()}
            with np.errstate(all="ignore"):  # of memory that nothing has written yet
                wide = {
                    name: each.astype(np.int64 if each.dtype.kind == "i" else np.float64)
                    for name, each in arrays.items()
                }
                made = layer_meaning.OPERATIONS[keys["op"]](keys, wide, dims)
                for name in written & arrays.keys():
                    arrays[name][...] = made[name]
            self.launched.append((part, stream))

        return run


def array(tensor):
    """The tensor's memory as an array."""
    dtype = np.dtype({"bf16": ml_dtypes.bfloat16}.get(tensor.dtype, DTYPES[tensor.dtype].framework))
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    if not size:
        return np.empty(tensor.shape, dtype)
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(tensor.shape)
