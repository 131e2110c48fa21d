"""The record's JSON: nothing is lost, and whatever is wrong is named by its path."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.abi import (
    F32_END,
    Constraint,
    Dim,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    RecordError,
    ScalarArgument,
    TensorArgument,
    TensorMapParameter,
)
from fusekit.abi.checks import ATTRIBUTES
from fusekit.abi.expr import OPERATORS
from fusekit.dtypes import ARGUMENTS
from tests.runtime.samples import again, record


@pytest.mark.parametrize(
    ("scalar", "words"),
    [
        (ScalarArgument("n", "i32", 3_000_000_000), "default: 3000000000; it must be -2147483648 to 2147483647"),
        (ScalarArgument("flag", "i32", 2, 0, 1), "default: 2; it must be 0 to 1"),
        (ScalarArgument("n", "i32", 12, 0, 100, 8), "default: 12; it must be a multiple of 8 from 0 to 100"),
        (ScalarArgument("a", "f32", -1e300), "default: -1e\\+300; an f32 ends at 3.4028235e38"),
        (ScalarArgument("a", "f32", 10**400), "an f32 ends at 3.4028235e38"),
        (ScalarArgument("a", "f32", F32_END), "an f32 ends at 3.4028235e38"),
    ],
)
def test_a_default_that_no_launch_could_take(scalar, words) -> None:
    with pytest.raises(RecordError, match=words):
        scalar.check("arguments[0]")


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.4028234663852886e38, 0, 1e-300])
def test_a_default_that_launches_take(value) -> None:
    ScalarArgument("a", "f32", value).check("arguments[0]")


def test_the_sample_comes_back() -> None:
    assert again(record()) == record()


DTYPES = st.sampled_from(["bf16", "fp16"])
SCALES = st.integers(1, 64)
FLOATS = st.one_of(st.none(), st.floats(width=32, allow_nan=False))


@st.composite
def records(draw: st.DrawFn) -> LaunchRecord:
    """Complete records with one to four matrices, each by tensor map and by pointer."""
    count = draw(st.integers(1, 4))
    arguments: list[Any] = []
    parameters: list[Any] = []
    offset = 0
    for number in range(count):
        name, dtype = f"t{number}", draw(DTYPES)
        read = draw(st.booleans())
        strides = (f"{name}.stride0" if read else "K", 1)
        arguments.append(
            TensorArgument(name, draw(st.sampled_from(["input", "output", "inout"])), dtype, ("M", "K"), strides, 8)
        )
        swizzle, widest = draw(st.sampled_from([("none", 256), ("32B", 16), ("64B", 32), ("128B", 64)]))
        parameters.append(
            TensorMapParameter(
                f"{name}_map", name, offset, dtype=dtype, dims=("K", "M"),
                strides=(("mul", 2, f"{name}.stride0"),), swizzle=swizzle,
                box=(8 * draw(st.integers(1, widest // 8)), draw(st.integers(1, 256))),
                element_strides=(1, draw(st.integers(1, 8))),
                l2_promotion=draw(st.sampled_from(["none", "64B", "128B", "256B"])),
                oob_fill=draw(st.sampled_from(["none", "nan_zero"])),
                address=("add", f"{name}.address", ("mul", draw(SCALES), "K")),
            )
        )  # fmt: skip
        parameters.append(PointerParameter(f"{name}_pointer", name, offset + 128))
        offset += 192
    arguments.append(ScalarArgument("scale", "f32", draw(FLOATS)))
    parameters.append(FloatParameter("scale", "scale", offset))
    parameters.append(IntegerParameter("rows", "i64", ("ceildiv", "M", draw(SCALES)), offset + 8))
    return LaunchRecord(
        symbol="kernel_" + "x" * draw(st.integers(0, 9)),
        arch=draw(st.sampled_from(["sm_80", "sm_90a", "sm_100f"])),
        arguments=tuple(arguments),
        dims=(Dim("M", maximum=draw(st.integers(1, 2**40))), Dim("K", 8, 8)),
        parameters=tuple(parameters),
        grid=(("ceildiv", "M", draw(SCALES)), ("max", 1, "cluster_margin"), 1),
        block=(draw(st.integers(1, 1024)), 1, 1),
        cluster=(draw(st.integers(1, 8)), 1, 1),
        dynamic_shared=draw(st.integers(0, 232_448)),
        constraints=(Constraint(("mod", "K", draw(SCALES)), "K is off"),),
        attributes=draw(st.dictionaries(st.sampled_from(["cooperative"]), st.integers(0, 1))),
        workspace=draw(st.sampled_from([0, 4096, ("mul", "sm_count", 16)])),
        workspace_zeroed=draw(st.booleans()),
        scratch=draw(st.sampled_from([0, ("mul", "M", 4), ("add", "K", "sm_count")])),
        skip_if_zero=draw(st.sampled_from([(), ("M",)])),
    )


@given(records())
def test_any_record_comes_back(built: LaunchRecord) -> None:
    assert again(built) == built
    assert json.dumps(again(built).to_json()) == json.dumps(built.to_json())


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


EVERYWHERE = list(paths(record().to_json()))
MEMBERS = [path for path in EVERYWHERE if isinstance(path[-1], str)]


@pytest.mark.parametrize("path", MEMBERS, ids=lambda path: ".".join(map(str, path)))
def test_a_member_of_another_type_is_named(path: tuple[Any, ...]) -> None:
    data = record().to_json()
    at(data, path[:-1])[path[-1]] = {"not": "this"}
    with pytest.raises(RecordError) as caught:
        LaunchRecord.from_json(data)
    assert str(caught.value).startswith(_shown(path))


@pytest.mark.parametrize("path", [path for path in MEMBERS if path[0] != "attributes"], ids=lambda path: str(path))
def test_a_missing_member_is_named(path: tuple[Any, ...]) -> None:
    data = record().to_json()
    del at(data, path[:-1])[path[-1]]
    with pytest.raises(RecordError, match="missing; the field is required") as caught:
        LaunchRecord.from_json(data)
    assert str(caught.value).startswith(f"{_shown(path)}:")


@pytest.mark.parametrize(
    "path", [(), ("dims", 0), ("arguments", 0), ("parameters", 3), ("workspace",), ("attributes",)]
)
def test_an_unknown_member_is_named(path: tuple[Any, ...]) -> None:
    data = record().to_json()
    at(data, path)["surprise"] = 1
    with pytest.raises(RecordError, match="unknown") as caught:
        LaunchRecord.from_json(data)
    assert str(caught.value).startswith(f"{_shown((*path, 'surprise'))}:")


def _shown(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another schema": ({"schema": 6}, "schema: 6; this fusekit reads launch records of schema 1 to 5"),
    "arch": ({"arch": "hopper"}, "arch: 'hopper'"),
    "grid of two": ({"grid": [1, 1]}, "grid: 2 entries; it has 3"),
    "grid variable": ({"grid": ["M", "rows", 1]}, r"grid\[1\]: unknown variable 'rows'"),
    "grid from an address": ({"grid": ["x.address", 1, 1]}, r"grid\[0\]: unknown variable 'x.address'"),
    "block": ({"block": [1024, 2, 1]}, "block: 1024x2x1; each is at least 1 and their product at most 1024"),
    "cluster": ({"cluster": [0, 1, 1]}, "cluster: 0x1x1"),
    "shared": ({"dynamic_shared": -1}, "dynamic_shared: -1"),
    "attribute": ({"attributes": {"priority": 1}}, "attributes.priority: unknown"),
    "skip rule": ({"skip_if_zero": ["Q"]}, r"skip_if_zero\[0\]: 'Q' is no dim"),
    "workspace": ({"workspace": {"bytes": "M", "zeroed": False}}, "workspace.bytes: unknown variable 'M'"),
    "scratch": ({"scratch": {"bytes": "x.stride0"}}, "scratch.bytes: unknown variable 'x.stride0'"),
    "scratch of more": ({"scratch": {"bytes": 4, "zeroed": True}}, "scratch.zeroed: unknown"),
    "no symbol": ({"symbol": ""}, "symbol: empty; a record is complete only after compilation"),
}


@pytest.mark.parametrize("case", WRONG)
def test_records_that_mean_nothing(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(RecordError, match=message):
        LaunchRecord.from_json(record().to_json() | changes)


PARAMETERS: dict[str, tuple[int, dict[str, Any], str]] = {
    "box": (0, {"box": [64, 257]}, r"parameters\[0\].box\[1\]: 257; a box extent is 1 to 256"),
    "box past the swizzle": (0, {"box": [128, 1]}, r"box\[0\]: 256 bytes; swizzle 128B allows at most 128"),
    "box off 16 bytes": (0, {"box": [12, 1]}, r"box\[0\]: 24 bytes; .* a multiple of 16 bytes"),
    "element strides": (0, {"element_strides": [1, 9]}, r"element_strides\[1\]: 9; an element stride is 1 to 8"),
    "rank": (0, {"strides": []}, r"parameters\[0\].strides: 0 entries; rank 2 needs 1"),
    "swizzle": (0, {"swizzle": "16B"}, r"parameters\[0\].swizzle: '16B'; it must be one of none, 32B, 64B, 128B"),
    "argument": (2, {"argument": "bias"}, r"parameters\[2\].argument: 'bias'; .* may name offsets, w, x, y"),
    "scalar by pointer": (2, {"argument": "act_alpha"}, "may name offsets, w, x, y"),
    "tensor as float": (6, {"argument": "x"}, r"parameters\[6\].argument: 'x'; .* may name act_alpha, act_limit"),
    "misaligned": (1, {"offset": 132}, r"parameters\[1\].offset: 132; w_map needs a multiple of 16"),
    "overlap": (3, {"offset": 256}, r"parameters\[3\].offset: 256; y_pointer overlaps what ends at 264"),
    "no offset": (3, {"offset": -1}, r"parameters\[3\].offset: -1; a record is complete only after compilation"),
    "size": (3, {"size": 4}, r"parameters\[3\].size: 4; a pointer parameter of this type has 8 bytes"),
    "name twice": (3, {"name": "x_map"}, r"parameters\[3\].name: 'x_map' occurs twice"),
    "no name": (3, {"name": "a b"}, r"parameters\[3\].name: 'a b'; a name is up to 1024 letters"),
    "kind": (3, {"kind": "divisor"}, r"parameters\[3\].kind: 'divisor'; it must be one of tensor_map, pointer"),
}  # fmt: skip


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_that_mean_nothing(case: str) -> None:
    index, changes, message = PARAMETERS[case]
    data = copy.deepcopy(record().to_json())
    data["parameters"][index] |= changes
    with pytest.raises(RecordError, match=message):
        LaunchRecord.from_json(data)


def test_every_dim_can_be_read_off_a_shape() -> None:
    base = record()
    with pytest.raises(RecordError, match=r"dims\[4\].name: 'Q' stands in no tensor's shape"):
        record(dims=(*base.dims, Dim("Q")))
    arguments = tuple(argument for argument in base.arguments if argument.name != "y")
    with pytest.raises(RecordError, match=r"'I' stands only inside expressions; some shape must be its bare name"):
        LaunchRecord(
            arch="sm_90a", arguments=arguments, dims=base.dims, parameters=(), grid=(1, 1, 1), block=(32, 1, 1)
        )


@pytest.mark.parametrize("name", ["sm_count", "cluster_margin", "workspace", "scratch", "stream"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(RecordError, match=f"arguments\\[0\\].name: '{name}' is reserved"):
        LaunchRecord("sm_90a", (TensorArgument(name, "input", "bf16", (), ()),), (), (), (1, 1, 1), (32, 1, 1))


def test_a_template_is_no_record_to_store() -> None:
    template = LaunchRecord(
        "sm_90a", (TensorArgument("x", "input", "bf16", ("M",), (1,)),), (Dim("M"),), (PointerParameter("x", "x"),),
        (1, 1, 1), (32, 1, 1),
    )  # fmt: skip
    with pytest.raises(RecordError, match="complete only after compilation"):
        LaunchRecord.from_json(template.to_json())


def test_the_example_of_the_documentation_is_a_record() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch-record.md").read_text()
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert LaunchRecord.from_json(example).to_json() == example
    for name in (*ATTRIBUTES, *OPERATORS, *ARGUMENTS):
        assert f"`{name}`" in page
