"""The flat form of launch records: what the writer refuses, and that a form has one version."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest

from fusekit.abi import ScalarArgument
from fusekit.cabi import Exported, flat, generate
from fusekit.cabi.layout import VERSION, declarations, loader_declarations
from fusekit.errors import UsageError
from tests.runtime.samples import record

from .bundles import bundle_of
from .launcher import CUBIN, complete

FORMS = {1: "8bac861675d09930"}


def test_another_form_is_another_version():
    """A loader takes the tables of its own version alone, so what is read otherwise has to have another one. A limit
    may grow within a version, operators and kinds may follow, and a table the record: an older loader refuses what is
    beyond its own.
    """
    text = re.sub(r"INT64_C\(\d+\)|FK_MOST_\w+ = \d+", "", declarations() + loader_declarations())
    result = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert FORMS[VERSION] == result, "raise layout.VERSION, and give it a line here"


@pytest.mark.parametrize(
    ("name", "value"),
    [("cluster_margin", value) for value in (2.5, 2.0, True, -1, 2**31, float("inf"))]
    + [("rows", value) for value in (7.5, True, -1, 7, 2**31)],
)
def test_a_default_that_would_be_cut_is_refused(tmp_path, name, value):
    """Also in a bundle, whose directory says why."""
    base = record()
    rows = ScalarArgument("rows", "i32", minimum=0, maximum=2**20, divisor=8)
    kernel = Exported("sample/x@1", complete(replace(base, arguments=(*base.arguments, rows))), CUBIN, {name: value})
    with pytest.raises(UsageError, match=rf"sample/x@1: the default {name} = .* must be .*0 to .*as an integer; say"):
        generate([kernel])
    if value is not True:  # which no store takes
        bundle = bundle_of(tmp_path, [kernel]).read_bytes()
        assert f"the default {name} = {value!r} must be".encode() in bundle
    assert b"the default" not in bundle_of(tmp_path / "good", [replace(kernel, defaults={name: 8})]).read_bytes()


def test_words_are_little_endian_and_texts_end_with_zeros():
    row = {"name": "rows", "divisor": 8, "minimum": 0, "maximum": 2**63 - 1}
    assert flat.encode("", "dim", [row, row | {"name": "01234567"}]) == (
        flat.words([4, 8, 0, 2**63 - 1, 8, 8, 0, 2**63 - 1]) + b"rows\0\0\0\0" + b"01234567" + bytes(8)
    )
