"""The kernels of quantise: built, proved, nothing spilled; what their records say."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.abi import LaunchRecord, evaluate
from fusekit.compiler.build import execute, plan_build
from fusekit.errors import ToolchainError
from fusekit.kernels.quantise.tiles import AHEAD
from fusekit.spec import parse_file
from fusekit.store import Store
from tests.compiler import sass

SPECS = parse_file(Path(__file__).parents[1] / "gpu" / "quantise-matrix.toml")


CORE = ("blocks-turned", "blocks-gathered-turned", "mx-turned", "amax-rotated", "wide-blocks-turned")


@pytest.fixture(scope="module")
def built(tmp_path_factory, soak):
    """One kernel of each kind; all with --soak."""
    store = Store(tmp_path_factory.mktemp("store"))
    specs = [spec for spec in SPECS if soak or spec.kernel in CORE]
    report = execute(plan_build(specs, store), store)
    assert not report.failed
    return {spec.kernel: store.load(store.find_name(spec.full_name, spec.arch).key) for spec in specs}


def test_nothing_is_spilled_and_loads_run_ahead(built):
    for name, (entry, cubin) in built.items():
        assert entry.resources["spill_bytes"] == 0, name
        assert entry.proof["launches"] >= 64, name
        try:
            counted = sass.counts(sass.instructions(cubin, entry.launch["symbol"]))
        except ToolchainError as error:
            pytest.skip(str(error))
        assert counted["F2FP"] >= 8 or name.startswith("amax"), name
        assert bool(counted["LDGSTS"]) is not name.startswith(("rows", "amax", "wide")), name
        if name.startswith("wide"):
            order = "".join(
                instruction.base[0] for instruction in sass.instructions(cubin, entry.launch["symbol"])
                if instruction.base in ("LDG", "STS")
            )  # fmt: skip
            assert "L" * AHEAD + "S" * AHEAD in order, name
        if counted["LDGSTS"]:  # of several tiles, the first one's copies are a group of their own: else nobody waits
            assert counted["LDGDEPBAR"] == (2 if "gathered" in name else 1), name


def test_records(built):
    record = LaunchRecord.from_json(dict(built["blocks-turned"][0].launch))
    assert record.schema == 2
    assert [tensor.name for tensor in record.tensors] == ["x", "offsets", "x_q", "x_s", "x_t", "x_ts"]
    dims = {"M": 1000, "K": 2880, "E": 10, "P": 2304}
    assert evaluate(record.constraints[0].expr, dims) == 0
    assert evaluate(record.constraints[0].expr, dims | {"P": 2176}) == 94
    # A tile for every 128 rows, and one more for each group; 23 side by side, or 8 strips of three.
    assert evaluate(record.grid[0], dims) == (8 + 10) * 23
    gathered = LaunchRecord.from_json(dict(built["blocks-gathered-turned"][0].launch))
    assert evaluate(gathered.grid[0], dims) == (8 + 10) * 8
