"""The benchmark of dispatch and combine: the kernels that it asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.errors import DriverError
from fusekit.runtime import Devices, Driver
from fusekit.spec import parse_text
from tests.bench.rig import Rig
from tests.benchmarks.exchange import BLOCKS, COUNT, FEW, FILE, FP8, ROUNDS, WARPS, main, measure
from tests.runtime.fake import CUresult


def test_the_spec_has_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec"]) == 0
    specs = {spec.full_name: spec for spec in parse_text(capsys.readouterr().out, FILE)}
    wanted = {
        f"{FILE}/{op}-{blocks}@w{warps}" for op in ("dispatch", "combine") for blocks in BLOCKS for warps in WARPS
    }
    apart = {f"{FILE}/rows-{blocks}@w16": "rows" for blocks in FEW} | {f"{FILE}/choices-64@w16": "choices"}
    assert specs.keys() == wanted | apart.keys() | {f"{FILE}/{FP8}@w16"}
    assert specs[f"{FILE}/{FP8}@w16"].dtype == "e4m3"
    assert {name: specs[name].sends for name in apart} == apart
    with pytest.raises(SystemExit):
        main(["--blocks"])


def test_the_spec_needs_no_numpy() -> None:
    program = "import sys; sys.modules['numpy'] = None; from tests.benchmarks.exchange import main; main(['--spec'])"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, capture_output=True)


def test_a_measurement_gives_its_graphs_back() -> None:
    """Also one that fails. No rank is waited for before all have launched, nor between their graphs."""
    rig = Rig()
    library = SimpleNamespace(devices=Devices(Driver(rig)))
    of_rank: list[Any] = [SimpleNamespace(device=0, check=lambda: None) for _ in range(2)]
    ranks: list[Any] = [
        SimpleNamespace(library=library, ranks=each, stream=70 + rank, events=[(rank, 0), (rank, 1)])
        for rank, each in enumerate(of_rank)
    ]
    queued: list[int] = []

    def launch(stream: int) -> None:
        queued.append(stream)
        rig._spend(0.5)

    assert measure(ranks, [[launch], [launch]]) == pytest.approx(500)
    assert queued == [70, 71, *[70] * COUNT, *[71] * COUNT]
    launched = [call for call in rig.calls if call in ("cuGraphLaunch", "cuStreamSynchronize", "cuGraphInstantiate")]
    turn = ["cuGraphLaunch"] * 2 + ["cuStreamSynchronize"] * 2
    assert launched == ["cuStreamSynchronize"] * 2 + ["cuGraphInstantiate"] * 2 + turn * (ROUNDS + 1)
    assert not rig._graphs
    rig.fail["cuEventElapsedTime"] = CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(DriverError, match="cuEventElapsedTime"):
        measure(ranks, [[launch], [launch]])
    assert not rig._graphs
