"""fusekit.dtypes against those who define the types, and against the source: no other table of types."""

import ast
import re
from pathlib import Path

import pytest

from fusekit.cabi import layout
from fusekit.dtypes import ARGUMENTS, BOOL, DTYPES, FLOAT, INTEGERS, MAPS, ROWS, SIGNED, by

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for room in ("fusekit", "cli") for path in (ROOT / room).glob("**/*.py"))
OWN = ROOT / "fusekit" / "dtypes.py"
# Every name that some column has for a type, but for those of C, which are words of Python and English too.
NAMES = {name for row in ROWS for name in (row.name, row.framework, row.cutlass, row.tensor_map)} - {"", "bool"}
# By dtype, but nothing that a type is: how far a result may be from the reference; what people write instead of a name.
ALLOWED = {("fusekit/reference/measure.py", "FROBENIUS"), ("fusekit/plan/fields.py", "_TYPE_NAMES")}


def named(node: ast.expr | None) -> str | None:
    """The type that an item of a literal is: "bf16", cutlass.BFloat16, torch.bfloat16, Float32."""
    name = None
    if isinstance(node, ast.Constant):
        name = node.value
    elif isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Name):
        name = node.id
    return name if isinstance(name, str) and name in NAMES else None


def tables(source: str) -> list[int]:
    """The lines of literals that say something of each of several types, or list three and more."""
    tree = ast.parse(source)
    skipped = {id(alias) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    lines = []
    for node in ast.walk(tree):
        groups: list[tuple[int, list[ast.expr | None]]] = []
        if isinstance(node, ast.Dict):
            groups = [(2, node.keys), (3, list(node.values))]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and id(node) not in skipped:
            groups = [(3, list(node.elts))]
            pairs = [item.elts[0] for item in node.elts if isinstance(item, ast.Tuple) and len(item.elts) > 1]
            groups.append((3, list(pairs)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            keys = [ast.Constant(word.arg) for word in node.keywords if word.arg]
            groups = [(2, list(keys))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            if words and all(word in NAMES for word in words):
                groups = [(3, [ast.Constant(word) for word in words])]
        lines += [node.lineno for least, items in groups if len({named(item) for item in items} - {None}) >= least]
    return lines


def test_there_is_no_other_table_of_types():
    wrong = []
    for path in SOURCES:
        if path == OWN:
            continue
        source, name = path.read_text(), str(path.relative_to(ROOT))
        for line in tables(source):
            if (name, source.splitlines()[line - 1].split(" ")[0]) not in ALLOWED:
                wrong.append(f"{name}, line {line}: a table of types; read fusekit.dtypes, or add a column to it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        'SIZES = {"bf16": 2, "f32": 4}',
        'x = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[name]',
        "SIZES = dict(bf16=2, f32=4)",
        'SIZES = {4: "i32", 5: "i64", 6: "u8"}',
        'MAPS = {"a": "BFLOAT16", "b": "FLOAT16", "c": "INT32"}',
        'KINDS = ("e4m3", "e5m2", "e8m0")',
        'KINDS = "e4m3 e5m2 e8m0".split()',
        "TYPES = [torch.bfloat16, torch.float16, torch.float32]",
        'PAIRS = (("bf16", 2), ("fp16", 2), ("f32", 4))',
    ],
)
def test_a_table_of_types_is_seen(source):
    assert tables(source) == [1]


def test_a_mention_of_types_is_no_table():
    assert not tables('CHOICES = ("bf16", "fp16")\nkind = "float" if dtype == "f32" else "int32_t"')
    assert not tables('shapes = {"indices": ((4,), "i32"), "weights": ((4,), "f32"), "map": ((4,), "u8")}')


def test_names_and_numbers_are_given_once():
    for names in (ARGUMENTS, MAPS):
        for column in ("framework", "typestr", "dlpack", "xla", "number", "map_code"):
            values = [getattr(DTYPES[name], column) for name in names]
            known = [value for value in values if value not in (None, "")]
            assert len(by(column, names)) == len(known), column
    assert set(INTEGERS) == {row.name for row in ROWS if row.name[1:].isdigit() and row.name[0] in "iu"}
    assert len({row.framework for row in ROWS if row.framework}) == sum(bool(row.framework) for row in ROWS)


def test_numpy_has_the_same_types():
    np, ml_dtypes = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    kinds = {FLOAT: "f", SIGNED: "i", BOOL: "b"}
    for row in ROWS:
        if not row.framework:
            continue
        dtype = np.dtype(getattr(ml_dtypes, row.array, row.array))
        assert dtype.itemsize == row.bytes == -(-row.bits // 8)
        if row.typestr:
            assert dtype.str[1:] == row.typestr
        if dtype.kind != "V" and row.packed == 1:
            assert dtype.kind == kinds.get(row.kind, "u")
        if row.kind == FLOAT:
            limits = ml_dtypes.finfo(getattr(ml_dtypes, row.framework.removesuffix("_x2"), dtype))
            got = [float(each) for each in (limits.max, limits.smallest_normal, limits.eps, limits.smallest_subnormal)]
            assert got == [row.max, row.min_normal, row.eps, row.smallest], row.name


@pytest.mark.parametrize("name", ["bf16", "fp16", "f32", "f64", "e5m2"])
def test_minus_infinity(name):
    np, ml_dtypes = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    row = DTYPES[name]
    value = np.array(-np.inf, np.dtype(getattr(ml_dtypes, row.array, row.array)))
    assert int(value.view(f"u{row.bytes}")) == row.negative_infinity


def test_the_dsl_has_the_same_types():
    cutlass = pytest.importorskip("cutlass")
    for row in ROWS:
        if row.cutlass:
            bits = 1 if row.kind == BOOL else row.bits // row.packed
            assert getattr(cutlass, row.cutlass).width == bits, row.name


def test_the_driver_has_the_same_tensor_maps():
    driver = pytest.importorskip("cuda.bindings.driver")
    for row in ROWS:
        if row.tensor_map:
            number = int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{row.tensor_map}"))
            assert number == (row.number if row.map else DTYPES["u8"].number), row.name


def test_pytorch_has_the_same_types():
    torch = pytest.importorskip("torch")
    for row in ROWS:
        if row.framework and hasattr(torch, row.framework):
            dtype = getattr(torch, row.framework)
            assert (str(dtype), dtype.itemsize) == (f"torch.{row.framework}", row.bytes)


def test_the_c_loader_has_the_same_types():
    """Its enumeration, and the table of names that is generated for it."""
    header = (ROOT / "fusekit/cabi/loader.h").read_text()
    members = {name.lower(): int(number) for name, number in re.findall(r"FUSEKIT_([A-Z0-9]+) = (\d+)", header)}
    members = {name: number for name, number in members.items() if name in DTYPES}
    assert members == {name: DTYPES[name].number for name in ARGUMENTS}
    assert all(layout.DTYPES[DTYPES[name].number] == name for name in (*ARGUMENTS, *MAPS))
