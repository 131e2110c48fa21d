"""Every kernel with a backward activation in every case that breaks grouped GEMMs; see ``cases`` and ``harness``."""

from fusekit.spec import parse_file

from .cases import each_case
from .conftest import BACKWARD


@each_case(spec for spec in parse_file(BACKWARD) if spec.activation.backward)
def test_case(gpu, spec, case):
    result = gpu.trial(spec, case)
    assert not result, "\n".join(result)
