"""The JSON Schema of spec files, for editors; made from the same table as the parser."""

from dataclasses import replace
from typing import Any

from fusekit.spec.family import Family, families
from fusekit.spec.keys import FILE_KEYS, INT32_MAX, NAME_PATTERN, Key
from fusekit.spec.parse import SCHEMA_VERSION


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one spec file. Combinations of keys are checked by the parser only."""
    by_name = {key.name: key for key in FILE_KEYS}
    properties = {name: _property(key) for name, key in by_name.items()}
    properties["schema"] = {"description": by_name["schema"].doc, "const": SCHEMA_VERSION}
    properties["defaults"] = {
        "description": by_name["defaults"].doc,
        "type": "object",
        "properties": _defaults(),
        "additionalProperties": False,
    }
    kernel = {"type": "object", "required": ["name"], "anyOf": [_kernel(family) for family in families()]}
    properties["kernel"] = {"description": by_name["kernel"].doc, "type": "array", "minItems": 1, "items": kernel}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fusekit kernel spec",
        "type": "object",
        "properties": properties,
        "required": [key.name for key in FILE_KEYS if key.required],
        "additionalProperties": False,
    }


def _kernel(family: Family) -> dict[str, Any]:
    """A kernel of one family. What it lacks may come from [defaults], the operation too: nothing is required here."""
    keys = tuple(replace(key, choices=family.ops) if key.name == "op" else key for key in family.keys)
    return {"properties": {key.name: _property(key) for key in keys}, "additionalProperties": False}


def _defaults() -> dict[str, Any]:
    """Any key of any family; a value that one of them takes, since the file's kernels may belong to several."""
    forms: dict[str, list[dict[str, Any]]] = {}
    for family in families():
        for key in family.defaults_keys:
            form = _property(key)
            if form not in forms.setdefault(key.name, []):
                forms[key.name].append(form)
    return {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in forms.items()}


def _property(key: Key) -> dict[str, Any]:
    if key.type == "table":
        return _table(key, complete=True)
    single = _single(key)
    described: dict[str, Any] = {"description": key.doc}
    if key.default is not None:
        described["default"] = list(key.default) if isinstance(key.default, tuple) else key.default
    if key.sweep:
        return described | {"anyOf": [single, {"type": "array", "items": single, "minItems": 1, "uniqueItems": True}]}
    return described | single


def _single(key: Key) -> dict[str, Any]:
    match key.type:
        case "choice":
            return {"enum": list(key.choices)}
        case "pair" if key.choices:
            return {"enum": [list(choice) for choice in key.choices]}
        case "pair":
            return {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2}
        case "bool":
            return {"type": "boolean"}
        case "int":
            return {"type": "integer", "minimum": key.minimum, "maximum": INT32_MAX}
        case "float":
            return {"type": "number"}
        case _ if key.name == "name":
            return {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
        case _:
            return {"type": "string"}


def _table(key: Key, *, complete: bool) -> dict[str, Any]:
    required = [sub.name for sub in key.keys if sub.required] if complete else []
    return {
        "description": key.doc,
        "type": "object",
        "properties": {sub.name: _property(sub) for sub in key.keys},
        "required": required,
        "additionalProperties": False,
    }
