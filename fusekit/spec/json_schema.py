"""The JSON Schema of spec files, for editors; made from the same table as the parser.

A kernel is checked against the fields of its own operation, which it names or takes from [defaults]. A field that is
not allowed meets the schema `NONE`, not `additionalProperties: false`: so an editor marks it and not the whole table.
A kernel's `properties` are those of every operation, for completion. Draft 7, as editors of TOML know it.
"""

from dataclasses import replace
from typing import Any

from fusekit.plan.operations import Schema
from fusekit.spec.fields import FILE_FIELDS, INT32_MAX, NAME_PATTERN, Field, most_of
from fusekit.spec.layer import LAYER
from fusekit.spec.parse import SCHEMA_VERSION
from fusekit.spec.schemas import schemas
from fusekit.spec.values import MAX_TEXT, MAX_VALUES

A_LAYER = {"required": ["kind"]}
NONE = {"not": {}, "description": "There is no such field."}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 7) of one spec file. Combinations of fields are checked by the parser only."""
    by_name = {field.name: field for field in FILE_FIELDS}
    properties = {name: _property(field) for name, field in by_name.items()}
    properties["schema"] = {"description": by_name["schema"].doc, "const": SCHEMA_VERSION}
    properties["defaults"] = {
        "description": by_name["defaults"].doc,
        "type": "object",
        "properties": _union(defaults=True),
        "additionalProperties": NONE,
    }
    every = (*schemas(), LAYER)
    op = next(field for field in schemas()[0].fields if field.name == "op")
    kernel = {
        "type": "object",
        "required": ["name"],
        "properties": {**_union(defaults=False), "op": _property(op)},
        "allOf": [_when(_is(schema), _kernel_of(schema)) for schema in every],
    }
    properties["kernel"] = {"description": by_name["kernel"].doc, "type": "array", "minItems": 1, "items": kernel}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": f"urn:fusekit:spec:{SCHEMA_VERSION}",
        "title": "fusekit kernel spec",
        "type": "object",
        "properties": properties,
        "required": [field.name for field in FILE_FIELDS if field.required],
        "additionalProperties": NONE,
        "allOf": [_inherited(schema) for schema in every],
        "definitions": {_name(schema): _kernel(schema) for schema in every},
    }


def _when(condition: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": condition, "then": then}


def _name(schema: Schema) -> str:
    return schema.ops[0] if schema.ops else "layer"


def _is(schema: Schema) -> dict[str, Any]:
    """A table of the schema: a layer has a kind, a kernel an operation."""
    return {**_op_is(schema), "not": A_LAYER} if schema.ops else A_LAYER


def _op_is(schema: Schema) -> dict[str, Any]:
    return {"properties": {"op": {"enum": list(schema.ops)}}, "required": ["op"]}


def _kernel_of(schema: Schema) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{_name(schema)}"}


def _inherited(schema: Schema) -> dict[str, Any]:
    """Tables that leave `op` or `kind` to [defaults]."""
    kernel = _when({"not": {"anyOf": [{"required": ["op"]}, A_LAYER]}}, _kernel_of(schema))
    return _when(
        {"properties": {"defaults": _is(schema)}, "required": ["defaults"]},
        {"properties": {"kernel": {"items": kernel}}},
    )


def _kernel(schema: Schema) -> dict[str, Any]:
    """A kernel of one schema. What it lacks may come from [defaults]: nothing is required here."""
    fields = tuple(replace(field, choices=schema.ops) if field.name == "op" else field for field in schema.fields)
    return {"properties": {field.name: _property(field) for field in fields}, "additionalProperties": NONE}


def _union(*, defaults: bool) -> dict[str, Any]:
    """Any field of any schema; a value that one of them takes, since the file's kernels may belong to several."""
    forms: dict[str, list[dict[str, Any]]] = {}
    for schema in (*schemas(), LAYER):
        for field in schema.defaults_fields if defaults else schema.fields:
            form = _property(field)
            if form not in forms.setdefault(field.name, []):
                forms[field.name].append(form)
    return {name: options[0] if len(options) == 1 else {"anyOf": options} for name, options in forms.items()}


def _property(field: Field) -> dict[str, Any]:
    if field.type == "table":
        if field.choices:
            return {
                "description": field.doc,
                "default": field.default,
                "anyOf": [{"enum": list(field.choices)}, _table(field)],
            }
        if field.short:
            word = next(sub for sub in field.fields if sub.name == field.short)
            return {"description": field.doc, "anyOf": [_single(word), _table(field)]}
        return {"description": field.doc, **_table(field)}
    if field.type == "tables":
        tables = {**_table(field), "minProperties": 1}
        return {"description": field.doc, "type": "array", "items": tables, "maxItems": MAX_VALUES}
    if field.type in ("json", "combinations"):
        values = {"type": "array", "minItems": 1, "maxItems": MAX_VALUES} if field.type == "combinations" else {}
        return {"description": field.doc, "type": "object", "additionalProperties": values or True}
    if field.type == "strings":
        return {"description": field.doc, "type": "array", "items": {"type": "string"}, "maxItems": MAX_VALUES}
    single = _single(field)
    described: dict[str, Any] = {"description": field.doc}
    if field.default is not None:
        described["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if field.sweep:
        many = {"type": "array", "items": single, "minItems": 1, "maxItems": MAX_VALUES, "uniqueItems": True}
        return described | {"anyOf": [single, many]}
    return described | single


def _single(field: Field) -> dict[str, Any]:
    match field.type:
        case "choice":
            return {"enum": [*field.choices, *(word for word, choice in field.synonyms if choice in field.choices)]}
        case "pair" if field.choices:
            return {"enum": [list(choice) for choice in field.choices]}
        case "pair":
            side = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
            return {"type": "array", "items": side, "minItems": 2, "maxItems": 2}
        case "bool":
            return {"type": "boolean"}
        case "int":
            return {"type": "integer", "minimum": field.minimum, "maximum": most_of(field)}
        case "float":
            return {"type": "number"}
        case _ if field.name == "name":
            return {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
        case _:
            return {"type": "string", "maxLength": MAX_TEXT}


def _table(field: Field) -> dict[str, Any]:
    names = [(name, sub) for sub in field.fields for name in (sub.name, sub.alias) if name]
    either = [{"oneOf": [{"required": [sub.name]}, {"required": [sub.alias]}]}
              for sub in field.fields if sub.required and sub.alias]  # fmt: skip
    return {
        "type": "object",
        "properties": {name: _property(sub) for name, sub in names},
        "required": [sub.name for sub in field.fields if sub.required and not sub.alias],
        **({"allOf": either} if either else {}),
        "additionalProperties": NONE,
    }
