"""The programs on the page of a training run, on the CPU with stand-in layers."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers_blocks as blocks  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers import H, I, Library, said  # noqa: E402
from tests.interop.test_transformers_blocks import restored  # noqa: E402, F401

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_programs_of_the_page_train(restored, tmp_path, monkeypatch):  # noqa: F811
    config = models.configs(H, I)["qwen3-moe"]
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path / "path" / "to")
    monkeypatch.chdir(tmp_path)
    router = {"router": {}, "dtype": "bf16"}
    library = Library(bf16=said(16, 4, **router), fp8=said(16, 4, recipe="fp8-block", **router))
    monkeypatch.setattr(blocks, "open_library", lambda: library)
    known = dict(moe.ExpertsInterface._global_mapping)
    names = {"batches": [models.tokens(9)] * 3}
    *programs, graph = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "CUDAGraph" in graph and len(programs) == 2
    torch.manual_seed(0)
    for program in programs:
        exec(program.replace('"cuda"', '"cpu"'), names)
    added = moe.ExpertsInterface._global_mapping.keys() - known.keys()
    for name in added:
        del moe.ExpertsInterface._global_mapping[name]
    losses = torch.stack(names["losses"])
    assert len(losses) == 6 and losses[-1] < losses[0]
    passes = {name: [which for which, *_ in layer.passes] for name, layer in library._layers.items()}
    assert passes["store/bf16"] == (["forward"] * 2 + ["backward"] * 2) * 3
    assert passes["store/fp8"].count("quantise") == 2 * (1 + 3) and passes["store/fp8"].count("backward") == 2 * 3
