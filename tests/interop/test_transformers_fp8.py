"""FP8 checkpoints in model classes of Transformers, on the CPU with stand-in layers, beside what Transformers makes of
them when it dequantises.
"""

import json
from pathlib import Path

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from fusekit.interop import transformers as interop  # noqa: E402
from tests.doors.served import dequantised, error, quantised  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers import Library, said  # noqa: E402
from tests.interop.test_transformers_blocks import restored  # noqa: E402, F401

H, I = 256, 128  # noqa: E741
LAYER = {"hidden": H, "intermediate": I, "weights": "fp8-block", "keep": "none", "dtype": "bf16", "grad_dtype": "bf16"}
DEEPSEEK = {
    "router": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
    "shared": I,
}
APART = [".*self_attn", "lm_head"]  # not in FP8: Transformers multiplies it on GPUs alone


@pytest.fixture
def library(restored, monkeypatch):  # noqa: F811
    # It asks for a GPU, and dequantises without one.
    monkeypatch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    known = {interface: set(interface._global_mapping) for interface in interop._interfaces()}
    yield Library(
        bf16=said(16, 4, hidden=H, intermediate=I, dtype="bf16", grad_dtype="bf16"),
        experts=said(16, 4, **LAYER),
        qwen3_moe=said(16, 4, **LAYER | {"router": {}}), deepseek_v3=said(16, 4, **LAYER | DEEPSEEK),
    )  # fmt: skip
    for interface, names in known.items():
        for name in set(interface._global_mapping) - names:
            del interface._global_mapping[name]


def shipped(folder: Path, name: str, **quantization) -> Path:
    """A checkpoint as those of the family are shipped: each expert apart, with its scales."""
    models.model(name, "eager", H, I, dtype=torch.bfloat16).save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    state = files.load_file(file)
    for key in [key for key in state if "experts." in key and key.endswith("weight")]:
        state[key], state[f"{key}_scale_inv"] = quantised(state[key])
    files.save_file(state, file, {"format": "pt"})
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    table |= {"modules_to_not_convert": APART, **quantization}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": table}))
    return folder


def saved(folder: Path, name: str) -> Path:
    """A checkpoint that Transformers quantises and saves."""
    models.model(name, "eager", H, I, dtype=torch.bfloat16).save_pretrained(folder / "bf16")
    given = transformers.FineGrainedFP8Config(modules_to_not_convert=APART)
    load(folder / "bf16", "eager", quantization_config=given).save_pretrained(folder / "fp8")
    return folder / "fp8"


def load(folder, backend, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=backend, **more
    ).eval()


def decoded(folder):
    """The model that Transformers makes of the checkpoint without FP8."""
    kept = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=APART)
    model = load(folder, "grouped_mm", quantization_config=kept)
    experts = [layer.mlp.experts for layer in model.model.layers]
    if experts[0].down_proj.dtype != torch.bfloat16:  # scales that it saved itself are left out
        coded = [layer.mlp.experts for layer in load(folder, "eager").model.layers]
        for module, found in zip(experts, coded, strict=True):
            for name in ("gate_up_proj", "down_proj"):
                weights = dequantised(getattr(found, name), getattr(found, f"{name}_scale_inv")).detach().bfloat16()
                setattr(module, name, torch.nn.Parameter(weights))
    return model


def compared(folder, backend):
    """The model with the backend, whose logits and tokens are those of the one without FP8."""
    model, want = load(folder, backend), decoded(folder)
    experts = model.model.layers[-1].mlp.experts
    assert isinstance(experts, fp8.FP8Experts) and experts.down_proj.dtype == torch.float8_e4m3fn
    assert want.model.layers[-1].mlp.experts.down_proj.dtype == torch.bfloat16
    models.agree(model, want)
    return model


@pytest.mark.parametrize("source", [shipped, saved])
def test_experts_of_a_checkpoint(library, tmp_path, source):
    if source is saved and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("this version of transformers saves scales that it does not read")
    interop.register(library, "fusekit-fp8")
    model = compared(source(tmp_path, "qwen3-moe"), "fusekit-fp8")
    assert models.ran(library) == {"experts": {"inference"}}
    with pytest.raises(ArgumentError, match=r"reads fp8-block weights.* under torch\.no_grad"):
        model(input_ids=models.tokens(5))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_whole_blocks_of_a_checkpoint(library, tmp_path, name):
    interop.register(library, "fusekit-fp8", blocks=True)
    folder, x = shipped(tmp_path, name), torch.randn(1, 33, H).bfloat16()
    model, want = load(folder, "fusekit-fp8"), decoded(folder)
    with torch.no_grad():
        blocks = [each.model.layers[0].mlp for each in (model, want)]
        for block in blocks:
            block.gate.weight.mul_(8)  # scores apart: the layer's are not rounded to bf16
        got, expected = (tuples(block(x))[0] for block in blocks)
        assert error(got, expected.float()) < 0.02
        model.generate(models.tokens(3), max_new_tokens=2)
    assert models.ran(library) == {name.replace("-", "_"): {"inference"}}
    with pytest.raises(ArgumentError, match="has no block that a layer with a recipe computes"):
        interop.hold_fp8(model)


def test_scales_that_are_powers_of_two(library, tmp_path):
    """As bytes of an exponent, which Transformers keeps in their own type."""
    interop.register(library, "fusekit-fp8")
    experts = load(shipped(tmp_path, "qwen3-moe"), "fusekit-fp8").model.layers[0].mlp.experts
    x, indices, weights = torch.randn(5, H).bfloat16(), torch.randint(16, (5, 4)), torch.rand(5, 4)
    powers = {
        name: getattr(experts, name).log2().ceil().exp2() for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv")
    }
    results = []
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        for name, scales in powers.items():
            setattr(experts, name, torch.nn.Parameter(scales.to(dtype), requires_grad=False))
        with torch.no_grad():
            results.append(experts(x, indices, weights))
    assert torch.equal(*results) and results[0].any()


def test_what_is_said_where_no_layer_reads_the_weights(library, tmp_path):
    folder = shipped(tmp_path, "qwen3-moe")
    interop.register(library, "fusekit-fp8", recipe="fp8-block")
    ids = models.tokens(5)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="leave recipe out"):
            load(folder, "fusekit-fp8")(input_ids=ids)
        interop.register(library, "fusekit-fp8", layers="store/bf16")
        model = load(folder, "fusekit-fp8")
        with pytest.raises(NotBuiltError, match='weights = "fp8-block"\nkeep = "none"'):
            model(input_ids=ids)
        model.model.layers[0].mlp.experts.block_size = [64, 64]
        with pytest.raises(ArgumentError, match=r"blocks of \[64, 64\]; fusekit reads"):
            model(input_ids=ids)


def test_compiled_without_a_break(library, tmp_path):
    interop.register(library, "fusekit-fp8")
    block = load(shipped(tmp_path, "qwen3-moe"), "fusekit-fp8").model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for count in (6, 9):
            x = torch.randn(2, count, H).bfloat16()
            for left, right in zip(tuples(block(x)), tuples(compiled(x)), strict=True):
                torch.testing.assert_close(left, right)


def tuples(output):
    return output if isinstance(output, tuple) else (output,)
