"""A layer as a store has it: the spec of each of its kernels holds the layer's whole table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fusekit.dtypes import ARGUMENTS
from fusekit.errors import IntegrityError, UsageError
from fusekit.plan.activations import kinds
from fusekit.plan.layer.options import KINDS, MOE, NOTHING, ROUTER_FIELDS, Options, broken
from fusekit.plan.layer.passes import program
from fusekit.plan.quant import BLOCK, NONE
from fusekit.plan.tiles import GLU_LAYOUTS

_INT32_MAX = 2**31 - 1
_TYPES = {"str": str, "int": int, "bool": bool}  # of members, by their annotation; the others are tables
_CHOICES = {
    "kind": KINDS, "glu_layout": ("none", *GLU_LAYOUTS), "b_major": ("k", "n"), "keep": ("z", "x", NOTHING),
    "recipe": (NONE, BLOCK), "dtype": ARGUMENTS, "grad_dtype": ARGUMENTS, "weight_dtype": ("", *ARGUMENTS),
}  # fmt: skip


def stored_options(name: str, specs: Mapping[str, Mapping[str, Any]]) -> Options | None:
    """The options of the layer `name` (`file/layer`); None where no kernel is of it.

    specs: canonical ones, by the kernels' full names. A spec file that was edited may have left kernels behind: the
    table counts of which every kernel is there. Raises UsageError where that is none or several of them, IntegrityError
    for a table of another version of fusekit, and for one that no layer has.
    """
    tables: dict[str, tuple[Options, set[str]]] = {}
    for full_name, spec in specs.items():
        table = spec.get("layer")
        if isinstance(table, Mapping) and f"{table.get('file')}/{table.get('name')}" == name:
            text = json.dumps(table, sort_keys=True)
            if text not in tables:
                tables[text] = _options(full_name, name, table), set()
            tables[text][1].add(full_name.partition("@")[0].removeprefix(f"{name}."))
    if len(tables) < 2:
        return next((options for options, _ in tables.values()), None)
    whole = [options for options, parts in tables.values() if program(options).parts.keys() <= parts]
    if len(whole) == 1:
        return whole[0]
    first, *others = [json.loads(text) for text in tables]
    differ = [field for field in first if any(other.get(field) != first[field] for other in others)]
    raise UsageError(
        f"the kernels of {name} were built from tables that differ in {', '.join(differ)}, and "
        f"{'none' if not whole else 'more than one'} of them has all its kernels; build {name} again, with --prune, "
        "which removes what its spec file no longer has"
    )


def check_table(table: Mapping[str, Any]) -> Options:
    """The options of a stored table, each of its type. Raises TypeError for one of other fields or another activation,
    as another version of fusekit writes it, ValueError for a value that no spec file can have.
    """
    options = Options(**table)
    for field, value in _odd(options):
        raise ValueError(f"{field} = {repr(value)[:80]}")
    if (name := options.activation["kind"]) not in kinds():
        raise TypeError(f"activation.kind = {name!r}")
    if differ := set(options.router) ^ ({field.name for field in ROUTER_FIELDS} if options.kind == MOE else set()):
        raise TypeError(f"router: {', '.join(sorted(differ))}")
    for field, value in _odd_router(options.router):
        raise ValueError(f"router.{field} = {repr(value)[:80]}")
    return options


def _odd(options: Options) -> Iterator[tuple[str, Any]]:
    """Members of another type or range."""
    for field in fields(Options):
        value = getattr(options, field.name)
        kind = _TYPES.get(str(field.type))
        fits = isinstance(value, Mapping) if kind is None else type(value) is kind
        if fits and kind is int:
            fits = 0 <= value <= _INT32_MAX
        if not fits or (field.name in _CHOICES and value not in _CHOICES[field.name]):
            yield field.name, value
    name = options.activation.get("kind") if isinstance(options.activation, Mapping) else None
    if not isinstance(name, str):
        yield "activation.kind", name
    for label, value in options.activation.items():
        if not (label == "kind" or _is_number(value) or isinstance(value, (str, type(None)))):
            yield f"activation.{label}", value


def _odd_router(router: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in ROUTER_FIELDS if router else ():  # an mlp has none
        value = router[field.name]
        match field.type:
            case "choice":
                fits = isinstance(value, (str, type(field.default))) and value in (field.default, *field.choices)
            case "bool":
                fits = isinstance(value, bool)
            case "int":
                fits = type(value) is int and 0 <= value <= _INT32_MAX
            case _:
                fits = _is_number(value)
        if not fits:
            yield field.name, value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _options(full_name: str, name: str, table: Mapping[str, Any]) -> Options:
    try:
        options = check_table(table)
        for field, value, rule in broken(options):
            raise ValueError(f"{field} = {value!r}: {rule}")
    except TypeError as error:
        raise IntegrityError(
            f"{full_name}: its layer is not one that this version of fusekit knows: {error}; build {name} again with it"
        ) from error
    except ValueError as error:
        raise IntegrityError(f"{full_name}: its layer has {error}; no layer has that; build {name} again") from error
    return options
