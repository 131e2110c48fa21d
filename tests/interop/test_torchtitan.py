"""The contract of fusekit.interop.torchtitan, over stand-ins of what it takes from torchtitan; the real one is in
tests/doors.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torch.distributed.tensor")

from fusekit.errors import ArgumentError  # noqa: E402

E, H, I, K = 4, 32, 16, 2  # noqa: E741


class Config:
    def __init__(self, **given):
        vars(self).update(given)


class GroupedExperts(torch.nn.Module):
    Config = type("Config", (Config,), {})

    def __init__(self, config):
        super().__init__()

    def parallelize(self, parallel_dims):
        pass


class FusedGroupedExperts(GroupedExperts):
    Config = type("Config", (GroupedExperts.Config,), {})

    def __init__(self, config):
        super().__init__(config)
        self.w13 = torch.nn.Parameter(torch.randn(E, I, 2, H) / H**0.5)
        self.w2_EDF = torch.nn.Parameter(torch.randn(E, H, I) / I**0.5)


class GptOssGroupedExperts(GroupedExperts):
    Config = type("Config", (GroupedExperts.Config,), {})


class RoutedExperts(GroupedExperts):
    Config = type("Config", (Config,), {})

    def __init__(self, config):
        super().__init__(config)
        self.inner_experts = config.inner_experts


@pytest.fixture
def torchtitan(monkeypatch):
    contents = {
        "torchtitan": {}, "torchtitan.models": {}, "torchtitan.models.common": {}, "torchtitan.overrides": {},
        "torchtitan.models.gpt_oss": {},
        "torchtitan.config": {
            "override": lambda **_: lambda factory: factory,
            "derive": lambda source, kind, **more: (kind, vars(source) | more),
        },
        "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts, "RoutedExperts": RoutedExperts},
        "torchtitan.models.gpt_oss.moe": {"GptOssGroupedExperts": GptOssGroupedExperts},
        "torchtitan.overrides.fused_swiglu": {
            "FusedGroupedExperts": FusedGroupedExperts,
            "fused_grouped_experts": lambda config: FusedGroupedExperts.Config(**vars(config)),
        },
    }  # fmt: skip
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("fusekit.interop.torchtitan", None)
    yield importlib.import_module("fusekit.interop.torchtitan")
    del sys.modules["fusekit.interop.torchtitan"]


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))

    def write(topk):
        path = tmp_path / f"top{topk}.toml"
        path.write_text(
            f'schema = 1\n[[kernel]]\nname = "moe"\nkind = "moe"\narch = "sm_90a"\nhidden = {H}\nintermediate = {I}\n'
            f'experts = {E}\ntopk = {topk}\nrouter = {{ input = "choices" }}\nglu_layout = "interleaved"\n'
        )
        return f"{path}/moe"

    return write


def by_hand(experts, x, expert):
    gate, up = (x.double() @ experts.w13[expert].double().flatten(0, 1).T).unflatten(-1, (-1, 2)).unbind(-1)
    return (torch.nn.functional.silu(gate) * up) @ experts.w2_EDF[expert].double().T


@pytest.mark.filterwarnings("ignore:layers with device")
def test_sorted_rows_and_those_beyond_the_counts(torchtitan, spec):
    experts = torchtitan.FusedRows(Config(layer=spec(1)))
    rows = torch.randn(5, H, requires_grad=True)
    y = experts(rows, torch.tensor([1, 0, 2, 0], dtype=torch.int32))
    wanted = torch.stack([by_hand(experts, rows[n], expert) for n, expert in enumerate([0, 2, 2])])
    torch.testing.assert_close(y[:3].double(), wanted, rtol=0.05, atol=0.05)
    assert y.dtype == torch.float32 and not y[3:].any()
    y.sum().backward()
    assert experts.w13.grad[2].any() and not experts.w13.grad[1].any()


@pytest.mark.filterwarnings("ignore:layers with device")
def test_dispatch_experts_and_combination_in_one(torchtitan, spec):
    inner = FusedGroupedExperts(Config())
    dispatcher = SimpleNamespace(top_k=K)
    moe = torchtitan.FusedRoutedExperts(Config(inner_experts=inner, token_dispatcher=dispatcher, layer=spec(K)))
    x, ids = torch.randn(1, 3, H), torch.tensor([[[0, 1], [3, 2], [1, 3]]])
    scores = torch.rand(1, 3, K)
    y = moe(x, scores, ids, None)
    wanted = [
        sum(scores[0, t, k] * by_hand(inner, x[0, t], int(ids[0, t, k])) for k in range(K)) for t in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(y[0].double(), torch.stack(wanted), rtol=0.05, atol=0.05)
    with pytest.raises(ArgumentError, match=r"interop\.torchtitan\.grouped"):
        moe.parallelize(SimpleNamespace(get_optional_mesh=lambda name: name == "ep" or None))


def test_what_the_overrides_make(torchtitan):
    kind, settings = torchtitan.grouped(GroupedExperts.Config(dim=H), layer="model/moe")
    assert kind is torchtitan.FusedRows.Config and settings == {"dim": H, "layer": "model/moe"}
    assert torchtitan.grouped(GptOssGroupedExperts.Config())[0] is torchtitan.FusedGptOssRows.Config
    kind, settings = torchtitan.routed(RoutedExperts.Config(inner_experts=GroupedExperts.Config()))
    assert kind is torchtitan.FusedRoutedExperts.Config
    assert type(settings["inner_experts"]) is FusedGroupedExperts.Config
    quantised = type("Config", (GroupedExperts.Config,), {})
    with pytest.raises(ArgumentError, match="leave the converter or the other override out"):
        torchtitan.grouped(quantised())


@pytest.mark.filterwarnings("ignore:layers with device")
def test_a_layer_of_other_experts_is_refused(torchtitan, spec):
    with pytest.raises(ArgumentError, match="topk is 2, not 1"):
        torchtitan.FusedRows(Config(layer=spec(K)))(torch.randn(2, H), torch.tensor([2, 0, 0, 0]))
