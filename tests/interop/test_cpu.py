"""Layers on the CPU: by name, from a spec alone, in PyTorch and on NumPy arrays."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

import fusekit
from fusekit import cpu
from fusekit.config import Config
from fusekit.errors import ArgumentError, UsageError
from fusekit.interop.views import as_dtype
from fusekit.library import Library, default_library
from fusekit.plan.layer.options import MLP
from fusekit.reference import decode, encode
from tests.layers import samples
from tests.plan.test_layer_program import options

SPEC = """
schema = 1
[[kernel]]
name = "moe"
kind = "moe"
hidden = 64
intermediate = 32
experts = 8
topk = 2
shared = 32
router = { score_function = "sigmoid", expert_bias = true, aux_loss = true }

[[kernel]]
name = "mlp"
kind = "mlp"
hidden = 64
intermediate = 32

[[kernel]]
name = "ranked"
kind = "moe"
hidden = 64
intermediate = 32
experts = 8
topk = 2
ranks = 2

[[kernel]]
name = "fc1"
op = "dense-gemm"
problem = { M = 64, N = 64, K = 64 }
"""


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'layers with device="cpu"')
        yield


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def library(tmp_path):
    return Library(Config(store=tmp_path / "store"))


def test_a_module_by_name_has_the_gradients_of_plain_pytorch(spec, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.interop import torch_layers

    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))
    torch.manual_seed(0)
    moe = torch_layers.interop.MoE(f"{spec}/moe", device="cpu", aux_coefficient=torch_layers.COEFFICIENT)
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    y, loss = moe(x)
    weights = torch.arange(64).cos()
    ((y.float() * weights).sum() + 0.7 * loss).backward()
    flat = x.detach().reshape(-1, 64).double().requires_grad_()
    tensors = {name: torch_layers.plain_of(moe, name, torch.float64) for name in moe.names}
    coefficient = torch_layers.COEFFICIENT
    wanted, aux = torch_layers.plain_torch.forward(moe.layer.options, tensors, flat, coefficient=coefficient)
    ((wanted * weights).sum() + 0.7 * aux).backward()
    torch_layers.close(y.detach().reshape(-1, 64), wanted.detach(), 2e-2)
    torch_layers.close(loss.detach(), aux.detach(), 1e-5)
    torch_layers.close(x.grad.reshape(-1, 64), flat.grad, 2e-2)
    found = torch_layers.gradients(moe)
    for name, path in moe.names.items():
        if name != "expert_bias":
            torch_layers.close(found[path], tensors[name].grad, 2e-2)


def test_a_gpus_tensors_are_refused(spec, library):
    torch = pytest.importorskip("torch")
    layer = library.layer(f"{spec}/mlp", device="cpu")
    with pytest.raises(ArgumentError, match=r'x is on meta; the layer was opened with device="cpu"'):
        layer.forward(x=torch.empty(3, 64, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ArgumentError, match="has no kernels"):
        layer.set_variant("fc1-fwd", "128x128-c1x1")


def arrays(layer, tokens):
    """Inputs and empty outputs of the forward pass in bf16, as NumPy holds them, and its scratch memory."""
    rng, dims = np.random.default_rng(0), layer.dims(tokens)
    inputs = {
        name: encode(rng.standard_normal(buffer.extents(dims)), "bf16")
        for name, buffer in layer.inputs("forward").items()
    }
    y = np.empty((tokens, layer.options.hidden), np.uint16)
    return inputs, y, np.empty(layer.sizes(tokens).inference, np.uint8)


def test_arrays_of_numpy(spec, library):
    layer = library.layer(f"{spec}/mlp", device="cpu")
    inputs, y, scratch = arrays(layer, 7)
    given = {name: as_dtype(array, "bf16") for name, array in inputs.items()}
    layer.forward(**given, y=as_dtype(y, "bf16"), scratch=scratch)
    x, w1, w2 = (decode(inputs[name], "bf16").astype(np.float64) for name in ("x", "w1", "w2"))
    gate, up = np.split(x @ w1.T, 2, axis=1)
    wanted = (gate / (1 + np.exp(-gate)) * up) @ w2.T
    np.testing.assert_allclose(decode(y, "bf16"), wanted, atol=0.02 * np.abs(wanted).max())
    bound = layer.bind_forward(**given, y=as_dtype(y, "bf16"), scratch=scratch)
    before = y.copy()
    y[...] = 0
    bound()
    assert (y == before).all()


def test_wrong_arrays_get_the_errors_of_a_gpu(spec, library):
    layer = library.layer(f"{spec}/mlp", device="cpu")
    inputs, y, scratch = arrays(layer, 7)
    given = {name: as_dtype(array, "bf16") for name, array in inputs.items()} | {"y": as_dtype(y, "bf16")}
    with pytest.raises(ArgumentError, match=r"w2 is bf16 \[64, 31\]; for 7 tokens it must be bf16 \[64, 32\]"):
        layer.forward(**{**given, "w2": as_dtype(np.zeros((64, 31), np.uint16), "bf16")}, scratch=scratch)
    with pytest.raises(ArgumentError, match=r"x is u16 \[7, 64\]; for 7 tokens it must be bf16"):
        layer.forward(**{**given, "x": inputs["x"]}, scratch=scratch)
    with pytest.raises(ArgumentError, match="scratch is missing; give"):
        layer.forward(**given)
    with pytest.raises(ArgumentError, match="the inference pass has no z"):
        layer.forward(**given, z=y, scratch=scratch)
    read_only = y.copy()
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match="y is read-only"):
        layer.forward(**{**given, "y": as_dtype(read_only, "bf16")}, scratch=scratch)
    with pytest.raises(ArgumentError, match="x has strides"):
        layer.forward(**{**given, "x": inputs["x"][::-1]}, scratch=scratch)
    with pytest.raises(ArgumentError, match="x is a list; it must be a tensor of PyTorch"):
        layer.forward(**{**given, "x": [1.0]}, scratch=scratch)


def test_what_is_on_the_cpu(spec, library, tmp_path):
    assert library.layer("qwen3-30b-a3b/moe", device="cpu").options.experts == 128
    with pytest.raises(ArgumentError, match="ranked is over 2 ranks"):
        library.layer(f"{spec}/ranked", device="cpu")
    with pytest.raises(UsageError, match="is a kernel, and not a layer"):
        library.layer(f"{spec}/fc1", device="cpu")
    with pytest.raises(UsageError, match="is several layers"):
        library.layer(f"{spec}/m*", device="cpu")
    with pytest.raises(UsageError, match="names no packaged kernel"):
        library.layer("qwen3-30b-a3b/mow", device="cpu")
    with pytest.raises(ArgumentError, match="takes no tokens"):
        library.layer(f"{spec}/moe", device="cpu", tokens=8)


def test_a_stored_layer_needs_no_spec(tmp_path):
    said = options(kind=MLP, dtype="bf16")
    library, _ = samples.library(tmp_path, said)
    assert library.layer(f"{said.file}/{said.name}", device="cpu").options.canonical() == said.canonical()


def test_it_is_said_once(spec, library):
    cpu._announce.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            library.layer(f"{spec}/mlp", device="cpu")
    # Whatever else is collected meanwhile may warn of files that other tests left open.
    others = [each for each in caught if not issubclass(each.category, ResourceWarning)]
    assert [(str(each.message), each.filename) for each in others] == [
        ('layers with device="cpu" compute their definition in float64: for tests, and slow', __file__)
    ]


def test_without_numpy_the_error_names_it():
    code = (
        "import sys; sys.modules['numpy'] = None; import fusekit\n"
        "try: fusekit.open_library().layer('gpt-oss-20b/moe', device='cpu')\n"
        "except fusekit.UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("layers on the CPU need NumPy") and "pip install 'numpy" in done.stdout


def test_the_default_library_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path))
    assert default_library() is default_library() and default_library().store.roots[0].path == tmp_path
    with pytest.raises(fusekit.NotBuiltError, match="fusekit build quickstart/linear"):
        fusekit.load("quickstart/linear")
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "other"))
    assert default_library().store.roots[0].path == tmp_path / "other"


def test_layers_of_one_name_that_compute_other_things_are_two():
    one, same, other = (cpu.CpuLayer(options(topk=topk)) for topk in (1, 1, 2))
    assert one == same and hash(one) == hash(same)
    assert one.name == other.name and one != other
