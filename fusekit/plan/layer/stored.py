"""A layer as a store has it: the spec of each of its kernels holds the layer's whole table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fusekit.errors import IntegrityError, UsageError
from fusekit.plan.layer.options import Options
from fusekit.plan.layer.passes import program


def stored_options(name: str, specs: Mapping[str, Mapping[str, Any]]) -> Options | None:
    """The options of the layer `name` (`file/layer`); None where no kernel is of it.

    specs: canonical ones, by the kernels' full names. A spec file that was edited may have left kernels behind: the
    table counts of which every kernel is there. Raises UsageError where that is none or several of them, IntegrityError
    for a table of another version of fusekit.
    """
    tables: dict[str, tuple[Options, set[str]]] = {}
    for full_name, spec in specs.items():
        said = spec.get("layer")
        if isinstance(said, Mapping) and f"{said.get('file')}/{said.get('name')}" == name:
            text = json.dumps(said, sort_keys=True)
            if text not in tables:
                tables[text] = _options(full_name, name, said), set()
            tables[text][1].add(full_name.partition("@")[0].removeprefix(f"{name}."))
    if len(tables) < 2:
        return next((options for options, _ in tables.values()), None)
    whole = [options for options, parts in tables.values() if program(options).parts.keys() <= parts]
    if len(whole) == 1:
        return whole[0]
    first, *others = [json.loads(text) for text in tables]
    differ = [key for key in first if any(other.get(key) != first[key] for other in others)]
    raise UsageError(
        f"the kernels of {name} were built from tables that differ in {', '.join(differ)}, and "
        f"{'none' if not whole else 'more than one'} of them has all its kernels; build {name} again, with --prune, "
        "which removes what its spec file no longer has"
    )


def _options(full_name: str, name: str, said: Mapping[str, Any]) -> Options:
    try:
        return Options.of(said)
    except TypeError as error:
        raise IntegrityError(
            f"{full_name}: its layer is not one that this version of fusekit knows: {error}; build {name} again with it"
        ) from error
