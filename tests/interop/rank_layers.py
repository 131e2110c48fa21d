"""A layer without a GPU: each pass is run formula by formula in float64 on tensors of PyTorch, on the CPU."""

import threading
from types import SimpleNamespace

import numpy as np
import torch

from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.layers import Layer
from fusekit.layers.arguments import outputs_among
from fusekit.plan.layer import program
from fusekit.plan.layer.record import unproved
from tests.plan import layer_meaning, ranks_meaning
from tests.plan.test_layer_program import options

TORCH = {name: getattr(torch, DTYPES[name].framework) for name in ("bf16", "fp16", "f32", "i32", "u8", "e4m3")}


class StandIn(Layer):
    """A Layer whose kernels are NumPy; said: as for `options`. It counts its passes, and what each was asked for."""

    def __init__(self, **said):
        self.options = options(**{"dtype": "f32", **said})
        self.name = f"{self.options.file}/{self.options.name}"
        self.program = program(self.options)
        self.record = unproved(self.options, "sm_90a", lambda part, tokens: part, plan=self.program)
        self._library, self._device = self, None
        self.passes = []

    def dims(self, tokens):
        return self.program.dims(tokens)

    def _call(self, which, kept, scratch, arguments, stream, cluster_margin=None, in_place=False, sm_count=None):
        assert stream is None  # of a tensor on the CPU
        inputs, outputs = self.program.arguments(which)
        lead = {"backward": "dy", "quantise": None}.get(which, "x")
        tokens = arguments[lead].shape[0] if lead else 0
        dims = self.program.dims(tokens)
        asked = outputs_among(self, which, arguments)
        for name, tensor in arguments.items():
            buffer = inputs.get(name) or outputs[name]
            if tuple(tensor.shape) != buffer.extents(dims) or tensor.dtype != TORCH[buffer.dtype]:
                raise ArgumentError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {buffer}")
            assert tensor.is_contiguous(), name
        self.passes.append((which, tokens, frozenset(asked)))
        needed = self.program.scratch(which, asked, dims)[1]
        assert needed == 0 or scratch.numel() >= needed
        if scratch is not None:
            scratch.fill_(0xFF)
        given = {name: array(tensor) for name, tensor in arguments.items() if name in inputs}
        if which == "backward":
            given |= {name: array(part) for name, part in self.kept(kept, dims).items()}
        got = self.run(which, given, tokens, asked)
        for name in asked:
            sums = any(
                self.program.parts[step.part].get("accumulate") and step.writes.get("dw") == name
                for step in self.program.steps[which]
            )
            new = torch.from_numpy(np.array(got[name]))
            arguments[name].add_(new) if sums else arguments[name].copy_(new)
        if which == "forward":
            kept.zero_()  # the bytes between buffers, so that PyTorch's checks can compare the whole
            for name, part in self.kept(kept, dims).items():
                part.copy_(torch.from_numpy(np.array(got[name])))

    def run(self, which, given, tokens, asked):
        """Every buffer after a pass."""
        return layer_meaning.run(self.program, which, given, tokens, asked)

    def kept(self, memory, dims):
        """Each kept buffer as a tensor within `memory`."""
        places, size = self.program.kept(dims)
        assert memory.dtype == torch.uint8 and memory.numel() >= size
        got = {}
        for name, begin in places.items():
            buffer = self.program.buffers[name]
            size = DTYPES[buffer.dtype].bytes * int(np.prod(buffer.extents(dims)))
            got[name] = memory[begin : begin + size].view(TORCH[buffer.dtype]).reshape(buffer.extents(dims))
        return got


class RankedStandIn(StandIn):
    """That of a rank. All ranks are threads of this process, and wait for each other in every pass."""

    def __init__(self, rank, meeting, **said):
        super().__init__(**said)
        self.ranks, self.meeting = SimpleNamespace(rank=rank), meeting
        self.program = self.program.within(meeting.world.program.room)

    def run(self, which, given, tokens, asked):
        if which == "quantise":  # each rank for itself
            return super().run(which, given, tokens, asked)
        return self.meeting.run(self.ranks.rank, which, given, asked)


class Meeting:
    """Where the passes of all ranks are run: by the last one to come."""

    def __init__(self, options, tokens):
        layer_program = program(options).within(ranks_meaning.room(options, tokens))
        self.world = ranks_meaning.World(layer_program, options.ranks)
        self.barrier = threading.Barrier(options.ranks, timeout=30)
        self.given, self.found = [None] * options.ranks, None

    def run(self, rank, which, given, asked):
        self.given[rank] = given
        if self.barrier.wait() == 0:
            self.found = self.world.run(which, self.given, asked)
        self.barrier.wait()
        return self.found[rank]


def array(tensor):
    tensor = tensor.detach()
    return (tensor.long() if not tensor.is_floating_point() else tensor.double()).numpy().copy()
