"""A library of TVM-FFI functions on the GPU: PyTorch's tensors, stream and allocator; the bits that Python gives.

fusekit --store STORE build layer quickstart examples/ranks.toml
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_tvm_ffi.py
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")
TOKENS = 1000
ROOT = Path(__file__).parents[2]


def exported(opened, file, *names):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    for name in names:
        if not [*opened.store.names(name, "sm_90a")]:
            pytest.skip(f"the store has no {name}; build it there")
    store = opened.store.roots[0].path
    command = [sys.executable, "-m", "fusekit", "--store", store, "export", "--lang", "tvm-ffi", file, *names]
    subprocess.run(command, check=True, capture_output=True)
    return file


@pytest.fixture(scope="module")
def moe(opened, tmp_path_factory):
    file = tmp_path_factory.mktemp("tvm_ffi") / "moe.so"
    return tvm_ffi.load_module(str(exported(opened, file, "layer/moe", "quickstart/moe-fc1")))


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).mul_(shape[-1] ** -0.5).bfloat16()


def arguments(layer, which):
    """Random inputs and empty outputs, by name."""
    dims, given = layer.dims(TOKENS), {}
    for name, buffer in layer.inputs(which).items():
        given[name] = random(*buffer.extents(dims))
    for name, buffer in layer.outputs(which).items():
        given[name] = torch.empty(*buffer.extents(dims), device="cuda", dtype=getattr(torch, _dtype(buffer)))
    return given


def _dtype(buffer):
    return {"bf16": "bfloat16", "f32": "float32"}[buffer.dtype]


def memory(size):
    return torch.zeros(size, device="cuda", dtype=torch.uint8)


def test_a_step_of_a_layer_has_the_bits_of_python(opened, moe):
    torch.manual_seed(0)
    layer = opened.layer("layer/moe")
    forward, backward = (arguments(layer, which) for which in ("forward", "backward"))
    backward |= {name: forward[name] for name in layer.inputs("backward") if name in forward}
    sizes = layer.sizes(TOKENS)
    kept, scratch = memory(sizes.kept), memory(sizes.scratch)
    layer.bind_forward(**forward, kept=kept, scratch=scratch)(torch.cuda.current_stream())
    layer.bind_backward(**backward, kept=kept, scratch=scratch)(torch.cuda.current_stream())
    outputs = {name: each for which, given in (("forward", forward), ("backward", backward))
               for name, each in given.items() if name in layer.outputs(which)}  # fmt: skip
    want = {name: each.clone() for name, each in outputs.items()}
    assert moe.layer_moe_kept_bytes(TOKENS) == sizes.kept
    again = memory(sizes.kept)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for each in outputs.values():
                each.zero_()
            moe.layer_moe_forward(*forward.values(), again)  # scratch memory of PyTorch's allocator
            moe.layer_moe_backward(*backward.values(), again)
    side.synchronize()
    for name, each in outputs.items():
        assert torch.equal(each, want[name]), f"{name} differs"


def test_a_captured_call_of_a_kernel_has_the_bits_of_python(opened, moe):
    torch.manual_seed(1)
    x, w, y = random(1024, 512), random(8, 1536, 512), random(1024, 768)
    offsets = torch.arange(128, 1025, 128, device="cuda", dtype=torch.int32)
    opened.load("quickstart/moe-fc1")(x=x, w=w, y=y, offsets=offsets)
    want = y.clone()
    moe.prepare(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe.quickstart_moe_fc1(x, w, y, offsets)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, want)
    with pytest.raises(ValueError, match="w has DLPack's dtype"):
        moe.quickstart_moe_fc1(x, w.float(), y, offsets)


def test_ranks_in_symmetric_memory_have_the_bits_of_python(opened, tmp_path):
    """On two GPUs, or on one that both processes use in turn."""
    file = exported(opened, tmp_path / "ranks.so", "ranks/moe")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               ROOT / "examples" / "symmetric_ranks.py", file]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
