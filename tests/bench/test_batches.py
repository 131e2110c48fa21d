"""The GPU tests' random batches, on a stand-in GPU: layers of real records, choice of variants and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusekit.library import open_library
from fusekit.plan.layer.record import pinned
from tests.bench.rig import Rig
from tests.gpu import batches
from tests.gpu.batches import Batches
from tests.plans import plan_of
from tests.soak import sample

HEAD = """
schema = 1
[[kernel]]
name = "moe"
kind = "{}"
arch = "sm_90a"
hidden = 64
intermediate = 32
tile = [[128, 64], [128, 128], [128, 192]]
cluster = [[1, 1], [2, 1]]
problem = {{ T = 100 }}
"""
EXPERTS = HEAD.format("moe") + "experts = 8\ntopk = 2\n"
LAYERS = {
    "gpt-oss": 'bias = true\nrouter = { bias = true }\nb_major = "n"\nglu_layout = "interleaved"\n',
    "deepseek": 'shared = 32\nrouter = { score_function = "sigmoid", expert_bias = true, aux_loss = true }\n',
    "llama4": 'router = { scale = "input", score_function = "sigmoid" }\nkeep = "x"\n',
    "choices": 'bias = true\nrouter = { input = "choices" }\n',
    "logits": 'router = { input = "logits" }\nactivation = { kind = "srelu" }\n',
    "router-f32": 'router = { bias = true, weight_dtype = "f32" }\n',
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "POOL", 40)
    monkeypatch.setattr(batches, "MOST", 90)


@pytest.mark.parametrize("name", sample([*LAYERS, "mlp"], most=2))
def test_no_token_depends_on_its_batch(rig: Rig, tmp_path: Path, name: str) -> None:
    rig.publish(tmp_path, EXPERTS + LAYERS[name] if name in LAYERS else HEAD.format("mlp") + "bias = true\n", "layers")
    batches = Batches(open_library(), "layers/moe")
    assert batches.problems(4) == []
    assert sum(len(names) > 1 for names in batches.loose.taken.values()) > 3
    parts = plan_of(batches.layer).parts
    assert all(len(names) == 1 for part, names in batches.loose.taken.items() if pinned(parts[part]))


@pytest.mark.parametrize(
    ("part", "name", "variant", "said"),
    [
        ("fc2", "y", "@128x64", "y"), ("fc1-dgrad", "y", "-c2x1", "dx"), ("fc2-dgrad", "dprob", "", None),
        ("unpermute", "y", "", None), ("weights-bwd", "grad_weights", "", None),
    ],
)  # fmt: skip
def test_what_depends_on_a_variant_is_found(
    rig: Rig, tmp_path: Path, part: str, name: str, variant: str, said: str | None
) -> None:
    """And what is wrong in the same way everywhere is not a matter of batches."""
    rig.publish(tmp_path, EXPERTS, "layers")

    def harm(full: str, arrays: dict[str, Any]) -> None:
        if full.startswith(f"layers/moe.{part}@") and variant in full:
            arrays[name][...] = arrays[name] & 0xFFF0 if arrays[name].dtype.kind == "u" else 2 * arrays[name]

    rig.harm = harm
    got = Batches(open_library(), "layers/moe").problems(4)
    assert {line.partition(":")[0] for line in got} == ({said} if said else set())


def test_what_depends_on_other_tokens_is_found(rig: Rig, tmp_path: Path) -> None:
    rig.publish(tmp_path, EXPERTS, "layers")

    def harm(full: str, arrays: dict[str, Any]) -> None:
        if ".fc1-fwd@" in full:
            arrays["y"][...] ^= len(arrays["x"]) & 1

    rig.harm = harm
    assert any(line.startswith("y: ") for line in Batches(open_library(), "layers/moe").problems(4))
