"""`fusekit bench --html` and `--csv`, on a stand-in GPU, and of documents with every kind of line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import resource
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fusekit.bench import report
from fusekit.errors import UsageError
from fusekit_cli.main import main
from fusekit_cli.output import save
from tests.bench.rig import Rig
from tests.bench.test_gemms import KERNELS, MODEL
from tests.bench.test_tokens import ROUTER

NASTY = "<script>alert(1) & $x_1$"


@pytest.fixture
def model(rig: Rig, tmp_path: Path) -> Rig:
    rig.publish(tmp_path, MODEL, "small")
    rig.publish(tmp_path, ROUTER, "router")
    return rig


def line(what: str, **given: Any) -> dict[str, Any]:
    """A line of a GEMM, with peers as a machine with PyTorch has them."""
    absent = dict.fromkeys(("variant", "dense_share", "speedup", "agrees", "error"))
    times = {"ms": 2.0, "best_ms": 1.9, "rounds": 9, "tflops": 400.0, "gbs": 900.0, "peak_share": 0.4}
    return {"what": what} | absent | times | given


def document() -> dict[str, Any]:
    lines = [
        line("fusekit", variant="128x128", agrees={"fro": 1e-3, "ok": True}, speedup=2.0),
        line("fusekit", variant="128x256", ms=1.0, tflops=800.0, gbs=1800.0, agrees={"fro": None, "ok": False}),
        line("torch", ms=4.0, tflops=200.0, gbs=450.0),
        line("te", ms=None, best_ms=None, rounds=0, tflops=None, gbs=None, peak_share=None, error=NASTY),
        line("dense", tflops=700.0),
    ]
    kernel = {"name": f"model/{NASTY}", "problem": {"E": 2, "M": 64, "N": 8, "K": 4}, "lines": lines}
    step = {"step": "forward", "kernels": [], "lines": [line("fusekit"), line("torch", ms=3.0)]}
    got = {"model": NASTY, "kernels": [kernel], "steps": [step], "ok": True}
    shared = {"device": "NVIDIA H200", "arch": "sm_90a", "sms": 132, "groups": "uneven", "steady": False}
    return shared | {"models": [got], "tokens": [], "ok": True, "notes": [NASTY], "tuning": None}


def charts(page: str) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """By title, the name and the bars of each chart: label -> figure."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for part in page.split("<h3>")[1:]:
        title = unescape(part.partition("</h3>")[0])
        for figure in re.findall(r"<figure>(.*?)</figure>", part, re.DOTALL):
            tree = ElementTree.fromstring(f"<figure>{figure}</figure>")
            rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
            name = tree.findtext("figcaption") or ""
            found.setdefault(title.partition(":")[0], []).append((name, {label: value for label, _, value in rows}))
    return found


def roofline(page: str) -> str:
    """The text of the roofline, which is well-formed."""
    plot = page.partition('<div class="roofline">')[2].partition("</svg>")[0]
    return " ".join(ElementTree.fromstring(f"{plot}</svg>").itertext())


def test_both_files_of_a_benchmark(model: Rig, no_torch: None, tmp_path: Path, capsys: Any) -> None:
    html, table = tmp_path / "page.html", tmp_path / "table.csv"
    code = main(
        ["bench", "small", "router", "--all", "--seconds", "0.01", "--json", "--html", str(html), "--csv", str(table)]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    got = list(csv.DictReader(io.StringIO(table.read_text())))
    kernels = [each for each in got if each["model"] == "small" and each["variant"]]
    assert [each["kernel"] for each in kernels[::2]] == KERNELS
    lines = [line for kernel in json.loads(out)["models"][0]["kernels"] for line in kernel["lines"]]
    assert [float(each["ms"]) for each in kernels] == [line["ms"] for line in lines]
    assert [(each["kernel"], each["what"]) for each in got if each["T"]][-3:] == [
        ("topk", "fusekit"), ("topk", "fusekit"), ("topk", "copy"),
    ]  # fmt: skip
    assert {each["device"] for each in got} == {"FAKE H200"}
    page = html.read_text()
    assert len(page) < 400_000
    shown = charts(page)
    assert [name for name, _ in shown["TFLOP/s"]] == KERNELS
    assert all(name in roofline(page) for name in KERNELS)
    assert "The line is the data sheet" in page
    assert [name for name, _ in shown["ms a step"]] == ["forward", "backward"]
    assert shown["\u00b5s"][-1][0].startswith("topk T=")
    assert "up to 1980 MHz, driver for CUDA 13.0, 20" in page
    progress = [line for line in err.splitlines() if line.startswith(("1/", "9/"))]
    assert progress == ["1/9 small/fc1-fwd at 150 rows", "9/9 router/topk"]


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = report.to_html(document())
    loads = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            loads.extend([tag] if tag in ("script", "link", "img", "iframe", "object") else [])
            loads.extend(name for name, _ in attributes if name.startswith("on") or name == "style")
            named = [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
            loads.extend(value for value in named if value[:1] != "#")

    Links().feed(page)
    assert not loads
    assert "script-src" not in page
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "@import" not in page
    assert "url(" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert NASTY in roofline(page)
    assert report.to_html(document()) == page


def test_the_fastest_is_shown_next_to_its_peers() -> None:
    shown = charts(report.to_html(document()))
    assert shown["TFLOP/s"] == [(NASTY, {"fusekit WRONG": "800", "torch": "200", "dense": "700"})]
    assert shown["Speed-up"] == [(NASTY, {"torch": "2.00\u00d7"}), ("forward", {"torch": "1.50\u00d7"})]
    assert shown["ms a step"] == [("forward", {"fusekit": "2", "torch": "3"})]


def test_the_page_begins_with_the_speed_up() -> None:
    first = report.to_html(document())
    assert "<li><b>2.00\u00d7</b><span>as fast as torch, 1 kernel</span></li>" in first.partition("<h2>")[0]
    many = document()
    lines = [line("fusekit"), line("torch", ms=1.0)]
    many["models"][0]["kernels"].append({"name": "model/slow", "problem": {"E": 2, "M": 64}, "lines": lines})
    assert "<b>1.00\u00d7</b><span>as fast as torch, geometric mean of 2 kernels</span>" in report.to_html(many)
    assert charts(report.to_html(many))["Speed-up"][1] == ("slow", {"torch": "0.50\u00d7"})


def test_no_label_of_a_roofline_covers_another() -> None:
    many = document()
    kernel = many["models"][0]["kernels"][0]
    many["models"][0]["kernels"] = [kernel | {"name": f"model/kernel-{number}"} for number in range(60)]
    page = report.to_html(many)
    heights = [float(at) for at in re.findall(r'<text x="629" y="([\d.]+)">kernel-', page)]
    assert len(heights) == 60
    assert all(below - above >= 14.9 for above, below in itertools.pairwise(heights))


def test_the_table_has_every_line() -> None:
    got = report.rows(document())
    assert [(row["what"], row["variant"], row["ms"], row["agrees"]) for row in got] == [
        ("fusekit", "128x128", 2.0, 1e-3), ("fusekit", "128x256", 1.0, "WRONG"), ("torch", None, 4.0, None),
        ("te", None, None, None), ("dense", None, 2.0, None), ("fusekit", None, 2.0, None), ("torch", None, 3.0, None),
    ]  # fmt: skip
    assert got[3]["error"] == NASTY
    assert all(tuple(row) == report.COLUMNS for row in got)


def test_an_unknown_device_has_no_roof() -> None:
    unknown = document() | {"device": "a new GPU"}
    assert "The line is the data sheet" not in report.to_html(unknown)


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_what_cannot_be_written_is_said_before_anything_is_timed(
    model: Rig, no_torch: None, tmp_path: Path, capsys: Any, option: str
) -> None:
    assert main(["bench", "small", option, str(tmp_path / "absent" / "file")]) == 2
    assert f"there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err
    assert not model.launches


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link.csv").symlink_to(tmp_path / "mine")
    save("--csv", tmp_path / "link.csv", b"new")
    assert (tmp_path / "link.csv").read_bytes() == b"new"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a module that is imported first below the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(UsageError, match=r"--table: cannot write .*File too large"):
            save("--table", tmp_path / "mine", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "mine").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "link.csv"}
