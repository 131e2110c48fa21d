"""A layer in a spec file: its table becomes the tables of its kernels, whose names begin with the layer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusekit.plan.layer import Options, broken, layer_keys, program
from fusekit.plan.layer.options import make
from fusekit.spec.family import Family, family_of
from fusekit.spec.keys import ACTIVATION_KEYS
from fusekit.spec.model import DTYPES
from fusekit.spec.sweep import Expansion, expand, indexed


def expand_layer(stem: str, values: Mapping[str, Any]) -> Expansion:
    """The specs of every kernel of a layer; values: of its table by key, complete."""
    options = make(stem, values)
    found = Expansion(broken=list(broken(options)))
    if found.broken:
        return found
    for part, keys in program(options).parts.items():
        family = family_of(keys["op"])
        made = expand(family, stem, _table(family, options, part, keys, values), indexed(()))
        found.specs += [replace(spec, layer=options) for spec in made.specs]  # type: ignore[type-var]
        found.broken += [(f"{part}: {key}", value, rule) for key, value, rule in made.broken]
        found.dropped += made.dropped
    return found


def _table(
    family: Family, options: Options, part: str, keys: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The complete table of a kernel. Raises KeyError for a key that its operation does not have."""
    known = {key.name: key for key in family.keys}
    table = {name: (key.default,) if key.sweep else key.default for name, key in known.items()}
    table |= {"name": f"{options.name}.{part}", "summary": values["summary"], "arch": values["arch"]}
    for name, value in keys.items():
        table[name] = (value,) if known[name].sweep else value
    return table


LAYER = Family(
    (), layer_keys(ACTIVATION_KEYS, DTYPES), ("arch",), make=lambda *_: None, broken=lambda _: [], expand=expand_layer
)
