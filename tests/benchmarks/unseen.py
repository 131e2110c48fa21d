"""What shapes cost the host that were not seen before: a kernel's calls, and a layer's passes at random token counts.

    fusekit --store STORE build tests/benchmarks/module_host.toml          on any machine
    FUSEKIT_STORE=STORE python tests/benchmarks/run.py unseen [--count 700] [--stand-in]

Prints JSON; times are medians in microseconds. `kernel`: a call of the layer's fc2 at `known` rows; at `count` other
numbers of rows, each for the first time (`first`); the last 100 of those (`late`), and the first 100 once more, which
are no longer kept by then where `count` is large (`again`). `forward`, `backward`: a layer's passes at `known` tokens,
at half as many with tensors, kept and scratch memory elsewhere each time (`moved`), and at `count` other numbers of
tokens in random order, each for the first time (`first`). `equal`: the first forward pass of each of 48
more layers of the same spec. `memory`: how many kernels were loaded, and the bytes of their code.
`--stand-in`: see module_host.
"""

import argparse
import json
import random
import statistics
import sys
import time
from functools import partial

import torch

from .module_host import stand_in

MOST, EQUAL, LATE = 4096, 48, 100
BF16 = torch.bfloat16


def median(call, values, wait, before=lambda value: None):
    """Microseconds of the host for one `call(value)`, after `before(value)`; the device is idle before each."""
    times = []
    for value in values:
        before(value)
        wait()
        begin = time.perf_counter()
        call(value)
        times.append(time.perf_counter() - begin)
    wait()
    return round(1e6 * statistics.median(times), 1)


def kernel_costs(library, layer, count, new, wait, stream):
    """Calls of fc2 at many numbers of rows."""
    options, rows = layer.options, random.sample(range(1, MOST), count)
    experts, hidden, inner = options.experts, options.hidden, options.intermediate
    kernel = library.load(layer.kernel_name("fc2", MOST))
    x, y = torch.randn(MOST, inner, dtype=BF16, **new), torch.empty(MOST, hidden, dtype=BF16, **new)
    w = torch.randn(experts, hidden, inner, dtype=BF16, **new)
    offsets = torch.zeros(experts, dtype=torch.int32, **new)  # ends: all groups are empty

    def call(count):
        kernel(x=x[:count], w=w, offsets=offsets, y=y[:count], stream=stream)

    call(MOST)
    known = median(call, [MOST] * 300, wait)
    first = median(call, rows[:-LATE], wait)
    late, again = median(call, rows[-LATE:], wait), median(call, rows[:LATE], wait)
    return {"known": known, "first": first, "late": late, "again": again}


def layer_costs(layers, count, new, wait, stream):
    """Passes of the first layer at many token counts, and the first ones of the others."""
    layer, tokens = layers[0], random.sample(range(1, MOST), count)
    extents = lambda buffer: (MOST, *buffer.shape[1:]) if buffer.shape[0] == "T" else buffer.shape  # noqa: E731
    given = {
        name: torch.randn(extents(buffer), **new).mul(0.02).to(BF16) for name, buffer in layer.inputs("forward").items()
    }
    sizes = layer.sizes(MOST)
    kept, scratch = (torch.empty(size, dtype=torch.uint8, **new) for size in (sizes.kept, sizes.scratch))
    y, dy = torch.empty_like(given["x"]), torch.randn_like(given["x"])
    outputs = {
        name: torch.empty(extents(buffer), dtype=BF16, **new) for name, buffer in layer.outputs("backward").items()
    }
    read = [name for name in layer.inputs("backward") if name in given]

    def forward(count, at=0, of=layer):
        memory, cut = {"kept": kept[256 * at :], "scratch": scratch[256 * at :]}, slice(at, at + count)
        of.forward(**{**given, "x": given["x"][cut]}, y=y[cut], **memory, stream=stream)

    def backward(count, at=0):
        memory, cut = {"kept": kept[256 * at :], "scratch": scratch[256 * at :]}, slice(at, at + count)
        tensors = {name: given[name][cut] if name == "x" else given[name] for name in read}
        gradients = {**outputs, "dx": outputs["dx"][cut]}
        layer.backward(dy=dy[cut], **tensors, **gradients, **memory, stream=stream)

    costs = {}
    # A backward pass reads what the forward pass of as many tokens has kept.
    for name, call, before in (("forward", forward, lambda count, at=0: None), ("backward", backward, forward)):
        before(MOST)
        call(MOST)
        known = median(call, [MOST] * 100, wait, before)
        moved = median(partial(call, MOST // 2), range(1, 300), wait, partial(before, MOST // 2))
        costs[name] = {"known": known, "moved": moved, "first": median(call, tokens, wait, before)}
    return costs | {"equal": median(lambda other: forward(MOST, of=other), layers[1:], wait)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=700)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.stand_in else "cuda"
    wait = (lambda: None) if options.stand_in else torch.cuda.synchronize
    random.seed(0)

    import fusekit
    from fusekit.config import Config

    library = stand_in(Config.from_environment()) if options.stand_in else fusekit.open_library()
    layers = [library.layer("module_host/moe") for _ in range(1 + EQUAL)]
    new, stream = {"device": device}, 4096 if options.stand_in else torch.cuda.current_stream().cuda_stream
    costs = {"device": "stand-in driver" if options.stand_in else torch.cuda.get_device_name(), "count": options.count}
    costs |= layer_costs(layers, options.count, new, wait, stream)
    costs["kernel"] = kernel_costs(library, layers[0], options.count, new, wait, stream)
    used = library.memory()
    costs["memory"] = {"kernels": len({use.kernel for use in used}), "code": sum(use.code for use in used)}
    json.dump(costs, sys.stdout)
