"""A benchmark's document as a table of comma-separated values, and as one HTML page with plots.

The page is a single file (`fusekit.bench.page`): bars and points are SVG in it, and every text stays text.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fusekit.bench.page import page, tiles
from fusekit.choice.gpus import Gpu, gpu_of

DIMS = ("E", "M", "N", "K", "T", "H", "X")
COLUMNS = (
    "device", "arch", "groups", "model", "kernel", *DIMS, "what", "variant", "ms", "best_ms", "rounds", "tflops", "gbs",
    "peak_share", "dense_share", "of_copy", "speedup", "agrees", "error",
)  # fmt: skip
"""Of the table. ms: median. agrees: relative Frobenius distance from the first peer, or whether a check passed."""
_KNOWN = ("fusekit", "torch", "loop", "compile", "te", "dense", "copy")  # that have a color
_STYLE = """
:root{--fusekit:#1b8a48;--torch:#d6604d;--loop:#9a8fd0;--compile:#3d8fc4;--te:#b07a1e;--dense:#8b9691;--copy:#8b9691}
@media (prefers-color-scheme:dark){:root{--fusekit:#3fae6c}}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(21rem,100%),1fr));
gap:.8rem 1.6rem;max-width:80rem}
figure{margin:0;border-top:1px solid var(--line);padding:.5rem 0 .3rem}
figcaption{font-weight:600;font-size:13.5px;overflow-wrap:anywhere;margin:0 0 .15rem}
.charts table{width:100%}.charts td{border:0;padding:.06rem .5rem .06rem 0}
.charts td:first-child{width:5.2rem}.charts td:last-child{width:4.4rem;padding-right:0;text-align:right}
.charts svg,.legend svg{display:block}.one{stroke:var(--text);stroke-dasharray:2 2}
.other{fill:var(--quiet)}.slow{fill:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.2rem 0 .5rem;padding:0;list-style:none;font-size:13px}
.legend li{display:flex;gap:.4rem;align-items:center}
.roofline{overflow-x:auto}.roofline svg{max-width:none}
.grid{stroke:var(--line)}.roof{stroke:var(--text);fill:none;stroke-width:1.5}.lead{stroke:var(--quiet);stroke-width:.6}
td,th{text-align:right}td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}
""" + "".join(f".{what}{{fill:var(--{what})}}" for what in _KNOWN)


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
    """The page: first how many times as fast as each peer, then speeds, a roofline for each model, and all figures."""
    models = [model for model in document["models"] if model["kernels"]]  # else each GEMM of a layer has one variant
    steps = [_named(step["step"], step) for model in models for step in model["steps"]]
    kernels = [kernel for model in models for kernel in model["kernels"]]
    speedups = _means("kernel", (*kernels, *document["tokens"])) | _means("step", steps)
    parts = [
        '<p class="quiet">fusekit bench</p>', f"<h1>{escape(document['device'])}</h1>",
        f'<p class="note">{escape(_conditions(document))}</p>', tiles(speedups) if speedups else "",
    ]  # fmt: skip
    for model in models:
        sizes = " ".join(f"{name}={value}" for name, value in model["kernels"][0]["problem"].items() if name in "EM")
        parts.append(f'<h2>{escape(model["model"])} <span class="quiet">{sizes}</span></h2>')
        timed = [_named(step["step"], step) for step in model["steps"]]
        parts += [
            _speedups((*model["kernels"], *timed)), _bars("TFLOP/s: more is better", model["kernels"], "tflops"),
            _roofline(model["kernels"], gpu_of(document["device"])), _bars("ms a step: less is better", timed, "ms"),
        ]  # fmt: skip
    if tokens := [_named(_sized(kernel), kernel) for kernel in document["tokens"]]:
        parts += ["<h2>Router and permutation</h2>", _speedups(tokens), _bars("\u00b5s: less is better", tokens, "us")]
    if document.get("layers"):
        passes = [_pass(layer, line) for layer in document["layers"] for line in layer["lines"]]
        parts += ["<h2>Layers</h2>", _bars("ms: less is better; dense: its GEMMs, by cuBLAS", passes, "ms")]
    parts += ["<h2>All figures</h2>", _table(rows(document))]
    parts.append(
        "<footer>" + "".join(f'<p class="note">{escape(note)}</p>' for note in document["notes"]) + "</footer>"
    )
    return page(f"fusekit bench: {document['device']}", "\n".join(filter(None, parts)), style=_STYLE)


def _conditions(document: Mapping[str, Any]) -> str:
    """Under which a document was measured, in a sentence; an older one lacks clock, driver and date."""
    import fusekit

    timed = "each alone, at the clock that its power leaves" if document["steady"] else "in interleaved rounds"
    parts = [document["arch"], f"{document['sms']} multiprocessors"]
    if document.get("clock_mhz"):
        parts.append(f"up to {document['clock_mhz']} MHz")
    if document.get("driver"):
        parts.append(f"driver for CUDA {document['driver']}")
    parts += [document["date"]] if document.get("date") else []
    return f"{', '.join(parts)}. Groups {document['groups']}, timed {timed}; fusekit {fusekit.__version__}."


def _named(name: str, timed: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "lines": timed["lines"]}


def _sized(kernel: Mapping[str, Any]) -> str:
    sizes = "".join(f" {name}={value}" for name, value in kernel["problem"].items())
    return f"{kernel['name']}{sizes}"


def _pass(layer: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """A pass of a layer, next to the sum of its GEMMs."""
    dense = [{"what": "dense", "ms": line["dense_ms"]}] if line.get("dense_ms") else []
    tokens = f" {layer['problem']['T']} tokens" if "T" in layer["problem"] else ""
    return {"name": f"{layer['name']}: {line['variant']}{tokens}", "lines": [line, *dense]}


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


def _ratios(timed: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as each peer fusekit's fastest variant is, of those whose results are right."""
    figure = "us" if any("us" in line for line in timed["lines"]) else "ms"
    best = _best({"lines": [line for line in timed["lines"] if not _wrong(line)]}, figure)
    ours = best.get("fusekit")
    peers = {what: line for what, line in best.items() if what not in ("fusekit", "dense", "copy")}
    return {what: line[figure] / ours[figure] for what, line in peers.items()} if ours else {}


def _wrong(line: Mapping[str, Any]) -> bool:
    verdict = line.get("agrees") or line.get("check")
    return verdict is not None and not verdict["ok"]


def _means(noun: str, timed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The geometric mean of the speed-ups over each peer, by a label."""
    ratios: dict[str, list[float]] = {}
    for each in timed:
        for what, ratio in _ratios(each).items():
            ratios.setdefault(what, []).append(ratio)
    return {
        f"as fast as {what}, {'geometric mean of ' if len(values) > 1 else ''}{len(values)} "
        f"{noun}{'s' if len(values) > 1 else ''}": f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}\u00d7"
        for what, values in ratios.items()
    }


def _speedups(timed: Sequence[Mapping[str, Any]]) -> str:
    """How many times as fast as each peer, a bar each; the dashed line is the peer's speed."""
    charts = [(each["name"], ratios) for each in timed if (ratios := _ratios(each))]
    most = max((ratio for _, ratios in charts for ratio in ratios.values()), default=0)
    if not most:
        return ""
    most = max(most, 1.0)
    one = f'<line class="one" x1="{100 / most:.2f}%" x2="{100 / most:.2f}%" y1="0" y2="12"/>'
    return _charts("Speed-up: times as fast as a peer", (
        (name, [(what, ratio / most, f"{ratio:.2f}\u00d7", "slow" if ratio < 1 else "fusekit", one)
                for what, ratio in ratios.items()])
        for name, ratios in charts
    ))  # fmt: skip


def _bars(title: str, timed: Sequence[Mapping[str, Any]], figure: str) -> str:
    """One bar for each thing that was timed; of fusekit's variants the fastest."""
    best = [(each["name"], lines) for each in timed if (lines := _best(each, figure))]
    most = max((line[figure] for _, lines in best for line in lines.values()), default=0)
    if not most:
        return ""
    return _charts(title, (
        (name, [(f"{what} WRONG" if _wrong(line) else what, line[figure] / most, _cell(line[figure]), _class(what), "")
                for what, line in lines.items()])
        for name, lines in best
    ))  # fmt: skip


def _charts(title: str, charts: Iterable[tuple[str, Sequence[tuple[str, float, str, str, str]]]]) -> str:
    """A chart for each name, with a row for each (label, part of the width, figure, class, more SVG)."""
    drawn = []
    for name, bars in charts:
        rows = "".join(
            f'<tr><td>{escape(label)}</td><td><svg width="100%" height="12" aria-hidden="true">'
            f'<rect class="{kind}" width="{100 * part:.2f}%" height="12" rx="2"/>{more}</svg></td>'
            f'<td class="n">{figure}</td></tr>'
            for label, part, figure, kind, more in bars
        )
        shown = escape(name.rpartition("/")[2])
        drawn.append(f"<figure><figcaption>{shown}</figcaption><table>{rows}</table></figure>\n")
    return f'<h3>{escape(title)}</h3>\n<div class="charts">{"".join(drawn)}</div>'


def _class(what: str) -> str:
    return what if what in _KNOWN else "other"


_LEFT, _RIGHT, _TOP, _LINE = 56, 620, 12, 15  # of the roofline's axes, and between two labels, in pixels


def _roofline(kernels: Sequence[Mapping[str, Any]], peak: Gpu | None) -> str:
    """Arithmetic intensity against speed, on logarithmic axes; the roof is what the device's data sheet allows. Labels
    of fusekit's kernels have a column of their own, so none covers another.
    """
    points = [
        (kernel["name"].rpartition("/")[2], what, line["tflops"] * 1e3 / line["gbs"], line["tflops"])
        for kernel in kernels
        for what, line in _best(kernel, "tflops").items()
        if what != "dense" and line["gbs"]
    ]
    if not points:
        return ""
    labels = sorted((point for point in points if point[1] == "fusekit"), key=lambda point: -point[3])
    bottom = max(330, _TOP + _LINE * len(labels))
    ridge = [] if peak is None else [(peak.tflops * 1e3 / peak.gbs, peak.tflops)]
    x = _Axis([point[2] for point in points] + [at for at, _ in ridge], _LEFT, _RIGHT)
    y = _Axis([point[3] for point in points] + [at for _, at in ridge], bottom, _TOP)
    parts = []
    for at in x.ticks():
        parts.append(f'<line class="grid" x1="{x(at)}" x2="{x(at)}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="quiet" x="{x(at)}" y="{bottom + 16}" text-anchor="middle">{at:g}</text>')
    for at in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(at)}" y2="{y(at)}"/>')
        parts.append(f'<text class="quiet" x="{_LEFT - 6}" y="{y(at) + 4}" text-anchor="end">{at:g}</text>')
    if peak is not None:
        roof = [(at, min(peak.tflops, at * peak.gbs * 1e-3)) for at in (x.low, *(at for at, _ in ridge), x.high)]
        begin = max(x.low, y.low * 1e3 / peak.gbs)
        corners = " ".join(f"{x(max(at, begin))},{y(max(speed, y.low))}" for at, speed in roof)
        parts.append(f'<polyline class="roof" points="{corners}"/>')
    last: float = _TOP - _LINE
    for index, (name, _, at, speed) in enumerate(labels):
        # As near to the point as the labels above it and those below it allow.
        last = max(last + _LINE, min(y(speed), bottom - _LINE * (len(labels) - index - 1)))
        parts.append(
            f'<polyline class="lead" fill="none" points="{x(at)},{y(speed)} {_RIGHT},{last} {_RIGHT + 6},{last}"/>'
        )
        parts.append(f'<text x="{_RIGHT + 9}" y="{last + 4}">{escape(name)}</text>')
    for name, what, at, speed in points:
        about = f"{name}, {what}: {speed:.4g} TFLOP/s at {at:.4g} FLOP/byte"
        parts.append(
            f'<circle class="{_class(what)}" cx="{x(at)}" cy="{y(speed)}" r="4"><title>{escape(about)}</title></circle>'
        )
    width = _RIGHT + 16 + 7 * max((len(name) for name, *_ in labels), default=0)
    axis = f'<text class="quiet" x="{_LEFT}" y="{bottom + 34}">FLOP per byte that must cross the memory bus</text>'
    size = f'width="{width}" height="{bottom + 40}" viewBox="0 0 {width} {bottom + 40}"'
    roof_name = " The line is the data sheet." if peak is not None else ""
    return (
        f"<h3>Roofline: TFLOP/s over arithmetic intensity</h3>{_legend(dict.fromkeys(what for _, what, *_ in points))}"
        f'<p class="note">Both axes are logarithmic.{roof_name}</p>'
        f'<div class="roofline"><svg {size} role="img">{"".join(parts)}{axis}</svg></div>'
    )


class _Axis:
    """A logarithmic axis from the pixel `start` to the pixel `end`, with room around `values`."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.6, max(values) * 1.6
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self._start + part * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """1, 2, 5, 10, ... within the axis; of many, powers of 10 alone."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) < 5 else (1,)
        return [at for decade in decades for step in steps if self.low < (at := step * 10.0**decade) < self.high]


def _legend(whats: Iterable[str]) -> str:
    items = "".join(
        f'<li><svg width="10" height="10" aria-hidden="true"><circle class="{_class(what)}" cx="5" cy="5" r="4"/></svg>'
        f"{escape(what)}</li>"
        for what in whats
    )
    return f'<ul class="legend">{items}</ul>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [name for name in COLUMNS[3:] if any(row[name] is not None for row in rows)]
    head = "".join(f"<th>{name}</th>" for name in shown)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in shown) + "</tr>\n" for row in rows)
    return f'<div class="wrap"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))
