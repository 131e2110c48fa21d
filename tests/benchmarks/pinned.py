"""What batch invariance costs a layer: its kernels whose bits depend on the tile have one variant for any batch.

    python tests/benchmarks/run.py pinned LAYER [--rows T ...] [--seconds 1]

For each number of tokens, every stored variant of such a kernel is timed alone, and so is the whole layer, forward and
backward. Prints one JSON document: `pinned` is the variant that the layer takes for any number of tokens, `fastest` the
one that it would take for this one, both with `ms`; `cost` is what the first takes longer, as a share of the layer.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from fusekit.bench.gemms import GemmBench, Options
from fusekit.bench.layer_trial import BOTH
from fusekit.bench.layers import LayerBench
from fusekit.bench.shape import Shape
from fusekit.bench.timing import own_stream
from fusekit.library import Library, open_library
from fusekit.runtime import Device


def measure(library: Library, device: Device, name: str, tokens: int | None, options: Options) -> list[dict[str, Any]]:
    """A document for each pinned kernel of the layer `name`, for `tokens` (None: the spec's)."""
    layer = library.layer(name, device=device.ordinal)
    arch = layer.record.arch
    count = layer.options.tokens if tokens is None else tokens
    variants = []
    with library.devices.active(device), own_stream(library.devices, device) as stream:
        lines = LayerBench(library, device, arch, options).measure(name, count, stream)["lines"]
        whole = next(line["ms"] for line in lines if line["variant"] == BOTH)
        for part in layer.record.promises["pinned"]:
            bench = GemmBench(library, device, [f"{name}.{part}"], arch, options)
            (kernel,) = bench.measure(Shape(T=count), stream)["kernels"]
            times = {line["variant"]: line["ms"] for line in kernel["lines"]}
            taken = layer.kernel_name(part, count).partition("@")[2]
            fastest = min(times, key=lambda variant: (times[variant], variant))
            variants.append(
                {
                    "kernel": f"{name}.{part}", "tokens": count, "layer_ms": whole,
                    "pinned": {"variant": taken, "ms": times[taken]},
                    "fastest": {"variant": fastest, "ms": times[fastest]},
                    "cost": (times[taken] - times[fastest]) / whole,
                }
            )  # fmt: skip
    return variants


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = ArgumentParser(description="What batch invariance costs a layer.")
    parser.add_argument("layer", help="a layer of the store, such as gpt-oss-20b/moe")
    parser.add_argument("--rows", type=int, action="append", help="tokens; may be given several times (the spec's)")
    parser.add_argument("--seconds", type=float, default=1.0, help="device time for each thing that is timed")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    given = parser.parse_args(arguments)
    library = open_library()
    options = Options("uneven", True, (), given.seconds * 1e3, 0, True)
    device = library.devices.get(given.device)
    kernels = [
        each for tokens in given.rows or (None,) for each in measure(library, device, given.layer, tokens, options)
    ]
    sys.stdout.write(json.dumps({"device": device.name, "kernels": kernels}) + "\n")
    return 0
