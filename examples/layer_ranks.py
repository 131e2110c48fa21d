"""A layer whose experts are on two GPUs, without any framework.

python layer_ranks.py                  both ranks in this process
mpirun -n 2 python layer_ranks.py      a process for each; needs mpi4py
"""

import os

import numpy as np

import fusekit
from fusekit.exchange import Ranks
from fusekit.runtime import DeviceArray

TOKENS = 512  # of a rank, at most
H, I, X, K = 256, 128, 16, 4
library = fusekit.open_library()
devices = library.devices
if devices.count < 2:
    raise SystemExit("needs two GPUs: ranks that wait for each other need one each")


def bf16(numbers):
    """Bits of bf16, which is the upper half of a float32."""
    return (np.ascontiguousarray(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


source = np.random.default_rng(0)  # all ranks make the weights of all experts, and each takes its own
w1 = floats(bf16(source.standard_normal((X, 2 * I, H)) * H**-0.5))
w2 = floats(bf16(source.standard_normal((X, H, I)) * I**-0.5))


class Rank:
    """A rank's tokens, its experts, and its passes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.layer = layer = library.layer("ranks/moe", ranks=ranks, tokens=TOKENS)
        sizes = layer.sizes()  # bytes, before anything is allocated
        print(f"rank {ranks.rank}: kept {sizes.kept}, scratch {sizes.scratch}, windows {sum(sizes.windows.values())}")
        count = 300 + 100 * ranks.rank  # ranks may have other numbers of tokens
        source = np.random.default_rng(1 + ranks.rank)
        local = slice(ranks.rank * X // ranks.count, (ranks.rank + 1) * X // ranks.count)
        self.x = floats(bf16(source.standard_normal((count, H))))
        self.indices = np.argsort(source.random((count, X)), axis=1)[:, :K].astype(np.int32)
        self.weights = source.random((count, K), np.float32)
        given = {"x": bf16(self.x), "dy": bf16(self.x), "w1": bf16(w1[local]), "w2": bf16(w2[local])}
        given |= {"indices": self.indices, "weights": self.weights}
        self.tensors, dims = {}, layer.dims(count)
        for which in ("forward", "backward"):
            for name, buffer in (layer.inputs(which) | layer.outputs(which)).items():
                self.tensors[name] = DeviceArray(devices, buffer.extents(dims), buffer.dtype, ranks.device)
                if name in given:
                    self.tensors[name].upload(np.ascontiguousarray(given[name]))
        self.memory = {
            name: DeviceArray(devices, (size,), "u8", ranks.device)
            for name, size in (("kept", sizes.kept), ("scratch", sizes.scratch))
        }
        # Binding makes the windows, all ranks together, and loads the kernels: in one process of all ranks before the
        # first launch, since loading may wait for launches, and those wait for other ranks.
        self.passes = []
        for which, bind in (("forward", layer.bind_forward), ("backward", layer.bind_backward)):
            names = (*layer.inputs(which), *layer.outputs(which))
            self.passes.append(bind(**{name: self.tensors[name] for name in names}, **self.memory))

    def launch(self) -> None:
        """Queues both passes; they wait on the GPU for those of the other ranks, and the host waits for nothing."""
        for each in self.passes:
            each()

    def check(self) -> None:
        """y against plain NumPy."""
        devices.synchronize(devices.get(self.ranks.device))
        self.layer.check()  # raises if another rank did not come
        want = np.zeros_like(self.x)
        for choice in range(K):
            for expert in range(X):
                rows = self.indices[:, choice] == expert
                gate, up = np.split(self.x[rows] @ w1[expert].T, 2, axis=1)
                out = (gate / (1 + np.exp(-gate)) * up) @ w2[expert].T
                want[rows] += self.weights[rows, choice, None] * out
        y = floats(np.frombuffer(self.tensors["y"].download(), np.uint16)).reshape(want.shape)
        error = np.linalg.norm(y - want) / np.linalg.norm(want)
        assert error < 1e-2, error
        print(f"rank {self.ranks.rank}: right, relative error {error:.1e}")


if "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    group = [Ranks.of_process(devices, comm.rank % devices.count, comm.rank, comm.allgather)]
else:
    group = Ranks.in_process(devices, [rank % devices.count for rank in range(2)])

local_ranks = [Rank(ranks) for ranks in group]
for rank in local_ranks:
    rank.launch()
for rank in local_ranks:
    rank.check()
for ranks in group:
    ranks.close()
