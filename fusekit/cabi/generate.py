"""One header and one source file for some kernels."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord
from fusekit.abi.layer_record import LayerRecord
from fusekit.cabi import flat
from fusekit.cabi.identifiers import check_prefix, kernel_identifiers
from fusekit.cabi.layer_wrappers import LayerWrapper
from fusekit.cabi.layout import declarations, layer_declarations, loader_declarations
from fusekit.cabi.wrappers import Wrapper
from fusekit.errors import UsageError

# The launcher, in the order in which its parts build on each other; then the loader of bundles.
PARTS = (
    "driver.c", "layout", "record.c", "expressions.c", "reader.c", "arguments.c", "workspace.c", "maps.c", "launch.c",
    "load.c",
)  # fmt: skip
LAYER_PARTS = ("dims.c", "layer", "layer.c")
LOADER_PARTS = ("listing", "sha256.c", "bundle.c", "kernels.c", "dims.c", "named.c")
_ABOUT = "/* Written by fusekit; changes are lost when it is written again. */\n"
_PREFIXED = re.compile(r"\b(fusekit|FUSEKIT)_")
_PER_LINE = 6


@dataclass(frozen=True, slots=True)
class Exported:
    """A kernel to export: `name` as the store has it, its complete record, its cubin, the spec's defaults."""

    name: str
    record: LaunchRecord
    cubin: bytes
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportedLayer:
    """A layer to export. kernels: the full name of each kernel that `record` names, by its key."""

    record: LayerRecord
    kernels: Mapping[str, str]


def generate(
    kernels: Sequence[Exported], prefix: str = "fusekit", layers: Sequence[ExportedLayer] = ()
) -> dict[str, str]:
    """File name -> text of ``<prefix>.h`` and ``<prefix>.c``, for C11 and C++17 alike.

    prefix: what every public name begins with, so that several exports can be linked into one program. layers: their
    kernels are among `kernels`. Raises UsageError for a prefix that is no identifier, names that collide, a record
    beyond the launcher's limits, or a layer over ranks.
    """
    check_prefix(prefix)
    if not kernels:
        raise UsageError("no kernel to export; name at least one")
    names = [kernel.name for kernel in kernels]
    identifiers = kernel_identifiers([*names, *(layer.record.name for layer in layers)])
    numbers = {name: number for number, name in enumerate(names)}
    cubins: dict[bytes, str] = {}
    declarations, definitions = [], []
    for number, (kernel, identifier) in enumerate(zip(kernels, identifiers, strict=False)):
        kernel.record.check_complete()
        label = cubins.setdefault(kernel.cubin, f"fk_cubin_{len(cubins)}")
        source = _source_of(number, kernel, label)
        wrapper = Wrapper(prefix, identifier, number, kernel.name, kernel.record, kernel.defaults)
        declarations.append(wrapper.declarations())
        definitions.append(f"/* ---- {kernel.name} */\n\n{source}\n{wrapper.definitions()}")
    for number, (layer, identifier) in enumerate(zip(layers, identifiers[len(kernels) :], strict=True)):
        layer_wrapper = LayerWrapper(prefix, identifier, number, layer.record)
        declarations.append(layer_wrapper.declarations())
        definitions.append(
            f"/* ---- {layer.record.name} */\n\n{_layer_source(number, layer, numbers)}\n{layer_wrapper.definitions()}"
        )
    headers, parts = (("core.h", "layer.h"), (*PARTS, *LAYER_PARTS)) if layers else (("core.h",), PARTS)
    header = _header(prefix, [*(_part(part, prefix) for part in headers), *declarations])
    source = _source(
        prefix,
        [
            *(_part(part, prefix) for part in parts),
            "/* ---- Cubins, as little-endian words. */\n",
            *(_embedded(label, cubin) for cubin, label in cubins.items()),
            *definitions,
        ],
    )
    return {f"{prefix}.h": header, f"{prefix}.c": source}


def generate_loader(prefix: str = "fusekit") -> dict[str, str]:
    """File name -> text of ``<prefix>.h`` and ``<prefix>.c`` without a kernel: they load those of a bundle at run time.

    prefix, errors: as for `generate`. The text depends on nothing else.
    """
    check_prefix(prefix)
    header = _header(prefix, [_part("core.h", prefix), _part("loader.h", prefix)])
    source = _source(prefix, [_part(part, prefix) for part in (*PARTS, *LOADER_PARTS)])
    # pread and fstat, which C11 alone does not declare; before the first header of the system.
    posix = "#ifndef _POSIX_C_SOURCE\n#define _POSIX_C_SOURCE 200809L\n#endif\n"
    return {f"{prefix}.h": header, f"{prefix}.c": source.replace("#include", f"{posix}#include", 1)}


def _header(prefix: str, parts: Sequence[str]) -> str:
    guard = f"{prefix.upper()}_H"
    closing = "#ifdef __cplusplus\n}\n#endif\n\n#endif\n"
    return "\n".join([_ABOUT, f"#ifndef {guard}\n#define {guard}\n", *parts, closing])


def _source(prefix: str, parts: Sequence[str]) -> str:
    return "\n".join([_ABOUT, f'#include "{prefix}.h"\n\n#include <math.h>', *parts])


def _part(name: str, prefix: str) -> str:
    """A file of this folder with the launcher's public names under `prefix`, or what `layout` declares."""
    tables = {"layout": declarations, "layer": layer_declarations, "listing": loader_declarations}
    if name in tables:
        return tables[name]()
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    if prefix == "fusekit":
        return text
    return _PREFIXED.sub(lambda match: f"{prefix if match[1].islower() else prefix.upper()}_", text)


def _source_of(number: int, kernel: Exported, cubin: str) -> str:
    """A kernel's launch record, and what leads to it and its cubin."""
    record = flat.record(kernel.name, kernel.record, kernel.defaults)
    shown = kernel.name.encode("unicode_escape").decode().replace('"', '\\"').replace("?", "\\?")
    return (
        f"{_embedded(f'fk_words_{number}', record)}\n"
        f'static const char fk_name_{number}[] = "{shown}";\n'
        f"static const fk_source fk_source_{number} = {{(const int64_t *)fk_words_{number}, {len(record) // 8},\n"
        f"    (const unsigned char *){cubin}, {len(kernel.cubin)}}};\n"
    )


def _layer_source(number: int, layer: ExportedLayer, numbers: Mapping[str, int]) -> str:
    """A layer record, and what leads to it and its kernels."""
    keys = list(dict.fromkeys(key for ladder in layer.record.parts.values() for _, key in ladder))
    kernels = [numbers[layer.kernels[key]] for key in keys]
    record = flat.layer(layer.record, keys)
    return (
        f"{_embedded(f'fk_layer_words_{number}', record)}\n"
        f'static const char fk_layer_name_{number}[] = "{layer.record.name}";\n'
        f"static const fk_source fk_layer_source_{number} = {{(const int64_t *)fk_layer_words_{number},"
        f" {len(record) // 8}, NULL, 0}};\n"
        f"static const fk_source *const fk_layer_kernels_{number}[] = {{\n    "
        + ",\n    ".join(f"&fk_source_{kernel}" for kernel in kernels)
        + f"\n}};\nstatic const char *const fk_layer_titles_{number}[] = {{\n    "
        + ",\n    ".join(f"fk_name_{kernel}" for kernel in kernels)
        + "\n};\n"
    )


def _embedded(label: str, data: bytes) -> str:
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    words = [f"{word:#x}u" for (word,) in struct.iter_unpack("<Q", padded)]
    lines = [",".join(words[start : start + _PER_LINE]) for start in range(0, len(words), _PER_LINE)]
    digest = hashlib.sha256(data).hexdigest()
    return (
        f"/* {len(data)} bytes, SHA-256 {digest} */\nstatic const uint64_t {label}[] = {{\n"
        + ",\n".join(lines)
        + "\n};\n"
    )
