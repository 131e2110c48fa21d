"""The first launch of a process: the programs that are measured, and what is made of their times."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.config import Config
from fusekit.errors import NotBuiltError, UsageError
from fusekit.store import Store
from tests.benchmarks import first_launch
from tests.benchmarks.first_launch import CASES, Case, lines, main, measure, ours, quack, run

from .foreign import NAME, install, record

CASE = Case(NAME, {"M": 40, "K": 24}, "import math", "", "y = 1")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    x, fp8, *rest = record().tensors
    compact = (x, replace(fp8, strides=("fp8.stride0", 1), stride_divisor=8), *rest)
    fake = install(tmp_path, monkeypatch, record(arguments=compact, parameters=record().parameters[:4]))
    return Store.open(Config(store=tmp_path)), fake


def test_the_program_launches_and_tells_its_times(store: Any) -> None:
    opened, fake = store
    out = io.StringIO()
    with redirect_stdout(out):
        exec(ours(CASE, opened), {})
    figures = json.loads(out.getvalue())
    assert [launched.grid for launched in fake.launches] == [(40, 1, 1), (1, 1, 1)]
    assert sorted(figures) == sorted([*first_launch.PARTS, "modules"])
    assert min(figures[part] for part in first_launch.PARTS) > 0
    assert "numpy" in figures["modules"]  # this process has it


def test_what_is_not_built_says_so(store: Any) -> None:
    with pytest.raises(NotBuiltError):
        ours(CASES[0], store[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quacks_programs_are_python(case: Case) -> None:
    compile(quack(case, Path("/nowhere")), case.name, "exec")
    assert "y = " in case.call or "y" in case.arrays


def test_a_process_is_timed_until_its_answer() -> None:
    answer = json.dumps({"imports": 1.0, "arrays": 2.0, "kernel": 4.0, "modules": []})
    got = run(f"import time; print('noise'); print({answer!r}, flush=True); time.sleep(0.5)")
    assert got["inside"] == 7.0 and 0 < got["process"] < 60
    with pytest.raises(UsageError, match=r"ended with 1: (?s:.*)no good"):
        run("raise SystemExit('no good')")


def test_medians_and_quotients(store: Any) -> None:
    asked: list[tuple[str, str]] = []

    def runner(program: str) -> dict[str, Any]:
        is_fusekit = "import fusekit" in program
        asked.append(("fusekit" if is_fusekit else "quack", program))
        cold = not is_fusekit and [each[1] for each in asked].count(asked[-1][1]) == 1
        unit = 1.0 if is_fusekit else 40.0 if cold else 12.0
        return {"process": unit, "inside": unit / 2, "imports": 0.1, "arrays": 0.1, "kernel": unit / 4, "modules": []}

    document = measure(CASE, store[0], rounds=3, cold=2, peer=True, runner=runner)
    assert document["seconds"]["cold"]["process"] == 40.0 and document["seconds"]["cold"]["rounds"] == 2
    assert document["of fusekit"] == {
        "cold": {"process": 40.0, "inside": 40.0, "kernel": 40.0},
        "cache": {"process": 12.0, "inside": 12.0, "kernel": 12.0},
    }
    theirs = [program for who, program in asked if who == "quack"]
    assert len(set(theirs)) == 3 and theirs.count(theirs[0]) == 4  # filled once, then read three times
    assert [line.split(" | ")[1] for line in lines(document)] == ["fusekit", "cold", "cache"]
    alone = measure(CASE, store[0], rounds=1, cold=2, peer=False, runner=runner)
    assert list(alone["seconds"]) == ["fusekit"] and alone["of fusekit"] == {}


def test_the_module_prints_a_document(store: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    figures = {"process": 1.0, "inside": 0.5, "imports": 0.1, "arrays": 0.1, "kernel": 0.3, "modules": []}
    monkeypatch.setattr(first_launch, "CASES", (CASE,))
    monkeypatch.setattr(first_launch.measure, "__kwdefaults__", {"runner": lambda program: figures})
    monkeypatch.setattr(first_launch.importlib.util, "find_spec", lambda name: None)
    assert main(["--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kernels"][0]["name"] == NAME and "| through |" in err
    with pytest.raises(SystemExit):
        main(["quack/nothing"])
    monkeypatch.setattr(first_launch, "CASES", (Case("quack/absent@base", {}, "", "", ""), CASE))
    assert main([]) == 1
    absent, there = json.loads(capsys.readouterr().out)["kernels"]
    assert "is not in the store" in absent["error"] and there["name"] == NAME
