"""Pages that show the source show it as it is."""

import re
from pathlib import Path

import pytest

from fusekit.plan.activations import functions
from fusekit.reference import activations
from tests.plans import ACTIVATIONS, BACKWARD_ACTIVATIONS, GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
SHOWN = (
    "fusekit/plan/activations/reglu.py",
    "fusekit/reference/activations/reglu.py",
    "fusekit/plan/operands/saved_preactivation.py",
    "fusekit/kernels/gemm/operands/row_scale.py",
    "tests/packages/stories.py",
)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


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


def test_every_activation_has_its_twin():
    names = {path.stem for path in (ROOT / "fusekit" / "plan" / "activations").glob("*.py")}
    twins = {path.stem for path in (ROOT / "fusekit" / "reference" / "activations").glob("*.py")}
    assert names == twins == {"__init__", *PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS}
    assert {kind for kind in functions() if activations.load(kind).gated} == set(GATED_ACTIVATIONS)
    assert {f"d{kind}" for kind in functions() if kind != "identity"} == set(BACKWARD_ACTIVATIONS)
    assert set(ACTIVATIONS) == {*PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS, *BACKWARD_ACTIVATIONS}


def test_every_operand_has_its_device_half():
    operands = {path.stem for path in (ROOT / "fusekit" / "plan" / "operands").glob("*.py")}
    halves = {path.stem for path in (ROOT / "fusekit" / "kernels" / "gemm" / "operands").glob("*.py")}
    assert operands - {"accumulate"} == halves  # which makes dw an inout, and has nothing to do


def test_nothing_else_knows_reglu():
    """Apart from its files: benchmarks, which run PyTorch's own, and names of models' configs and trainers."""
    knowing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fusekit").glob("**/*.py")
        if re.search(r"reglu", path.read_text()) and path.name != "reglu.py"
    }
    # What Activation says of every kind; which gated kind people mean by the name of a plain one.
    documented = {"fusekit/spec/model.py", "fusekit/plan/activations/__init__.py"}
    doors = {"fusekit/interop/megatron.py", "fusekit/interop/transformers.py"}
    assert knowing - documented - doors == {"fusekit/bench/torch_gemm.py", "fusekit/spec/hf_model.py"}
