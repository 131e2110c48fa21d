"""The flat form of a launch record: what `flat` writes, and what the C launcher reads in place.

It is a sequence of little-endian words of 64 bits, without offsets. A table is its rows, one after the other; then
come, row by row and field by field, the tables, texts and expressions of those rows, each in the same form. So a reader
takes what comes next, checks it, and sets a pointer: nothing can overlap, and nothing can point elsewhere.

`TABLES` is the one definition. The writer follows it, and `declarations` gives the launcher's structures, constants and
rules: a row in memory is the row in the file, a pointer takes the place of what it will point to.

| field | words of its row | after the rows |
|---|---|---|
| whole | the number, signed | |
| text | its length in bytes | its UTF-8 bytes, zeros up to the next whole word, at least one |
| rows | 0, their number | the table |
| expression | 0, the number of steps | the steps: operation and value each, in postfix order |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusekit.abi.limits import (
    CONSTRAINTS,
    INT,
    LAUNCH_VARIABLES,
    LAUNCHES,
    PARAMETERS,
    SCALARS,
    SPACE,
    TENSORS,
    TEXT,
    THREADS,
    VARIABLES,
    WORD,
)
from fusekit.dtypes import DTYPES as TYPES
from fusekit.dtypes import FLOATS, ROUNDINGS, ROWS

MAGIC = int.from_bytes(b"fusekit\0", "little")
VERSION = 1
"""Version of this form, with everything below; a reader accepts its own version alone."""
LAYER_ROW = "layer"
"""What a row has for a problem whose record is a layer's: the loader of 0.1 takes it for one."""
CANDIDATE = 0
"""Instead of the major number of its architecture: an earlier build of a name, which the loader of 0.1 passes over."""

# Steps of expressions. `jump` leaves out `value` steps; `unless` does where the value on top, which it takes, is 0.
OPERATORS = (
    "push", "variable", "jump", "unless", "bit_length", "exp2", "add", "sub", "mul", "floordiv", "ceildiv", "mod",
    "min", "max", "eq", "ne", "lt", "le", "fadd", "fsub", "fmul", "fdiv",
    # Of floats alone: `number` pushes a double, of which `value` has the bits; `fint` and `dint` a variable.
    "number", "fint", "dint", "fsqrt", "dsqrt", *ROUNDINGS, "neg", "dadd", "dsub", "dmul", "ddiv", "feq",
    "flt", "fle", "floor", "ceil", "trunc", "abs",
)  # fmt: skip
KINDS = ("tensor_map", "pointer", "workspace", "scratch", "int", "uint", "float", "double", "half", "bfloat")
# By CUtensorMapDataType, then by the loader's fusekit_dtype; "": no type of ours has the number.
_NUMBERED = {row.number: row.name for row in ROWS if row.number is not None}
DTYPES = tuple(_NUMBERED.get(number, "") for number in range(max(_NUMBERED) + 1))
# How many variables an expression may read, or tensors a number may name: fields of the record; `outer` is what the
# field says that holds the rows, `value` the values before this one; `whole` the integers that a float is made of.
LIMITS = (
    "none", "first_stride", "first_value", "variable_count", "float_count", "tensor_count", "outer", "value", "whole",
)  # fmt: skip

PASSES = ("forward", "inference", "backward", "quantise")
PLACES = ("argument", "kept", "scratch", "checked")
LAYER_VARIABLES = ("T", "capacity", "rows")
"""Before the dims of a layer; the last two of one over ranks."""
BUFFERS, STEPS, OUTPUTS, WINDOWS = 128, 64, 30, 8
RANKS = 32  # that a layer is over at most
RANK = 5
STACK = 40  # values of an expression that is nested as deep as a record allows
DOCUMENT, CUBIN = 16 << 20, 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Field:
    """low, high: of a number, or how many rows or bytes there may be. count: of an array, in the structure itself.
    of: the rows' table. limit: what a number must stay below, or which variables an expression may read.
    """

    name: str
    kind: str = "whole"
    low: int = 0
    high: int = WORD
    count: int = 1
    of: str = ""
    limit: str = "none"


def _text(name: str) -> Field:
    return Field(name, "text", high=TEXT)


def _rows(name: str, of: str, high: int, low: int = 0, limit: str = "none") -> Field:
    return Field(name, "rows", low, high, of=of, limit=limit)


def _expression(name: str, limit: str, count: int = 1) -> Field:
    return Field(name, "expression", high=1 << 16, count=count, limit=limit)


def _flag(name: str) -> Field:
    return Field(name, high=1)


def _index(name: str, low: int = 0, limit: str = "none") -> Field:
    return Field(name, low=low, high=INT, limit=limit)


def _place(what: str, most: int) -> tuple[Field, ...]:
    """Where `what` lies: how many bytes before the directory it begins, size, SHA-256."""
    digest = Field(f"{what}_digest", low=-WORD - 1, count=4)
    return Field(f"{what}_before"), Field(f"{what}_bytes", high=most), digest


TABLES: dict[str, tuple[Field, ...]] = {
    "dim": (_text("name"), Field("divisor", low=1), Field("minimum"), Field("maximum")),
    "tensor": (
        # written: 0, 1, or 2 and more: over the tensor of that number from 2 on, if both are the same memory
        _text("name"), Field("written", high=TENSORS + 1), Field("itemsize", low=1, high=8), Field("rank", high=RANK),
        Field("alignment", low=1, high=1 << 30), Field("stride_divisor", low=1),
        Field("free_strides", high=2**RANK - 1),  # bit i: stride i is the caller's
        Field("first_stride", high=VARIABLES),  # index of its first stride among the variables
        _expression("shape", "first_stride", RANK), _expression("strides", "first_stride", RANK),
    ),
    "argument": (  # in the record's order; tensor: its index, -1 for a scalar
        _text("name"), Field("dtype", high=len(DTYPES) - 1), Field("tensor", low=-1, limit="tensor_count"),
        _flag("has_default"), Field("default_bits", low=-WORD - 1),  # of a double
    ),
    "constraint": (_expression("expression", "outer"), _text("message")),
    "own_value": (_expression("expression", "value"),),
    "skip": (Field("dim", low=len(LAUNCH_VARIABLES), limit="first_stride"),),
    "map": (  # numbers are those of the driver's enumerations; raw: written by the launcher
        Field("dtype", high=15), Field("rank", low=1, high=RANK), _expression("address", "variable_count"),
        _expression("dims", "variable_count", RANK), _expression("strides", "variable_count", RANK),
        Field("box", high=256, count=RANK), Field("element_strides", high=8, count=RANK),
        Field("interleave", high=2), Field("swizzle", high=3), Field("promotion", high=3), _flag("fill"), _flag("raw"),
    ),
    "parameter": (_text("name"), Field("offset", high=SPACE), Field("size", low=1, high=SPACE)),
    "part": (  # one value in the parameter space: a parameter, or a field of one; value: of a pointer the bytes to add
        _text("name"), Field("kind", high=len(KINDS) - 1), Field("offset", high=SPACE), Field("size", low=1, high=128),
        Field("argument", low=-1, limit="tensor_count"), _expression("value", "variable_count"),
        _expression("number", "float_count"), _rows("map", "map", 1),
    ),
    "node": (
        _text("symbol"), _rows("parameters", "parameter", PARAMETERS), _rows("parts", "part", SPACE),
        _expression("grid", "variable_count", 3), Field("block", low=1, high=1024, count=3),
        Field("cluster", low=1, high=16, count=3), Field("shared", high=INT), _flag("cooperative"),
        _flag("serialization"), _flag("non_portable_cluster"), Field("carveout", low=-INT - 1, high=INT),
    ),
    "record": (
        _text("name"), _text("arch"), Field("major", high=99), Field("minor", high=9), _flag("exact"),
        Field("margin", high=INT), _flag("asks_clusters"), Field("float_count", high=SCALARS),
        *(Field(name, high=VARIABLES) for name in (
            "first_stride", "first_address", "first_integer", "first_value", "variable_count")),
        _expression("workspace", "first_stride"), _flag("workspace_zeroed"), _expression("scratch", "first_value"),
        _rows("dims", "dim", VARIABLES), _rows("tensors", "tensor", TENSORS),
        _rows("arguments", "argument", TENSORS + SCALARS),
        _rows("constraints", "constraint", CONSTRAINTS, limit="first_value"),
        _rows("late_constraints", "constraint", CONSTRAINTS + SCALARS, limit="variable_count"),
        _rows("values", "own_value", VARIABLES),
        _rows("skips", "skip", VARIABLES), _rows("nodes", "node", LAUNCHES, low=1),
    ),
    # After a record of schema 5; earlier loaders refuse it for that. Without steps: what its node says.
    "more_node": (
        _expression("when", "variable_count"), _expression("block", "variable_count", 3),
        _expression("shared", "variable_count"), Field("preferred", high=16, count=3),
        # of the two events: the variable that is its handle, 0 for none
        Field("programmatic", limit="variable_count"), Field("programmatic_flags", high=INT), _flag("at_block_start"),
        Field("completion", limit="variable_count"), Field("completion_flags", high=INT),
    ),
    "more_value": (_expression("number", "float_count"),),  # of a value that is a float without its fraction
    "more": (_rows("nodes", "more_node", LAUNCHES, low=1), _rows("values", "more_value", VARIABLES)),
    # Of layers: see fusekit.abi.layer_record. Sets of outputs are masks over those of the pass.
    "layer_buffer": (  # place: that of PLACES, or further on a window's; offset: from the begin of that
        _text("name"), Field("dtype", high=len(DTYPES) - 1), Field("itemsize", low=1, high=8), Field("rank", high=RANK),
        Field("place", high=len(PLACES) + WINDOWS - 1), _expression("offset", "variable_count"),
        _expression("shape", "variable_count", RANK),
    ),
    "layer_window": (_text("name"), _expression("bytes", "variable_count")),
    "layer_rung": (Field("tokens"), _index("kernel", -1)),  # -1: none is launched
    "layer_part": (_text("name"), _rows("rungs", "layer_rung", 256, 1)),
    "layer_operand": (_text("name"), _index("buffer"), _flag("written")),
    "layer_index": (_index("index"),),
    "layer_step": (  # outputs: those for which it is queued, 0: always; writes: the buffers of one on the side stream
        _index("part"), Field("outputs", high=INT), _index("needs", -1), _index("unless", -1), _index("window", -1),
        _flag("on_side"), _flag("awaits"), _flag("apart"), _rows("operands", "layer_operand", TENSORS),
        _rows("writes", "layer_index", BUFFERS),
    ),
    "layer_place": (_index("buffer"), _index("home", -1), _rows("above", "layer_index", BUFFERS)),
    "layer_layout": (
        Field("outputs", high=INT), Field("lends", high=INT), _flag("in_place"), Field("since"), Field("until"),
        _rows("places", "layer_place", BUFFERS),
    ),
    "layer_pass": (
        _rows("inputs", "layer_index", BUFFERS), _rows("outputs", "layer_index", OUTPUTS),
        _rows("steps", "layer_step", STEPS), _rows("layouts", "layer_layout", 1 << 16),
        _rows("in_place", "layer_index", STEPS),
    ),
    "layer": (
        _text("name"), _text("arch"), Field("kernel_count", low=1, high=1 << 12),
        Field("variable_count", high=VARIABLES), _rows("dims", "own_value", VARIABLES),
        # ranges: the variable that those of layouts are of; over ranks, capacity of T tokens, and rows of any routing
        Field("ranges", limit="variable_count"), _rows("windows", "layer_window", WINDOWS),
        _expression("capacity", "variable_count"), _expression("most_rows", "variable_count"),
        _rows("buffers", "layer_buffer", BUFFERS), _rows("parts", "layer_part", STEPS),
        _rows("passes", "layer_pass", len(PASSES), len(PASSES)),
    ),
    # Of the loader alone: what a bundle holds for it (`member`). suffix: 0, 1 for f, 2 for a; problem: why there is no
    # record. Candidates come last.
    "listed": (
        _text("name"), _text("arch"), Field("major", high=99), Field("minor", high=9), Field("suffix", high=2),
        _text("problem"), *_place("record", DOCUMENT), *_place("cubin", CUBIN),
    ),
    "directory": (_rows("kernels", "listed", 1 << 20),),
    "footer": (  # the end of it: where the directory begins, counted from here
        Field("magic"), Field("version"), Field("before"), Field("bytes", low=1, high=1 << 28),
        Field("digest", low=-WORD - 1, count=4),
    ),
}  # fmt: skip


LOADER_TABLES = ("listed", "directory", "footer")
LAYER_TABLES = tuple(name for name in TABLES if name.partition("_")[0] == "layer")


def layer_declarations() -> str:
    """The structures and rules of layers."""
    constants = {
        "MOST_BUFFERS": BUFFERS, "MOST_STEPS": STEPS, "MOST_WINDOWS": WINDOWS, "MOST_RANKS": RANKS,
        "PASSES": len(PASSES), "FIRST_LAYER_DIM": len(LAYER_VARIABLES),
    }  # fmt: skip
    names = ", ".join(f'"{name}"' for name in PASSES)
    return "\n".join([
        "/* ---- What a layer's passes launch, in words of 64 bits. */\n",
        f'#define FK_LAYER_ROW "{LAYER_ROW}" /* instead of a problem in a row of a bundle */\n',
        _enum(None, [f"FK_{name} = {value}" for name, value in constants.items()]),
        _enum("fk_pass", [f"FK_PASS_{name.upper()}" for name in PASSES]),
        _enum("fk_where", [*(f"FK_IN_{name.upper()}" for name in PLACES), "FK_IN_WINDOW"]),
        f"static const char *const fk_pass_names[] = {{{names}}};\n",
        *(text(name, TABLES[name]) for name in LAYER_TABLES for text in (_structure, _rules)),
    ])  # fmt: skip


def loader_declarations() -> str:
    """The structures and rules of the C loader."""
    names = ", ".join(f'"{name}"' for name in DTYPES)
    parts = [text(name, TABLES[name]) for name in LOADER_TABLES for text in (_structure, _rules)]
    return "\n".join([
        "/* ---- What a bundle holds for the loader. */\n",
        f"#define FK_MAGIC INT64_C({MAGIC})\n",
        f"static const char *const fk_dtype_names[] = {{{names}}};\n",
        *parts,
    ])  # fmt: skip


def dlpack_declarations() -> str:
    """DLPack's number of each type."""
    rows = []
    for name in DTYPES:
        code, bits, lanes = (TYPES[name].dlpack if name else None) or (-1, 0, 0)
        rows.append(f'    {{"{name}", {code}, {bits}, {lanes}}}')
    return (
        f"enum {{ FK_U8 = {DTYPES.index('u8')} }};\n\n"
        "typedef struct {\n    const char *name;\n    int code, bits, lanes;\n} fk_dlpack;\n\n"
        "static const fk_dlpack fk_dlpack_types[] = {\n" + ",\n".join(rows) + "\n};\n"
    )


def declarations() -> str:
    """The constants, structures and rules of the C launcher."""
    most = {"rank": RANK, "variables": VARIABLES, "nodes": LAUNCHES, "parameters": PARAMETERS, "space": SPACE,
            "tensors": TENSORS, "threads": THREADS, "scalars": SCALARS, "stack": STACK, "document": DOCUMENT,
            "cubin": CUBIN}  # fmt: skip
    constants = {
        "VERSION": VERSION,
        "DTYPES": len(DTYPES),
        "I32": DTYPES.index("i32"),
        **{f"TYPE_{name.upper()}": DTYPES.index(name) for name in ("i64", *FLOATS[1:])},
        "FIRST_DIM": len(LAUNCH_VARIABLES),
    }
    parts = [
        "/* ---- Launch records, in words of 64 bits. */\n",
        _enum(None, [f"FK_MOST_{name.upper()} = {value}" for name, value in most.items()]),
        _enum(None, [f"FK_{name} = {value}" for name, value in constants.items()]),
        _enum("fk_operator", [f"FK_{name.upper()}" for name in OPERATORS]),
        _enum("fk_kind", [f"FK_{name.upper()}" for name in KINDS]),
        _enum("fk_own_variable", [f"FK_{name.upper()}" for name in LAUNCH_VARIABLES]),
        _enum("fk_limit", [f"FK_BELOW_{name.upper()}" for name in LIMITS]),
        "typedef struct {\n    int64_t operation, value;\n} fk_step;\n",
        "typedef struct {\n    const fk_step *steps;\n    int64_t count;\n} fk_expression;\n",
        "typedef enum { FK_WHOLE, FK_TEXT, FK_ROWS, FK_EXPRESSION } fk_field_kind;\n",
        "typedef struct fk_type fk_type;\n",
        "typedef struct {\n    const char *name;\n    fk_field_kind kind;\n    int64_t low, high;\n    int count;\n"
        "    fk_limit limit;\n    const fk_type *of;\n} fk_field;\n",
        "struct fk_type {\n    const fk_field *fields;\n    int count;\n    size_t words;\n};\n",
    ]
    for name, fields in TABLES.items():
        if name not in (*LOADER_TABLES, *LAYER_TABLES):
            parts += [_structure(name, fields), _rules(name, fields)]
    return "\n".join(parts)


def count_of(field: Field) -> str:
    """The member that holds how many rows there are."""
    return f"{field.name.removesuffix('s')}_count"


def _enum(name: str | None, items: Sequence[str]) -> str:
    lines = [", ".join(items[at : at + 6]) for at in range(0, len(items), 6)]
    body = "{\n    " + ",\n    ".join(lines) + "\n}"
    return f"enum {body};\n" if name is None else f"typedef enum {body} {name};\n"


def _structure(name: str, fields: Sequence[Field]) -> str:
    members = []
    for field in fields:
        size = f"[{field.count}]" if field.count > 1 else ""
        members += {
            "whole": [f"int64_t {field.name}{size};"],
            "text": [f"const char *{field.name};"],
            "rows": [f"const fk_{field.of} *{field.name};", f"int64_t {count_of(field)};"],
            "expression": [f"fk_expression {field.name}{size};"],
        }[field.kind]
    return "typedef struct {\n    " + "\n    ".join(members) + f"\n}} fk_{name};\n"


def _rules(name: str, fields: Sequence[Field]) -> str:
    rows = [
        f'{{"{field.name}", FK_{field.kind.upper()}, {_constant(field.low)}, {_constant(field.high)}, {field.count}, '
        f"FK_BELOW_{field.limit.upper()}, {f'&fk_type_{field.of}' if field.of else 'NULL'}}}"
        for field in fields
    ]
    body = ",\n    ".join(rows)
    return (
        f"static const fk_field fk_fields_{name}[] = {{\n    {body}\n}};\n"
        f"static const fk_type fk_type_{name} = {{fk_fields_{name}, {len(fields)}, sizeof(fk_{name}) / 8}};\n"
    )


def _constant(value: int) -> str:
    return "INT64_MIN" if value == -WORD - 1 else f"INT64_C({value})"
