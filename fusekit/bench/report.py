"""A benchmark's document as a table of comma-separated values, and as one HTML page with plots.

The page is a single file: plots are SVG inside it, drawn by matplotlib (extra `plot`); a browser loads nothing else.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fusekit.choice.gpus import Gpu, gpu_of

DIMS = ("E", "M", "N", "K", "T", "H", "X")
COLUMNS = (
    "device", "arch", "groups", "model", "kernel", *DIMS, "what", "variant", "ms", "best_ms", "rounds", "tflops", "gbs",
    "peak_share", "dense_share", "of_copy", "speedup", "agrees", "error",
)  # fmt: skip
"""Of the table. ms: median. agrees: relative Frobenius distance from the first peer, or whether a check passed."""
_COLORS = {"fusekit": "#1b7837", "torch": "#d6604d", "loop": "#b2abd2", "compile": "#4393c3", "te": "#8073ac"}
_GREY = "#878787"
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1a1a1a}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:13px}"
    "th,td{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right}"
    "th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}.wrap{overflow-x:auto}"
)


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row of `COLUMNS` for each thing that was timed; what does not apply is None. A step's kernel is its name."""
    shared = {name: document[name] for name in ("device", "arch", "groups")}
    rows = []
    for model in document["models"]:
        for kernel in model["kernels"]:
            rows += [_row(shared, model["model"], kernel["name"], kernel["problem"], line) for line in kernel["lines"]]
        for step in model["steps"]:
            rows += [_row(shared, model["model"], step["step"], {}, line) for line in step["lines"]]
    for kernel in document["tokens"]:
        model = kernel["name"].partition("/")[0]
        rows += [_row(shared, model, kernel["name"], kernel["problem"], line) for line in kernel["lines"]]
    for layer in document.get("layers", ()):
        model, sizes = layer["name"].partition("/")[0], {"T": layer["problem"]["T"]}
        rows += [_row(shared, model, layer["name"], sizes, line) for line in layer["lines"]]
    return rows


def to_csv(document: Mapping[str, Any]) -> str:
    """The rows of `document` under a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(document))
    return text.getvalue()


def to_html(document: Mapping[str, Any]) -> str:
    """The page: for each model its speed against peers, a roofline and all figures. ImportError without matplotlib."""
    import fusekit

    peak = gpu_of(document["device"])
    title = f"fusekit bench: {document['device']}"
    timed = "each alone, at the clock that its power leaves" if document["steady"] else "in interleaved rounds"
    how = f"{document['arch']}, groups {document['groups']}, timed {timed}; fusekit {fusekit.__version__}."
    parts = [f"<p>{escape(how)}</p>"]
    for model in document["models"]:
        if not model["kernels"]:  # a layer in which each GEMM has one variant
            continue
        sizes = " ".join(f"{name}={value}" for name, value in model["kernels"][0]["problem"].items() if name in "EM")
        parts.append(f"<h2>{escape(model['model'])} {sizes}</h2>")
        parts.append(_bars(model["kernels"], "tflops", "TFLOP/s, more is better"))
        parts.append(_roofline(model["kernels"], peak))
        if model["steps"]:
            steps = [{"name": step["step"], "lines": step["lines"]} for step in model["steps"]]
            parts.append(_bars(steps, "ms", "ms a step, less is better"))
    if document["tokens"]:
        parts += ["<h2>router and permutation</h2>", _bars(document["tokens"], "us", "µs, less is better")]
    if document.get("layers"):
        passes = [
            {"name": f"{layer['name']}: {line['variant']}", "lines": [line]}
            for layer in document["layers"] for line in layer["lines"]
        ]  # fmt: skip
        parts += ["<h2>layers</h2>", _bars(passes, "ms", "ms, less is better")]
    parts += ["<h2>All figures</h2>", _table(rows(document))]
    parts += [f"<p>{escape(note)}</p>" for note in document["notes"]]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _row(
    shared: Mapping[str, Any], model: str, kernel: str, problem: Mapping[str, int], line: Mapping[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {**shared, "model": model, "kernel": kernel.rpartition("/")[2], **problem}
    row |= {name: line[name] for name in COLUMNS if name in line}
    if "us" in line:
        row |= {"ms": _scaled(line["us"]), "best_ms": _scaled(line["best_us"])}
    verdict = line.get("agrees") or line.get("check")
    if verdict is not None:
        row["agrees"] = verdict.get("fro", verdict["ok"]) if verdict["ok"] else "WRONG"
    return row


def _scaled(us: float | None) -> float | None:
    return None if us is None else us * 1e-3


def _best(kernel: Mapping[str, Any], figure: str) -> dict[str, Mapping[str, Any]]:
    """Maps what was timed to its line; of fusekit's variants the fastest."""
    fastest: dict[str, Mapping[str, Any]] = {}
    for line in kernel["lines"]:
        time = "us" if "us" in line else "ms"
        if line[figure] is not None and (line["what"] not in fastest or line[time] < fastest[line["what"]][time]):
            fastest[line["what"]] = line
    return fastest


def _bars(kernels: Sequence[Mapping[str, Any]], figure: str, label: str) -> str:
    best = [_best(kernel, figure) for kernel in kernels]
    whats = list(dict.fromkeys(what for lines in best for what in lines))
    if not whats:
        return ""
    height = 0.8 / len(whats)

    def draw(axes: Any) -> None:
        for place, what in enumerate(whats):
            there = [(index + place * height, lines[what][figure]) for index, lines in enumerate(best) if what in lines]
            places, values = zip(*there, strict=True)
            bars = axes.barh(places, values, height * 0.92, label=what, color=_COLORS.get(what, _GREY))
            axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
        axes.set_yticks(
            [index + (len(whats) - 1) * height / 2 for index in range(len(kernels))],
            [kernel["name"].rpartition("/")[2] for kernel in kernels],
        )
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(label)

    return _drawn(0.7 + len(kernels) * (0.25 + 0.17 * len(whats)), draw)


def _roofline(kernels: Sequence[Mapping[str, Any]], peak: Gpu | None) -> str:
    """Arithmetic intensity against speed; the roof is what the device's data sheet allows."""
    points = [
        (kernel["name"].rpartition("/")[2], what, line["tflops"] * 1e3 / line["gbs"], line["tflops"])
        for kernel in kernels
        for what, line in _best(kernel, "tflops").items()
        if what != "dense" and line["gbs"]
    ]
    if not points:
        return ""
    from matplotlib.ticker import LogLocator, NullFormatter

    def draw(axes: Any) -> None:
        for what in dict.fromkeys(point[1] for point in points):
            of = [point for point in points if point[1] == what]
            axes.scatter([x for *_, x, _ in of], [y for *_, y in of], label=what, color=_COLORS.get(what, _GREY), s=24)
        for name, what, x, y in points:
            if what == "fusekit":
                axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
        if peak is not None:
            ridge = peak.tflops * 1e3 / peak.gbs
            ends = [min(ridge, *(point[2] for point in points)) / 2, max(ridge, *(point[2] for point in points)) * 2]
            roof = [(x, min(peak.tflops, x * peak.gbs * 1e-3)) for x in (ends[0], ridge, ends[1])]
            axes.plot([x for x, _ in roof], [y for _, y in roof], color="black", linewidth=1, label="data sheet")
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("FLOP per byte that must cross the memory bus")
        axes.set_ylabel("TFLOP/s")
        axes.grid(True, which="both", linewidth=0.3)

    return _drawn(4.5, draw)


def _drawn(height: float, draw: Callable[[Any], None]) -> str:
    """What `draw` puts on axes 8 inches wide, with a legend, as an element of a page: without pyplot and its global
    state. Text stays text; no name is taken for a formula.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusekit", "text.parse_math": False}):
        figure, text = Figure((8, height), layout="tight"), io.StringIO()
        axes = figure.subplots()
        draw(axes)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [name for name in COLUMNS[3:] if any(row[name] is not None for row in rows)]
    head = "".join(f"<th>{name}</th>" for name in shown)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in shown) + "</tr>\n" for row in rows)
    return f'<div class="wrap"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))
