"""The contract of fusekit.interop.megatron, over stand-ins of what it takes from Megatron-Core; the real one is in
tests/doors.
"""

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from fusekit.cpu import CpuLayer  # noqa: E402
from fusekit.errors import ArgumentError  # noqa: E402
from tests.plan.test_layer_program import options  # noqa: E402

E, H, I, K = 4, 32, 16, 2  # noqa: E741
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE, tp=ALONE)


class Module(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


@dataclass
class Shard:
    """A ShardedTensor, ShardedObject or ShardedTensorFactory."""

    key: str
    data: object
    rest: tuple = ()

    def __init__(self, key, data, *rest):
        self.key, self.data, self.rest = key, data, rest

    @classmethod
    def from_rank_offsets(cls, key, data, *offsets, replica_id, prepend_axis_num):
        return cls(key, data, offsets, replica_id, prepend_axis_num)


class MoELayer(Module):
    moe_layer_recompute = False

    def __init__(self, config, experts, routing):
        super().__init__(config)
        self.experts, self.route = experts, lambda x, mask: routing

    def shared_experts_compute(self, x):
        return None


@dataclass
class Submodules:
    mlp: object = None
    experts: object = None


@dataclass
class Spec:
    submodules: object = None


@dataclass
class Block:
    layer_specs: list


@pytest.fixture
def megatron(monkeypatch):
    def quick_gelu(x):
        return x * torch.sigmoid(1.702 * x)

    parallel = {
        "random": {"get_cuda_rng_tracker": None, "get_expert_parallel_rng_tracker_name": None},
        "layers": {"set_tensor_model_parallel_attributes": lambda *_: None},
    }
    contents = {
        "megatron": {}, "megatron.core": {}, "megatron.core.transformer": {}, "megatron.core.transformer.moe": {},
        "megatron.core.dist_checkpointing": {},
        "megatron.core.tensor_parallel": {"layers": SimpleNamespace(**parallel["layers"])},
        "megatron.core.tensor_parallel.random": parallel["random"],
        "megatron.core.activations": {"quick_gelu": quick_gelu, "squared_relu": lambda x: torch.relu(x) ** 2},
        "megatron.core.dist_checkpointing.mapping": {
            "ShardedObject": Shard, "ShardedTensor": Shard, "ShardedTensorFactory": Shard,
        },
        "megatron.core.transformer.module": {"MegatronModule": Module},
        "megatron.core.transformer.moe.moe_layer": {"MoELayer": MoELayer},
    }  # fmt: skip
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
    sys.modules.pop("fusekit.interop.megatron", None)
    yield importlib.import_module("fusekit.interop.megatron")
    del sys.modules["fusekit.interop.megatron"]


def config(**more):
    given = {
        "hidden_size": H, "moe_ffn_hidden_size": I, "moe_router_topk": K, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "params_dtype": torch.bfloat16, "use_cpu_initialization": True,
        "perform_initialization": True, "gradient_accumulation_fusion": False, "expert_model_parallel_size": 1,
        "transformer_impl": "local", "init_method": torch.nn.init.normal_, "moe_latent_size": None,
        "output_layer_init_method": torch.nn.init.normal_,
    }  # fmt: skip
    return SimpleNamespace(**given | more)


def layer(topk=1, **more):
    table = {"hidden": H, "intermediate": I, "experts": E, "dtype": "bf16", "router": {"input": "choices"}}
    return CpuLayer(options(**table | {"topk": topk, "grad_dtype": "f32"} | more))


def by_hand(module, x, expert):
    gate, up = (x.double() @ module.w1[expert].double().T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ module.w2[expert].double().T


@pytest.mark.filterwarnings("ignore:layers with device")
def test_rows_of_each_expert_and_those_beyond_the_counts(megatron):
    module = megatron.FusedExperts(E, config(), pg_collection=GROUPS, layer=layer(accumulate=True))
    for weight in module.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    rows, probs = torch.randn(7, H).bfloat16().requires_grad_(), torch.rand(7)
    y, bias = module(rows, torch.tensor([2, 0, 1, 3]), probs)
    wanted = [probs[n] * by_hand(module, rows[n], expert) for n, expert in enumerate([0, 0, 2, 3, 3, 3])]
    torch.testing.assert_close(y[:6].double(), torch.stack(wanted), rtol=0.05, atol=0.2)
    assert bias is None and not y[6].any()
    y.float().sum().backward()
    assert all(weight.grad_added_to_main_grad for weight in module.parameters())
    assert module.w1.main_grad[0].any() and not module.w1.main_grad[1].any()


@pytest.mark.filterwarnings("ignore:layers with device")
def test_the_whole_layer_leaves_out_experts_that_a_token_does_not_have(megatron):
    experts = megatron.ChosenExperts(E, config(), pg_collection=GROUPS, layer=layer(K))
    probs = torch.tensor([[0.0, 0.7, 0.0, 0.3], [0.0, 0.0, 1.0, 0.0]])
    block = megatron.WholeMoELayer(config(), experts, (probs, probs > 0))
    x = torch.randn(2, 1, H).bfloat16()
    y, _ = block(x)
    wanted = [0.7 * by_hand(experts, x[0, 0], 1) + 0.3 * by_hand(experts, x[0, 0], 3), by_hand(experts, x[1, 0], 2)]
    torch.testing.assert_close(y[:, 0].double(), torch.stack(wanted), rtol=0.05, atol=0.3)
    with pytest.raises(ArgumentError, match="runs in one piece"):
        block(x, intermediate_tensors=())


def test_the_keys_of_a_sharded_state(megatron):
    module = megatron.FusedExperts(E, config(), pg_collection=GROUPS, layer=layer())
    state = module.sharded_state_dict("mlp.experts.", ((0, 1, 3),))
    first = state["mlp.experts.w1"]
    build, merge, replica = first.rest
    shards = build(first.key, first.data, replica, None)
    gate, up = shards[2]
    assert first.key == gate.key == "mlp.experts.experts.linear_fc1.weight"
    assert [gate.rest[0], up.rest[0]] == [((0, 1, 3), (1, 2, E), (2, half, 2)) for half in range(2)]
    assert torch.equal(merge([[half.data for half in pair] for pair in shards]), module.w1)
    extra = state["mlp.experts.linear_fc2.3._extra_state"]
    assert (extra.key, extra.rest[:2]) == ("mlp.experts.experts.linear_fc2._extra_state", ((3, E), (1, 3)))
    apart = module.sharded_state_dict("mlp.experts.", (), {"singleton_local_shards": True})["mlp.experts.w1"]
    pair = apart.rest[0](apart.key, apart.data, replica, None)[1]
    assert [half.key for half in pair] == [f"mlp.experts.experts.1.linear_fc1.weight_{end}" for end in "wv"]
    module.load_state_dict({"w1": module.w1, "w2": module.w2, "linear_fc1.0._extra_state": None})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fp8": "hybrid"}, "fp8 = 'hybrid'.*set fp8 = None"),
        ({"recompute_modules": ["moe_act"]}, "recompute_modules has 'moe_act'"),
        ({"activation_func": torch.tanh}, "activation_func = tanh, gated"),
        ({"hidden_size": 64}, "hidden is 32, not 64"),
        ({"transformer_impl": "inference_optimized"}, "for training"),
    ],
)
def test_what_it_cannot_honour_is_refused(megatron, settings, words):
    with pytest.raises(ArgumentError, match=words):
        megatron.FusedExperts(E, config(**settings), pg_collection=GROUPS, layer=layer())


def test_a_copy_of_a_spec(megatron):
    routed = partial(MoELayer, submodules=Submodules(experts="theirs"))
    block = Block([Spec(Submodules(mlp=routed)), Spec(Submodules(mlp=partial(Module)))])
    copy = megatron.fused(block, whole=True, layer="model/moe")
    mlp = copy.layer_specs[0].submodules.mlp
    assert mlp.func is megatron.WholeMoELayer
    assert mlp.keywords["submodules"].experts.func is megatron.ChosenExperts
    assert mlp.keywords["submodules"].experts.keywords == {"layer": "model/moe"}
    assert copy.layer_specs[1] is block.layer_specs[1]
    assert routed.keywords["submodules"].experts == "theirs"
    with pytest.raises(ArgumentError, match="no MoE layer"):
        megatron.fused(Block(block.layer_specs[1:]))
