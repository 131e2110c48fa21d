"""One field of a spec file: type, allowed values, default, meaning. Parser and JSON Schema both read it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Broken = tuple[str, Any, str]  # field, its value, the rule


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    type: "string", "choice", "bool", "int", "float", "pair" (two positive integers), "table", "tables" (a list of
    them), "strings" (a list of strings), "json" (a table of JSON values) or "combinations" (a table of lists, of which
    each combination is a value). choices: allowed strings, or allowed pairs. fields: a table's own fields. sweep: a
    list of values is allowed, and makes one kernel for each. alias: another name of the field. short: the field of a
    table that a string alone gives. synonyms: (other name, choice) of a choice. hint: what the error of another value,
    given that and the choices, ends with; None, or where it gives None: the nearest choice.
    """

    name: str
    type: str
    doc: str
    choices: tuple[Any, ...] = ()
    fields: tuple["Field", ...] = ()
    minimum: int = 0
    default: Any = None
    required: bool = False
    sweep: bool = False
    alias: str = ""
    short: str = ""
    synonyms: tuple[tuple[str, str], ...] = ()
    hint: Callable[[str, tuple[str, ...]], str | None] | None = None


_TYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "f32", "fp32": "f32"}


def type_hint(word: str, choices: tuple[str, ...]) -> str | None:
    """The hint of a dtype: another name of one, or how operands are FP8."""
    if _TYPE_NAMES.get(word) in choices:
        return f'; say "{_TYPE_NAMES[word]}"'
    if word.lower().startswith(("fp8", "float8", "e4m3", "e5m2")):
        return (
            '; for FP8 operands say dtype = "bf16" and, of a GEMM, quant = { in = "fp8-tensor" }, of a layer, recipe = '
            '"fp8-block"'
        )
    return None
