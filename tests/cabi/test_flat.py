"""The flat form of launch records: what the writer refuses, and that a form has one version."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from fusekit.abi import Dim, LaunchRecord, TensorArgument
from fusekit.cabi import Exported, flat, generate
from fusekit.cabi.layout import VERSION, declarations, loader_declarations
from fusekit.errors import UsageError
from tests.runtime.samples import record

from .launcher import CUBIN, complete

FORMS = {1: "22e91d19638095b4"}


def test_another_form_is_another_version():
    """A loader takes the tables of its own version alone, so what is read otherwise has to have another one."""
    text = declarations() + loader_declarations()
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert FORMS[VERSION] == found, "raise layout.VERSION, and give it a line here"


def large(**changes: int) -> LaunchRecord:
    base = record()
    dims = tuple(Dim(f"D{n}") for n in range(changes.get("dims", 0)))
    tensors = tuple(
        TensorArgument(f"t{n}", "input", "f32", (f"D{n}",) * changes.get("rank", 1), (1,) * changes.get("rank", 1))
        for n in range(len(dims))
    )
    return complete(replace(base, dims=(*base.dims, *dims), arguments=(*base.arguments, *tensors)))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (large(dims=512), "sample/x@1: first_stride has 519; the C launcher takes 0 to 512"),
        (large(dims=29), "sample/x@1: tensors has 33 entries; the C launcher takes 0 to 32"),
        (large(dims=1, rank=6), r"sample/x@1: tensors\[4\].rank has 6; the C launcher takes 0 to 5"),
    ],
)
def test_a_record_beyond_the_launchers_limits(made, text):
    with pytest.raises(UsageError, match=text):
        generate([Exported("sample/x@1", made, CUBIN)])


def test_words_are_little_endian_and_texts_end_with_zeros():
    row = {"name": "rows", "divisor": 8, "minimum": 0, "maximum": 2**63 - 1}
    assert flat.encode("", "dim", [row, row | {"name": "01234567"}]) == (
        flat.words([4, 8, 0, 2**63 - 1, 8, 8, 0, 2**63 - 1]) + b"rows\0\0\0\0" + b"01234567" + bytes(8)
    )
