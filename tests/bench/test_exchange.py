"""The benchmark of dispatch and combine: the kernels that it asks for."""

from __future__ import annotations

import pytest

from fusekit.bench.exchange import BLOCKS, CODES, FEW, FILE, WARPS, main
from fusekit.spec import parse_text


def test_the_spec_has_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec"]) == 0
    specs = {spec.full_name: spec for spec in parse_text(capsys.readouterr().out, FILE)}
    wanted = {
        f"{FILE}/{op}-{blocks}@w{warps}" for op in ("dispatch", "combine") for blocks in BLOCKS for warps in WARPS
    }
    apart = {f"{FILE}/rows-{blocks}@w16": "rows" for blocks in FEW} | {f"{FILE}/choices-64@w16": "choices"}
    assert specs.keys() == wanted | apart.keys() | {f"{FILE}/{CODES}@w16"}
    assert specs[f"{FILE}/{CODES}@w16"].dtype == "e4m3"
    assert {name: specs[name].sends for name in apart} == apart
    with pytest.raises(SystemExit):
        main(["--blocks"])
