"""The door to Transformer Engine with stand-ins for its operations; tests/doors has the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")

from tests.doors.served import E, H, I, Problem, error, library  # noqa: E402


class FusedOperation:
    def __init__(self, basic_ops):
        self.basic_ops = basic_ops


class GroupedLinear:
    has_bias = single_grouped_weight = _accumulate_into_main_grad = False
    wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)

    def __init__(self, weights):
        self.num_groups, self.out_features, self.in_features = weights.shape
        for group, weight in enumerate(weights):
            setattr(self, f"weight{group}", torch.nn.Parameter(weight))


class ScaledSwiGLU:
    glu_interleave_size = None


@pytest.fixture
def door(monkeypatch):
    registered = []
    ops = ModuleType("transformer_engine.pytorch.ops")
    ops.FusedOperation, ops.GroupedLinear, ops.ScaledSwiGLU = FusedOperation, GroupedLinear, ScaledSwiGLU
    ops.ScaledClampedQGeGLU, ops.ScaledSReLU = type("ScaledClampedQGeGLU", (), {}), type("ScaledSReLU", (), {})
    ops.register_forward_backward_fusion = lambda fuse, prepend: registered.append(fuse)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    monkeypatch.delitem(sys.modules, "fusekit.interop.transformer_engine", raising=False)
    from fusekit.interop import transformer_engine as door

    door.register(library(), "*/one_trained")
    yield registered[0]
    sys.modules.pop("fusekit.interop.transformer_engine", None)


def test_forward_and_backward(door):
    problem = Problem()
    problem.ids, order = problem.ids[:, :1].sort(0)
    problem.x, problem.weights = problem.x[order[:, 0]], problem.weights[:, :1]
    fc1, fc2 = GroupedLinear(problem.w1), GroupedLinear(problem.w2)
    ops = [object(), fc1, ScaledSwiGLU(), fc2]
    first, fused = door(ops, recipe=None)
    assert first is ops[0] and fused.basic_ops == (fc1, ops[2], fc2)
    assert door(ops, recipe="fp8") == ops
    splits = torch.bincount(problem.ids[:, 0], minlength=E)
    contexts, scales = [SimpleNamespace(requires_grad=True) for _ in range(3)], problem.weights[:, 0]
    extra = [(splits,), (scales,), (splits,)]
    others = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None, "basic_op_kwargs": [{}] * 3}
    y, _ = fused.fuser_forward(contexts, problem.x, basic_op_extra_inputs=extra, **others)
    assert error(y, problem.wanted()) < 0.01
    fc2.weight0.requires_grad_(False)
    dy = torch.ones_like(y)
    dx, (dw1, _, dw2), (_, (dscales,), _) = fused.fuser_backward(contexts, dy, basic_op_grad_extra_outputs=[(), (), ()])
    assert dx.shape == (len(problem.x), H) and [len(dw1), len(dw2)] == [E, E] and dw2[0].shape == (H, I)
    # y is linear in a row's scale
    assert error(dscales * scales, y.float().sum(1)) < 0.02
