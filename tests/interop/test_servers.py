"""Layers for the experts of servers, and the door to vLLM with stand-ins for its classes."""

import enum
import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")

from fusekit.errors import ArchMismatchError  # noqa: E402
from fusekit.interop.experts import Experts, given_parameters  # noqa: E402
from fusekit.interop.serving import Chooser  # noqa: E402
from tests.doors.served import GPT_OSS, E, H, I, K, Problem, error, library  # noqa: E402

SILU = given_parameters({"kind": "swiglu"})


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def chooser(stored, layers="*"):
    return Chooser(stored, layers, logging.getLogger("server"))


def experts(**changed):
    fields = {"hidden": H, "intermediate": I, "experts": E, "topk": K, "dtype": "bf16", "activation": SILU,
              "glu_layout": "concat", "bias": False, "b_major": "k"}  # fmt: skip
    return Experts(**fields | changed)


def test_a_layer_for_inference_is_preferred_and_named_once(records):
    chosen = chooser(library())
    assert chosen.served(experts(), 64, cpu=True) is chosen.served(experts(), 64, cpu=True)
    assert [record.message for record in records.records] == [
        f"fusekit: the layer store/plain runs experts 8 x [{H} -> {I}], top 2, swiglu (concat), bf16"
    ]
    assert chooser(library(), "*/trained").served(experts(), 64, cpu=True).layer.options.keep == "z"


def test_fp8_weights_have_layers_of_their_own(records):
    names = []
    for weights in ("none", "fp8-block"):
        served = chooser(library()).served(experts(weights=weights), 64, cpu=True)
        names.append((served.layer.name, "w1_s" in served.layer.inputs("inference")))
    assert names == [("store/plain", False), ("store/fp8", True)]
    assert chooser(library(), "*/fp8").served(experts(), 64, cpu=True) is None
    assert chooser(library(), "*/plain").served(experts(weights="fp8-block"), 64, cpu=True) is None
    assert 'weights = "fp8-block"' in records.records[-1].message


def test_a_layer_that_does_not_load_leaves_the_next(records):
    stored = library()

    def refuse(tokens):
        raise ArchMismatchError("it is for sm_90a", expected="sm_90a", found="sm_80")

    stored.layer("store/plain", device="cpu").load = refuse
    assert chooser(stored).served(experts(), 64, cpu=True).layer.options.keep == "z"
    assert chooser(stored, "*/plain").served(experts(), 64, cpu=True) is None
    assert "store/plain: it is for sm_90a" in records.records[-1].message


def test_refusals_are_logged_once(records):
    chosen = chooser(library())
    for _ in range(2):
        assert chosen.served(experts(topk=3), 64, cpu=True) is None
        chosen.refuse("no kernels for LoRA")
    first, second = (record.message for record in records.records)
    assert "topk = 3" in first and 'keep = "none"' in first and second.startswith("fusekit: no kernels for LoRA")


class Activation(enum.Enum):
    SILU, SWIGLUOAI, SITU = "silu", "swigluoai", "situ"


class Format(enum.Enum):
    Standard = 1


class Backend(enum.Enum):
    TRITON, CPU, MARLIN, XPU = 1, 2, 3, 4


class Base:
    def __init__(self, moe_config, quant_config):
        self.quant_config = quant_config
        self.w1_bias, self.w2_bias = quant_config.biases
        self.w1_scale, self.w2_scale = quant_config.scales

    @staticmethod
    def is_supported_config(cls, config, weight_key, activation_key, activation_format):
        supported = cls._supports_activation(config.activation) and cls._supports_quant_scheme(
            weight_key, activation_key
        )
        return supported and activation_format is cls.activation_format(), "it says so"


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's modules as far as the door reads them."""
    select, select_fp8 = lambda config: (Backend.TRITON, Base), lambda config, *keys: (Backend.TRITON, Base)
    quant = SimpleNamespace(make=lambda: SimpleNamespace(biases=(None, None)))
    numbers = SimpleNamespace(
        from_configs=lambda moe, quant: SimpleNamespace(clamp_limit=moe.swiglu_limit, alpha=1.0, beta=0.0)
    )
    fused_moe = "vllm.model_executor.layers.fused_moe"
    modules = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True)},
        f"{fused_moe}.modular_kernel": {
            "FusedMoEExperts": Base, "FusedMoEExpertsModular": Base, "FusedMoEActivationFormat": Format,
        },
        f"{fused_moe}.unquantized_fused_moe_method": {"select_unquantized_moe_backend": select},
        "vllm.model_executor.layers.quantization.fp8": {"select_fp8_moe_backend": select_fp8},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "kFp8Static128BlockSym": "w128", "kFp8Dynamic128Sym": "x128", "kMxfp4Static": "w32",
        },
        "vllm.model_executor.layers.quantization.mxfp4": {
            "select_mxfp4_moe_backend": lambda config, activation_key=None: (Backend.MARLIN, Base)
        },
        f"{fused_moe}.activation": {"ApplyMoEActivationConfig": numbers},
        f"{fused_moe}.config": {"FusedMoEQuantConfig": quant},
        f"{fused_moe}.oracle": {},
        f"{fused_moe}.oracle.unquantized": {"select_unquantized_moe_backend": select, "UnquantizedMoeBackend": Backend},
        f"{fused_moe}.oracle.fp8": {"select_fp8_moe_backend": select_fp8, "Fp8MoeBackend": Backend},
        f"{fused_moe}.oracle.mxfp4": {"Mxfp4MoeBackend": Backend},
        f"{fused_moe}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": object},
    }  # fmt: skip
    names = {".".join(name.split(".")[:count]) for name in modules for count in range(1, name.count(".") + 2)}
    for name in sorted(names):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "fusekit.interop.vllm", raising=False)
    yield importlib.import_module("fusekit.interop.vllm")
    sys.modules.pop("fusekit.interop.vllm", None)


def config(**changed):
    return SimpleNamespace(**{
        "hidden_dim": H, "intermediate_size_per_partition": I, "num_local_experts": E, "experts_per_token": K,
        "in_dtype": torch.bfloat16, "activation": Activation.SILU, "has_bias": False, "swiglu_limit": None,
        "max_num_tokens": 64, "device": "cpu", "moe_backend": "auto", **changed,
    })  # fmt: skip


def test_vllm_chooses_and_falls_back(vllm):
    vllm.register(library())
    vllm.register(library())
    method = sys.modules["vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"]
    for select in (vllm.unquantized.select_unquantized_moe_backend, method.select_unquantized_moe_backend):
        assert select(config())[1].__qualname__ == vllm.NAME
        for changed in (
            {"moe_backend": "triton"}, {"topk": 3, "experts_per_token": 3}, {"activation": Activation.SITU},
            {"in_dtype": torch.float16}, {"swiglu_limit": 5.0},
        ):  # fmt: skip
            assert select(config(**changed)) == (Backend.TRITON, Base)


def test_vllm_chooses_for_fp8_experts(vllm):
    vllm.register(library())
    method = sys.modules["vllm.model_executor.layers.quantization.fp8"]
    assert (
        method.select_fp8_moe_backend(config(), "w128", "x128", allow_vllm_cutlass=False)[1].__qualname__ == vllm.NAME
    )
    for keys, changed in ((("w128", "x128"), {"experts_per_token": 3}), (("tensor", "tensor"), {})):
        assert method.select_fp8_moe_backend(config(**changed), *keys) == (Backend.TRITON, Base)


def test_vllm_chooses_for_mxfp4_experts(vllm):
    vllm.register(library())
    select, given = vllm.mxfp4_methods.select_mxfp4_moe_backend, config(activation=Activation.SWIGLUOAI, has_bias=True)
    backend, kernel = select(given)
    assert backend is Backend.XPU and kernel.__qualname__ == vllm.NAME
    assert select(given, "x8") == select(config(experts_per_token=3)) == (Backend.MARLIN, Base)


@pytest.mark.parametrize("which", ["plain", "gpt_oss", "fp8", "mxfp4"])
def test_vllm_runs_a_layer(vllm, which):
    vllm.register(library())
    gpt_oss, fp8, mxfp4 = which in ("gpt_oss", "mxfp4"), which == "fp8", which == "mxfp4"
    problem = Problem(bias=gpt_oss, fp8=fp8, mxfp4=mxfp4)
    settings = config(activation=Activation.SWIGLUOAI if gpt_oss else Activation.SILU, has_bias=gpt_oss)
    select, keys = vllm.unquantized.select_unquantized_moe_backend, ()
    if fp8:
        select, keys = vllm.fp8.select_fp8_moe_backend, ("w128", "x128")
    if mxfp4:
        select = vllm.mxfp4_methods.select_mxfp4_moe_backend
    quant = SimpleNamespace(
        biases=(problem.b1, problem.b2), scales=(problem.s1, problem.s2),
        weight_quant_dtype="e4m3" if fp8 else "mxfp4" if mxfp4 else None,
    )  # fmt: skip
    kernel = select(settings, *keys)[1](settings, quant)
    assert kernel.expects_unquantized_inputs is (fp8 or mxfp4)
    first, second, out = kernel.workspace_shapes(len(problem.x), 2 * I, H, K, E, E, None, settings.activation)
    output = torch.empty(out, dtype=torch.bfloat16)
    given = output, problem.x, problem.w1, problem.w2, problem.weights, problem.ids, settings.activation, E
    workspaces = torch.empty(first, dtype=torch.bfloat16), torch.empty(second, dtype=torch.bfloat16)
    kernel.apply(*given, None, None, None, *workspaces, None, False)
    assert error(output, problem.wanted(gpt_oss=gpt_oss)) < 0.01
    expert_map = torch.arange(E, dtype=torch.int32).where(torch.arange(E) < 4, -1)
    kernel.apply(*given, expert_map, None, None, *workspaces, None, False)
    assert error(output, problem.wanted(gpt_oss=gpt_oss, local=range(4))) < 0.01
    assert dict(vllm.described(settings, None).activation) == dict(
        given_parameters(GPT_OSS if gpt_oss else {"kind": "swiglu"})
    )
