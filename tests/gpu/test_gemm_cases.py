"""Every kernel of the matrix in every case that breaks grouped GEMMs.

Outputs are poisoned and lie between guards, everything around the inputs is NaN, each launch runs twice. See ``cases``
for what is run and ``harness`` for how it is judged.
"""

from fusekit.spec import parse_file

from .cases import each_case
from .conftest import MATRIX


@each_case(parse_file(MATRIX))
def test_case(gpu, spec, case):
    result = gpu.trial(spec, case)
    assert not result, "\n".join(result)
