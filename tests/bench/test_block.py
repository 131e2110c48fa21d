"""The GPU tests' block, on a stand-in GPU: its wiring is right, and what is wrong is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusekit.library import open_library
from tests.bench.rig import Rig
from tests.gpu.block import Block, random_inputs, wrong

TEXT = (Path(__file__).parents[1] / "gpu" / "block.toml").read_text()


@pytest.mark.parametrize("harmed", [None, "indices", "row_scale", "weights"])
def test_a_block(rig: Rig, tmp_path: Path, harmed: str | None) -> None:
    rig.publish(tmp_path, TEXT, "block")
    if harmed:

        def harm(name: str, arrays: dict[str, Any]) -> None:
            if harmed in arrays and name.startswith(("block/topk", "block/index", "block/permute")):
                arrays[harmed][-1 if harmed == "row_scale" else 0] = 1

        rig.harm = harm
    inputs = random_inputs(33, 64, 32, 3)
    block = Block(open_library(), inputs)
    block.poison()
    block(1)
    problems = wrong(block, inputs)
    assert (problems == []) is (harmed is None), problems
    block.close()
    assert not rig.memory
