"""torchtitan 0.3 with fusekit's overrides: MoE blocks of its debug models on the CPU, beside its own."""

import inspect

import pytest

pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not installed", exc_type=ImportError)

import torch
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from fusekit.errors import ArgumentError, NotBuiltError
from fusekit.interop import torchtitan
from tests.benchmarks import torchtitan as benchmark

pytestmark = pytest.mark.filterwarnings("ignore")


def block(model, imports=()):
    """The first MoE block of a debug model, small."""
    return benchmark.block(model, imports, hidden=96)


def spec(folder, model, override):
    """A spec file with the layer of a block; its name."""
    experts = block(model).routed_experts
    inner, topk = experts.inner_experts, experts.token_dispatcher.top_k
    weight = inner.mlp2_weight_EDF if model == "gpt_oss" else inner.w2_EDF
    count, hidden, intermediate = weight.shape
    activation = 'bias = true\nactivation = { kind = "swiglu", alpha = 1.702, limit = 7.0, up_offset = 1.0 }'
    path = folder / f"{model}-{override}.toml"
    path.write_text(f"""schema = 1
[[kernel]]
name = "moe"
kind = "moe"
arch = "sm_90a"
hidden = {hidden}
intermediate = {intermediate}
experts = {count}
topk = {1 if override == "grouped" else topk}
router = {{ input = "choices" }}
glu_layout = "interleaved"
{activation if model == "gpt_oss" else ""}
""")
    return f"{path}/moe"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))


@pytest.mark.parametrize("override", benchmark.OVERRIDES)
@pytest.mark.parametrize("model", benchmark.MODELS)
def test_blocks_compute_what_its_own_compute(tmp_path, model, override):
    name = spec(tmp_path, model, override)
    theirs, ours = block(model), block(model, [(f"fusekit.interop.torchtitan.{override}", {"layer": name})])
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    ours.load_state_dict(state)
    assert all(torch.equal(ours.state_dict()[key], tensor) for key, tensor in state.items())
    dim = next(iter(theirs.routed_experts.parameters())).shape[-1]
    rows = torch.randn(2, 9, dim, generator=torch.Generator().manual_seed(1))
    rows = rows.to(next(theirs.parameters()).dtype)
    wanted, results = benchmark.passes(theirs, rows), benchmark.passes(ours, rows)
    limit = 0.08 if model == "gpt_oss" else 0.02  # whose gradients are rounded to bf16
    errors = benchmark.compare(results, wanted)
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(torchtitan.FusedRoutedExperts, RoutedExperts)]
    + [(each, GroupedExperts) for each in (torchtitan.FusedRows, torchtitan.FusedGptOssRows)],
)
def test_arguments_have_the_names_that_its_shardings_go_by(ours, theirs):
    assert inspect.signature(ours.forward).parameters.keys() == inspect.signature(theirs.forward).parameters.keys()


def test_w13_is_read_as_it_lies():
    inner = block("qwen3", ["fusekit.interop.torchtitan.grouped"]).routed_experts.inner_experts
    assert torchtitan._Weights.of(inner).tensors["w1"].data_ptr() == inner.w13.data_ptr()


def test_rows_beyond_the_counts_give_nothing(tmp_path):
    name = spec(tmp_path, "qwen3", "grouped")
    moe = block("qwen3", [("fusekit.interop.torchtitan.grouped", {"layer": name})])
    inner = moe.routed_experts.inner_experts
    counts = torch.zeros(inner.num_experts, dtype=torch.int32)
    counts[1] = 3
    y = inner(torch.randn(5, inner.w13.shape[-1]), counts)
    assert y[:3].abs().sum() > 0 and not y[3:].any()


def test_a_missing_layer_says_what_to_build():
    moe = block("qwen3", ["fusekit.interop.torchtitan.routed"])
    with pytest.raises(NotBuiltError, match='glu_layout = "interleaved"'):
        benchmark.passes(moe, torch.randn(1, 3, moe.routed_experts.inner_experts.w13.shape[-1]))


def test_another_layer_is_refused(tmp_path):
    name = spec(tmp_path, "qwen3", "grouped")
    moe = block("qwen3", [("fusekit.interop.torchtitan.routed", {"layer": name})])
    with pytest.raises(ArgumentError, match="topk is 1, not"):
        benchmark.passes(moe, torch.randn(1, 3, moe.routed_experts.inner_experts.w13.shape[-1]))


def test_meshes_that_spread_experts_are_refused():
    class Meshes:
        def get_optional_mesh(self, name):
            return name if name == "ep" else None

    with pytest.raises(ArgumentError, match=r"fusekit\.interop\.torchtitan\.grouped"):
        block("qwen3", ["fusekit.interop.torchtitan.routed"]).routed_experts.parallelize(Meshes())
