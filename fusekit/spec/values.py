"""One TOML value against one field of the table: type, allowed values, sweeps. Problems are collected, not raised."""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fusekit.spec.fields import INT32_MAX, NAME_PATTERN, NAME_RULE, Field, most_of

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_VALUES = 256  # of a list
MAX_PROBLEMS = 50  # of a file
MAX_TEXT = 1000  # characters of a string
SHOWN, SHOWN_DEPTH = 80, 8  # characters of a value in a message; tables and arrays within one another
_NEAR = 64  # characters of a word that is compared with others

_TYPE_NAMES = (
    (bool, "a boolean"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a float"),
    (dict, "a table"),
    (list, "an array"),
    (type(None), "null"),  # in JSON
)

_EXPECTED = {
    "pair": "a pair of integers [M, N]", "json": "a table of JSON values", "combinations": "a table of lists",
    "strings": "a list of strings", "bool": "true or false", "int": "an integer", "float": "a number",
}  # fmt: skip


class Bad:
    """The value of a field whose problem has been reported."""


BAD = Bad()


class TooManyError(Exception):
    """A file has more problems than anybody reads: the rest is not looked at."""


def show(value: Any) -> str:
    """The value as a TOML file would have it, shortened; what does not print is escaped."""
    text = ""
    for piece in _pieces(value, SHOWN_DEPTH):
        text += piece
        if len(text) > SHOWN:
            return text[: SHOWN - 3] + "..."
    return text


def bare(field: str) -> str:
    """A field as a TOML file would have it, shortened."""
    return field if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", field) else show(field)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, (dict, list, tuple)) and depth == 0:
        yield "..."
    elif isinstance(value, dict):
        yield "{ "
        for number, (field, item) in enumerate(value.items()):
            yield f"{', ' if number else ''}{bare(field)} = "
            yield from _pieces(item, depth - 1)
        yield " }"
    elif isinstance(value, (list, tuple)):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, depth - 1)
        yield "]"
    elif isinstance(value, str):
        text = json.dumps(value[: SHOWN + 1], ensure_ascii=False)
        yield "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, int) and abs(value) > 10**SHOWN:
        yield hex(value)  # of any length, which str is not
    else:
        yield str(value)


def type_name(value: Any) -> str:
    """The name of the value's type in TOML."""
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "a date or time")


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean "x"?` for a word close to an allowed one, else nothing."""
    if len(word) > _NEAR:
        return ""
    from difflib import get_close_matches  # only where an error is being written

    words = list(allowed)
    folded = {item.lower().replace("-", "_"): item for item in words}
    match = get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return f'; did you mean "{folded[match[0]]}"?' if match else ""


def one_of(allowed: Iterable[Any]) -> str:
    """The allowed values as a phrase."""
    words = [show(item) for item in allowed]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


class TableReader:
    """Reads tables of one file; `problems` has a line for everything that is wrong, each once."""

    def __init__(self) -> None:
        self._problems: dict[str, None] = {}
        self._reported = 0

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems)

    def add(self, problem: str) -> None:
        """Adds a line. Raises TooManyError at the last one that is reported."""
        self._reported += 1
        self._problems[problem] = None
        if len(self._problems) == MAX_PROBLEMS:
            raise TooManyError

    def report(self, where: str, field: str, value: Any, rule: str) -> Bad:
        """Adds a line: where, the field, its value, the rule that it breaks."""
        self.add(f"{where}{field} = {show(value)}: {rule}")
        return BAD

    def table(
        self, where: str, table: dict[str, Any], fields: tuple[Field, ...], *, complete: bool = True
    ) -> dict[str, Any]:
        """The table's values by field, `BAD` where a problem was reported; absent fields stay absent.

        complete: report required fields that are missing.
        """
        known = {field.name: field for field in fields}
        aliases = {field.alias: field for field in fields if field.alias}
        values: dict[str, Any] = {}
        for name, value in table.items():
            if name in known:
                values[name] = self.value(where, known[name], value)
            elif name in aliases and aliases[name].name in table:
                self.report(where, name, value, f"is another name of {aliases[name].name}; leave one of the two out")
            elif name in aliases:
                values[aliases[name].name] = self.value(where, replace(aliases[name], name=name), value)
            else:
                hint = nearest(name, known) or f"; the fields are {', '.join(known)}"
                self.add(f"{where}{bare(name)} = {show(value)}: there is no such field{hint}")
        if complete:
            for field in fields:
                if field.required and field.name not in table and field.alias not in table:
                    self.missing(where, field)
        return values

    def missing(self, where: str, field: Field) -> None:
        """Reports a required field that is absent."""
        self.add(f"{where}{field.name} is missing ({field.doc.rstrip('.')}); give {_expected(field)}")

    def value(self, where: str, field: Field, value: Any) -> Any:
        """The value, normalised; a sweep comes as a tuple of values, always, for a field that may be swept."""
        if field.type == "combinations":
            return self._combinations(where, field, value)
        if not field.sweep:
            return self._single(where, field, value)
        many = isinstance(value, list) and not (
            field.type == "pair" and not any(isinstance(item, list) for item in value)
        )
        if (many and not value) or value == []:
            return self.report(
                where, field.name, value, f"an empty sweep makes no kernel; give {_expected(field)}, or a list of them"
            )
        if many and len(value) > MAX_VALUES:
            return self.report(where, field.name, value, f"{len(value)} values; a list has at most {MAX_VALUES}")
        items = tuple(self._single(where, field, item) for item in (value if many else [value]))
        if any(item is BAD for item in items):
            return BAD
        if len(set(items)) < len(items):
            twice = next(item for index, item in enumerate(items) if item in items[:index])
            return self.report(where, field.name, value, f"{show(twice)} appears twice; a sweep names each value once")
        return items

    def _single(self, where: str, field: Field, value: Any) -> Any:
        read = getattr(self, f"_{field.type}")
        return read(where, field, value)

    def _wrong_type(self, where: str, field: Field, value: Any) -> Bad:
        return self.report(where, field.name, value, f"must be {_expected(field)}, is {type_name(value)}")

    def _string(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, str):
            return self._wrong_type(where, field, value)
        if field.name == "name" and not re.fullmatch(NAME_PATTERN, value):
            return self.report(where, field.name, value, NAME_RULE)
        if len(value) > MAX_TEXT:
            return self.report(where, field.name, value, f"{len(value)} characters; at most {MAX_TEXT}")
        return value

    def _choice(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, str):
            return self._wrong_type(where, field, value)
        value = dict(field.synonyms).get(value, value)
        if value not in field.choices:
            hint = field.hint(value, field.choices) if field.hint else None
            hint = nearest(value, field.choices) if hint is None else hint
            must = f"must be {one_of(field.choices)}{hint}"
            return self.report(where, field.name, value, must)
        return value

    def _bool(self, where: str, field: Field, value: Any) -> Any:
        return value if isinstance(value, bool) else self._wrong_type(where, field, value)

    def _int(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return self._wrong_type(where, field, value)
        if not field.minimum <= value <= most_of(field):
            return self.report(where, field.name, value, f"must be from {field.minimum} to {most_of(field)}")
        return value

    def _float(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return self._wrong_type(where, field, value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return self.report(
                where,
                field.name,
                value,
                "must be finite" + ("; leave limit out for none" if field.name == "limit" else ""),
            )
        if abs(number) > FLOAT32_MAX or (number and struct.unpack("<f", struct.pack("<f", number)) == (0.0,)):
            rule = f"a launch passes a float32, up to {FLOAT32_MAX:.8g} and, but for 0, from 1.4e-45 on"
            return self.report(where, field.name, value, rule)
        return number

    def _pair(self, where: str, field: Field, value: Any) -> Any:
        whole = isinstance(value, list) and len(value) == 2
        if not whole or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return self.report(
                where,
                field.name,
                value,
                f"must be {_expected(field)}" + (", or a list of such pairs" if field.sweep else ""),
            )
        pair = (value[0], value[1])
        if min(pair) < 1 or max(pair) > INT32_MAX:
            return self.report(where, field.name, value, f"both must be from 1 to {INT32_MAX}")
        if field.choices and pair not in field.choices:
            return self.report(where, field.name, value, f"must be {one_of(field.choices)}")
        return pair

    def _table(self, where: str, field: Field, value: Any) -> Any:
        if isinstance(value, str) and value in field.choices:
            return value
        if isinstance(value, str) and field.short:
            value = {field.short: value}
        if not isinstance(value, dict):
            return self._wrong_type(where, field, value)
        before = self._reported
        values = self.table(f"{where}{field.name}.", value, field.fields)
        return values if self._reported == before else BAD

    def _json(self, where: str, field: Field, value: Any) -> Any:
        from fusekit.spec.extern import is_json

        if not isinstance(value, dict):
            return self._wrong_type(where, field, value)
        odd = next((name for name, item in value.items() if not is_json(item)), None)
        if odd is not None:
            rule = "must be a JSON value: a string, a finite number, true, false, a list or a table of those"
            return self.report(where, f"{field.name}.{bare(odd)}", value[odd], rule)
        return value

    def _strings(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return self._wrong_type(where, field, value)
        if len(value) > MAX_VALUES or any(len(item) > MAX_TEXT for item in value):
            return self.report(where, field.name, value, f"at most {MAX_VALUES} strings of {MAX_TEXT} characters")
        return tuple(value)

    def _combinations(self, where: str, field: Field, value: Any) -> Any:
        from fusekit.spec.extern import MOST_COMBINATIONS, combinations, variant_of

        if self._json(where, field, value) is BAD:
            return BAD
        count = 1
        for name, items in value.items():
            if not isinstance(items, list) or not items:
                rule = "must be a list of values, of which each makes a kernel; one value belongs into params"
                return self.report(where, f"{field.name}.{bare(name)}", items, rule)
            if len(items) > MAX_VALUES:
                rule = f"{len(items)} values; a list has at most {MAX_VALUES}"
                return self.report(where, f"{field.name}.{bare(name)}", items, rule)
            texts = [json.dumps(item, sort_keys=True) for item in items]  # where 0, 0.0 and false differ
            twice = next((index for index, text in enumerate(texts) if text in texts[:index]), None)
            if twice is not None:
                rule = f"{show(items[twice])} appears twice; a sweep names each value once"
                return self.report(where, f"{field.name}.{bare(name)}", items, rule)
            count *= len(items)
        if count > MOST_COMBINATIONS:
            rule = f"makes {count} kernels; at most {MOST_COMBINATIONS}; sweep less, or write several kernels"
            return self.report(where, field.name, value, rule)
        choices = combinations(value)
        names = [variant_of(choice) for choice in choices]
        if len(set(names)) < len(names):
            alike = next(name for index, name in enumerate(names) if name in names[:index])
            rule = f"makes two variants {show(alike)}: names have letters, digits and dots of the values; choose others"
            return self.report(where, field.name, value, rule)
        return choices

    def _tables(self, where: str, field: Field, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(table, dict) and table for table in value):
            return self.report(where, field.name, value, f"must be {_expected(field)}")
        if len(value) > MAX_VALUES:
            return self.report(where, field.name, value, f"{len(value)} tables; a list has at most {MAX_VALUES}")
        before = self._reported
        tables = tuple(self.table(f"{where}{field.name}.", table, field.fields) for table in value)
        return tables if self._reported == before else BAD


def _expected(field: Field) -> str:
    match field.type:
        case "choice":
            return f"a string, {one_of(field.choices)}"
        case "tables":
            return "a list of tables [{ " + ", ".join(f"{sub.name} = .." for sub in field.fields[1:3]) + " }]"
        case "table":
            table = "a table { " + ", ".join(f"{sub.name} = .." for sub in field.fields[:4]) + " }"
            return f"{one_of(field.choices)}, or {table}" if field.choices else table
        case _:
            return _EXPECTED.get(field.type, "a string")
