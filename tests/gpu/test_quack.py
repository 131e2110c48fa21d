"""QuACK's kernels for sm_90a from their launch records alone, against PyTorch; odd numbers of rows, strided rows.

fusekit --store STORE build quack --arch sm_90a --allow-extern     on any machine, with fusekit[quack]
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_quack.py    on the machine with the GPU and PyTorch; where QuACK is
installed too, each kernel's results are also compared with those of QuACK's own launch, bit for bit
"""

import json

import pytest

from fusekit_cli.main import main
from tests.benchmarks import first_launch

from .quack_calls import CALLS, empty, rows

ROWS = (1, 5, 257, 3001)


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


@pytest.mark.parametrize("count", [5, 1027])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_as_quacks_own_launch(torch, load, name, count):
    pytest.importorskip("quack", reason="QuACK (extra `quack`), which launches the same kernels itself, is missing")
    launch, call = load(name), CALLS[name](torch, count)
    ours, theirs = call.outputs(), call.outputs()
    launch(**call.inputs, **ours)
    call.own({**call.inputs, **theirs})
    torch.cuda.synchronize()
    for output, actual in ours.items():
        if output == "tile_count":
            continue
        assert not actual.isnan().any(), f"{output} was not written whole"
        assert torch.equal(actual.view(torch.uint8), theirs[output].view(torch.uint8)), output


def test_a_capture_on_the_gpu_builds_what_was_run(torch, tmp_path, monkeypatch):
    """QuACK compiles and launches; what it compiled is built from the file, and gives the same bits."""
    cache = pytest.importorskip("quack.cache", reason="QuACK (extra `quack`) is missing")
    from quack.softmax import softmax_fwd

    import fusekit
    from fusekit.config import Config

    monkeypatch.setattr(cache, "CACHE_ENABLED", False)
    x = rows(torch, 257, 1536)
    with fusekit.capture() as actual:
        theirs = softmax_fwd(x)
    assert [kernel.arch for kernel in actual.kernels] == ["sm_90a"], actual.problems
    report = fusekit.build([actual.write(tmp_path / "found.toml")], config=Config(store=tmp_path / "store"),
                           allow_extern=True)  # fmt: skip
    assert not report.failed, report.failed
    (name,) = (item.name for item in report.built)
    kernel = fusekit.open_library(Config(store=tmp_path / "store")).load(name)
    ours = empty(torch, 257, 1536)
    source, result = kernel.record.tensors
    kernel(**{source.name: x, result.name: ours}, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("case", first_launch.CASES, ids=lambda case: case.name)
def test_the_first_launch_of_a_process(opened, figure, case):
    """Imports neither a framework nor a compiler; how long it takes is printed."""
    if not opened.store.names("quack/*"):
        pytest.skip("no kernels of quack in the store")
    result = first_launch.run(first_launch.ours(case, opened.store))
    assert result["modules"] == []
    figure(f"{case.name}: first launch {result['process']:.3f} s after the start of the process")


@pytest.mark.parametrize("name", ["rmsnorm@n4096", "gemm-nn@tile128x192", "gemm-varlen-k@tile128x192"])
def test_fusekit_run(opened, capsys, name):
    if not opened.store.names(f"quack/{name}"):
        pytest.skip("no kernels of quack in the store")
    assert main(["run", f"quack/{name}", "--check", "--time", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["error"] is None
    assert document["ms"] > 0
    assert "no reference" in document["notes"][0]
