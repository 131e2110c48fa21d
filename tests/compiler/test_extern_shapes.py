"""op = "extern": extents, strides and bounds of tensors and integers, and how they are tied."""

import pytest

from fusekit.abi import evaluate, flat
from fusekit.errors import ArgumentError, FusekitError
from fusekit.runtime.binding import bind
from fusekit.runtime.tensors import View

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from .externs import FILLED, TWICE, compiled, refused, spec_of

VOLUMES = 'arguments.y = { role = "output", shape = ["A", "B", "C", "D", "E", "F"] }\n'


def test_many_numbers_that_are_multiplied_are_proved(tmp_path):
    assert compiled(tmp_path, "volumes", VOLUMES)[1].proof["launches"] >= 64


def test_bounds_of_an_integer(tmp_path):
    record, _ = compiled(tmp_path, "volumes", VOLUMES + "arguments.a = { minimum = 2, maximum = 8, divisor = 2 }")
    bounds = {scalar.name: (scalar.minimum, scalar.maximum, scalar.divisor) for scalar in record.scalars}
    assert (bounds["a"], bounds["b"]) == ((2, 8, 2), (-(2**31), 2**31 - 1, 1))


def test_an_integer_that_is_an_extent_is_read_from_the_tensor(tmp_path):
    record, _ = compiled(tmp_path, "sized", 'arguments.y = { role = "output", shape = ["N"] }')
    assert [argument.name for argument in record.arguments] == ["y", "sizes_1"]
    assert record.grid == ("sizes_1", 1, 1)
    assert ("N", "i64") in [(item.value, item.dtype) for _, item in flat(record.parameters) if hasattr(item, "value")]


def test_dims_bounds_defaults_and_names(tmp_path):
    rest = (
        TWICE
        + """
        arguments.options_sm_count = { rename = "rows", default = 1 }
        dims.M = { skip_if_zero = true }
        dims.N = { divisor = 6, maximum = 1200 }
        """
    )
    record, _ = compiled(tmp_path, "twice", rest)
    assert [(dim.name, dim.divisor, dim.minimum, dim.maximum) for dim in record.dims] == [
        ("M", 1, 0, 2**31 - 1), ("N", 12, 12, 1200),
    ]  # fmt: skip
    assert record.skip_if_zero == ("M",)
    assert record.scalars[-1].name == "rows" and record.scalars[-1].default == 1


def test_a_fixed_extent_is_a_number_a_param_or_a_star(tmp_path):
    for message in ("96", '"columns"', '"*"', '["mul", "columns", 1]'):
        rest = f"""params.columns = 96
            arguments.x = {{ role = "input", shape = ["M", {message}] }}
            arguments.y = {{ role = "output", shape = ["M", 96] }}"""
        record, _ = compiled(tmp_path, "twice", rest)
        assert record.tensors[0].shape == ("M", 96)
    message = refused("twice", rest.replace("96] }", "95] }"))
    assert message == (
        'arguments.y.shape[1] is 95; the trace fixes this extent at 96; say 96, a param of that value, or "*"'
    )


def test_one_name_ties_two_extents_and_expressions_derive_them(tmp_path):
    rest = """arguments.x = { role = "input", shape = ["M", "N"] }
        arguments.y = { role = "output", shape = ["M", ["floordiv", "N", 2]] }"""
    record, _ = compiled(tmp_path, "halves", rest)
    assert [(dim.name, dim.divisor) for dim in record.dims] == [("M", 1), ("N", 8)]
    assert record.tensors[1].shape == ("M", ("floordiv", "N", 2))


def test_an_extent_has_one_name():
    rest = TWICE.replace('["M", "N"] }', '["M", "J"] }')
    assert refused("twice", rest) == (
        "arguments.y.shape[1] is J; the trace has one extent for it and for arguments.x.shape[1], which is N; call both"
        " the same"
    )


def test_prescribed_strides(tmp_path):
    rest = TWICE.replace('"output", shape', '"output", strides = ["N", 1], shape')
    record, _ = compiled(tmp_path, "twice", rest)
    assert record.tensors[1].strides == ("N", 1)
    message = refused("twice", TWICE.replace('"output", shape', '"output", strides = ["N", 2], shape'))
    assert message == "arguments.y.strides[1] is 2; the trace fixes this stride at 1"


def test_an_extent_and_a_scalar_of_one_name():
    rest = FILLED.replace('"N"', '"count"').rpartition("arguments.count")[0]
    assert refused("filled", rest).startswith("'count' is an extent of a tensor and a scalar argument; name the extent")


ROWS = """
arguments.x = { role = "input", shape = ["M", 128] }
arguments.y = { role = "output", shape = ["M", 128] }
"""


@pytest.mark.parametrize(("bits", "large", "bounded"), [(0, False, 2), (32, False, 2), (64, False, 0), (32, True, 1)])
def test_address_sums_of_32_bits_do_not_reach_2_31_elements(tmp_path, bits, large, bounded):
    rest = ROWS.replace("128] }", "128], large = true }", 1) if large else ROWS
    record, _ = compiled(tmp_path, "rows", f"{rest}params.bits = {bits}")
    assert len([constraint for constraint in record.constraints if "2**31 elements" in constraint.message]) == bounded
    most = 2**24 if bits == 0 else (2**31 - 128) // 200 + 1
    for m, fits in ((1, True), (most, True), (most + 1, bounded == 0)):
        views = [View("fp16", (m, 128), (200 if bits else 128, 1), 0) for _ in range(2)]
        if fits:
            bind(record, views)
            continue
        name = "y" if large else "x"
        words = rf"{name} must span fewer than 2\*\*31 elements: .*, or say arguments\.{name}\.large = true in its spec"
        with pytest.raises(ArgumentError, match=words):
            bind(record, views)


def test_a_tensor_map_stays_within_its_tensor(tmp_path):
    record, kernel = compiled(tmp_path, "mapped_by_sizes", 'arguments.x = { role = "input", shape = ["elements"] }')
    (constraint,) = record.constraints
    assert kernel.proof["launches"] >= 64
    assert constraint.message.startswith("x is smaller than what the kernel's tensor map over it reaches: give it all")
    for m, n, elements, fits in ((4, 64, 256, True), (4, 64, 255, False), (5, 64, 256, False), (1, 64, 64, True)):
        assert (evaluate(constraint.expr, {"m": m, "n": n, "elements": elements}) == 0) == fits


def test_large_is_a_key_of_tensors():
    with pytest.raises(FusekitError, match=r"arguments\.count\.large"):
        spec_of("filled", FILLED.replace('value = ["mul", 2, "N"]', "large = true, value = 3"))
