"""The figures of the pages: drawn from results.json, whose numbers are those of the tables of docs/measured.md."""

import json
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "docs" / "figures"
RESULTS = json.loads((HERE / "results.json").read_text())
FILES = dict(runpy.run_path(str(HERE / "draw.py"))["files"]())


def measured(section, row):
    """The cells of a row of a section's first table that has it, as they are on the page."""
    text = (HERE.parent / "measured.md").read_text()
    table = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    (line, *_) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("panel", RESULTS["pairs"], ids=lambda panel: panel["section"])
def test_times_and_memory_are_those_that_were_measured(panel):
    for row in panel["rows"]:
        cells = measured(panel["section"], row["row"])
        before, times, after = cells[:-3], cells[-3].removesuffix(" times as fast"), cells[-2:]
        assert (before[-2:], times, after) == (row["ms"], row["times"], row["gib"]), row["row"]
        assert float(row["ms"][1]) / float(row["ms"][0]) == pytest.approx(float(row["times"]), abs=0.01)


def test_the_cold_start_is_the_one_that_was_measured():
    cells = measured(RESULTS["cold"]["section"], RESULTS["cold"]["row"])
    assert [cell.partition(" ")[0] for cell in cells] == [bar["seconds"] for bar in RESULTS["cold"]["bars"]]


def test_steps_are_those_that_were_measured():
    for bar in (bar for group in RESULTS["steps"]["groups"] for bar in group["bars"]):
        assert measured(RESULTS["steps"]["section"], bar["row"])[-3] == bar["ms"], bar["row"]


def test_the_drawings_are_what_the_script_draws():
    assert {path.name for path in HERE.glob("*.svg")} == {*FILES, "exec.svg"}  # that one is recorded
    for name, text in FILES.items():
        assert (HERE / name).read_text() == text, f"{name}: run python docs/figures/draw.py"


@pytest.mark.parametrize("name", FILES)
def test_a_drawing_is_small_and_within_its_borders(name):
    root = ET.fromstring(FILES[name])
    assert len(FILES[name]) < 12_000
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        size = float(text.get("font-size", root.get("font-size")))
        width = 0.56 * size * len(text.text)  # of a common letter
        left = float(text.get("x")) - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert left >= -8, text.text
        assert left + width <= float(root.get("width")) + 8, text.text


def test_results_of_the_readme_are_in_the_section_that_they_link_to():
    readme, page = (HERE.parents[1] / "README.md").read_text(), (HERE.parent / "measured.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| \[[^]]+\]\(docs/measured\.md#([\w-]+)\) \|$", readme, re.MULTILINE)
    assert len(rows) >= 6
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    sections = {title.lower().replace(" ", "-"): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    for result, section in rows:
        numbers = re.findall(r"(?<![\w.])\d+\.\d+", result)
        assert numbers
        assert not [number for number in numbers if number not in sections[section]], result
