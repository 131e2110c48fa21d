"""The three glu layouts, against loops that spell them out."""

import numpy as np
import pytest

from fusekit.reference import layouts


def spelled_out(layout, width):
    if layout == "concat":
        return [("g", i) for i in range(width)] + [("u", i) for i in range(width)]
    if layout == "interleaved":
        return [(kind, i) for i in range(width) for kind in "gu"]
    return [(kind, start + i) for start in range(0, width, 32) for kind in "gu" for i in range(32)]


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
@pytest.mark.parametrize("width", [0, 32, 96, 160])
def test_columns(layout, width):
    gate, up = layouts.gate_columns(layout, width), layouts.up_columns(layout, width)
    for column, (kind, index) in enumerate(spelled_out(layout, width)):
        assert (gate if kind == "g" else up)[index] == column
    assert sorted([*gate, *up]) == list(range(2 * width))


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
def test_join_undoes_split(layout):
    z = np.arange(3 * 128).reshape(3, 128)
    assert np.array_equal(layouts.join(*layouts.split(z, layout), layout), z)


@pytest.mark.parametrize(
    ("layout", "width", "text"),
    [("interleaved-32", 40, "multiple of 32"), ("blocked", 32, "concat, interleaved")],
)
def test_refused(layout, width, text):
    with pytest.raises(ValueError, match=text):
        layouts.gate_columns(layout, width)


def test_odd_and_unequal_widths_are_refused():
    with pytest.raises(ValueError, match="even"):
        layouts.split(np.ones((1, 3)), "concat")
    with pytest.raises(ValueError, match="differ"):
        layouts.join(np.ones((1, 3)), np.ones((1, 2)), "concat")
