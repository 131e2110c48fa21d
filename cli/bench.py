"""`fusekit bench`: compare kernels with other libraries, at the user's sizes; write tuning tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import DriverError, UsageError, install
from fusekit_cli import complete, output
from fusekit_cli.lookup import kernels, note_runs, stored
from fusekit_cli.options import Session, common, signing, stored_names
from fusekit_cli.progress import progress

if TYPE_CHECKING:
    from fusekit.bench.gemms import Options
    from fusekit.bench.shape import Shape
    from fusekit.choice.tuning import Row
    from fusekit.library import Library
    from fusekit.runtime import Device
    from fusekit.store import NameRecord

GROUPS = ("uneven", "even", "one")
PEERS = ("torch", "loop", "compile", "te")
DEFAULT_PEERS = ("torch", "te")
MOST_ROWS = 2**31 - 1
FEW_TOKENS = tuple(1 << power for power in range(10))  # of --decode


@click.command("bench")
@click.argument(
    "targets", metavar="MODEL...", nargs=-1, required=True, shell_complete=complete.stored, callback=stored_names
)
@click.option(
    "-E", "--experts", type=click.IntRange(min=1), help="Groups: the experts of one device (default: the spec's)."
)
@click.option("--hidden", type=click.IntRange(min=1), help="Hidden size H (default: the spec's).")
@click.option("--intermediate", type=click.IntRange(min=1), help="Intermediate size I (default: the spec's).")
@click.option(
    "--rows",
    type=click.IntRange(1, MOST_ROWS),
    multiple=True,
    help="Rows M of all groups together, or tokens of a router or a layer; may be given several times (default: the"
    " spec's).",
)
@click.option(
    "--groups",
    type=click.Choice(GROUPS),
    default="uneven",
    show_default=True,
    help="Sizes of groups: uneven by up to 3 to 1, even, or one with nine tenths of all rows.",
)
@click.option("--all", "every", is_flag=True, help="Every stored variant, not only the one that loading takes.")
@click.option(
    "--steady",
    is_flag=True,
    help="Time each GEMM alone for --seconds, at the clock that its power leaves; not in rounds with the others.",
)
@click.option(
    "--sweep",
    is_flag=True,
    help="--all --steady, without peers, and write what is fastest into the tuning table. Of a layer, its passes are"
    " timed with each variant of each GEMM in its place, for --seconds each: with 9 GEMMs of 6 variants about a minute"
    " for each of --rows.",
)
@click.option(
    "--table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that --sweep writes (default: the writable store's table).",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice(PEERS),
    multiple=True,
    help="What to compare with: PyTorch's grouped GEMM with eager code, one cuBLAS call a group, torch.compile for"
    " what is not a GEMM, Transformer Engine; may be given several times (default: torch and te).",
)
@click.option("--alone", is_flag=True, help="No peers.")
@click.option(
    "--decode",
    is_flag=True,
    help="Of GEMMs, and of the inference pass of layers, a CUDA graph at 1 to 512 tokens or at --rows, without peers,"
    " and the bandwidth at which it reads weights, of a layer those of the experts that so many tokens choose.",
)
@click.option("--check", is_flag=True, help="Compare router kernels with the NumPy reference, too.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    help="Device time for the rounds of one kernel; with --steady, for each thing that is timed.",
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots, too.")
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures as a table, too.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="For random inputs.")
@click.option("--device", type=click.IntRange(min=0), help="Ordinal of the GPU (default: the current one, else 0).")
@signing
@common
def command(
    session: Session, targets: tuple[str, ...], experts: int | None, hidden: int | None, intermediate: int | None,
    rows: tuple[int, ...], groups: str, every: bool, steady: bool, sweep: bool, table: Path | None,
    peers: tuple[str, ...], alone: bool, decode: bool, check: bool, seconds: float, html: Path | None, csv: Path | None,
    seed: int, device: int | None,
) -> int:  # fmt: skip
    """Time the stored kernels of MODEL (a file, a kernel, a layer, a full name or a glob), and other libraries.

    A model's kernels take any size: give yours with -E, --hidden, --intermediate and --rows. GEMMs are compared with
    PyTorch's unfused operations and one dense product through cuBLAS; router and permutation kernels with a copy of the
    same bytes; a layer with the sum of its GEMMs, each as one dense product. Exit code 1 if results do not agree, 3 if
    MODEL is not built, 4 without a usable GPU.
    """
    if table is not None and not sweep:
        raise UsageError(f"--table {table} without --sweep; only a sweep writes a table; add --sweep")
    if alone and peers:
        raise UsageError("--alone with --peer; --alone times no peers; leave one of them out")
    if decode and (sweep or peers):
        other = "--sweep" if sweep else "--peer"
        raise UsageError(f"--decode with {other}; --decode times kernels alone; leave one of them out")
    from fusekit.library import open_library

    _check_files(html, csv)
    library = open_library(session.config)
    compared = () if alone or decode or (sweep and not peers) else peers or DEFAULT_PEERS
    records = [listed.record for target in targets for listed in kernels(stored(library.store, target, None))]
    target = library.devices.get(library.devices.current() if device is None else device)
    arch = library.find(records[0].name, device=target.ordinal).arch
    try:
        from fusekit.bench.gemms import Options
        from fusekit.bench.shape import Shape
        from fusekit.bench.timing import device_clock
    except ImportError as error:
        raise UsageError(f"random inputs need NumPy: {error}; {install('check')}") from error
    layers, single = _layers(targets, [record for record in records if record.arch == arch])
    gemms, tokens, others = _kernels(targets, single)
    if others and not (gemms or tokens or layers):
        raise UsageError(f"{others[0]} has no benchmark: {_TIMED}; fusekit run {others[0]} --time times it")
    if decode and tokens:
        raise UsageError(f"--decode times GEMMs and layers, and {tokens[0]} is neither; name those alone")
    before = None if not sweep else _table(library, arch, table)
    document: dict[str, Any] = {
        "device": target.name, "arch": arch, "sms": target.sm_count, "groups": groups, "steady": steady or sweep,
        "decode": decode, "clock_mhz": device_clock(library.devices, target),
        "driver": output.driver(library.devices.driver.version),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "models": [], "tokens": [], "layers": [],
        "ok": True, "notes": [], "tuning": None,
    }  # fmt: skip
    _add_notes(document, [f"{name} is left out: {_TIMED}; fusekit run {name} --time times it" for name in others])
    try:
        measured = _measure(
            session, library, target, document, (gemms, tokens, layers), Shape(experts, hidden, intermediate),
            rows or (FEW_TOKENS if decode else ()),
            Options(groups, every or sweep, compared, seconds * 1e3, seed, steady or sweep, decode), check=check,
            sweeping=sweep,
        )  # fmt: skip
    except DriverError as error:
        if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        raise UsageError(f"{error}; a model's tensors must fit together; take fewer --rows or -E") from error
    timed = (*document["models"], *document["tokens"], *document["layers"])
    document["ok"] = all(result["ok"] for result in timed)
    if before is not None:
        document["tuning"] = _write(
            library, arch, table, before.merged(row for row in measured if len(row.variants) > 1)
        )
        if layers and table is None:
            names = " ".join(layers)
            _add_notes(
                document,
                [f"layers are launched as before; fusekit build {names} takes up the table, and compiles nothing"],
            )
    if document["ok"]:
        note_runs(library)
    _write_report(document, html, csv)
    output.answer(session, document, lambda: _print(session, document, target))
    return 0 if document["ok"] else 1


def _check_files(html: Path | None, csv: Path | None) -> None:
    """Check the output files before minutes of measuring."""
    for option, path in (("--html", html), ("--csv", csv)):
        if path is not None:
            output.check_folder(option, path)


def _write_report(document: dict[str, Any], html: Path | None, csv: Path | None) -> None:
    from fusekit.bench import report

    for option, path, write in (("--html", html, report.to_html), ("--csv", csv, report.to_csv)):
        if path is not None:
            output.save(option, path, write(document).encode())


def _measure(
    session: Session, library: Library, device: Device, document: dict[str, Any],
    which: tuple[Sequence[str], Sequence[str], Sequence[str]], shape: Shape, rows: Sequence[int], options: Options, *,
    check: bool, sweeping: bool,
) -> list[Row]:  # fmt: skip
    """Fill in the document; returns the rows of a tuning table. which: names of GEMMs, token kernels and layers.

    sweeping: the passes of a layer are timed with each variant of its GEMMs.
    """
    gemms, tokens, layers = which
    from fusekit.bench.gemms import PEERS as GEMM_PEERS
    from fusekit.bench.gemms import GemmBench, roles
    from fusekit.bench.timing import own_stream
    from fusekit.bench.tokens import TokenBench

    arch, measured = document["arch"], []
    sizes = rows or (None,)
    with (
        library.devices.active(device),
        own_stream(library.devices, device) as stream,
        progress(session, "timing") as update,
    ):
        of_gemms = replace(options, peers=tuple(peer for peer in options.peers if peer in GEMM_PEERS))
        total, done = (len(gemms) + len(tokens) + len(layers)) * len(sizes), itertools.count(1)

        def timed(what: str) -> None:
            update(next(done), total, what, 0)

        for model, names in _by_file(roles(gemms)):
            bench = GemmBench(library, device, names, arch, of_gemms)
            for size in sizes:
                result = (bench.decode if options.decode else bench.measure)(replace(shape, M=size), stream, timed)
                document["models"].append({"model": model, **result})
                measured += bench.rows
            _add_notes(document, bench.notes)
        token_bench = TokenBench(library, device, arch, options, check=check)
        for name in tokens:
            for size in sizes:
                document["tokens"].append(token_bench.measure(name, size, shape.H, stream))
                timed(f"{name}{'' if size is None else f' at {size} tokens'}")
        _add_notes(document, token_bench.notes)
        if layers:
            from fusekit.bench.layers import LayerBench

            layer_bench = LayerBench(library, device, arch, options)
            for name, size in itertools.product(layers, sizes):
                if sweeping:
                    document["models"].append(layer_bench.sweep(name, size, stream))
                else:
                    measure = layer_bench.decode if options.decode else layer_bench.measure
                    document["layers"].append(measure(name, size, stream))
                timed(f"{name}{'' if size is None else f' at {size} tokens'}")
            _add_notes(document, layer_bench.notes)
            measured += layer_bench.rows
    return measured + token_bench.rows


def _layers(targets: Sequence[str], records: Sequence[NameRecord]) -> tuple[list[str], list[NameRecord]]:
    """Names of layers ("file/layer"), and records of single kernels: those of no layer, and kernels of a layer that a
    target names.
    """
    from fusekit.store import matches
    from fusekit.store.names import is_of_layer

    layers: dict[str, None] = {}
    single = []
    for record in records:
        named = any("." in target.rpartition("/")[2] and matches(target, record.name) for target in targets)
        if named or not is_of_layer(record):
            single.append(record)
        else:
            layers[record.name.partition("@")[0].rpartition(".")[0]] = None
    return list(layers), single


def _kernels(targets: Sequence[str], records: Sequence[NameRecord]) -> tuple[list[str], list[str], list[str]]:
    """Names of GEMMs, of token kernels and of others: "file/kernel", with "@variant" if a target has it."""
    from fusekit.plan.operations import OPERATIONS
    from fusekit.store import matches

    gemms: dict[str, None] = {}
    tokens: dict[str, None] = {}
    others: dict[str, None] = {}
    for record in records:
        whole = any("@" in target and matches(target, record.name) for target in targets)
        name = record.name if whole else record.name.partition("@")[0]
        row = OPERATIONS.get(record.spec["op"])
        (others if row is None else tokens if row.token_wise else gemms if row.gemm else others)[name] = None
    return list(gemms), list(tokens), list(others)


def _by_file(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for file in dict.fromkeys(name.partition("/")[0] for name in names):
        yield file, [name for name in names if name.partition("/")[0] == file]


def _add_notes(document: dict[str, Any], notes: Sequence[str]) -> None:
    document["notes"] += [note for note in notes if note not in document["notes"]]


def _table(library: Library, arch: str, path: Path | None) -> Any:
    """The table that will be updated; a damaged one is an error before anything is timed."""
    from fusekit.choice import tuning

    if path is not None:
        return tuning.read(path, arch)
    root = library.store.roots[0]
    library.store.check_writable()
    library.store.sign("tuning", b"")  # fails before anything is timed
    data = root.tuning(arch)
    return tuning.Tuning(arch) if data is None else tuning.Tuning.from_bytes(data, root.tuning_path(arch), arch)


def _write(library: Library, arch: str, path: Path | None, table: Any) -> dict[str, Any]:
    data = table.to_bytes()
    if path is None:
        path = library.store.publish_tuning(arch, data)
    else:
        output.save("--table", path, data)
    return {"path": str(path), "rows": len(table.rows)}


def _print(session: Session, document: dict[str, Any], device: Device) -> None:
    for model in document["models"]:
        _print_model(session, document, model)
    if document["tokens"]:
        _print_tokens(session, document)
    if document["layers"]:
        _print_layers(session, document)
    for note in document["notes"]:
        session.note(note)
    if document["tuning"] is not None:
        click.echo(f"tuning table: {document['tuning']['path']}, {output.plural(document['tuning']['rows'], 'row')}")


# Heading -> member of a line, and its format.
_TIMED = "bench times GEMMs, router and permutation kernels of fusekit's own, and layers"
_OF_GEMM = {"ms": ("ms", ".4g"), "TFLOP/s": ("tflops", ".0f"), "of peak": ("peak_share", ".1%"),
            "of dense": ("dense_share", ".3f"), "speed-up": ("speedup", ".2f")}  # fmt: skip
_OF_TOKENS = {"us": ("us", ".2f"), "GB/s": ("gbs", ".0f"), "of peak": ("peak_share", ".1%"),
              "of a copy": ("of_copy", ".2f"), "speed-up": ("speedup", ".2f")}  # fmt: skip
_OF_LAYER = {"ms": ("ms", ".4g"), "TFLOP/s": ("tflops", ".0f"), "of peak": ("peak_share", ".1%"),
             "of its GEMMs": ("dense_share", ".3f")}  # fmt: skip
_OF_DECODE = {"ms": ("ms", ".4g"), "GB/s": ("gbs", ".0f"), "of peak": ("peak_share", ".1%")}


def _figures(line: dict[str, Any], forms: dict[str, tuple[str, str]]) -> list[str]:
    return [_number(line[figure], form) for figure, form in forms.values()]


def _print_model(session: Session, document: dict[str, Any], model: dict[str, Any]) -> None:
    rows, forms = [], _OF_DECODE if document["decode"] else _OF_GEMM
    for kernel in model["kernels"]:
        name, shape = kernel["name"].rpartition("/")[2], " ".join(map(str, kernel["problem"].values()))
        if "passes" in kernel:
            name += f" in {' and '.join(kernel['passes'])}"
        for line in kernel["lines"]:
            mark = ", chosen" if "chosen" in kernel and line["variant"] == kernel["chosen"] else ""
            rows.append((name, shape, (line["variant"] or line["what"]) + mark, line))
    rows += [(step["step"], "", line["what"], line) for step in model["steps"] for line in step["lines"]]
    cells = [(*about, *_figures(line, forms), _agrees(line)) for *about, line in rows]
    click.echo(f"{model['model']} ({document['arch']}) on {document['device']}, groups {document['groups']}")
    output.table(session, ("kernel", "E M N K", "what", *forms, "agrees"), cells, right=(*forms,))


def _agrees(line: dict[str, Any]) -> str:
    agrees = line["agrees"]
    agreement = "" if agrees is None else ("" if agrees["ok"] else "WRONG ") + _number(agrees["fro"], ".1e", "nan")
    return line["error"] or agreement


def _print_tokens(session: Session, document: dict[str, Any]) -> None:
    rows = []
    for kernel in document["tokens"]:
        shape = " ".join(f"{name}={value}" for name, value in kernel["problem"].items())
        for line in kernel["lines"]:
            check = line["check"]
            verdict = line["error"] or (
                "" if check is None else "ok" if check["ok"] else f"WRONG: {check['problems'][0]}"
            )
            what = line["variant"] or line["what"]
            rows.append((kernel["name"], shape, what, *_figures(line, _OF_TOKENS), verdict))
    click.echo(f"router and permutation ({document['arch']}) on {document['device']}")
    output.table(session, ("kernel", "problem", "what", *_OF_TOKENS, "check"), rows, right=(*_OF_TOKENS,))


def _print_layers(session: Session, document: dict[str, Any]) -> None:
    rows = []
    forms = _OF_DECODE if document["decode"] else _OF_LAYER
    for layer in document["layers"]:
        shape = " ".join(f"{name}={value}" for name, value in layer["problem"].items())
        memory = [output.size(layer["memory"][which]) for which in ("kept", "scratch")]
        rows += [(layer["name"], shape, line["variant"], *_figures(line, forms), *memory) for line in layer["lines"]]
    click.echo(f"layers ({document['arch']}) on {document['device']}; both: forward and backward in one graph")
    figures = (*forms, "kept", "scratch")
    output.table(session, ("layer", "problem", "pass", *figures), rows, right=figures)


def _number(value: float | None, form: str, absent: str = "") -> str:
    return absent if value is None else format(value, form)
