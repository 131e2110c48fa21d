"""The typed interface of one kernel: its structure of arguments and the functions that take it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Any

from fusekit.abi import Dim, LaunchRecord, PeersArgument, ScalarArgument, TensorArgument, render
from fusekit.cabi.flat import FLOAT_KINDS, default_of
from fusekit.cabi.identifiers import members
from fusekit.dtypes import DTYPES

FUNCTIONS = """\
/* The arguments with every default: pointers NULL, strides 0 (rows of no padding), scalars the spec's. */
{p}_{k}_args {p}_{k}_defaults(void);

/* Loads the kernel on a device (an ordinal), whose primary context it retains. */
{p}_status {p}_{k}_load(const {p}_driver *driver, int device, {p}_{k} **kernel, {p}_error *error);

/* Checks, packs and launches. */
{p}_status {p}_{k}_launch(const {p}_{k} *kernel, const {p}_{k}_args *args, void *stream, {p}_error *error);

/* Checks and packs once, for {p}_launch_run; free with {p}_launch_free before unloading the kernel. */
{p}_status {p}_{k}_bind(const {p}_{k} *kernel, const {p}_{k}_args *args, {p}_launch **launch, {p}_error *error);

/* NULL is allowed. */
{p}_status {p}_{k}_unload({p}_{k} *kernel, {p}_error *error);
"""

BODIES = """\
{p}_status {p}_{k}_load(const {p}_driver *driver, int device, {p}_{k} **kernel, {p}_error *error) {{
    fk_kernel *loaded;
    {p}_status status = fk_load(driver, &fk_source_{i}, fk_name_{i}, device, &loaded, error);
    *kernel = ({p}_{k} *)loaded;
    return status;
}}

{p}_status {p}_{k}_launch(const {p}_{k} *kernel, const {p}_{k}_args *args, void *stream, {p}_error *error) {{
    fk_values_{i} values;
    fk_call call;
    {p}_status status = fk_read_{i}((const fk_kernel *)kernel, args, &values, &call, error);
    return status == {P}_OK ? fk_launch((const fk_kernel *)kernel, &call, stream, error) : status;
}}

{p}_status {p}_{k}_bind(const {p}_{k} *kernel, const {p}_{k}_args *args, {p}_launch **launch, {p}_error *error) {{
    fk_values_{i} values;
    fk_call call;
    {p}_status status = fk_read_{i}((const fk_kernel *)kernel, args, &values, &call, error);
    *launch = NULL;
    return status == {P}_OK ? fk_bind((const fk_kernel *)kernel, &call, launch, error) : status;
}}

{p}_status {p}_{k}_unload({p}_{k} *kernel, {p}_error *error) {{ return fk_unload((fk_kernel *)kernel, error); }}
"""


_ROUNDED = {name: f"fk_{kind}({{}})" for name, kind in FLOAT_KINDS.items() if DTYPES[name].bits == 16}


class Wrapper:
    """Declarations and definitions for one kernel, called `identifier`; `number` is that of its tables."""

    def __init__(
        self, prefix: str, identifier: str, number: int, name: str, record: LaunchRecord, defaults: Mapping[str, Any]
    ) -> None:
        self._names = {"p": prefix, "P": prefix.upper(), "k": identifier, "i": number}
        self._title = name
        self._record = record
        self._defaults = defaults
        self._member = members((dim.name for dim in record.dims), (argument.name for argument in record.arguments))

    def declarations(self) -> str:
        """The part of the header: handle, structure, functions."""
        p, k = self._names["p"], self._names["k"]
        lines = [f"/* ---- {self._title} ({self._record.arch}) */", ""]
        if self._record.workspace != 0:
            lines.append(
                "/* It has a workspace for each stream; a graph keeps that of the stream that was captured. */"
            )
        lines += [f"typedef struct {p}_{k} {p}_{k};", ""]
        lines += [f"typedef struct {p}_{k}_args {{"]
        lines += [f"    int64_t {self._dim(dim.name)}; /* {_limits(dim)} */" for dim in self._record.dims]
        for argument in self._record.arguments:
            if isinstance(argument, PeersArgument):
                lines += self._peers(argument)
            else:
                lines += self._tensor(argument) if isinstance(argument, TensorArgument) else self._scalar(argument)
        lines += [
            "    int32_t cluster_margin; /* clusters reserved for other kernels (SM carve-out), from 0 */",
            "    int32_t has_priority;   /* 1: `priority` counts for this launch, 0: the stream's does */",
            "    int32_t priority;       /* lower is sooner */",
            f"}} {p}_{k}_args;",
            "",
            FUNCTIONS.format(**self._names),
        ]
        return "\n".join(lines)

    def definitions(self) -> str:
        """The part of the source, after the tables."""
        return "\n".join([self._values(), self._defaults_function(), BODIES.format(**self._names)])

    def _dim(self, name: str) -> str:
        return self._member[f"dim {name}"]

    def _tensor(self, tensor: TensorArgument) -> list[str]:
        pointer = "void *" if tensor.written else "const void *"
        member = self._member[tensor.name]
        shape = ", ".join(_renamed(render(extent), self._record, self._member) for extent in tensor.shape)
        over = f", or {self._member[tensor.in_place_of]} itself" if tensor.in_place_of else ""
        rule = f"{tensor.role}: {tensor.dtype}[{shape}], {tensor.alignment}-byte aligned{over}"
        lines = [f"    {pointer}{member}; /* {rule} */"]
        for index in range(tensor.rank):
            if tensor.reads_stride(index):
                rule = f"multiple of {tensor.stride_divisor}" if tensor.stride_divisor > 1 else "any"
                lines.append(f"    int64_t {member}_stride{index}; /* elements, {rule}; 0: compact */")
        return lines

    def _peers(self, peers: PeersArgument) -> list[str]:
        size, last = _renamed(render(peers.bytes), self._record, self._member), peers.count - 1
        rule = f"the windows of ranks 0 to {last}, each of {size} bytes, {peers.alignment}-byte aligned"
        return [f"    void *{self._member[peers.name]}[{peers.count}]; /* {rule} */"]

    def _scalar(self, scalar: ScalarArgument) -> list[str]:
        default = default_of(scalar, self._defaults)
        note = "must be set" if default is None else f"default {default}"
        if scalar.bounded:
            note = f"{note}; {scalar.rule}"
        kind = "float" if scalar.dtype in ("bf16", "fp16") else DTYPES[scalar.dtype].c
        return [f"    {kind} {self._member[scalar.name]}; /* {note} */"]

    def _values(self) -> str:
        """The structure's members by index, as the launcher reads them."""
        record, i = self._record, self._names["i"]
        floats = [scalar for scalar in record.scalars if scalar.is_float]
        integers = [scalar for scalar in record.scalars if scalar.is_integer]
        ranks = sum(tensor.rank for tensor in record.tensors)
        lines = [
            "typedef struct {",
            f"    int64_t dims[{len(record.dims) or 1}], strides[{ranks or 1}], integers[{len(integers) or 1}];",
            f"    uint64_t addresses[{max(len(record.tensors), 1)}];",
            f"    double floats[{max(len(floats), 1)}];",
            f"}} fk_values_{i};",
            "",
            "static {p}_status fk_read_{i}(const fk_kernel *kernel, const {p}_{k}_args *args, fk_values_{i} *values,"
            " fk_call *call,".format(**self._names),
            "    {p}_error *error) {{".format(**self._names),
            f"    if (kernel == NULL || kernel->source != &fk_source_{i})",
            "        return fk_fail(error, {P}_INVALID_ARGUMENT,".format(**self._names),
            f'                       "%s: the handle is of no such kernel; load it first", fk_name_{i});',
        ]  # fmt: skip
        for scalar in floats:
            if default_of(scalar, self._defaults) is None:
                member = self._member[scalar.name]
                lines += [
                    f"    if (args->{member} != args->{member}) /* not a number, as _defaults left it */",
                    f"        return fk_fail(error, {self._names['P']}_INVALID_ARGUMENT,"
                    f' "%s: {scalar.name} must be set", fk_name_{i});',
                ]
        lines += ["    memset(values, 0, sizeof *values);"]
        lines += [f"    values->dims[{n}] = args->{self._dim(dim.name)};" for n, dim in enumerate(record.dims)]
        stride = 0
        for number, tensor in enumerate(record.tensors):
            name, _, rank = tensor.name.partition(".")
            member = self._member[name] + (f"[{rank}]" if rank else "")
            lines.append(f"    values->addresses[{number}] = (uint64_t)(uintptr_t)args->{member};")
            for index in range(tensor.rank):
                if tensor.reads_stride(index):
                    lines.append(f"    values->strides[{stride}] = args->{member}_stride{index};")
                stride += 1
        for n, item in enumerate(floats):
            value = f"args->{self._member[item.name]}"
            lines.append(f"    values->floats[{n}] = {_ROUNDED.get(item.dtype, '{}').format(value)};")
        lines += [f"    values->integers[{n}] = args->{self._member[item.name]};" for n, item in enumerate(integers)]
        lines += [
            "    call->dims = values->dims;",
            "    call->strides = values->strides;",
            "    call->given = NULL;",
            "    call->addresses = values->addresses;",
            "    call->integers = values->integers;",
            "    call->floats = values->floats;",
            "    call->margin = args->cluster_margin;",
            "    call->has_priority = args->has_priority;",
            "    call->priority = args->priority;",
            f"    return {self._names['P']}_OK;",
            "}",
            "",
        ]
        return "\n".join(lines)

    def _defaults_function(self) -> str:
        p, k = self._names["p"], self._names["k"]
        lines = [
            f"{p}_{k}_args {p}_{k}_defaults(void) {{",
            f"    {p}_{k}_args args;",
            "    memset(&args, 0, sizeof args);",
        ]
        for scalar in self._record.scalars:
            value = default_of(scalar, self._defaults)
            if scalar.is_float:
                lines.append(f"    args.{self._member[scalar.name]} = {_float(value, scalar.dtype == 'f64')};")
            elif value is not None:
                number = f"INT64_C({value})" if scalar.dtype == "i64" and value != -(2**63) else value
                lines.append(f"    args.{self._member[scalar.name]} = {'INT64_MIN' if value == -(2**63) else number};")
        if margin := self._defaults.get("cluster_margin", 0):
            lines.append(f"    args.cluster_margin = {margin};")
        return "\n".join([*lines, "    return args;", "}", ""])


def _limits(dim: Dim) -> str:
    many = f"multiple of {dim.divisor}, " if dim.divisor > 1 else ""
    return f"{dim.name}: {many}{dim.minimum} to {dim.maximum}"


def _renamed(text: str, record: LaunchRecord, member: Mapping[str, str]) -> str:
    names = {dim.name: member[f"dim {dim.name}"] for dim in record.dims}
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)


def _float(value: float | int | None, double: bool) -> str:
    """An exact constant; None is not a number."""
    if value is None or math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if double:
        return f"{float(value).hex()} /* {value} */"
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return f"{single.hex()}f /* {value} */"
