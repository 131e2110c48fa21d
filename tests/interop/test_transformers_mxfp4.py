"""MXFP4 checkpoints of gpt-oss in Transformers, on the CPU with stand-in layers, beside what Transformers makes of them
when it dequantises.
"""

import json

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
auto = pytest.importorskip("transformers.quantizers.auto")
pytest.importorskip("transformers.quantizers.quantizer_mxfp4")
files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from fusekit.interop import transformers as interop  # noqa: E402
from tests.doors.served import GPT_OSS, error  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers import Library, said  # noqa: E402
from tests.interop.test_transformers_blocks import restored  # noqa: E402, F401

H, I = 128, 64  # noqa: E741
LAYER = {"hidden": H, "intermediate": I, "weights": "mxfp4", "keep": "none", "dtype": "bf16", "grad_dtype": "bf16",
         "activation": GPT_OSS, "glu_layout": "interleaved", "bias": True}  # fmt: skip
APART = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture
def library(restored, monkeypatch):  # noqa: F811
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "mxfp4", auto.AUTO_QUANTIZER_MAPPING["mxfp4"])
    known = {interface: set(interface._global_mapping) for interface in interop._interfaces()}
    yield Library(
        bf16=said(8, 4, **LAYER | {"weights": "none", "b_major": "n"}),
        experts=said(8, 4, **LAYER), block=said(8, 4, **LAYER | {"router": {"bias": True}}),
        block_bf16=said(8, 4, **LAYER | {"weights": "none", "b_major": "n", "router": {"bias": True}}),
    )  # fmt: skip
    for interface, names in known.items():
        for name in set(interface._global_mapping) - names:
            del interface._global_mapping[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as gpt-oss is shipped."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    models.model("gpt-oss", "eager", H, I, dtype=torch.bfloat16).save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    state = files.load_file(file)
    for key in [key for key in state if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = state.pop(key).shape
        shape = experts, rows, columns // 32
        state[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        state[f"{key}_scales"] = torch.randint(115, 121, shape, dtype=torch.uint8)
    for key in [key for key in state if key.endswith("router.weight")]:
        state[key] *= 16  # so that a rounding does not choose another expert
    files.save_file(state, file, {"format": "pt"})
    table = {"quant_method": "mxfp4", "modules_to_not_convert": APART}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": table}))
    return folder


def load(folder, backend, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=backend, **more
    ).eval()


def decoded(folder, backend="eager"):
    return load(folder, backend, quantization_config=transformers.Mxfp4Config(dequantize=True))


def compared(folder, backend, other="eager"):
    """The model with the backend, whose logits and tokens are those of the dequantised one."""
    model, want = load(folder, backend), decoded(folder, other)
    experts, state = model.model.layers[-1].mlp.experts, files.load_file(folder / "model.safetensors")
    for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"):
        assert torch.equal(getattr(experts, name), state[f"model.layers.1.mlp.experts.{name}"])
    assert not hasattr(experts, "down_proj")
    models.agree(model, want)
    return model


def test_experts_of_a_checkpoint(library, folder, tmp_path):
    interop.register(library, "fusekit-mxfp4")
    model = compared(folder, "fusekit-mxfp4")
    assert models.ran(library) == {"experts": {"inference"}}
    model.save_pretrained(tmp_path)  # as it was loaded
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    one, other = (files.load_file(each / "model.safetensors") for each in (folder, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_blocks_of_a_checkpoint(library, folder):
    interop.register(library, "fusekit-mxfp4", blocks=True)
    compared(folder, "fusekit-mxfp4", "fusekit-mxfp4")  # Transformers' own rounds logits, which chooses other experts
    assert models.ran(library) == {"block": {"inference"}, "block_bf16": {"inference"}}


def test_blocks_of_a_model_that_was_loaded_with_experts(library, folder):
    interop.register(library, "fusekit-experts")
    interop.register(library, "fusekit-mxfp4", blocks=True)
    model = load(folder, "fusekit-experts")
    model.set_experts_implementation("fusekit-mxfp4")
    with torch.no_grad():
        model(input_ids=models.tokens(3))
    assert models.ran(library).keys() == {"block"}


@pytest.mark.parametrize("blocks", [False, True])
def test_one_graph_under_the_compiler(library, folder, blocks):
    interop.register(library, "fusekit-mxfp4", blocks=blocks)
    model, ids = load(folder, "fusekit-mxfp4"), models.tokens(11)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        # Attention rounds otherwise there, by which a token in a tie may have another expert.
        assert error(compiled(input_ids=ids).logits, model(input_ids=ids).logits.float()) < 0.1


def test_other_models_are_transformers_own(library, folder):
    pytest.importorskip("accelerate", reason="accelerate, which Transformers asks for here, is not installed")
    interop.register(library, "fusekit-mxfp4")
    model = decoded(folder, "fusekit-mxfp4")
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    with torch.no_grad():
        model(input_ids=models.tokens(11))
    assert models.ran(library).keys() == {"bf16"}
    assert type(load(folder, "eager").model.layers[0].mlp.experts).__name__ == "GptOssExperts"  # there is no GPU


def test_a_model_that_keeps_its_blocks_has_fusekit_alone(library, folder):
    interop.register(library, "fusekit-mxfp4")
    model = load(folder, "fusekit-mxfp4")
    model.set_experts_implementation("eager")
    with pytest.raises(ArgumentError, match=r'is "eager".*Mxfp4Config\(dequantize=True\)'):
        model(input_ids=models.tokens(3))


def test_a_missing_layer_is_named_with_its_spec(library, folder):
    interop.register(library, "fusekit-mxfp4", layers="*/bf16")
    with pytest.raises(NotBuiltError, match='weights = "mxfp4"') as raised:
        load(folder, "fusekit-mxfp4")(input_ids=models.tokens(3))
    assert 'b_major = "k"' in str(raised.value) and 'keep = "none"' in str(raised.value)
