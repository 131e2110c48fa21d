"""Draws the figures of the pages, light and dark (python docs/figures/draw.py), with the numbers of results.json."""

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from math import log
from pathlib import Path

HERE = Path(__file__).parent
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "line": "#818b98", "accent": "#2563eb", "peer": "#b6bec8",
              "plain": "#f6f8fa", "tint": "#e4edfd", "zone": "#ffffff"},
    "dark": {"text": "#f0f3f6", "muted": "#a9b3bf", "line": "#7d8794", "accent": "#5b94f7", "peer": "#596371",
             "plain": "#2a303a", "tint": "#1d3765", "zone": "#1b2028"},
}  # fmt: skip


class Drawing:
    """An SVG with a transparent background, in one theme's colours."""

    def __init__(self, width: int, height: int, title: str, theme: str) -> None:
        self.colours = THEMES[theme]
        line = self.colours["line"]
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="{FONT}" font-size="13" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{line}"/></marker></defs>',
        ]

    def text(self, x: float, y: float, text: str, colour: str = "text", anchor: str = "start", **style: object) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        fill = self.colours[colour]
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        fill = self.colours[colour]
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{fill}"/>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, fill: str = "plain") -> None:
        """A box with centred lines, the first one in bold."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
            f' fill="{self.colours[fill]}" stroke="{self.colours["accent" if fill == "tint" else "line"]}"/>'
        )
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            style = {"font_weight": 600} if number == 0 else {"font_size": 12}
            self.text(x + width / 2, top + 16 * number, line, "muted" if number else "text", "middle", **style)

    def zone(self, x: float, y: float, width: float, height: float, title: str) -> None:
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="{self.colours["zone"]}"'
            f' stroke="{self.colours["line"]}" stroke-dasharray="4 4"/>'
        )
        self.text(x + 14, y + 22, title, font_weight=600)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.lines.append(
            f'<path d="{path}" fill="none" stroke="{self.colours["line"]}" stroke-width="1.5"{dash}'
            ' marker-end="url(#head)"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.5, dash: str = "") -> None:
        path = "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in points)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self.lines.append(
            f'<path d="{path}" fill="none" stroke="{self.colours[colour]}" stroke-width="{width:g}"{extra}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>\n"])


def pair(drawing: Drawing, x: float, y: float, room: float, values: Sequence[str], unit: str, after: str = "") -> None:
    """Two bars, fusekit's first; the longer one takes the room."""
    for number, (value, colour) in enumerate(zip(values, ("accent", "peer"), strict=True)):
        width = room * float(value) / max(map(float, values))
        drawing.bar(x, y + 16 * number, width, 13, colour)
        drawing.text(
            x + width + 6, y + 16 * number + 11, f"{'0' * value.startswith('.')}{value} {unit}", "muted", font_size=12
        )
        if number == 0 and after:
            drawing.text(x + width + 72, y + 11, after, font_size=12, font_weight=600)


def results(theme: str) -> Drawing:
    """Time and memory of layers beside peers; cold start beside JIT."""
    data = json.loads((HERE / "results.json").read_text())
    rows = sum(len(panel["rows"]) for panel in data["pairs"])
    height = 24 + 66 * len(data["pairs"]) + 44 * rows + 40 + 20 * len(data["cold"]["bars"])
    drawing = Drawing(760, height, "Layers of fusekit beside grouped_mm and SonicMoE, and cold start beside JIT", theme)
    drawing.text(0, 14, data["conditions"], "muted", font_size=12)
    y = 24
    for panel in data["pairs"]:
        drawing.text(0, y + 20, panel["title"], font_size=15, font_weight=600)
        drawing.text(175, y + 42, "forward + backward, ms", "muted", font_size=12)
        drawing.text(525, y + 42, panel["memory"], "muted", font_size=12)
        drawing.bar(0, y + 32, 11, 11, "accent")
        drawing.text(16, y + 42, "fusekit", font_size=12)
        drawing.bar(64, y + 32, 11, 11, "peer")
        drawing.text(80, y + 42, panel["peer"], font_size=12)
        y += 54
        for row in panel["rows"]:
            drawing.text(0, y + 19, row["label"])
            pair(drawing, 175, y, 180, row["ms"], "ms", f"{row['times']}x as fast")
            pair(drawing, 525, y, 165, row["gib"], "GiB")
            y += 44
        y += 12
    drawing.text(0, y + 16, data["cold"]["title"], font_size=15, font_weight=600)
    longest = max(float(bar["seconds"]) for bar in data["cold"]["bars"])
    for number, bar in enumerate(data["cold"]["bars"]):
        top, width = y + 30 + 20 * number, 490 * float(bar["seconds"]) / longest
        drawing.text(0, top + 11, bar["label"])
        drawing.bar(180, top, width, 13, "peer" if number else "accent")
        drawing.text(186 + width, top + 11, f"{bar['seconds']} s", "muted", font_size=12)
    return drawing


def pipeline(theme: str) -> Drawing:
    """Spec, compile, store, launch."""
    drawing = Drawing(760, 330, "From a spec to a launch", theme)
    drawing.zone(1, 1, 758, 150, "Build: any Linux machine, no GPU")
    drawing.box(16, 60, 110, 60, "spec", "TOML")
    drawing.box(166, 60, 130, 60, "CuTe DSL", "compiler")
    drawing.box(346, 36, 120, 44, "cubin")
    drawing.box(346, 96, 120, 44, "host function", "machine code")
    drawing.box(506, 96, 110, 44, "launch record", "JSON", fill="tint")
    drawing.box(656, 96, 90, 44, "proof", "byte by byte", fill="tint")
    drawing.arrow((126, 90), (166, 90))
    drawing.arrow((296, 78), (346, 58))
    drawing.arrow((296, 102), (346, 118))
    drawing.arrow((466, 118), (506, 118))
    drawing.arrow((616, 118), (656, 118))
    drawing.box(246, 172, 500, 44, "store", "key -> entry -> cubin; names; signatures", fill="tint")
    drawing.arrow((486, 58), (486, 172))
    drawing.arrow((466, 58), (486, 58))
    drawing.arrow((701, 140), (701, 172))
    drawing.zone(1, 236, 758, 92, "Launch: a GPU, no compiler")
    runs = ((246, "load", "checks the bytes"), (416, "bind", "checks arguments"), (586, "launch", "one driver call"))
    for x, *lines in runs:
        drawing.box(x, 268, 140, 48, *lines)
    drawing.arrow((316, 216), (316, 268))
    drawing.arrow((386, 292), (416, 292))
    drawing.arrow((556, 292), (586, 292))
    drawing.text(16, 282, "Tensors of PyTorch, JAX, CuPy", "muted", font_size=12)
    drawing.text(16, 300, "and others, or C pointers", "muted", font_size=12)
    return drawing


def layer(theme: str) -> Drawing:
    """The launches of a layer, and what is kept between the passes."""
    drawing = Drawing(760, 560, "The launches of a mixture-of-experts layer, forward and backward", theme)
    drawing.zone(1, 1, 330, 558, "Forward")
    drawing.zone(409, 1, 350, 558, "Backward")
    steps = [
        (60, ("router", "logits [T, X]")), (136, ("router-topk", "indices, weights [T, K]")),
        (212, ("index", "offsets, token, inverse")), (288, ("fc1", "z [M, N], a [M, I]")),
        (364, ("fc2", "o [M, H]")), (440, ("unpermute", "sums a token's rows")),
    ]  # fmt: skip
    drawing.text(100, 46, "x [T, H]", "muted", font_size=12)
    for y, lines in steps:
        drawing.box(90, y, 170, 48, *lines, fill="tint" if lines[0].startswith("fc") else "plain")
    for (above, _), (below, _) in pairwise(steps):
        drawing.arrow((175, above + 48), (175, below))
    drawing.arrow((90, 42), (40, 42), (40, 312), (90, 312))
    drawing.text(46, 330, "rows", "muted", font_size=11)
    drawing.text(46, 343, "by index", "muted", font_size=11)
    drawing.arrow((175, 488), (175, 524))
    drawing.text(175, 544, "y [T, H]", "muted", "middle", font_size=12)
    for y, name in ((84, "logits"), (160, "choices"), (236, "index"), (312, "z")):
        drawing.arrow((260, y), (409, y), dashed=True)
        drawing.text(370, y - 6, name, "muted", "middle", font_size=11)
    drawing.text(370, 342, "dashed: kept", "muted", "middle", font_size=11)
    drawing.text(515, 46, "dy [T, H]", "muted", "middle", font_size=12)
    drawing.arrow((515, 52), (515, 72))
    drawing.box(430, 72, 170, 48, "fc2-dgrad", "dz [M, N], a, dprob", fill="tint")
    drawing.box(430, 168, 170, 48, "fc1-dgrad", "drows [M, H]", fill="tint")
    drawing.box(622, 72, 130, 48, "weights-bwd")
    drawing.box(622, 168, 130, 48, "router-topk-bwd", "dlogits [T, X]")
    drawing.box(622, 264, 130, 48, "router-dgrad")
    drawing.box(430, 264, 170, 48, "unpermute-dx", "dx [T, H]")
    drawing.box(430, 376, 170, 48, "fc2-wgrad", "dw2", fill="tint")
    drawing.box(430, 440, 170, 48, "fc1-wgrad", "dw1", fill="tint")
    drawing.box(622, 440, 130, 48, "router-wgrad", "drouter")
    drawing.arrow((600, 96), (622, 96))
    drawing.arrow((687, 120), (687, 168))
    drawing.arrow((687, 216), (687, 264))
    drawing.arrow((515, 120), (515, 168))
    drawing.arrow((515, 216), (515, 264))
    drawing.arrow((622, 288), (600, 288))
    drawing.arrow((515, 312), (515, 338))
    drawing.text(584, 358, "dx first, then the gradients of weights", "muted", "middle", font_size=11)
    return drawing


def experts(theme: str) -> Drawing:
    """Expert parallelism: a pass of a layer over two GPUs."""
    drawing = Drawing(760, 330, "Expert parallelism: a pass of a layer over two GPUs", theme)
    for y, rank in ((1, 0), (185, 1)):
        drawing.zone(1, y, 758, 130, f"GPU {rank}: rank {rank}")
        for x, width, lines in (
            (16, 100, ("router", "choices")), (156, 116, ("dispatch", "rows and choices")),
            (306, 110, ("index", "rows of experts")),
            (450, 122, ("fc1, fc2", "experts here")), (612, 130, ("combine", "y of tokens here")),
        ):  # fmt: skip
            fill = "tint" if lines[0] in ("dispatch", "combine") else "plain"
            drawing.box(x, y + 50, width, 52, *lines, fill=fill)
        for left, right in ((116, 156), (272, 306), (416, 450), (572, 612)):
            drawing.arrow((left, y + 76), (right, y + 76))
    for x in (214, 677):
        drawing.arrow((x - 12, 103), (x - 12, 235))
        drawing.arrow((x + 12, 235), (x + 12, 103))
    drawing.text(440, 163, "NVLink: IPC buffers, no NCCL, no host", "muted", "middle", font_size=12)
    return drawing


def losses(theme: str) -> Drawing:
    """The losses of a language model by backend, on a logarithmic axis."""
    data = json.loads((HERE / "results.json").read_text())["losses"]
    drawing = Drawing(760, 330, data["title"], theme)
    left, top, width, height, low, high = 46, 44, 560, 240, 0.5, 4.0
    drawing.text(0, 16, data["title"], font_size=15, font_weight=600)
    for tick in (0.5, 1.0, 2.0, 4.0):
        y = top + height * log(high / tick) / log(high / low)
        drawing.line([(left, y), (left + width, y)], "peer", 0.5)
        drawing.text(left - 8, y + 4, f"{tick:g}", "muted", "end", font_size=12)
    steps = data["window"] * len(data["curves"][0]["losses"])
    for tick in range(0, steps + 1, 500):
        drawing.text(left + width * tick / steps, top + height + 20, str(tick), "muted", "middle", font_size=12)
    drawing.text(left + width / 2, top + height + 40, "steps of 8192 bytes", "muted", "middle", font_size=12)
    for number, (curve, colour) in enumerate(zip(data["curves"], ("line", "accent", "text"), strict=True)):
        points = [
            (left + width * (index + 0.5) * data["window"] / steps,
             top + height * log(high / loss) / log(high / low))
            for index, loss in enumerate(curve["losses"])
        ]  # fmt: skip
        dash = "4 4" if number == 2 else ""
        drawing.line(points, colour, 3 if number == 0 else 1.5, dash)
        y = top + 10 + 38 * number
        drawing.line([(left + width + 14, y), (left + width + 38, y)], colour, 3 if number == 0 else 1.5, dash)
        drawing.text(left + width + 44, y + 4, curve["label"], font_size=12)
        drawing.text(left + width + 44, y + 20, f"held out: {curve['held_out']}", "muted", font_size=12)
    return drawing


def steps(theme: str) -> Drawing:
    """The passes of a training step by model, backend and flags."""
    data = json.loads((HERE / "results.json").read_text())["steps"]
    bars = sum(len(group["bars"]) for group in data["groups"])
    drawing = Drawing(760, 48 + 40 * len(data["groups"]) + 20 * bars, data["title"], theme)
    drawing.text(0, 16, data["title"], font_size=15, font_weight=600)
    drawing.text(0, 36, data["conditions"], "muted", font_size=12)
    y = 48
    for group in data["groups"]:
        drawing.text(0, y + 20, group["label"], font_weight=600)
        y += 30
        longest = max(float(bar["ms"]) for bar in group["bars"])
        for bar in group["bars"]:
            width = 490 * float(bar["ms"]) / longest
            drawing.text(0, y + 11, bar["label"])
            drawing.bar(180, y, width, 13, "accent" if bar["label"].startswith("fusekit") else "peer")
            drawing.text(186 + width, y + 11, f"{bar['ms']} ms", "muted", font_size=12)
            y += 20
        y += 10
    return drawing


FIGURES: dict[str, Callable[[str], Drawing]] = {
    "results": results, "pipeline": pipeline, "layer": layer, "experts": experts,
    "losses": losses, "steps": steps,
}  # fmt: skip


def files() -> Iterator[tuple[str, str]]:
    """Name and text of each file."""
    for name, figure in FIGURES.items():
        for theme in THEMES:
            yield f"{name}-{theme}.svg", str(figure(theme))


if __name__ == "__main__":
    for file, text in files():
        (HERE / file).write_text(text)
