"""Every kernel with FP8 operands in every case that breaks GEMMs; see ``cases`` and ``harness``."""

from fusekit.spec import parse_file

from .cases import each_case
from .conftest import FP8


@each_case(parse_file(FP8))
def test_case(gpu, spec, case):
    result = gpu.trial(spec, case)
    assert not result, "\n".join(result)
