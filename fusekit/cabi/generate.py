"""One header and one source file for some kernels."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord, PeersArgument, ScalarArgument
from fusekit.abi.layer_record import LayerRecord
from fusekit.cabi import flat
from fusekit.cabi.identifiers import check_prefix, kernel_identifiers
from fusekit.cabi.layer_wrappers import LayerWrapper
from fusekit.cabi.layout import declarations, dlpack_declarations, layer_declarations, loader_declarations
from fusekit.cabi.wrappers import Wrapper
from fusekit.errors import UsageError

# The launcher, in the order in which its parts build on each other; then the loader of bundles.
PARTS = (
    "driver.c", "layout", "record.c", "expressions.c", "reader.c", "arguments.c", "workspace.c", "maps.c", "launch.c",
    "load.c",
)  # fmt: skip
LAYER_PARTS = (
    "dims.c", "layer", "layer_load.c", "layer_memory.c", "layer_ranks.c", "layer_enough.c", "layer.c",
)  # fmt: skip
LOADER_PARTS = (
    *LAYER_PARTS, "layer_windows.c", "layer_tensors.c", "listing", "sha256.c", "bundle.c", "kernels.c", "named.c",
    "named_layer.c",
)  # fmt: skip
TVM_FFI_PARTS = (
    "core.h", "layer.h", *PARTS, *LAYER_PARTS, "layer_windows.c", "layer_tensors.c", "dlpack", "tvm_ffi.c",
    "tvm_ffi_layers.c", "tvm_ffi_calls.c",
)  # fmt: skip
_ABOUT = "/* Written by fusekit; changes are lost when it is written again. */\n"
_PREFIXED = re.compile(r"\b(fusekit|FUSEKIT)_")
_PER_LINE = 6
_SCRATCH = ("scratch?", "cluster_margin?")
_RANKS = "ranks"
_MOST_ARGUMENTS = 96


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
    kernels are among `kernels`. Raises UsageError for a prefix that is no identifier, names that collide, or a record
    beyond the launcher's limits.
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
    ranks = [_ranks_of(layer, kernels) for layer in layers]
    for number, (layer, identifier) in enumerate(zip(layers, identifiers[len(kernels) :], strict=True)):
        layer_wrapper = LayerWrapper(prefix, identifier, number, layer.record, ranks[number])
        declarations.append(layer_wrapper.declarations())
        definitions.append(
            f"/* ---- {layer.record.name} */\n\n{_layer_source(number, layer, numbers)}\n{layer_wrapper.definitions()}"
        )
    headers: tuple[str, ...] = ("core.h",)
    parts: tuple[str, ...] = PARTS
    if layers:
        headers += ("layer.h",)
        parts += (*LAYER_PARTS, *["layer_windows.c"] * any(ranks), "layer_handle.c")
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
    header = _header(prefix, [_part(part, prefix) for part in ("core.h", "layer.h", "loader.h")])
    source = _source(prefix, [_part(part, prefix) for part in (*PARTS, *LOADER_PARTS)])
    # pread and fstat, which C11 alone does not declare; before the first header of the system.
    posix = "#ifndef _POSIX_C_SOURCE\n#define _POSIX_C_SOURCE 200809L\n#endif\n"
    return {f"{prefix}.h": header, f"{prefix}.c": source.replace("#include", f"{posix}#include", 1)}


@dataclass(frozen=True, slots=True)
class Function:
    """A TVM-FFI function. arguments: in their order; those that may be left out, or None, have a ``?`` after them."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


def generate_tvm_ffi(
    kernels: Sequence[Exported], layers: Sequence[ExportedLayer] = (), functions: Sequence[str] = ()
) -> tuple[str, list[Function]]:
    """C11 source of a library of TVM-FFI functions, and what it has.

    kernels: with those of the layers; functions: the names of those that have one. Raises UsageError as `generate`.
    """
    numbers = {kernel.name: number for number, kernel in enumerate(kernels)}
    titles = [*functions, *(layer.record.name for layer in layers)]
    identifiers = dict(zip(titles, kernel_identifiers(titles), strict=True))
    cubins: dict[bytes, str] = {}
    sources: list[str] = []
    items: list[str] = []
    rows: list[str] = []
    bodies: list[str] = []
    listed = [Function("prepare", ("device",))]

    def function(name: str, which: str, arguments: Iterable[str]) -> None:
        given = tuple(arguments)
        ranks = given.index(_RANKS) if _RANKS in given else -1
        bodies.append(f"FK_FFI_FUNCTION({name}, {len(rows)})")
        rows.append(
            f'{{"{name}", &fk_ffi_items[{len(items)}], {which}, {ranks}, PTHREAD_MUTEX_INITIALIZER, {{{{0}}}}}}'
        )
        listed.append(Function(name, given))

    def size(name: str, which: str, *arguments: str) -> None:
        bodies.append(f"FK_FFI_BYTES({name}_bytes, {len(items)}, {which})")
        listed.append(Function(f"{name}_bytes", arguments))

    for number, kernel in enumerate(kernels):
        kernel.record.check_complete()
        sources.append(_source_of(number, kernel, cubins.setdefault(kernel.cubin, f"fk_cubin_{len(cubins)}")))
        if kernel.name in identifiers:
            function(identifiers[kernel.name], "-1", _arguments(kernel))
            items.append(f"{{&fk_source_{number}, fk_name_{number}, NULL, NULL, {{NULL}}, NULL}}")
    for number, layer in enumerate(layers):
        sources.append(_layer_source(number, layer, numbers))
        name = identifiers[layer.record.name]
        sized, over = (("tokens", "capacity", "rows?"), (_RANKS,)) if layer.record.windows else (("tokens",), ())
        for which, each in layer.record.passes.items():
            if not each.steps:
                continue
            extra: tuple[str, ...] = {"quantise": (), "inference": (*over, *_SCRATCH)}.get(
                which, ("kept", *over, *_SCRATCH)
            )
            extra += ("in_place?",) if which == "backward" else ()
            outputs = (f"{output}?" for output in each.outputs)
            function(f"{name}_{which}", f"FK_PASS_{which.upper()}", (*each.inputs, *outputs, *extra))
            if which != "quantise":
                size(f"{name}_{which}", f"FK_PASS_{which.upper()}", *sized)
        size(f"{name}_kept", "FK_FFI_KEPT_BYTES", *sized)
        for index, window in enumerate(layer.record.windows):
            size(f"{name}_{window}", f"FK_FFI_WINDOW_BYTES - {index}", "capacity")
        items.append(
            f"{{&fk_layer_source_{number}, fk_layer_name_{number}, fk_layer_kernels_{number},"
            f" fk_layer_titles_{number}, {{NULL}}, NULL}}"
        )
    names = [one.name for one in listed]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two functions would be called {twice[0]}; export what they are of into two files")
    for one in listed:
        if len(one.arguments) > _MOST_ARGUMENTS:
            raise UsageError(f"{one.name} takes {len(one.arguments)} arguments; there may be {_MOST_ARGUMENTS}")
    text = "\n".join([
        _ABOUT, "#include <math.h>",
        *(_part(part, "fusekit") for part in TVM_FFI_PARTS),
        *(_embedded(label, cubin) for cubin, label in cubins.items()),
        *sources,
        "static fk_ffi_item fk_ffi_items[] = {\n    " + ",\n    ".join(items) + "\n};\n",
        "static fk_ffi_function fk_ffi_functions[] = {\n    " + ",\n    ".join(rows) + "\n};\n",
        "FK_FFI_SYMBOL(prepare) {\n    (void)self; (void)result;",
        f"    return fk_ffi_prepare(fk_ffi_items, {len(items)}, args, count);\n}}",
        *bodies, "",
    ])  # fmt: skip
    return text, listed


def _ranks_of(layer: ExportedLayer, kernels: Iterable[Exported]) -> int:
    """The ranks that a layer is over, which its kernels say; 0: it is on one GPU."""
    names = set(layer.kernels.values()) if layer.record.windows else set()
    return max((peers.count for kernel in kernels if kernel.name in names for peers in kernel.record.peers), default=0)


def _arguments(kernel: Exported) -> Iterator[str]:
    for argument in kernel.record.arguments:
        if isinstance(argument, PeersArgument):
            raise UsageError(
                f"{kernel.name} takes windows of ranks, which TVM-FFI has no tensors for; launch it from Python or C"
            )
        optional = isinstance(argument, ScalarArgument) and flat.default_of(argument, kernel.defaults) is not None
        yield f"{argument.name}?" if optional else argument.name
    yield "cluster_margin?"


def _header(prefix: str, parts: Sequence[str]) -> str:
    guard = f"{prefix.upper()}_H"
    closing = "#ifdef __cplusplus\n}\n#endif\n\n#endif\n"
    return "\n".join([_ABOUT, f"#ifndef {guard}\n#define {guard}\n", *parts, closing])


def _source(prefix: str, parts: Sequence[str]) -> str:
    return "\n".join([_ABOUT, f'#include "{prefix}.h"\n\n#include <math.h>', *parts])


def _part(name: str, prefix: str) -> str:
    """A file of this folder with the launcher's public names under `prefix`, or what `layout` declares."""
    tables = {
        "layout": declarations, "layer": layer_declarations, "listing": loader_declarations,
        "dlpack": dlpack_declarations,
    }  # fmt: skip
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
    keys = list(dict.fromkeys(key for ladder in layer.record.parts.values() for _, key in ladder if key))
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
