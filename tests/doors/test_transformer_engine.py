"""Transformer Engine's own Python over a stand-in for its compiled part, on the CPU with layers by definition."""

import enum
import importlib.machinery
import importlib.util
import re
import sys
import types
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
FOUND = importlib.util.find_spec("transformer_engine")
if FOUND is None:
    pytest.skip("transformer_engine is not installed", allow_module_level=True)

from fusekit.cpu import CpuLayer  # noqa: E402
from tests.doors.absent import stand_in  # noqa: E402
from tests.plan.test_layer_program import options  # noqa: E402

stand_in("onnx", "onnx_ir", "onnxruntime", "onnxscript", "nvdlfw_inspect")

E, H, I, T = 4, 64, 96, 32  # noqa: E741


class Compiled(types.ModuleType):
    """transformer_engine_torch, of which these operations need the names alone."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"tex.{name}"))
        return getattr(self, name)


def members(folder, file, pattern):
    return dict.fromkeys(re.findall(pattern, (folder / file).read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def te():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_PROJECT_BUILDING", "1")
        patch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "0")
        folder = Path(FOUND.submodule_search_locations[0])
        compiled = Compiled("transformer_engine_torch")
        compiled.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
        dtypes = members(folder, "pytorch/constants.py", r"^    (k\w+) = int\(tex")
        compiled.DType = enum.IntEnum("DType", {name: number for number, name in enumerate(dtypes)})
        attention = members(
            folder, "pytorch/cpp_extensions/fused_attn.py", r"^    \w+ = int\(NVTE_Fused_Attn_Backend\.(\w+)\)"
        )
        compiled.NVTE_Fused_Attn_Backend = enum.IntEnum(
            "NVTE_Fused_Attn_Backend", {name: number for number, name in enumerate(attention)}
        )
        patch.setitem(sys.modules, "transformer_engine_torch", compiled)
        package = types.ModuleType("transformer_engine")
        package.__path__ = [str(folder)]
        patch.setitem(sys.modules, "transformer_engine", package)
        from transformer_engine import common

        package.common = common
        patch.setattr(common, "load_framework_extension", lambda *given: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
        properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
        patch.setattr(torch.cuda, "get_device_properties", lambda *given: properties)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformer_engine.pytorch import ops
        patch.setattr(ops.GroupedLinear, "reset_parameters", lambda self: [
            torch.nn.init.normal_(weight, std=0.1) for weight in self.parameters()
        ])  # fmt: skip
        yield ops


class Library:
    def __init__(self):
        shared = {"dtype": "bf16", "grad_dtype": "bf16", "hidden": H, "intermediate": I, "experts": E, "topk": 1,
                  "router": {"input": "choices"}}  # fmt: skip
        clamped = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
        specs = {"concat": {}, "interleaved": {"glu_layout": "interleaved-32"}, "clamped": {"activation": clamped},
                 "relu": {"activation": {"kind": "srelu"}, "glu_layout": "none"}}  # fmt: skip
        self._layers = {f"store/{name}": CpuLayer(options(**shared | spec, file="store", name=name))
                        for name, spec in specs.items()}  # fmt: skip

    def layers(self):
        return {name: layer.options for name, layer in self._layers.items()}

    def layer(self, name, device=None):
        assert device == "cpu"
        return self._layers[name]


@pytest.fixture(scope="module")
def door(te):
    from fusekit.interop import transformer_engine

    transformer_engine.register(Library())
    return transformer_engine


def linears(te, gated=True, **more):
    torch.manual_seed(0)
    given = {"bias": False, "device": "cpu", "dtype": torch.bfloat16, **more}
    return te.GroupedLinear(E, H, 2 * I if gated else I, **given), te.GroupedLinear(E, I, H, **given)


def activated(name, z):
    if name == "relu":
        return torch.relu(z).square()
    if name == "interleaved":
        gate, up = (part.flatten(1) for part in z.unflatten(-1, (-1, 2, 32)).unbind(2))
    else:
        gate, up = z.chunk(2, -1)
    if name == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen-fc1"])
@pytest.mark.parametrize("name", ["concat", "interleaved", "clamped", "relu"])
def test_results_and_gradients(te, door, name, frozen):
    activation = {
        "concat": te.ScaledSwiGLU, "interleaved": lambda: te.ScaledSwiGLU(glu_interleave_size=32),
        "clamped": te.ScaledClampedQGeGLU, "relu": te.ScaledSReLU,
    }[name]()  # fmt: skip
    fc1, fc2 = linears(te, gated=name != "relu")
    for weight in fc1.parameters():
        weight.requires_grad_(not frozen)
    mlp = te.Sequential(fc1, activation, fc2)
    splits = torch.tensor([7, 0, 20, 5])
    x, scales = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True), torch.rand(T, requires_grad=True)
    y = mlp(x, splits, scales, splits)
    (fuser,) = (group for group in mlp._module_groups if hasattr(group, "_forward_ops"))
    assert [type(op[0]).__name__ for op in fuser._forward_ops] == ["FusekitGroupedMLP"]
    torch.sin(3 * y.float()).sum().backward()

    copies = [tensor.detach().float().requires_grad_() for tensor in (x, scales)]
    weights = [[weight.detach().float().requires_grad_() for weight in fc.parameters()] for fc in (fc1, fc2)]
    parts, start = [], 0
    for expert, count in enumerate(splits.tolist()):
        rows = slice(start, start := start + count)
        h = activated(name, copies[0][rows] @ weights[0][expert].T) * copies[1][rows, None]
        parts.append(h @ weights[1][expert].T)
    wanted = torch.cat(parts)
    torch.sin(3 * wanted).sum().backward()

    def error(result, reference):
        return ((result.float() - reference).norm() / reference.norm()).item()

    assert error(y, wanted) < 0.01
    assert error(x.grad, copies[0].grad) < 0.02 and error(scales.grad, copies[1].grad) < 0.02
    for fc, reference in zip((fc1, fc2), weights, strict=True):
        grads = [weight.grad for weight in fc.parameters()]
        if frozen and fc is fc1:
            assert grads == [None] * E
        else:
            assert error(torch.stack(grads), torch.stack([weight.grad for weight in reference])) < 0.02


def test_no_gradient_without_autograd(te, door):
    fc1, fc2 = linears(te)
    splits, scales = torch.tensor([8, 8, 8, 8]), torch.rand(T)
    with torch.no_grad():
        assert (
            te.Sequential(fc1, te.ScaledSwiGLU(), fc2)(torch.randn(T, H).bfloat16(), splits, scales, splits).grad_fn
            is None
        )


def test_weights_in_one_block_of_memory_are_not_copied(te, door):
    fc1, _ = linears(te)
    block = torch.randn(E, 2 * I, H, dtype=torch.bfloat16)
    assert door._stacked(fc1).data_ptr() != fc1.weight0.data_ptr()
    for expert in range(E):
        getattr(fc1, f"weight{expert}").data = block[expert]
    assert door._stacked(fc1).data_ptr() == block.data_ptr() and torch.equal(door._stacked(fc1), block)


def test_what_is_left_to_transformer_engine(te, door):
    fc1, fc2 = linears(te)
    assert door.described(fc1, te.ScaledSwiGLU(), fc2) is not None
    assert door.described(fc1, te.SwiGLU(), fc2) is None
    assert door.described(fc1, te.ScaledSwiGLU(glu_interleave_size=16), fc2) is None
    for more in ({"bias": True}, {"dtype": torch.float16}, {"accumulate_into_main_grad": True}):
        assert door.described(linears(te, **more)[0], te.ScaledSwiGLU(), fc2) is None
