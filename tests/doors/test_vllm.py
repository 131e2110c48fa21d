"""vLLM's choice of experts and its modular kernel, by its own Python, with layers on the CPU."""

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.doors.absent import stand_in  # noqa: E402

stand_in(
    "cpuinfo", "fastapi", "llguidance", "openai", "openai_harmony", "partial_json_parser", "prometheus_client",
    "requests", "urllib3", "xgrammar",
)  # fmt: skip
pytest.importorskip("vllm", reason="vllm is not installed")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    biased_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from fusekit.errors import NotBuiltError  # noqa: E402
from fusekit.interop import vllm as door  # noqa: E402
from tests.doors.served import E, H, I, K, Problem, error, library  # noqa: E402


@pytest.fixture
def stock(monkeypatch):
    """vLLM on the CPU, whose oracle chooses as on a Hopper GPU."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    monkeypatch.setattr(TritonExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(oracle, "_get_priority_backends", lambda config: [oracle.UnquantizedMoeBackend.TRITON])
    original = oracle.select_unquantized_moe_backend
    yield
    oracle.select_unquantized_moe_backend = door.method.select_unquantized_moe_backend = original


@pytest.fixture
def store(stock):
    stored = library()
    door.register(stored)
    door.register(stored)  # as vLLM may
    return stored


def config(**changed):
    return FusedMoEConfig(**{
        "num_experts": E, "experts_per_token": K, "hidden_dim": H, "intermediate_size": I, "num_local_experts": E,
        "num_logical_experts": E, "activation": MoEActivation.SILU, "device": "cpu", "in_dtype": torch.bfloat16,
        "routing_method": RoutingMethodType.Renormalize, **changed,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
    })  # fmt: skip


def chosen(**changed):
    return door.method.select_unquantized_moe_backend(config(**changed))[1]


def run(problem, quant=None, expert_map=None, on_input=False, **changed):
    settings = config(**changed)
    _, experts = door.method.select_unquantized_moe_backend(settings)
    assert experts.__qualname__ == door.NAME
    kernel = mk.FusedMoEKernel(
        no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), experts(settings, quant or FusedMoEQuantConfig.make())
    )
    with torch.inference_mode():
        return kernel.apply(
            hidden_states=problem.x, w1=problem.w1, w2=problem.w2, topk_weights=problem.weights, topk_ids=problem.ids,
            activation=settings.activation, global_num_experts=E, expert_map=expert_map,
            apply_router_weight_on_input=on_input,
        )  # fmt: skip


def test_silu(store):
    problem = Problem()
    assert error(run(problem), problem.wanted()) < 0.01
    assert store.searched == 1


def test_gpt_oss(store):
    problem = Problem(bias=True)
    y = run(problem, biased_moe_quant_config(problem.b1, problem.b2), activation=MoEActivation.SWIGLUOAI, has_bias=True)
    assert error(y, problem.wanted(gpt_oss=True)) < 0.01


def test_expert_map(store):
    problem, local = Problem(), range(2, 6)
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[list(local)] = torch.arange(4, dtype=torch.int32)
    whole, problem.w1, problem.w2 = (
        problem.wanted(local=local),
        problem.w1[2:6].contiguous(),
        problem.w2[2:6].contiguous(),
    )
    assert error(run(problem, expert_map=expert_map, num_local_experts=4), whole) < 0.01
    problem.ids[0] = -1
    y = run(problem, expert_map=expert_map, num_local_experts=4)
    assert not y[0].any() and error(y[1:], whole[1:]) < 0.01


def test_weights_on_the_input(store):
    problem = Problem()
    problem.weights, problem.ids = torch.full_like(problem.weights[:, :1], 0.5), problem.ids[:, :1].contiguous()
    plain = run(problem, experts_per_token=1)
    problem.x = problem.x * 2  # by a power of two, so that bf16 rounds nothing
    y = run(problem, on_input=True, experts_per_token=1)
    assert error(y, 2 * plain.float()) < 0.01


def test_a_reload_of_weights_is_read(store):
    problem = Problem()
    run(problem)
    problem.w2.mul_(2)
    assert error(run(problem), problem.wanted()) < 0.01


@pytest.mark.parametrize(
    "changed",
    [
        {"experts_per_token": 3}, {"activation": MoEActivation.GELU}, {"activation": MoEActivation.SITU},
        {"in_dtype": torch.float16}, {"has_bias": True}, {"swiglu_limit": 5.0}, {"moe_backend": "triton"},
        {"is_lora_enabled": True},
    ],
    ids=str,
)  # fmt: skip
def test_elsewhere_vllm_chooses(store, changed, monkeypatch):
    monkeypatch.setattr(oracle, "_trtllm_bf16_lora_supported", lambda config: False)
    assert chosen(**changed) is TritonExperts


def test_a_refusal_is_logged_once_with_the_spec_to_build(store, monkeypatch):
    records = []
    logger = logging.getLogger("vllm.fusekit")
    monkeypatch.setattr(logger, "warning", lambda text, *given: records.append(text % given))
    for _ in range(3):
        assert chosen(experts_per_token=3) is TritonExperts
    (text,) = records
    assert "top 3" in text and "topk = 3" in text and 'keep = "none"' in text


def test_numbers_that_come_after_the_choice_are_not_ignored(store):
    with pytest.raises(NotBuiltError, match=r"clamp_limit=5\.0"):
        run(Problem(), FusedMoEQuantConfig.make(gemm1_clamp_limit=5.0))


def test_numbers_of_a_config(store):
    described = door.described(
        config(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0),
        SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=None, gemm1_beta=None),
    )
    assert described.glu_layout == "concat" and dict(described.activation)["alpha"] == 1.702
