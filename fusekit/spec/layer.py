"""A layer in a spec file: its table becomes the tables of its kernels, whose names begin with the layer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fusekit.errors import some
from fusekit.plan.activations import kind
from fusekit.plan.layer import Options, broken, layer_fields, program
from fusekit.plan.layer.options import make, token_counts
from fusekit.plan.operations import Schema
from fusekit.spec.fields import ACTIVATION_FIELDS, KERNEL_ONLY
from fusekit.spec.model import DTYPES
from fusekit.spec.schemas import schema_of
from fusekit.spec.sweep import ALONE, FEW, Expansion, expand, indexed
from fusekit.spec.values import one_of

NAMED = 3  # kernels that a message lists
MOST_KERNELS = 50  # of a layer, each of them in three variants or in those that its table lists
SWEPT = ("tile", "cluster", "schedule")  # fields of a layer that are those of its GEMMs


def expand_layer(stem: str, values: Mapping[str, Any]) -> Expansion:
    """The specs of every kernel of a layer; values: of its table by field, complete."""
    options = make(stem, values)
    expansion = Expansion(broken=list(broken(options)))
    if expansion.broken:
        return expansion
    refused: dict[tuple[str, Any, str], list[str]] = {}
    programs = [program(replace(options, tokens=tokens)).parts for tokens in token_counts(values)]
    for part, fields in programs[0].items():
        schema, specs = schema_of(fields["op"]), dict[str, Any]()
        for tables in programs if schema.candidates else programs[:1]:
            table = _table(schema, options, part, {**fields, "problem": tables[part]["problem"]}, values)
            for refusal in _unknown(schema, table):
                refused.setdefault(refusal, []).append(part)
            part_expansion = expand(schema, stem, table, indexed(()))
            for spec in part_expansion.specs:
                specs.setdefault(spec.full_name, spec)
            for refusal in part_expansion.broken:
                refused.setdefault(refusal, []).append(part)
        problem = next((spec.problem for spec in specs.values()), None)
        expansion.specs += [replace(spec, layer=options, problem=problem) for spec in specs.values()]
    for (field, value, rule), named in refused.items():
        parts = [*dict.fromkeys(named)]
        field = f"router.{field}" if field in options.router and field not in values else field
        expansion.broken.append(
            (field, value, f"{rule} (of its kernel{'s' if len(parts) > 1 else ''} {some(parts, NAMED)})")
        )
    return expansion


def _unknown(schema: Schema, table: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The values that an operation does not take."""
    for field in schema.fields:
        value = table[field.name]
        if field.type == "choice" and not field.sweep and value not in (None, *field.choices):
            yield field.name, value, f"must be {one_of(field.choices)}"


def _table(
    schema: Schema, options: Options, part: str, fields: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The complete table of a kernel. Raises KeyError for a field that its operation does not have."""
    known = {field.name: field for field in schema.fields}
    table = {name: (field.default,) if field.sweep else field.default for name, field in known.items()}
    table |= {"name": f"{options.name}.{part}", "summary": values["summary"], "arch": values["arch"]}
    for name, value in fields.items():
        table[name] = (value,) if known[name].sweep else value
    swept = {name: values[name] for name in SWEPT if name in known}
    if fields.get("choices"):  # tiles of few rows alone can; a layer of others has the model's
        low = tuple(tile for tile in swept["tile"] if tile in FEW)
        swept |= {"tile": low or (None,), "cluster": (ALONE,) if low else (None,)}
    return table | swept


_FORWARD = tuple(
    replace(field, choices=tuple(choice for choice in field.choices if not kind(choice).backward))
    if field.name == "kind"
    else field
    for field in ACTIVATION_FIELDS
)  # the layer knows each one's backward activation
LAYER = Schema(
    layer_fields(_FORWARD, DTYPES), ("arch", *SWEPT), make=lambda *_: None, broken=lambda _: [],
    kernel_only=(*KERNEL_ONLY, *SWEPT), expand=expand_layer, most=MOST_KERNELS,
)  # fmt: skip
