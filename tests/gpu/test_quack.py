"""QuACK's kernels for sm_90a from their launch records alone, against PyTorch; odd numbers of rows, strided rows.

fusekit --store STORE build quack --arch sm_90a --allow-extern     on any machine, with fusekit[quack]
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_quack.py -s    on the machine with the GPU and PyTorch
"""

import math
import subprocess
import sys

import pytest

ROWS = (1, 5, 257, 3001)
FIRST_LAUNCH = """
import sys, time
start = time.perf_counter()
from fusekit import open_library
from fusekit.runtime import DeviceArray
library = open_library()
kernel = library.load({name!r})
arrays = {{}}
sizes = dict({sizes!r})
for argument in kernel.record.tensors:
    shape = [sizes.get(extent, extent) for extent in argument.shape]
    arrays[argument.name] = DeviceArray(library.devices, tuple(shape), argument.dtype)
kernel(**arrays)
arrays[kernel.record.tensors[-1].name].download(0, 16)
seconds = time.perf_counter() - start
odd = [name for name in ("torch", "cutlass", "tvm_ffi", "quack") if name in sys.modules]
print(f"{{seconds:.3f}} {{','.join(odd)}}")
"""


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="PyTorch is the reference")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    return torch


@pytest.fixture
def load(opened, torch):
    """load(name) -> a kernel of quack/ that launches on PyTorch's stream."""
    if not opened.store.names("quack/*"):
        pytest.skip(f"no kernels of quack in {opened}; build quack there with --allow-extern and name the store")

    def take(name):
        kernel = opened.load(f"quack/{name}", arch="sm_90a")

        def launch(**arguments):
            kernel(**arguments, stream=torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()

        return launch

    return take


def rows(torch, count, columns, dtype="bfloat16", seed=0, room=0):
    """Random rows, `room` elements between one and the next."""
    generator = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(count, columns + room, device="cuda", generator=generator).to(getattr(torch, dtype))
    return whole[:, :columns]


def empty(torch, *shape, dtype="bfloat16"):
    """Not a number everywhere: what a kernel leaves out shows."""
    made = torch.empty(*shape, device="cuda", dtype=getattr(torch, dtype))
    return made.fill_(math.nan) if made.is_floating_point() else made.fill_(-1)


def close(torch, found, wanted, fro=4e-3):
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error <= fro, f"relative error {error:.2e}"


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("n", [2880, 4096, 7168, 16384])
def test_rmsnorm(torch, load, count, n):
    x, w = rows(torch, count, n, room=64), torch.rand(n, device="cuda")
    y = empty(torch, count, n)
    load(f"rmsnorm@n{n}")(mX=x, mW=w, mO=y, eps=1e-6)
    wide = x.double()
    close(torch, y, wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("n", [4096, 7168])
def test_rmsnorm_with_residual(torch, load, n, count):
    x, residual, w = rows(torch, count, n), rows(torch, count, n, seed=1), torch.rand(n, device="cuda")
    y, total, rstd = empty(torch, count, n), empty(torch, count, n), empty(torch, count, dtype="float32")
    load(f"rmsnorm-residual@n{n}")(mX=x, mW=w, mRes=residual, mO=y, mResO=total, mRstd=rstd, eps=1e-6)
    wide = x.double() + residual.double()
    scale = (wide.square().mean(1) + 1e-6).rsqrt()
    close(torch, total, wide)
    close(torch, rstd, scale, 1e-5)
    close(torch, y, wide * scale[:, None] * w)


@pytest.mark.parametrize("count", ROWS)
def test_layernorm(torch, load, count):
    x, w = rows(torch, count, 4096), torch.rand(4096, device="cuda")
    y, rstd, mean = empty(torch, count, 4096), *(empty(torch, count, dtype="float32") for _ in range(2))
    load("layernorm@n4096")(mX=x, mW=w, mO=y, mRstd=rstd, mMean=mean, eps=1e-6)
    close(torch, y, torch.nn.functional.layer_norm(x.double(), (4096,), w.double(), eps=1e-6))


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("n", [4096, 32768])
def test_softmax(torch, load, count, n):
    x, y = rows(torch, count, n, room=8), empty(torch, count, n)
    load(f"softmax@n{n}")(mX=x, mO=y)
    close(torch, y, x.double().softmax(1))


@pytest.mark.parametrize("count", ROWS)
def test_softmax_backward(torch, load, count):
    y, dy, dx = rows(torch, count, 4096).softmax(1), rows(torch, count, 4096, seed=1), empty(torch, count, 4096)
    load("softmax-bwd@n4096")(mY=y, mdY=dy, mdX=dx)
    wide, grad = y.double(), dy.double()
    close(torch, dx, wide * (grad - (wide * grad).sum(1, keepdim=True)))


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("n", [32000, 128256])
def test_cross_entropy(torch, load, count, n):
    x, target = rows(torch, count, n), torch.randint(n, (count,), device="cuda")
    loss, lse = (empty(torch, count, dtype="float32") for _ in range(2))
    load(f"cross-entropy@n{n}")(mX=x, mTarget=target, mLoss=loss, mLSE=lse, ignore_index=-100)
    close(torch, loss, torch.nn.functional.cross_entropy(x.double(), target, reduction="none"), 1e-4)
    close(torch, lse, x.double().logsumexp(1), 1e-5)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("k", [8, 32])
def test_topk(torch, load, k, count):
    x = rows(torch, count, 1024)
    values, places = empty(torch, count, k), empty(torch, count, k, dtype="int32")
    load(f"topk@n1024-k{k}")(mX=x, mValues=values, mIndices=places)
    assert torch.equal(values, x.topk(k, dim=1).values)
    assert torch.equal(x.gather(1, places.long()), values)


@pytest.mark.parametrize("tile", ["128x192", "128x256"])
@pytest.mark.parametrize("shape", [(1, 257, 136, 72), (3, 1000, 520, 776), (2, 128, 4096, 64)])
def test_gemm(torch, load, shape, tile):
    batch, m, n, k = shape
    a, b = rows(torch, batch * m, k).view(batch, m, k), rows(torch, batch * n, k, seed=1).view(batch, n, k)
    d = empty(torch, batch, m, n)
    load(f"gemm@tile{tile}")(mA=a, mB=b, mD=d)
    close(torch, d, a.double() @ b.double().mT)


def test_gemm_with_addend(torch, load):
    a, b, c = rows(torch, 1000, 776)[None], rows(torch, 520, 776, seed=1)[None], rows(torch, 1000, 520, seed=2)[None]
    d = empty(torch, 1, 1000, 520)
    load("gemm-c@tile128x192")(mA=a, mB=b, mC=c, mD=d)
    close(torch, d, a.double() @ b.double().mT + c.double())


@pytest.mark.parametrize("ends", [(0, 0, 257, 900), (900, 900, 900, 900), (1, 130, 131, 900)])
def test_grouped_gemm(torch, load, ends):
    a, b = rows(torch, 900, 776), rows(torch, 4 * 520, 776, seed=1).view(4, 520, 776)
    d = empty(torch, 900, 520)
    offsets = torch.tensor([0, *ends], device="cuda", dtype=torch.int32)
    load("gemm-varlen-m@tile128x192")(mA=a, mB=b, mD=d, cu_seqlens_m=offsets)
    for group, (begin, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        if begin < end:
            close(torch, d[begin:end], a[begin:end].double() @ b[group].double().T)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("quack/rmsnorm@n4096", {"M": 4096}),
        ("quack/softmax@n4096", {"M": 4096}),
        ("quack/gemm@tile128x192", {"L": 1, "M": 1024, "N": 1024, "K": 1024}),
    ],
)
def test_the_first_launch_of_a_process(opened, figure, name, sizes):
    """Imports neither a framework nor a compiler; how long it takes is printed."""
    if not opened.store.names("quack/*"):
        pytest.skip("no kernels of quack in the store")
    script = FIRST_LAUNCH.format(name=name, sizes=tuple(sizes.items()))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    seconds, _, odd = ran.stdout.strip().partition(" ")
    assert odd == ""
    figure(f"{name}: first launch of a new process after {seconds} s, imports and driver included")
