"""SGLang's unquantised MoE method and runner, by its own Python, with layers on the CPU."""

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.doors.absent import stand_in  # noqa: E402

stand_in(
    "IPython",
    "compressed_tensors",
    "gguf",
    "openai",
    "partial_json_parser",
    "sentencepiece",
    "starlette",
    "torchvision",
)
pytest.importorskip("sglang", reason="sglang is not installed")

from sglang.srt.layers.moe import utils  # noqa: E402
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native  # noqa: E402
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import fp8 as fp8_module  # noqa: E402
from sglang.srt.layers.quantization import mxfp4 as mxfp4_module  # noqa: E402
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from fusekit.interop import sglang as door  # noqa: E402
from tests.doors.served import E, H, I, K, Problem, error, library  # noqa: E402

FP8 = {"is_checkpoint_fp8_serialized": True, "weight_block_size": [128, 128]}
GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


HOOKED = [(kind, "create_moe_runner") for kind in (UnquantizedFusedMoEMethod, Fp8MoEMethod)]
HOOKED += [(Fp8MoEMethod, "apply")]
HOOKED += [
    (mxfp4_module.Mxfp4MoEMethod, name) for name in ("create_moe_runner", "process_weights_after_loading", "apply")
]


@pytest.fixture
def store(monkeypatch):
    originals = [(kind, name, getattr(kind, name)) for kind, name in HOOKED]
    lora = SimpleNamespace(enable_lora=False, lora_paths=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_lora", lambda: lora)
    stored = library()
    door.register(stored)
    door.register(stored)
    HookRegistry.apply_hooks()
    yield stored
    for original in originals:
        setattr(*original)
    door.MOE_RUNNER_BACKEND_CHOICES.remove(door.NAME)
    HookRegistry.reset()


class Served:
    """A method of SGLang's with the weights of a problem."""

    def __init__(self, problem, fp8=None, mxfp4=False, **changed):
        fields = {
            "num_experts": E,
            "num_local_experts": E,
            "hidden_size": H,
            "intermediate_size_per_partition": I,
            "top_k": K,
            "params_dtype": torch.bfloat16,
            "num_fused_shared_experts": 0,
        }
        self.config = MoeRunnerConfig(**fields | changed)
        self.layer, self.problem = torch.nn.Module(), problem
        self.layer.moe_runner_config, self.layer.num_experts = self.config, self.config.num_local_experts
        self.layer.moe_tp_size = 1
        self.method = UnquantizedFusedMoEMethod() if fp8 is None else Fp8MoEMethod(Fp8Config(**fp8))
        if mxfp4:
            self.method = mxfp4_module.Mxfp4MoEMethod("mlp.experts")
            self.layer.num_local_experts = self.config.num_local_experts
        sizes = self.config.num_local_experts, H, self.config.intermediate_size_per_partition, torch.bfloat16
        self.method.create_weights(self.layer, *sizes, with_bias=problem.b1 is not None)
        given = {"w13_weight": problem.w1, "w2_weight": problem.w2, "w13_weight_bias": problem.b1,
                 "w2_weight_bias": problem.b2, "w13_weight_scale_inv": problem.s1,
                 "w2_weight_scale_inv": problem.s2, "w13_weight_scale": problem.s1,
                 "w2_weight_scale": problem.s2}  # fmt: skip
        for name, parameter in self.layer.named_parameters():
            if name in given and parameter.shape == given[name].shape:
                parameter.data.copy_(given[name])
        self.method.create_moe_runner(self.layer, self.config)
        if mxfp4 or (fp8 and problem.s1 is not None and self.method.block_quant):
            self.method.process_weights_after_loading(self.layer)

    @property
    def backend(self):
        return self.method.get_moe_runner_backend(self.layer).value

    def topk(self):
        return StandardTopKOutput(self.problem.weights, self.problem.ids, None)

    def run(self):
        with torch.inference_mode():
            given = StandardDispatchOutput(self.problem.x, None, self.topk())
            run = getattr(self.method, "forward_cuda", self.method.apply)
            return run(self.layer, given).hidden_states


def test_silu_as_the_native_implementation(store):
    served = Served(problem := Problem())
    assert served.backend == door.NAME and error(served.run(), problem.wanted()) < 0.01
    native = moe_forward_native(served.layer, problem.x, served.topk(), served.config)
    assert error(served.run(), native.float()) < 0.01
    assert store.searched == 1


def test_gpt_oss_with_float32_biases(store):
    served = Served(problem := Problem(bias=True, bias_dtype=torch.float32), **GPT_OSS)
    assert error(served.run(), problem.wanted(gpt_oss=True)) < 0.01


def test_the_scaling_factor_of_routed_experts(store):
    served = Served(problem := Problem(), routed_scaling_factor=2.5)
    assert error(served.run(), 2.5 * problem.wanted()) < 0.01


def test_experts_of_another_rank_add_nothing(store):
    problem = Problem()
    wanted = problem.wanted(local=range(4))
    problem.w1, problem.w2, problem.ids = problem.w1[:4], problem.w2[:4], problem.ids.where(problem.ids < 4, -1)
    assert error(Served(problem, num_local_experts=4).run(), wanted) < 0.01


def test_an_fp8_checkpoint_by_its_own_method(store):
    served = Served(problem := Problem(fp8=True), FP8)
    assert served.layer.w13_weight.dtype == torch.float8_e4m3fn
    assert served.backend == door.NAME and error(served.run(), problem.wanted()) < 0.01
    assert store.ran == {"store/fp8"}
    served.layer.w2_weight_scale_inv.data.mul_(2)  # a reload in place is read
    assert error(served.run(), 2 * problem.wanted()) < 0.01


def test_fp8_experts_elsewhere(store, monkeypatch):
    records = []
    logger = logging.getLogger("sglang.fusekit")
    monkeypatch.setattr(logger, "warning", lambda text, *given: records.append(text % given))
    wanted = utils.get_moe_runner_backend
    for _ in range(2):
        for backend in (wanted, door._backend):  # auto, and --moe-runner-backend fusekit
            for module in (utils, fp8_module):
                monkeypatch.setattr(module, "get_moe_runner_backend", backend)
            assert Served(Problem(fp8=True), FP8, top_k=3).backend == "triton"
            assert Served(Problem(fp8=True), FP8 | {"weight_block_size": None}).backend == "triton"
            assert Served(Problem(fp8=True), FP8).backend == door.NAME
    assert len(records) == 2 and 'weights = "fp8-block"' in records[0] and "topk = 3" in records[0]
    assert "128 x 128 scales" in records[1]


@pytest.fixture
def asked(store, monkeypatch):
    """--moe-runner-backend fusekit, of a server that has been set up."""
    flags = SimpleNamespace(moe=SimpleNamespace(flashinfer_mxfp4_moe_precision="default"))
    monkeypatch.setattr(mxfp4_module, "get_exec", lambda: flags)
    for module in (utils, mxfp4_module):
        monkeypatch.setattr(module, "get_moe_runner_backend", door._backend)
    return store


def test_an_mxfp4_checkpoint_by_its_own_method(asked):
    served = Served(problem := Problem(bias=True, mxfp4=True), mxfp4=True, **GPT_OSS)
    assert served.backend == door.NAME  # to which SGLang binds its top k
    assert error(served.run(), problem.wanted(gpt_oss=True)) < 0.01
    assert asked.ran == {"store/mxfp4"}
    assert torch.equal(served.layer.w13_weight, problem.w1) and torch.equal(served.layer.w2_weight_scale, problem.s2)
    served.layer.w2_weight_scale.data.add_(1)  # a reload in place is read
    served.layer.w2_weight_bias.data.mul_(2)
    assert error(served.run(), 2 * problem.wanted(gpt_oss=True)) < 0.01


def test_mxfp4_experts_elsewhere(asked, monkeypatch):
    records, own = [], []
    logger = logging.getLogger("sglang.fusekit")
    monkeypatch.setattr(logger, "warning", lambda text, *given: records.append(text % given))
    kind = mxfp4_module.Mxfp4MoEMethod
    hooked = kind.process_weights_after_loading.__wrapped__
    monkeypatch.setattr(hooked, "__code__", (lambda self, layer: self.own.append(layer)).__code__)
    monkeypatch.setattr(kind, "own", own, raising=False)
    for _ in range(2):
        served = Served(Problem(bias=True, mxfp4=True), mxfp4=True, **GPT_OSS, top_k=3)
        assert served.method.runner.runner_backend.value == "triton" and own.pop() is served.layer
    (text,) = records
    assert 'weights = "mxfp4"' in text and "topk = 3" in text and 'glu_layout = "interleaved"' in text
    Served(Problem(bias=True, mxfp4=True), mxfp4=True, **GPT_OSS)
    assert not own
    for value in ("triton", "triton_kernel"):  # asked for
        arguments = SimpleNamespace(moe_runner_backend=value)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda given=arguments: given)
        for module in (utils, mxfp4_module):
            monkeypatch.setattr(module, "get_moe_runner_backend", lambda value=value: utils.MoeRunnerBackend(value))
        served = Served(Problem(bias=True, mxfp4=True), mxfp4=True, **GPT_OSS)
        assert served.method.runner.runner_backend.value == value and own.pop() is served.layer


def test_sglang_may_have_chosen_triton_kernels_itself(asked, monkeypatch):
    """As it does for gpt-oss on Hopper, before it makes a layer."""
    for module in (utils, mxfp4_module):
        monkeypatch.setattr(module, "get_moe_runner_backend", lambda: utils.MoeRunnerBackend.TRITON_KERNELS)
    arguments = SimpleNamespace(moe_runner_backend="auto")
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: arguments)
    served = Served(problem := Problem(bias=True, mxfp4=True), mxfp4=True, **GPT_OSS)
    assert served.backend == door.NAME and torch.equal(served.layer.w13_weight, problem.w1)
    assert error(served.run(), problem.wanted(gpt_oss=True)) < 0.01


def test_no_tokens(store):
    served = Served(problem := Problem())
    problem.x, problem.weights, problem.ids = problem.x[:0], problem.weights[:0], problem.ids[:0]
    assert served.run().shape == (0, H)


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 3}, {"activation": "gelu"}, {"activation": "situ"}, {"params_dtype": torch.float16},
        {"gemm1_clamp_limit": 5.0}, {"swiglu_limit": 10}, {"no_combine": True}, {"apply_router_weight_on_input": True},
    ],
    ids=str,
)  # fmt: skip
def test_elsewhere_sglang_chooses(store, changed):
    assert Served(Problem(), **changed).backend == "triton"


def test_another_backend_that_was_asked_for_stays(store, monkeypatch):
    monkeypatch.setattr(utils, "get_moe_runner_backend", lambda: utils.MoeRunnerBackend.TRITON)
    assert Served(Problem()).backend == "triton"
    monkeypatch.setattr(utils, "get_moe_runner_backend", door._backend)
    assert Served(Problem()).backend == door.NAME


def test_a_refusal_is_logged_once(store, monkeypatch):
    records = []
    monkeypatch.setattr(
        logging.getLogger("sglang.fusekit"), "warning", lambda text, *given: records.append(text % given)
    )
    for _ in range(2):
        Served(Problem(), top_k=3)
    assert len(records) == 1 and "topk = 3" in records[0]
