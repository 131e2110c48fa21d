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
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    biased_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (  # noqa: E402
    OAITritonMxfp4ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, unquantized  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep  # noqa: E402
from vllm.model_executor.layers.quantization import mxfp4 as mxfp4_methods  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod  # noqa: E402
from vllm.model_executor.layers.quantization.utils import quant_utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from fusekit.errors import NotBuiltError  # noqa: E402
from fusekit.interop import vllm as door  # noqa: E402
from tests.doors.served import E, H, I, K, Problem, error, library  # noqa: E402

BLOCK = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
ORACLES = (unquantized, "select_unquantized_moe_backend"), (fp8, "select_fp8_moe_backend")


@pytest.fixture
def stock(monkeypatch):
    """vLLM on the CPU, whose oracle chooses as on a Hopper GPU."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    monkeypatch.setattr(TritonExperts, "_supports_current_device", staticmethod(lambda: True))
    scheme = TritonExperts._supports_quant_scheme
    monkeypatch.setattr(
        TritonExperts, "_supports_quant_scheme", staticmethod(lambda *keys: keys == BLOCK or scheme(*keys))
    )
    first = {unquantized: [unquantized.UnquantizedMoeBackend.TRITON], fp8: [*fp8.Fp8MoeBackend]}
    first[fp8].sort(key=lambda backend: backend is not fp8.Fp8MoeBackend.TRITON)
    for oracle, backends in first.items():
        monkeypatch.setattr(oracle, "_get_priority_backends", lambda *_, chosen=backends: [*chosen])
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(mxfp4_methods, "select_mxfp4_moe_backend", mxfp4.select_mxfp4_moe_backend)
    originals = {name: getattr(oracle, name) for oracle, name in ORACLES}
    yield
    for oracle, name in ORACLES:
        door.replace(name, getattr(oracle, name), originals[name])


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
    return method.select_unquantized_moe_backend(config(**changed))[1]


def run(problem, quant=None, expert_map=None, on_input=False, **changed):
    settings = config(**changed)
    _, experts = method.select_unquantized_moe_backend(settings)
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
    monkeypatch.setattr(unquantized, "_trtllm_bf16_lora_supported", lambda config: False)
    assert chosen(**changed) is TritonExperts


def fp8_layer(problem, block=(128, 128), **changed):
    """A method of vLLM's for FP8 checkpoints, and its layer with the weights of a problem."""
    layer = torch.nn.Module()
    layer.moe_config = settings = config(**changed)
    layer.activation, layer.global_num_experts, layer.expert_map = settings.activation, E, None
    layer.apply_router_weight_on_input, layer._expert_routing_tables = False, lambda: None
    given = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[*block])
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        method_ = Fp8MoEMethod(given, layer)
        method_.create_weights(layer, E, H, I, torch.bfloat16)
        for name, value in {"w13_weight": problem.w1, "w2_weight": problem.w2, "w13_weight_scale_inv": problem.s1,
                            "w2_weight_scale_inv": problem.s2}.items():  # fmt: skip
            getattr(layer, name).data.copy_(value)
        method_.process_weights_after_loading(layer)
    return method_, layer


def test_an_fp8_checkpoint_by_its_own_method(store):
    method_, layer = fp8_layer(problem := Problem(fp8=True))
    assert method_.experts_cls.__qualname__ == door.NAME and method_.fp8_backend is fp8.Fp8MoeBackend.TRITON
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    with torch.inference_mode():
        y = method_.apply(layer, problem.x, problem.weights, problem.ids, None, None)
    assert error(y, problem.wanted()) < 0.01
    assert store.ran == {"store/fp8"} and store.searched == 1
    assert addresses == [parameter.data_ptr() for parameter in layer.parameters()]


def test_fp8_experts_elsewhere(store, monkeypatch):
    records = []
    logger = logging.getLogger("vllm.fusekit")
    monkeypatch.setattr(logger, "warning", lambda text, *given: records.append(text % given))
    for _ in range(2):
        assert fp8_layer(Problem(fp8=True), experts_per_token=3)[0].experts_cls is TritonExperts
    (text,) = records
    assert 'weights = "fp8-block"' in text and "topk = 3" in text
    tensor = quant_utils.kFp8StaticTensorSym, quant_utils.kFp8DynamicTensorSym
    monkeypatch.setattr(TritonExperts, "_supports_quant_scheme", staticmethod(lambda *keys: True))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        assert fp8.select_fp8_moe_backend(config(), *tensor)[1] is TritonExperts
        assert fp8.select_fp8_moe_backend(config(moe_backend="triton"), *BLOCK)[1] is TritonExperts
        assert fp8.select_fp8_moe_backend(config(), *BLOCK)[1].__qualname__ == door.NAME
    assert "quantization scheme" in records[1]


@pytest.fixture(params=["TRITON", "MARLIN"])
def gpt_oss(store, request, monkeypatch):
    """What vLLM chooses for gpt-oss on a Hopper GPU, with its Triton kernels and without them."""
    own = {"TRITON": OAITritonMxfp4ExpertsMonolithic, "MARLIN": MarlinExperts}[request.param]
    for kernel in (OAITritonMxfp4ExpertsMonolithic, MarlinExperts):
        monkeypatch.setattr(kernel, "_supports_current_device", staticmethod(lambda kernel=kernel: kernel is own))
    monkeypatch.setattr(mxfp4, "_user_moe_activation_override", lambda: None)  # it asks the model's config
    return SimpleNamespace(backend=mxfp4.Mxfp4MoeBackend[request.param], kernel=own)


def gpt_oss_config(**changed):
    return config(**{"activation": MoEActivation.SWIGLUOAI, "has_bias": True, **changed})


def gpt_oss_layer(problem, **changed):
    """vLLM's method for gpt-oss, and its layer with the weights of a problem."""
    layer = torch.nn.Module()
    layer.moe_config = settings = gpt_oss_config(**changed)
    layer.activation, layer.global_num_experts, layer.expert_map = settings.activation, E, None
    layer.apply_router_weight_on_input, layer._expert_routing_tables = False, lambda: None
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        method_ = mxfp4_methods.GptOssMxfp4MoEMethod(settings)
        parallel = settings.moe_parallel_config
        hidden, settings.intermediate_size_per_partition = method_.maybe_roundup_sizes(
            H, settings.intermediate_size_per_partition, torch.bfloat16, parallel
        )
        method_.create_weights(layer, E, hidden, settings.intermediate_size_per_partition, torch.bfloat16)
        given = {"w13_weight": problem.w1, "w2_weight": problem.w2, "w13_weight_scale": problem.s1,
                 "w2_weight_scale": problem.s2, "w13_bias": problem.b1, "w2_bias": problem.b2}  # fmt: skip
        for name, value in given.items():
            there = getattr(layer, name).data
            there[tuple(slice(extent) for extent in value.shape)] = value
        addresses = [parameter.data_ptr() for parameter in layer.parameters()]
        method_.process_weights_after_loading(layer)
    assert addresses == [parameter.data_ptr() for parameter in layer.parameters()]
    return method_, layer


@pytest.mark.parametrize("cut", [0, 32], ids=["whole", "filled up"])
def test_an_mxfp4_checkpoint_by_its_own_method(store, gpt_oss, cut):
    problem = Problem(bias=True, mxfp4=True)
    if cut:  # of tensor parallelism, which leaves no multiple of 64; vLLM fills up with zeros
        problem.w1, problem.s1, problem.b1 = (each[:, : -2 * cut] for each in (problem.w1, problem.s1, problem.b1))
        problem.w2, problem.s2 = problem.w2[..., : -cut // 2], problem.s2[..., : -cut // 32]
    method_, layer = gpt_oss_layer(problem, intermediate_size=I - cut)
    assert method_.experts_cls.__qualname__ == door.NAME and not method_.is_monolithic
    with torch.inference_mode():
        y = method_.apply(layer, problem.x, problem.weights, problem.ids, None, None)
    assert error(y, problem.wanted(gpt_oss=True)) < 0.01
    assert store.ran == {"store/mxfp4"} and store.searched == 1
    layer.w2_weight.zero_()  # a reload in place
    with torch.inference_mode():
        assert not torch.equal(y, method_.apply(layer, problem.x, problem.weights, problem.ids, None, None))


def test_mxfp4_experts_elsewhere(gpt_oss, monkeypatch):
    records = []
    logger = logging.getLogger("vllm.fusekit")
    monkeypatch.setattr(logger, "warning", lambda text, *given: records.append(text % given))
    own = gpt_oss.backend, gpt_oss.kernel
    select = mxfp4_methods.select_mxfp4_moe_backend
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        for _ in range(2):
            assert select(gpt_oss_config(experts_per_token=3)) == own
        (text,) = records
        assert 'weights = "mxfp4"' in text and "topk = 3" in text and 'glu_layout = "interleaved"' in text
        assert select(gpt_oss_config(moe_backend=gpt_oss.backend.value.lower())) == own
        assert select(gpt_oss_config(), quant_utils.kFp8StaticTensorSym) == own
        assert mxfp4.select_mxfp4_moe_backend(gpt_oss_config()) == own  # for other formats than gpt-oss's
        assert select(gpt_oss_config())[1].__qualname__ == door.NAME


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
