"""Layers with `weights = "mxfp4"` in PyTorch, on the CPU with stand-in layers: checkpoints load as they are."""

import json
import re

import pytest

from fusekit.errors import ArgumentError
from fusekit.reference import mxfp4

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from tests.layers.host import host  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 128, 192, 8, 2
LAYER = {
    "hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": EXPERTS, "topk": TOPK, "weights": "mxfp4",
    "keep": "none", "grad_dtype": "bf16", "bias": True, "router": {"bias": True}, "glu_layout": "interleaved",
    "activation": {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
}  # fmt: skip
PREFIX = "model.layers.0.mlp."


def test_a_checkpoint_of_transformers_gives_its_dequantised_result(tmp_path):
    """Blocks and scales by Transformers' names, read as they are; Transformers dequantises the same files."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = pytest.importorskip("safetensors.torch")
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOPK,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = files.load_file(file)
    for name, rows, columns in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        del state[f"{PREFIX}experts.{name}_proj"]
        shape = EXPERTS, rows, columns // 32
        state[f"{PREFIX}experts.{name}_proj_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        state[f"{PREFIX}experts.{name}_proj_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    files.save_file(state, file, metadata={"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(described))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    block = theirs.model.layers[0].mlp

    moe = interop.MoE(host(**LAYER))
    moe.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)})
    assert torch.equal(moe.experts.down_proj_blocks, state[f"{PREFIX}experts.down_proj_blocks"])
    exact = mxfp4.decode(moe.experts.gate_up_proj_blocks.numpy(), moe.experts.gate_up_proj_scales.numpy())
    assert torch.equal(torch.from_numpy(exact).bfloat16().transpose(1, 2), block.experts.gate_up_proj)
    x = torch.randn(1, 33, HIDDEN).bfloat16()
    with torch.no_grad():
        want = block(x)
        want = want[0] if isinstance(want, tuple) else want
        got = moe(x.float())
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()


def test_new_weights_are_numbers():
    moe = interop.MoE(host(**LAYER))
    numbers = mxfp4.decode(moe.experts.down_proj_blocks.numpy(), moe.experts.down_proj_scales.numpy())
    assert 0 < abs(numbers).max() <= INTERMEDIATE**-0.5
    assert moe.experts.down_proj_blocks.shape == (EXPERTS, HIDDEN, INTERMEDIATE // 32, 16)
    assert not moe.experts.down_proj_blocks.requires_grad


def test_weights_in_bf16_are_refused():
    moe = interop.MoE(host(**LAYER))
    state = moe.state_dict()
    del state["experts.gate_up_proj_blocks"], state["experts.gate_up_proj_scales"]
    state["experts.gate_up_proj"] = torch.zeros(EXPERTS, HIDDEN, 2 * INTERMEDIATE, dtype=torch.bfloat16)
    message = 'experts.gate_up_proj is torch.bfloat16; layers/moe has weights = "mxfp4" and reads'
    with pytest.raises(ArgumentError, match=re.escape(message)):
        moe.load_state_dict(state)
