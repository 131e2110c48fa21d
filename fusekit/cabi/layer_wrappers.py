"""The typed interface of one layer: a structure of arguments for each pass, and the functions that take them."""

from __future__ import annotations

from collections.abc import Sequence

from fusekit.abi import render
from fusekit.abi.expr import variables
from fusekit.abi.layer_pass import LayerPass
from fusekit.abi.layer_record import LayerRecord
from fusekit.cabi.identifiers import members
from fusekit.cabi.layout import PASSES

BACKWARD, QUANTISE = "backward", "quantise"
COMMON = ("tokens", "kept", "scratch", "settings", "ranks")

FUNCTIONS = """\
/* Loads the layer's kernels on a device (an ordinal). */
{p}_status {p}_{k}_load(const {p}_driver *driver, int device, {p}_{k} **layer, {p}_error *error);

/* For passes of at most so many tokens. like: arguments with the outputs that every backward pass will have, all
 * contiguous, and its settings, which takes less scratch memory; NULL: any. */
{p}_status {p}_{k}_sizes(const {p}_{k} *layer, {over}int64_t tokens, {like}, {p}_sizes *sizes,
    {p}_error *error);
{windows}
/* NULL is allowed. */
{p}_status {p}_{k}_unload({p}_{k} *layer, {p}_error *error);
"""

WINDOWS = """
/* The bytes of each window for the capacity of `ranks`, whose windows may be NULL. */
{p}_status {p}_{k}_windows(const {p}_{k} *layer, const {p}_ranks *ranks, size_t bytes[{P}_{K}_WINDOWS],
    {p}_error *error);
"""

WINDOW_BODY = """\
{p}_status {p}_{k}_windows(const {p}_{k} *layer, const {p}_ranks *ranks, size_t bytes[{P}_{K}_WINDOWS],
    {p}_error *error) {{
    const fk_loaded_layer *loaded = (const fk_loaded_layer *)layer;
    {p}_status status = fk_check_layer_handle(loaded, &fk_layer_source_{i}, fk_layer_name_{i}, bytes, error);
    return status == {P}_OK ? fk_window_bytes(loaded->record, ranks, bytes, error) : status;
}}
"""

PASS_FUNCTIONS = """\
{p}_status {p}_{k}_{w}(const {p}_{k} *layer, const {p}_{k}_{w}_args *args, void *stream, {p}_error *error);
{p}_status {p}_{k}_bind_{w}(const {p}_{k} *layer, const {p}_{k}_{w}_args *args, {p}_pass **pass, {p}_error *error);
"""

BODIES = """\
{p}_status {p}_{k}_load(const {p}_driver *driver, int device, {p}_{k} **layer, {p}_error *error) {{
    fk_loaded_layer *loaded;
    {p}_status status = fk_load_layer(driver, &fk_layer_source_{i}, fk_layer_name_{i}, fk_layer_kernels_{i},
                                      fk_layer_titles_{i}, device, &loaded, error);
    *layer = ({p}_{k} *)loaded;
    return status;
}}

{p}_status {p}_{k}_sizes(const {p}_{k} *layer, {over}int64_t tokens, {like}, {p}_sizes *sizes,
    {p}_error *error) {{
    const fk_loaded_layer *loaded = (const fk_loaded_layer *)layer;
    fk_layer_call call;
    {p}_status status = fk_check_layer_handle(loaded, &fk_layer_source_{i}, fk_layer_name_{i}, sizes, error);
    if (status != {P}_OK) return status;
    {take_like}
    return fk_layer_sizes(loaded->record, {ranks}, tokens, like == NULL ? NULL : &call, sizes, error);
}}

{p}_status {p}_{k}_unload({p}_{k} *layer, {p}_error *error) {{
    return fk_unload_layer((fk_loaded_layer *)layer, error);
}}
"""

PASS_BODIES = """\
{p}_status {p}_{k}_{w}(const {p}_{k} *layer, const {p}_{k}_{w}_args *args, void *stream, {p}_error *error) {{
    const fk_loaded_layer *loaded = (const fk_loaded_layer *)layer;
    fk_layer_call call;
    {p}_status status = fk_check_layer_handle(loaded, &fk_layer_source_{i}, fk_layer_name_{i}, args, error);
    if (status != {P}_OK) return status;
    fk_take_{i}_{w}(args, &call);
    return fk_run_pass(loaded, FK_PASS_{W}, &call, stream, error);
}}

{p}_status {p}_{k}_bind_{w}(const {p}_{k} *layer, const {p}_{k}_{w}_args *args, {p}_pass **pass, {p}_error *error) {{
    const fk_loaded_layer *loaded = (const fk_loaded_layer *)layer;
    fk_layer_call call;
    {p}_status status = fk_check_layer_handle(loaded, &fk_layer_source_{i}, fk_layer_name_{i}, args, error);
    *pass = NULL;
    if (status != {P}_OK) return status;
    fk_take_{i}_{w}(args, &call);
    return fk_bind_pass(loaded, FK_PASS_{W}, &call, pass, error);
}}
"""


class LayerWrapper:
    """Declarations and definitions for one layer, called `identifier`; `number` is that of its tables."""

    def __init__(self, prefix: str, identifier: str, number: int, record: LayerRecord, ranks: int = 0) -> None:
        """ranks: that the layer is over; 0: it is on one GPU."""
        backward = bool(record.passes.get(BACKWARD) and record.passes[BACKWARD].steps)
        like = f"const {prefix}_{identifier}_backward_args *like" if backward else "const void *like"
        take = (
            f"if (like != NULL) fk_take_{number}_backward(like, &call);"
            if backward
            else "memset(&call, 0, sizeof call);"
        )
        self._names = {
            "p": prefix, "P": prefix.upper(), "k": identifier, "K": identifier.upper(), "i": number, "like": like,
            "take_like": take, "over": f"const {prefix}_ranks *ranks, " if ranks else "",
            "ranks": "ranks" if ranks else "NULL",
        }  # fmt: skip
        self._names["windows"] = WINDOWS.format(**self._names) if ranks else ""
        self._record, self._ranks = record, ranks
        self._passes = {which: record.passes[which] for which in PASSES if which in record.passes}
        self._passes = {which: each for which, each in self._passes.items() if each.steps}

    def declarations(self) -> str:
        """The part of the header: handle, structures, functions."""
        p, k = self._names["p"], self._names["k"]
        record = self._record
        shown = "; ".join(f"{name} = {render(expr)}" for name, expr in record.dims.items() if self._shown(name))
        over = f" over {self._ranks} ranks" if self._ranks else ""
        lines = [f"/* ---- {record.name} ({record.arch}), a layer{over}; T: the tokens{shown and f'; {shown}'} */", ""]
        if self._ranks:
            lines += self._windows()
        lines += [f"typedef struct {p}_{k} {p}_{k};", ""]
        for which, each in self._passes.items():
            lines += [f"typedef struct {p}_{k}_{which}_args {{"]
            if which != QUANTISE:
                lines.append("    int64_t tokens; /* T */")
            names = self._members(each)
            for name in (*each.inputs, *each.outputs):
                lines += self._tensor(each, name, names[name], which)
            if which in ("forward", BACKWARD):
                lines.append(f"    {p}_memory kept;")
            if which != QUANTISE:
                lines.append(f"    {p}_memory scratch;")
            if self._ranks and which != QUANTISE:
                lines.append(f"    const {p}_ranks *ranks;")
            lines += [f"    {p}_settings settings;", f"}} {p}_{k}_{which}_args;", ""]
        lines.append(FUNCTIONS.format(**self._names))
        lines += [PASS_FUNCTIONS.format(**self._names, w=which) for which in self._passes]
        return "\n".join(lines)

    def definitions(self) -> str:
        """The part of the source, after the tables."""
        takes = [self._take(which, each) for which, each in self._passes.items()]
        bodies = [PASS_BODIES.format(**self._names, w=which, W=which.upper()) for which in self._passes]
        windows = [WINDOW_BODY.format(**self._names)] if self._ranks else []
        return "\n".join([*takes, BODIES.format(**self._names), *windows, *bodies])

    def _windows(self) -> Sequence[str]:
        """Which windows there are, and the passes that need each."""
        lines = [f"enum {{ {self._names['P']}_{self._names['K']}_RANKS = {self._ranks} }};", ""]
        lines += [
            "/* Its windows, and the passes that use each. */",
            "typedef enum {p}_{k}_window {{".format(**self._names),
        ]
        for number, name in enumerate(self._record.windows):
            users = ", ".join(which for which, each in self._passes.items() if name in self._in(each))
            lines.append("    {P}_{K}_{w} = {n}, /* {users} */".format(
                **self._names, w=name.upper(), n=number, users=users
            ))  # fmt: skip
        lines.append("    {P}_{K}_WINDOWS = {n}".format(**self._names, n=len(self._record.windows)))
        return [*lines, "}} {p}_{k}_window;".format(**self._names), ""]

    def _in(self, each: LayerPass) -> set[str]:
        """The windows of a pass: those that it stores into, and those whose parts it reads."""
        places = {self._record.buffers[name].place for step in each.steps for name in step.arguments.values()}
        return places | {step.window for step in each.steps}

    def _shown(self, name: str) -> bool:
        """Whether an argument's shape reads the dim."""
        given = {each for one in self._passes.values() for each in (*one.inputs, *one.outputs)}
        return any(name in variables(extent) for each in given for extent in self._record.buffers[each].shape)

    def _members(self, each: LayerPass) -> dict[str, str]:
        names = members((), (*each.inputs, *each.outputs))
        return {name: f"{member}_" if member in COMMON else member for name, member in names.items()}

    def _tensor(self, each: LayerPass, name: str, member: str, which: str) -> Sequence[str]:
        buffer = self._record.buffers[name]
        shape = ", ".join(render(extent) for extent in buffer.shape)
        output = name in each.outputs
        pointer = "void *" if output else "const void *"
        words = "adds to what is there; " if name in each.adds else ""
        words += buffer.words and f"{buffer.words}; "
        lines = [f"    {pointer}{member}; /* {'output' if output else 'input'}: {words}{buffer.dtype}[{shape}] */"]
        if len(buffer.shape) > 1 and which != QUANTISE:
            lines.append(f"    int64_t {member}_stride0; /* elements; 0: compact */")
        return lines

    def _take(self, which: str, each: LayerPass) -> str:
        numbers = {name: index for index, name in enumerate(self._record.buffers)}
        names = self._members(each)
        lines = [
            "static void fk_take_{i}_{w}(const {p}_{k}_{w}_args *args, fk_layer_call *call) {{".format(
                **self._names, w=which
            ),
            "    memset(call, 0, sizeof *call);",
        ]
        if which != QUANTISE:
            lines.append("    call->tokens = args->tokens;")
        for name in (*each.inputs, *each.outputs):
            number, member = numbers[name], names[name]
            lines.append(f"    call->addresses[{number}] = (uint64_t)(uintptr_t)args->{member};")
            if len(self._record.buffers[name].shape) > 1 and which != QUANTISE:
                lines.append(f"    call->strides[{number}][0] = args->{member}_stride0;")
        if which in ("forward", BACKWARD):
            lines.append("    call->kept = args->kept;")
        if which != QUANTISE:
            lines.append("    call->scratch = args->scratch;")
        if self._ranks and which != QUANTISE:
            lines.append("    call->ranks = args->ranks;")
        return "\n".join([*lines, "    call->settings = args->settings;", "}", ""])
