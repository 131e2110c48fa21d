"""Every kernel of the matrix in every case that breaks grouped GEMMs.

Outputs are poisoned and lie between guards, everything around the inputs is NaN, each launch runs twice. See ``cases``
for what is run and ``harness`` for how it is judged.
"""

import pytest

from fusekit.spec import parse_file

from .cases import cases_of
from .conftest import MATRIX

TRIALS = [(spec, case) for spec in parse_file(MATRIX) for case in cases_of(spec)]


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(*trial, id=f"{trial[0].full_name}-{trial[1].name}") for trial in TRIALS]
)
def test_case(gpu, spec, case):
    found = gpu.trial(spec, case)
    assert not found, "\n".join(found)
