"""Every kernel with 8-bit factors in every case that breaks GEMMs; see ``cases`` and ``harness``."""

import pytest

from fusekit.spec import parse_file

from .cases import cases_of
from .conftest import FP8

TRIALS = [(spec, case) for spec in parse_file(FP8) for case in cases_of(spec)]


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(*trial, id=f"{trial[0].full_name}-{trial[1].name}") for trial in TRIALS]
)
def test_case(gpu, spec, case):
    found = gpu.trial(spec, case)
    assert not found, "\n".join(found)
