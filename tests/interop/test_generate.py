"""The benchmark of generation on the CPU: tiny models of its families, with stand-in layers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from tests.benchmarks import generate  # noqa: E402
from tests.doors.served import error  # noqa: E402
from tests.interop.models import ATTENTION  # noqa: E402
from tests.interop.test_transformers import GPT_OSS, H, I, Library, said  # noqa: E402
from tests.interop.test_transformers_blocks import restored  # noqa: E402, F401

SIZES = {name: ATTENTION[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
SIZES |= {"hidden_size": H, "num_hidden_layers": 2}
TINY = {
    "gpt-oss-20b": {"intermediate_size": I, "num_local_experts": 8, "layer_types": ["full_attention"] * 2},
    "qwen3-30b-a3b": {"intermediate_size": H, "moe_intermediate_size": I, "num_experts": 16, "norm_topk_prob": True},
}
BACKENDS = generate.BACKENDS[:3]  # without experts, tokens are others
FP8 = {"hidden": 256, "intermediate": 128, "weights": "fp8-block", "keep": "none", "dtype": "bf16",
       "grad_dtype": "bf16"}  # fmt: skip
MXFP4 = {"activation": GPT_OSS, "glu_layout": "interleaved", "bias": True, "weights": "mxfp4", "keep": "none",
         "hidden": 128, "intermediate": 64, "dtype": "bf16", "grad_dtype": "bf16"}  # fmt: skip
GPT = {"activation": GPT_OSS, "glu_layout": "interleaved", "bias": True, "b_major": "n"}


@pytest.fixture
def library(restored, monkeypatch):  # noqa: F811
    monkeypatch.setattr(generate, "VOCABULARY", 64)
    monkeypatch.setattr(generate, "ROUNDS", 1)
    monkeypatch.setattr(generate, "PROMPT", 5)
    common = {"dtype": "bf16", "grad_dtype": "bf16"}
    layers = Library(
        gpt=said(8, 4, **GPT, **common), qwen=said(16, 4, **common),
        fp8=said(16, 4, **FP8), fp8_block=said(16, 4, **FP8 | {"router": {}}),
        mxfp4=said(8, 4, **MXFP4), mxfp4_block=said(8, 4, **MXFP4 | {"router": {"bias": True}}),
        gpt_block=said(8, 4, **GPT, **common, router={"bias": True}), qwen_block=said(16, 4, **common, router={}),
    )  # fmt: skip
    known = set(moe.ExpertsInterface._global_mapping)
    generate.register(layers, "store/*")
    yield layers
    for name in set(moe.ExpertsInterface._global_mapping) - known:
        del moe.ExpertsInterface._global_mapping[name]


@pytest.mark.parametrize(("model", "parameter"), [("qwen3-30b-a3b-fp8", "down_proj"),
                                                  ("gpt-oss-20b-mxfp4", "down_proj_blocks")])  # fmt: skip
def test_a_checkpoint_has_the_tokens_of_what_it_dequantises_to(library, model, parameter):
    sizes = SIZES | TINY[model.rpartition("-")[0]] | {"num_experts_per_tok": 4, "num_hidden_layers": 1}
    if model.endswith("fp8"):
        sizes |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    else:
        sizes |= {"hidden_size": 128, "intermediate_size": 64, "layer_types": ["full_attention"]}
    network = generate.network_of(generate.MODELS[model][0], sizes, "cpu")
    before = network.model.layers[0].mlp.experts.down_proj.clone()
    twin = generate.twin_of(model, network)
    assert getattr(twin.model.layers[0].mlp.experts, parameter).element_size() == 1
    assert 0 < error(network.model.layers[0].mlp.experts.down_proj, before.float()) < 0.15  # of three bits and one
    own = [generate.OWN] if model.endswith("fp8") else []  # it wants a GPU, and has no rows here
    rows = generate.measure(model, network, [BACKENDS[0], *own, *BACKENDS[1:]], 2, 3, twin)
    assert {row["backend"] for row in rows} == {*BACKENDS}
    assert max(row.get("gap", 0) for row in rows if row["backend"] != "blocks") <= generate.WITHIN
    ran = {name for name, layer in library._layers.items() if layer.passes}
    kind = model.rpartition("-")[2]
    assert ran == {f"store/{kind}", f"store/{kind}_block"}


@pytest.mark.parametrize("model", TINY)
def test_tokens_are_those_of_grouped_mm_where_logits_are_apart(library, model):
    assert TINY[model].keys() <= generate.MODELS[model][1].keys()
    network = generate.network_of(generate.MODELS[model][0], SIZES | TINY[model] | {"num_experts_per_tok": 4}, "cpu")
    rows = generate.measure(model, network, BACKENDS, 2, 4)
    assert [row["backend"] for row in rows[::2]] == [*BACKENDS]
    assert [row["how"] for row in rows[:2]] == ["eager", "graph"] and rows[0]["differ"] == 0
    assert max(row.get("gap", 0) for row in rows) <= generate.WITHIN
    ran = {name for name, layer in library._layers.items() if layer.passes}
    family = model.partition("-")[0].removesuffix("3")
    assert ran == {f"store/{family}", f"store/{family}_block"}
    generate.table(rows)


def test_a_wrong_token_is_seen():
    logits = torch.randn(2, 4, 64)
    wanted = logits.argmax(-1)
    assert generate.differences(wanted, wanted, logits) == {"differ": 0, "gap": 0.0}
    other = wanted.clone()
    other[1, 2] = logits[1, 2].argmin()
    found = generate.differences(other, wanted, logits)
    assert found["differ"] == 1 and found["gap"] > generate.WITHIN


def test_a_gap_is_compared_with_those_of_the_first_backend():
    gaps = ("grouped_mm", 0.0), ("grouped_mm", 0.3), ("fusekit", 0.25), ("fusekit", 0.4), ("blocks", 1.0)
    rows = [{"model": "m", "backend": backend, "gap": gap} for backend, gap in gaps]
    rows += [{"model": "n", "backend": "grouped_mm", "gap": 0.0}, {"model": "n", "backend": "skip"}]
    assert generate.unexplained(rows) == [rows[3]]
    small = {"model": "n", "backend": "fusekit", "gap": generate.WITHIN}
    assert generate.unexplained([*rows[5:], small]) == []
