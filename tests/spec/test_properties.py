"""Round trips: any spec that can be written as TOML is read back as written."""

import itertools
import json
import pickle

from hypothesis import assume, given
from hypothesis import strategies as st

from fusekit.errors import SpecError
from fusekit.spec import parse_text
from fusekit.spec.model import DTYPES
from fusekit.spec.values import show
from fusekit.store import canonical_json
from tests.plans import BACKWARD_ACTIVATIONS, GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
scalars = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@st.composite
def activations(draw):
    if draw(st.booleans()):
        return {"kind": draw(st.sampled_from(PLAIN_ACTIVATIONS))}
    table = {"kind": draw(st.sampled_from(GATED_ACTIVATIONS)), "up_offset": draw(scalars)}
    if draw(st.booleans()):
        table["limit"] = draw(st.floats(0.5, 1e6, width=32))
    if table["kind"] == "swiglu":
        table["alpha"] = draw(scalars)
    return table


@st.composite
def kernels(draw):
    activation = draw(activations())
    table = {
        "name": draw(names),
        "op": "grouped-gemm",
        "arch": "sm_90a",
        "dtype": draw(st.sampled_from(DTYPES)),
        "out_dtype": draw(st.sampled_from(DTYPES)),
        "b_major": draw(st.sampled_from(["k", "n"])),
        "alpha": draw(st.sampled_from(["none", "scalar", "group"])),
        "bias": draw(st.booleans()),
        "save_preactivation": draw(st.booleans()),
        "row_scale": draw(st.booleans()),
        "activation": activation,
        "tile": draw(st.lists(st.sampled_from([[64, 128], [128, 128], [256, 128]]), min_size=1, unique_by=tuple)),
        "cluster": draw(st.lists(st.sampled_from([[1, 1], [2, 1], [1, 2]]), min_size=1, unique_by=tuple)),
        "cluster_margin": draw(st.integers(0, 132)),
    }
    if draw(st.booleans()) and f"d{activation['kind']}" in BACKWARD_ACTIVATIONS:
        activation["kind"] = f"d{activation['kind']}"
        table |= {"alpha": "none", "bias": False, "save_preactivation": False, "recompute": True}
        table |= {"dprob": table["row_scale"] and draw(st.booleans()), "dbias": draw(st.booleans())}
    if activation["kind"] == "identity":
        table["row_scale"] &= not table["bias"]  # a scaled bias is refused
    if activation["kind"].removeprefix("d") in GATED_ACTIVATIONS:
        table["glu_layout"] = draw(st.sampled_from(["concat", "interleaved", "interleaved-32"]))
    if draw(st.booleans()):
        table["problem"] = {"E": draw(st.integers(1, 9)), "M": draw(st.integers(0, 999)), "N": 192, "K": 64}
    return table


def as_toml(table):
    return "schema = 1\n[[kernel]]\n" + "".join(f"{key} = {written(value)}\n" for key, value in table.items())


def written(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {written(item)}" for key, item in value.items()) + " }"
    return repr(value) if isinstance(value, float) else show(value)


@given(kernels(), names)
def test_what_is_written_is_read(table, stem):
    specs = parse_text(as_toml(table), stem)
    combinations = list(itertools.product(table["tile"], table["cluster"]))
    assert [(list(spec.tile), list(spec.cluster)) for spec in specs] == combinations
    assert len({spec.full_name for spec in specs}) == len(specs)
    for spec in specs:
        canonical = spec.canonical()
        for key in table.keys() - {"name", "activation", "problem", "tile", "cluster"}:
            assert canonical[key] == table[key]
        assert {**canonical["activation"], **table["activation"]} == canonical["activation"]
        assert canonical["problem"] == table.get("problem")
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert canonical["file"] == stem
        json.dumps(spec.device_spec(), allow_nan=False)


@given(kernels(), st.randoms())
def test_the_order_of_keys_means_nothing(table, random):
    keys = list(table)
    random.shuffle(keys)
    shuffled = parse_text(as_toml({key: table[key] for key in keys}), "s")
    assert [canonical_json(spec.canonical()) for spec in shuffled] == [
        canonical_json(spec.canonical()) for spec in parse_text(as_toml(table), "s")
    ]


@given(kernels())
def test_defaults_mean_the_same_as_the_kernel_table(table):
    shared = {key: value for key, value in table.items() if key != "name"}
    text = as_toml(shared).replace("[[kernel]]", "[defaults]") + f'[[kernel]]\nname = "{table["name"]}"\n'
    assert parse_text(text, "s") == parse_text(as_toml(table), "s")


@given(kernels(), st.data())
def test_a_value_of_any_other_type_is_one_clear_error(table, data):
    key = data.draw(st.sampled_from([key for key in table if key != "name"]))
    table[key] = data.draw(st.sampled_from([-1, 3.5, True, "x", [[]], {"x": 1}, [1, [2, 3]], [["sm_90a"]]]))
    assume(not (key == "bias" and table[key] is True and table.get("row_scale")))
    try:
        specs = parse_text(as_toml(table), "s")
    except SpecError as error:
        assert all(line.startswith(f"[[kernel]] 1 ({table['name']}): {key}") for line in error.problems)
    else:
        assert isinstance(specs[0].canonical()[key], bool)


@given(st.text(max_size=200))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        parse_text(text, "s")
    except SpecError as error:
        assert str(error).startswith("s.toml: ")
