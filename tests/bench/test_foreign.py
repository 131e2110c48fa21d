"""Foreign kernels on random inputs: `fusekit run`, the host's time of a launch."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.abi import Dim, LaunchEvent, ScalarArgument, TensorArgument
from fusekit.bench import foreign
from fusekit_cli.main import main
from tests.benchmarks import host

from .foreign import NAME, install, record


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(tmp_path, monkeypatch)


def run(capsys: Any, *arguments: str) -> tuple[int, Any]:
    code = main(["run", NAME, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_runs_on_what_the_record_says(fake: Any, capsys: Any) -> None:
    seen: list[Any] = []

    def look(launched: Any) -> None:
        if launched.function[0] == "kernel" and not seen:
            x, _, fp8, index = (struct.unpack("<Q", each)[0] for each in launched.parameters[:4])
            seen.append(np.frombuffer(ctypes.string_at(x, 2 * 40 * 24), np.uint16))
            seen.append(np.frombuffer(ctypes.string_at(fp8, 48 * 24), np.uint8).reshape(24, 48)[:, :40])
            seen.append(np.frombuffer(ctypes.string_at(index, 4 * 24), np.int32))
            seen.append(struct.unpack("<f", launched.parameters[4])[0])

    fake.on_launch = look
    code, document = run(capsys, "--set", "M=40", "--set", "K=24", "--set", "scale=0.5", "--time", "--check")
    assert (code, document["ok"], document["error"], document["tflops"]) == (0, True, None, None)
    assert document["problem"] == {"M": 40, "K": 24}
    assert document["gbs"] > 0 and document["host_us"] > 0 and document["ms"] > 0
    assert "no reference" in document["notes"][0]
    x, fp8, index, scale = seen
    assert len(np.unique(x)) > 100 and (x & 0x7FFF).min() > 0
    assert fp8.min() > 0 and not np.isin(fp8, (0x7F, 0xFF)).any()
    assert not index.any()
    assert scale == 0.5
    assert [launched.grid for launched in fake.launches[:2]] == [(40, 1, 1), (1, 1, 1)]
    assert not fake.memory and fake.loaded == 0


def test_events_that_a_launch_records_are_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    handles = tuple(ScalarArgument(name, "i64", None, 1, 2**63 - 1) for name in ("ready", "begun"))
    events = LaunchEvent("programmatic", "ready"), LaunchEvent("launch_completion", "begun")
    fake = install(tmp_path, monkeypatch, record(arguments=(*record().arguments, *handles), events=events))
    left: list[int] = []
    create, destroy = fake.cuEventCreate, fake.cuEventDestroy
    monkeypatch.setattr(fake, "cuEventCreate", lambda flags: (left.append((done := create(flags))[1]), done)[1])
    monkeypatch.setattr(fake, "cuEventDestroy", lambda event: (left.remove(event), destroy(event))[1])
    assert run(capsys)[0] == 0
    kinds = ("PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT")
    ready, begun = (fake.launches[0].attributes[f"CU_LAUNCH_ATTRIBUTE_{kind}"] for kind in kinds)
    assert ready[1:] == begun[1:] == (0, 0) and ready[0] != begun[0] > 1
    assert not left


def test_sizes_that_nobody_gave(fake: Any, capsys: Any) -> None:
    assert run(capsys)[1]["problem"] == {"M": 1024, "K": 1024}
    assert run(capsys, "--rows", "3")[1]["problem"] == {"M": 3, "K": 1024}
    dims = tuple(Dim(name, 8) for name in "ABCD")
    wide = record(
        dims=dims, arguments=(*(TensorArgument(f"t{i}", "input", "f32", tuple("ABCD"), (1,) * 4) for i in range(2)),),
        parameters=(), then=(), scratch=0, grid=(1, 1, 1),
    )  # fmt: skip
    got = foreign.extents(wide, {"A": 16})
    assert got["A"] == 16 and got["B"] == got["C"] == got["D"]
    assert 2 * 4 * got["A"] * got["B"] ** 3 <= foreign.MOST_BYTES < 2 * 4 * got["A"] * (2 * got["B"]) ** 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("K=12", "K = 12; it must be a multiple of 8 from 8 to 4096"),
        ("K=8192", "from 8 to 4096"),
        ("N=8", "has no such dim or scalar; it has M, K, scale"),
        ("K", "it must be NAME=VALUE"),
    ],
)
def test_sizes_that_do_not_fit(fake: Any, capsys: Any, given: str, says: str) -> None:
    assert main(["run", NAME, "--set", given]) == 2
    assert says in capsys.readouterr().err
    assert not fake.launches


def test_a_write_out_of_bounds_is_noticed(fake: Any, capsys: Any) -> None:
    def harm(launched: Any) -> None:
        if launched.function[0] == "second":
            (y,) = struct.unpack("<Q", launched.parameters[1])
            ctypes.memset(y + 4 * 40, 0, 4)

    fake.on_launch = harm
    assert run(capsys, "--rows", "40")[0] == 0
    code, document = run(capsys, "--rows", "40", "--check")
    assert code == 1
    assert document["problems"] == ["y: the 4096 bytes after the buffer were written to"]
    assert main(["run", NAME, "--rows", "40", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "not compared: a foreign kernel has no reference" in shown


REFERENCES = """
import numpy as np

def right(x, fp8, index, scale):
    assert x.shape == fp8.shape == (40, 24) and index.shape == (24,) and not index.any()
    assert x.dtype == np.float64 and fp8.dtype == np.uint8 and abs(x).min() > 0
    return scale * np.arange(40)

def named(**arguments):
    return {"y": right(**arguments)}

def wrong(x, fp8, index, scale):
    return scale * np.arange(40) + (np.arange(40) == 7)

def other(x, scale):
    return x

def shape(x, fp8, index, scale):
    return x

def fails(**arguments):
    return arguments["bias"]

def nothing(**arguments):
    return {}

number = 3
"""


@pytest.fixture
def references(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `own_references` in the current folder, over a kernel that computes scale times the row."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_references.py").write_text(REFERENCES)
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.delitem(sys.modules, "own_references", raising=False)
    factor = [0.0]

    def compute(launched: Any) -> None:
        if launched.function[0] == "kernel":
            factor[:] = struct.unpack("<f", launched.parameters[4])
        else:
            (y,) = struct.unpack("<Q", launched.parameters[1])
            value = (factor[0] * np.arange(40)).astype(np.float32)
            ctypes.memmove(y, value.ctypes.data, value.nbytes)

    fake.on_launch = compute
    return fake


SIZES = ("--set", "M=40", "--set", "K=24", "--set", "scale=0.5", "--check", "--reference")


@pytest.mark.parametrize(("name", "ok"), [("right", True), ("named", True), ("wrong", False)])
def test_a_reference_of_the_callers(references: Any, capsys: Any, name: str, ok: bool) -> None:
    code, document = run(capsys, *SIZES, f"own_references:{name}")
    assert (code, document["ok"], document["notes"]) == (0 if ok else 1, ok, [])
    assert (document["error"]["fro"] < 1e-6) == ok


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("own_references", "it must be MODULE:FUNCTION, such as"),
        ("absent_references:f", "cannot be imported: ModuleNotFoundError"),
        ("own_references:f", "cannot be imported: AttributeError"),
        ("own_references:number", "is no function"),
        ("own_references:other", "it must take"),
        ("own_references:shape", "y: the reference gives the shape (40, 24); it must be (40,)"),
        ("own_references:fails", "own_references.py:22: KeyError: 'bias'"),
        ("own_references:nothing", "it must give every output"),
    ],
)
def test_a_reference_that_cannot_be_used(references: Any, capsys: Any, text: str, says: str) -> None:
    assert main(["run", NAME, *SIZES, text]) == 2
    assert says in capsys.readouterr().err
    assert not references.memory


def test_a_reference_is_for_a_check(references: Any, capsys: Any) -> None:
    assert main(["run", NAME, "--reference", "own_references:right"]) == 2
    assert "add --check" in capsys.readouterr().err


def test_layouts() -> None:
    open_rows = TensorArgument("b", "input", "bf16", ("L", "N", "K"), ("b.stride0", 1, "b.stride2"), 8)
    assert foreign.layout(open_rows, {"L": 2, "N": 5, "K": 3}) == ((2, 5, 3), (24, 1, 8))
    fixed = TensorArgument("b", "input", "bf16", ("N", "K"), ("K", 1))
    assert foreign.layout(fixed, {"N": 5, "K": 3}) == ((5, 3), (3, 1))


def test_the_host_time_of_two_launches(fake: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROUNDS", 3)
    monkeypatch.setattr(host, "WARM_UP", 1)
    monkeypatch.setattr(host.Rotation, "COUNT", 4 * host.ROUND + 1)
    counts: dict[int, int] = {}
    fake.on_launch = lambda launched: counts.update({launched.stream: counts.get(launched.stream, 0) + 1})
    assert host.main([NAME]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["launches"] == 2
    assert document["of bare"]["bare cuLaunchKernelEx"] == 1.0
    # Six ways, of which one is the default stream's; as many driver calls for each, the bare one's too.
    assert sorted(counts.values()) == [2 * 4 * host.ROUND, 5 * 2 * 4 * host.ROUND]
    assert not fake.memory


def test_the_reference_of_the_example_is_that_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root / "examples" / "cute")
    reference = foreign.load_reference("expected:silu_add", ("y",))
    x, residual = np.array([0.0, 2.0, -4.0]), np.ones(3)
    wanted = reference({}, {"x": x, "residual": residual, "scale": 0.5})
    assert wanted["y"] == pytest.approx([1.0, 1 / (1 + np.exp(-1.0)) + 1, -2 / (1 + np.exp(2.0)) + 1])
    snippet = (root / "examples" / "cute" / "expected.py").read_text().partition("import numpy as np\n")[2].strip()
    assert snippet in (root / "docs" / "your-kernel.md").read_text()
