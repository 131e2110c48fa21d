"""Layers with `weights = "fp8-block"` in PyTorch, on the CPU with stand-in layers: FP8 checkpoints load as they are."""

import re

import pytest

from fusekit.errors import ArgumentError
from fusekit.plan.quant import SIDE

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from tests.layers.host import host  # noqa: E402

SIZES = {"hidden": 256, "intermediate": 128, "experts": 8, "topk": 2}
LAYER = {**SIZES, "weights": "fp8-block", "keep": "none", "grad_dtype": "bf16"}


def dequantised(weight, scales):
    """FP8 weights times their scales, float32."""
    each = scales.repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
    return weight.float() * each[..., : weight.shape[-2], : weight.shape[-1]]


def test_a_checkpoint_of_transformers_gives_its_dequantised_result(tmp_path, monkeypatch):
    """Made and saved by Transformers; its tensors load by their names, experts stacked, and nothing is converted."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("this version of transformers saves scales that it does not read")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    files = pytest.importorskip("safetensors.torch")
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=128,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    block = model.model.layers[0].mlp
    # It asks for a GPU, and needs none to quantise.
    monkeypatch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    coded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config()
    )
    coded.save_pretrained(tmp_path / "fp8")
    prefix = "model.layers.0.mlp."
    state = {
        name.removeprefix(prefix): tensor
        for file in (tmp_path / "fp8").glob("*.safetensors") for name, tensor in files.load_file(file).items()
        if name.startswith(prefix)
    }  # fmt: skip
    assert state["experts.7.up_proj.weight"].dtype == torch.float8_e4m3fn

    moe = interop.MoE(host(**LAYER))
    moe.load_state_dict(dict(state))  # experts one by one, their scales in one tensor
    first, last = (state.pop(f"experts.{name}_scale_inv") for name in ("gate_up_proj", "down_proj"))
    for expert in range(8):  # as the checkpoints of models have it: all of an expert by itself
        scales = {"gate_proj": first[expert, :1], "up_proj": first[expert, 1:], "down_proj": last[expert]}
        state |= {f"experts.{expert}.{name}.weight_scale_inv": scale for name, scale in scales.items()}
    again = interop.MoE(host(**LAYER))
    again.load_state_dict(dict(state))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in moe.state_dict().items())
    numbers = fp8.Fp8Dequantize(None)
    with torch.no_grad():
        for expert in range(8):
            parts = {
                name: numbers._dequantize_one(
                    *(state[f"experts.{expert}.{name}.weight{end}"] for end in ("", "_scale_inv")), torch.bfloat16
                )
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            block.experts.gate_up_proj[expert] = torch.cat([parts["gate_proj"], parts["up_proj"]])
            block.experts.down_proj[expert] = parts["down_proj"]
        block.gate.weight.copy_(state["gate.weight"])
        w1 = dequantised(moe.experts.gate_up_proj, moe.experts.gate_up_proj_scale_inv)
        assert torch.equal(w1.bfloat16(), block.experts.gate_up_proj)
        x = torch.randn(1, 33, 256).bfloat16()
        want = block(x)
        want = want[0] if isinstance(want, tuple) else want
        got = moe(x.float())
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()


def test_stacked_tensors_load_as_well_and_the_result_is_the_definitions():
    torch.manual_seed(1)
    moe = interop.MoE(host(**LAYER, shared=128))
    names = {"w1": "experts.gate_up_proj", "w2_s": "experts.down_proj_scale_inv",
             "shared_w1_s": "shared_experts.gate_up_proj.weight_scale_inv"}  # fmt: skip
    assert names.items() <= moe.names.items()
    state = moe.state_dict()
    again = interop.MoE(host(**LAYER, shared=128))
    again.load_state_dict(state)
    x = torch.randn(5, 256).bfloat16()
    w1, w2, s1, s2 = (
        dequantised(state[path], state[f"{path}_scale_inv"]).double()
        for path in (names["w1"], "experts.down_proj", "shared_experts.gate_up_proj.weight",
                     "shared_experts.down_proj.weight")
    )  # fmt: skip
    scores, chosen = torch.softmax(x.double() @ state["gate.weight"].double().T, 1).topk(2)
    scores = scores / scores.sum(1, keepdim=True)

    def mlp(rows, first, second):
        gate, up = (rows @ first.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ second.T

    want = mlp(x.double(), s1, s2)
    for token in range(5):
        for score, expert in zip(scores[token], chosen[token], strict=True):
            want[token] += score * mlp(x[token].double(), w1[expert], w2[expert])
    got = again(x.float())
    assert (got.double() - want).norm() < 1e-2 * want.norm()
    assert torch.equal(got, moe(x.float()))


def test_new_weights_are_numbers():
    moe = interop.MoE(host(**LAYER))
    assert not moe.experts.down_proj.float().isnan().any()
    assert (dequantised(moe.experts.down_proj, moe.experts.down_proj_scale_inv).abs() <= 128**-0.5).all()


def test_weights_that_are_not_fp8_are_refused():
    moe = interop.MoE(host(**LAYER))
    state = moe.state_dict() | {"experts.down_proj": torch.zeros(8, 256, 128, dtype=torch.bfloat16)}
    with pytest.raises(ArgumentError, match=re.escape("experts.down_proj is torch.bfloat16; layers/moe has weights")):
        moe.load_state_dict(state)
