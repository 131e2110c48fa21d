"""Host time of a call through an exported TVM-FFI library, against a call of a function that does nothing.

python tests/benchmarks/run.py tvm_ffi_call      (a store with layer and quickstart; PyTorch, gcc; no GPU)

The driver is the tests' stand-in, whose launch does nothing: what is left is TVM-FFI's own time and fusekit's.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from fusekit.abi import LaunchRecord
from fusekit.config import Config
from fusekit.store import Store

CABI = Path(__file__).parents[1] / "cabi"
ROUNDS, CALLS = 101, 2000


def parameters(store: Store) -> str:
    """What the stand-in has to know of each kernel."""
    rows = set()
    for listed in store.names():
        entry = store.find_entry(listed.record.key)
        if entry is None or "parameters" not in entry.launch:
            continue
        for launch in LaunchRecord.from_json(dict(entry.launch)).launches:
            places = sorted((each.offset, each.size) for each in launch.parameters)
            rows.add(" ".join([launch.symbol, *(f"{offset} {size}" for offset, size in places)]))
    return "\n".join(sorted(rows))


def compiled(source: Path, target: Path, *flags: str) -> None:
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(target), *flags], check=True)


def once(function, args) -> float:
    """Microseconds of this thread for a call."""
    begin = time.thread_time_ns()
    for _ in range(CALLS):
        function(*args)
    return (time.thread_time_ns() - begin) / CALLS / 1000


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch
    import tvm_ffi
    from tvm_ffi import libinfo

    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels").write_text(parameters(Store.open(Config.from_environment())))
        os.environ["STAND_IN_KERNELS"] = str(folder / "kernels")
        compiled(CABI / "stand_in.c", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
        ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
        runtime = Path(libinfo.find_libtvm_ffi()).parent
        headers = [f"-isystem{path}" for path in libinfo.include_paths()]
        compiled(CABI / "on_cuda.c", folder / "on_cuda.so", *headers, f"-L{runtime}", "-ltvm_ffi")
        command = ["export", "--lang", "tvm-ffi", folder / "moe.so", "layer/moe", "quickstart/moe-fc1"]
        subprocess.run([sys.executable, "-m", "fusekit", *map(str, command)], check=True, stdout=subprocess.DEVNULL)
        moe, shim = (tvm_ffi.load_module(str(folder / file)) for file in ("moe.so", "on_cuda.so"))

        def tensor(*shape, dtype=torch.bfloat16):
            size = torch.Size(shape).numel() * dtype.itemsize
            whole = torch.zeros(size + 256, dtype=torch.uint8)
            return whole[-whole.data_ptr() % 256 :][:size].view(dtype).view(shape)

        layer = [tensor(*shape) for shape in ((1000, 512), (8, 512), (8, 512, 512), (8, 512, 256), (1000, 512))]
        layer += [tensor(size, dtype=torch.uint8)
                  for size in (moe.layer_moe_kept_bytes(1000), moe.layer_moe_forward_bytes(1000))]  # fmt: skip
        kernel = [tensor(1024, 512), tensor(8, 1536, 512), tensor(1024, 768), tensor(8, dtype=torch.int32)]
        for name, args in (("quickstart_moe_fc1", kernel), ("layer_moe_forward", layer)):
            empty, ours = [], []
            for _ in range(ROUNDS):
                for function, times in ((shim.get_function("empty"), empty), (moe.get_function(name), ours)):
                    shim.aim(function)
                    times.append(once(shim.on_cuda, args))
            sys.stdout.write(
                f"{name}, {len(args)} tensors: {median(ours):.2f} us; an empty function {median(empty):.2f} us;"
                f" {median(ours) / median(empty):.2f} times\n"
            )
    return 0
