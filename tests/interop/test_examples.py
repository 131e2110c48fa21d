"""Examples and snippets of pages that need no GPU."""

import re
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:layers with device")
ROOT = Path(__file__).parents[2]


def test_the_readmes_program_trains_on_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(ROOT / "examples" / "train.py"))
    assert capsys.readouterr().out.startswith("step 0: loss ")


LAYER = """schema = 1
[[kernel]]
name = "moe"
kind = "moe"
arch = "sm_90a"
hidden = 64
intermediate = 32
experts = 8
topk = 2
router = { aux_loss = true }
"""


def test_the_training_on_the_page_of_pytorch(tmp_path, monkeypatch):
    """As it is there, but for a smaller layer on the CPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model.toml").write_text(LAYER)
    page = (ROOT / "docs" / "layers-in-pytorch.md").read_text()
    code, *_ = (
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "for x, target in batches" in text
    )
    before, device, after = code.partition('"my-model/moe", device="cuda"')
    assert device
    rows = torch.randn(3, 2, 16, 64, dtype=torch.bfloat16)
    names = {"batches": rows}
    exec(f'{before}"my-model.toml/moe", device="cpu"{after}', names)
    assert torch.isfinite(names["loss"])
