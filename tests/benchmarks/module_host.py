"""Host time of a call of the PyTorch module, and of a bound pass, at small numbers of tokens.

    fusekit --store STORE build tests/benchmarks/module_host.toml          on any machine
    FUSEKIT_STORE=STORE python tests/benchmarks/run.py module_host [--tokens 1 16 128] [--stand-in]

Prints JSON, microseconds, medians, for `inference`, `forward`, `backward`, and the last two together (`training`):
`bound`, the bound passes; `driver`, their launches and events by the driver alone; `ratio`, of the first to the second
(on a GPU, the goal is 1.15 at most), and `within`, how far the medians of the fifths of its pairs are from it;
`module`, of an inference and a training; and `bare`, the bound passes of a training in a torch.autograd.Function that
does nothing else but allocate the same tensors: what PyTorch itself costs. `first`: seconds from an imported PyTorch
with one matmul done to the end of a first forward and backward pass. `--stand-in` takes a driver that launches nothing
and tensors of the CPU, to compare two versions on a machine without a GPU.

The two of a ratio take turns in blocks of a few calls, on one processor, and the ratio is the median over pairs of
blocks that follow one another: a clock that changes, or another program, meets both.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

CALLS, ROUNDS = 40, 25  # calls between two waits for the device: fewer launches than its queue holds
BLOCK, PAIRS = 20, 150  # calls of a block, and pairs of blocks of a ratio


def stand_in(config):
    """A library on a driver that does nothing; the CPU's tensors count as those of device 0."""
    from fusekit.abi import LaunchRecord
    from fusekit.interop import torch_layer
    from fusekit.layers import memory
    from fusekit.library import Library
    from fusekit.runtime import Driver, tensors
    from fusekit.store import Store

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.runtime.fake import CUresult, FakeDriver

    store, kernels = Store.open(config), {}
    for listing in store.names("*"):
        entry, _ = store.load(listing.record.key)
        for step in LaunchRecord.from_json(entry.launch).launches:
            kernels[entry.cubin_sha256, step.symbol] = sorted((each.offset, each.size) for each in step.parameters)

    def parameter(kernel, index):
        parameters = kernels[kernel]
        return (0, *parameters[index]) if index < len(parameters) else (CUresult.CUDA_ERROR_INVALID_VALUE, None, None)

    fake = FakeDriver()
    quiet = {name: getattr(fake, name) for name in dir(fake) if name.startswith(("cu", "CU"))} | {
        "cuLibraryLoadData": lambda cubin, *options: (0, hashlib.sha256(cubin).hexdigest()),
        "cuLibraryGetKernel": lambda library, symbol: (0, (library, symbol.decode())),
        "cuKernelGetParamInfo": parameter,
        "cuLaunchKernelEx": lambda *given: (0,), "cuTensorMapReplaceAddress": lambda *given: (0,),
        "cuStreamGetGreenCtx": lambda stream: (0, 0),
    }  # fmt: skip
    fake.cuCtxPushCurrent(1000)  # as PyTorch does
    ordinal, stream = tensors._ordinal, 4096
    tensors._ordinal = lambda device, name: 0 if getattr(device, "type", "") == "cpu" else ordinal(device, name)
    memory.ALIGNMENT = 64
    torch_layer.stream_of = lambda tensor: stream
    return Library(store, Driver(SimpleNamespace(**quiet)))


def median(call, wait, clock):
    """Microseconds of the host for one call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        wait()
        begin = clock()
        for _ in range(CALLS):
            call()
        times.append((clock() - begin) / CALLS)
    wait()
    return round(1e6 * statistics.median(times), 1)


def compared(call, driver, wait, clock):
    """Microseconds of the host for one call of each, their ratio, and how well it is known."""

    def block(call):
        wait()
        call()  # what the wait has put out of the processor's caches
        begin = clock()
        for _ in range(BLOCK):
            call()
        return (clock() - begin) / BLOCK

    pairs = []
    for number in range(PAIRS):
        first, second = (call, driver) if number % 2 else (driver, call)
        times = block(first), block(second)
        pairs.append(times if number % 2 else times[::-1])
    wait()
    ratios = [ours / theirs for ours, theirs in pairs]
    ratio = statistics.median(ratios)
    fifths = [statistics.median(ratios[begin : begin + PAIRS // 5]) for begin in range(0, PAIRS, PAIRS // 5)]
    ours, theirs = (round(1e6 * statistics.median(each), 1) for each in zip(*pairs, strict=True))
    within = max(abs(each - ratio) for each in fifths)
    return {"bound": ours, "driver": theirs, "ratio": round(ratio, 3), "within": round(within, 3)}


def bound(moe, x):
    """Calls of bound passes, on memory of their own."""
    layer, new, stream = moe.layer, {"device": x.device}, 4096
    if x.is_cuda:
        stream = torch.cuda.current_stream(x.device).cuda_stream
    sizes = layer.sizes(x.shape[0])
    given = {name: moe.get_parameter(path).detach() for name, path in moe.names.items()} | {"x": x}
    kept, scratch = (torch.empty(size, dtype=torch.uint8, **new) for size in (sizes.kept, sizes.scratch))
    y = torch.empty_like(x)
    inference = layer.bind_forward(**given, y=y, scratch=scratch)
    forward = layer.bind_forward(**given, y=y, kept=kept, scratch=scratch)
    outputs = {f"d{name}": torch.empty_like(tensor) for name, tensor in given.items()}
    read = {name: given[name] for name in layer.inputs("backward") if name in given}
    backward = layer.bind_backward(dy=torch.randn_like(y), **read, **outputs, kept=kept, scratch=scratch)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            y, kept, _ = torch.empty_like(x), *(torch.empty(size, dtype=torch.uint8, **new) for size in memory)
            forward(stream)
            ctx.save_for_backward(kept, *tensors)
            return y

        @staticmethod
        def backward(ctx, dy):
            _, *tensors = ctx.saved_tensors
            torch.empty(sizes.scratch, dtype=torch.uint8, **new)
            gradients = tuple(map(torch.empty_like, tensors))
            backward(stream)
            return gradients

    memory, dy = (sizes.kept, sizes.scratch), torch.randn_like(y)
    parameters = [x.clone().requires_grad_(), *moe.parameters()]

    def bare():
        for parameter in parameters:
            parameter.grad = None
        Bare.apply(*parameters).backward(dy)

    passes = {"inference": [inference], "forward": [forward], "backward": [backward], "training": [forward, backward]}
    calls = {
        which: {"bound": partial(queue_all, each, stream), "driver": driver_calls(stream, *each)}
        for which, each in passes.items()
    }
    calls["training"]["bare"] = bare
    return calls


def queue_all(passes, stream):
    for each in passes:
        each(stream)


def driver_calls(stream, *passes):
    """The driver's launches and events of bound passes alone, with what the passes give them."""
    for each in passes:
        each(stream)
    driver = next(iter(passes[0].launches[0].parts))[0].driver
    api, calls = driver.api, []

    class Recorder:
        def __getattr__(self, name):
            call = getattr(api, name)
            if not name.startswith(("cuLaunch", "cuEventRecord", "cuStreamWait")):
                return call
            return lambda *given: calls.append((call, given)) or call(*given)

    driver.api = Recorder()
    try:
        for each in passes:
            each(stream)
    finally:
        driver.api = api

    def queue():
        for call, given in calls:
            call(*given)

    return queue


def measured(moe, tokens, *how):
    """Those of one number of tokens."""
    device, hidden = next(moe.parameters()).device, moe.layer.options.hidden
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    dy, needing = torch.randn_like(x), x.clone().requires_grad_()

    def inference():
        with torch.no_grad():
            moe(x)

    def training():
        moe.zero_grad(set_to_none=True)
        needing.grad = None
        moe(needing).backward(dy)

    calls = bound(moe, x)
    calls["inference"]["module"], calls["training"]["module"] = inference, training
    return {
        which: compared(group.pop("bound"), group.pop("driver"), *how)
        | {name: median(call, *how) for name, call in group.items()}
        for which, group in calls.items()
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--layer", default="module_host/moe")
    options = parser.parse_args()
    device = "cpu" if options.stand_in else "cuda"
    clock = time.process_time if options.stand_in else time.perf_counter  # other programs may run on that machine
    wait = (lambda: None) if options.stand_in else torch.cuda.synchronize
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    wait()
    begin = time.perf_counter()

    import fusekit
    from fusekit.config import Config
    from fusekit.interop.torch import MoE

    library = stand_in(Config.from_environment()) if options.stand_in else fusekit.open_library()
    moe = MoE(library.layer(options.layer), device=device)
    x = torch.randn(options.tokens[0], moe.layer.options.hidden, dtype=torch.bfloat16, device=device)
    moe(x.requires_grad_()).sum().backward()
    wait()
    first = time.perf_counter() - begin
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures = {str(tokens): measured(moe, tokens, wait, clock) for tokens in options.tokens}
    name = "stand-in driver" if options.stand_in else torch.cuda.get_device_name()
    dynamo = "torch._dynamo" in sys.modules
    about = {"device": name, "torch": torch.__version__, "first": round(first, 3), "dynamo": dynamo}
    sys.stdout.write(json.dumps(about | figures) + "\n")


if __name__ == "__main__":
    main()
