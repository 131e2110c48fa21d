"""Pages that show the source show it as it is."""

import re
from pathlib import Path

import pytest

from fusekit.reference import activations
from fusekit.spec.model import ACTIVATIONS, BACKWARD_ACTIVATIONS, GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "fusekit" / "kernels" / "activations.md"
SHOWN = (
    "fusekit/kernels/activations.py",
    "fusekit/kernels/epilogue.py",
    "fusekit/kernels/backward_sm90.py",
    "fusekit/reference/activations.py",
    "fusekit/spec/model.py",
)
PAGES = (ROOT / "README.md", *sorted((ROOT / "fusekit").glob("**/*.md")))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
DEVICE = (ROOT / SHOWN[0]).read_text()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().partition("\n")[0][:40])
def test_code_stands_in_the_source_as_on_the_page(block):
    assert any(block in (ROOT / path).read_text() for path in SHOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:fusekit|tests|cli|kernel_specs)/[\w/.-]+)`", page.read_text())
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    for path in [*(ROOT / each for each in named), *(page.parent / each for each in linked)]:
        assert path.exists(), path


def test_every_activation_is_in_every_table():
    """The device's tables are read as text: importing them takes the compiler."""
    rows = set(re.findall(r'^    \("(\w+)", "\w+"\): \w+,$', DEVICE, re.MULTILINE))
    assert rows == set(ACTIVATIONS)
    assert set(activations.KINDS) == {*PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS}
    assert {kind for kind, row in activations.KINDS.items() if row.gated} == set(GATED_ACTIVATIONS)
    assert {f"d{kind}" for kind in activations.KINDS if kind != "identity"} == set(BACKWARD_ACTIVATIONS)


def test_nothing_else_knows_reglu():
    """Apart from the tables: benchmarks, which run PyTorch's own, and the names that models' configs have."""
    knowing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fusekit").glob("**/*.py")
        if re.search(r"reglu", path.read_text())
    }
    assert knowing == {SHOWN[0], SHOWN[3], SHOWN[4], "fusekit/bench/torch_gemm.py", "fusekit/spec/hf_config.py"}
