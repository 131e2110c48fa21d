"""One key of a spec file: type, allowed values, default, meaning. Parser and JSON Schema both read it."""

from dataclasses import dataclass
from typing import Any

Broken = tuple[str, Any, str]  # key, its value, the rule


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    type: "string", "choice", "bool", "int", "float", "pair" (two positive integers), "table", "tables" (a list of
    them), "strings" (a list of strings), "json" (a table of JSON values) or "combinations" (a table of lists, of which
    each combination is a value). choices: allowed strings, or allowed pairs. keys: a table's own keys. sweep: a list
    of values is allowed, and makes one kernel for each.
    """

    name: str
    type: str
    doc: str
    choices: tuple[Any, ...] = ()
    keys: tuple["Key", ...] = ()
    minimum: int = 0
    default: Any = None
    required: bool = False
    sweep: bool = False
