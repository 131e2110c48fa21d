"""A kernel's first launch in a new process: through fusekit from a store; through QuACK, from its cache and without.

    python tests/benchmarks/run.py first_launch [NAME ...] [--rounds 7] [--cold 2] > first_launch.json

The kernels are QuACK's own, at the same sizes and with the same tiles; without QuACK, fusekit alone is measured. Each
process is new, and the files that it reads are in the page cache. Two times are taken of each, from before it is
started, and from before its first import, both until the result's first bytes are on the host:

- `process`: as its parent sees it; Python's own start is part of it.
- `inside`: as the process sees it. `imports`, `arrays` and `kernel` are its parts: importing, making the context and
  the tensors, and the kernel itself (looked up, loaded or compiled, launched, waited for).

"cache" is QuACK's persistent cache, filled by an earlier process; "cold" an empty one, so QuACK compiles. Prints one
JSON document with the medians, and each line of a table on stderr as soon as it is measured.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord, evaluate
from fusekit.bench.timing import median
from fusekit.config import Config
from fusekit.errors import FusekitError, NotBuiltError, UsageError
from fusekit.store import Store

ARCH = "sm_90a"
PARTS = ("imports", "arrays", "kernel")
# Modules that a process through fusekit must do without.
BANNED = ("torch", "cutlass", "tvm_ffi", "quack", "numpy")
PATIENCE = 300.0

OURS = """
import time
start = time.perf_counter()
import fusekit
from fusekit.runtime import DeviceArray
imported = time.perf_counter()
library = fusekit.open_library()
arrays = {{name: DeviceArray(library.devices, shape, dtype) for name, shape, dtype in {tensors!r}}}
for array in arrays.values():
    array.fill(0)
ready = time.perf_counter()
library.load({name!r}, {arch!r})(**arrays)
arrays[{output!r}].download(0, 16)
"""

QUACK = """
import os, time
start = time.perf_counter()
os.environ.update({caches!r})
import torch
{imports}
imported = time.perf_counter()
def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device="cuda")
{arrays}
torch.cuda.synchronize()
ready = time.perf_counter()
{call}
y.view(-1)[:8].cpu()
"""

END = """
end = time.perf_counter()
import json, sys
print(json.dumps({"imports": imported - start, "arrays": ready - imported, "kernel": end - ready,
                  "modules": [name for name in %r if name in sys.modules]}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One of QuACK's kernels, `name` in the store, at the sizes `dims`; QuACK's call for the same, which makes y."""

    name: str
    dims: Mapping[str, int]
    imports: str
    arrays: str
    call: str


CASES = (
    Case(
        "quack/rmsnorm@n4096", {"M": 4096}, "from quack.rmsnorm import rmsnorm_fwd",
        "x, w = zeros(4096, 4096), zeros(4096, dtype=torch.float32)", "y = rmsnorm_fwd(x, w, eps=1e-6)[0]",
    ),
    Case(
        "quack/softmax@n4096", {"M": 4096}, "from quack.softmax import softmax_fwd", "x = zeros(4096, 4096)",
        "y = softmax_fwd(x)",
    ),
    Case(
        "quack/gemm@tile128x192", {"L": 1, "M": 1024, "N": 1024, "K": 1024}, "from quack.gemm import gemm",
        "a, b, y = (zeros(1, 1024, 1024) for _ in range(3))", "gemm(a, b, y, None, None, 128, 192, 2, 1)",
    ),
)  # fmt: skip


def ours(case: Case, store: Store) -> str:
    """The program that launches `case` through fusekit."""
    record = store.find_name(case.name, ARCH)
    entry = None if record is None else store.find_entry(record.key)
    if entry is None:
        raise NotBuiltError.of(case.name, ARCH)
    tensors = LaunchRecord.from_json(entry.launch).tensors
    shapes = [
        (tensor.name, tuple(evaluate(extent, case.dims) for extent in tensor.shape), tensor.dtype) for tensor in tensors
    ]
    output = next(tensor.name for tensor in tensors if tensor.written)
    return OURS.format(tensors=shapes, name=case.name, arch=ARCH, output=output) + END % (BANNED,)


def quack(case: Case, folder: Path) -> str:
    """The program that launches the same through QuACK, whose cache, and that of the compiler, are below `folder`."""
    caches = {"QUACK_CACHE_ENABLED": "1", "QUACK_CACHE_DIR": f"{folder}/quack", "CUTE_DSL_CACHE_DIR": f"{folder}/dsl"}
    return QUACK.format(caches=caches, imports=case.imports, arrays=case.arrays, call=case.call) + END % (BANNED,)


def run(program: str) -> dict[str, Any]:
    """Seconds of one process, and the banned modules that it has imported."""
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            watch = threading.Timer(PATIENCE, process.kill)
            watch.start()
            printed, seconds = "", 0.0
            for line in process.stdout:  # whatever else is printed comes before the answer
                printed, seconds = line, time.perf_counter() - start
            process.wait()
            watch.cancel()
        if process.returncode or not printed:
            errors.seek(0)
            raise UsageError(f"a measured process ended with {process.returncode}: {errors.read().strip()[-2000:]}")
    figures = json.loads(printed)
    return {"process": seconds, "inside": sum(figures[part] for part in PARTS), **figures}


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `run` gave, its seconds as medians."""
    seconds = {key: round(median([each[key] for each in runs]), 4) for key in ("process", "inside", *PARTS)}
    return {**seconds, "modules": runs[0]["modules"], "rounds": len(runs)}


Runner = Callable[[str], dict[str, Any]]


def measure(case: Case, store: Store, rounds: int, cold: int, *, peer: bool, runner: Runner = run) -> dict[str, Any]:
    """One kernel: `ways`, and how many times as long as fusekit QuACK takes (`process`, `inside`, `kernel`)."""
    figures = ours(case, store)
    runner(figures)  # for the page cache
    runs_of: dict[str, list[dict[str, Any]]] = {"fusekit": []}
    with tempfile.TemporaryDirectory() as folder:
        theirs, *compiling = (quack(case, Path(folder) / str(index)) for index in range(cold + 1))
        if peer:
            runner(theirs)  # likewise, and it fills the cache
            runs_of |= {"cold": [runner(each) for each in compiling], "cache": []}
        for _ in range(rounds):
            runs_of["fusekit"].append(runner(figures))
            if peer:
                runs_of["cache"].append(runner(theirs))
    ways = {way: medians(runs) for way, runs in runs_of.items() if runs}
    quotients = {
        way: {key: round(each[key] / ways["fusekit"][key], 1) for key in ("process", "inside", "kernel")}
        for way, each in ways.items()
        if way != "fusekit"
    }
    return {"name": case.name, "dims": dict(case.dims), "seconds": ways, "of fusekit": quotients}


def lines(document: Mapping[str, Any]) -> list[str]:
    """The rows of the table for what `measure` gave."""
    rows = []
    for way, each in document["seconds"].items():
        times = " | ".join(f"{each[key]:.3f}" for key in ("process", "inside", *PARTS))
        factor = document["of fusekit"].get(way)
        shown = "" if factor is None else f"{factor['process']:.1f}, {factor['inside']:.1f}, {factor['kernel']:.1f}"
        rows.append(f"| {document['name']} | {way} | {times} | {shown} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    known = {case.name: case for case in CASES}
    parser = ArgumentParser(description="First launch of a new process.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="processes through fusekit, and from QuACK's cache")
    parser.add_argument("--cold", type=int, default=2, help="processes in which QuACK compiles")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - known.keys())
    if unknown or given.rounds < 1 or given.cold < 0:
        parser.error(f"no case {', '.join(unknown)}" if unknown else "--rounds is at least 1, --cold at least 0")
    store = Store.open(Config.from_environment())
    peer = all(importlib.util.find_spec(name) is not None for name in ("torch", "quack"))
    documents = []
    head = ("kernel", "through", "process s", "inside s", *(f"{part} s" for part in PARTS), "times fusekit's")
    sys.stderr.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    for name in given.names or known:
        try:
            documents.append(measure(known[name], store, given.rounds, given.cold, peer=peer))
            sys.stderr.write("\n".join(lines(documents[-1])) + "\n")
        except FusekitError as error:  # the other kernels' times are worth having
            documents.append({"name": name, "error": str(error)})
            sys.stderr.write(f"{name}: {error}\n")
        sys.stderr.flush()
    json.dump({"kernels": documents, "quack": peer}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 1 if any("error" in document for document in documents) else 0
