"""`fusekit run` over a stand-in for the driver whose kernel is the reference itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import TensorArgument
from fusekit.bench import compare
from fusekit.compiler.gemm import signature
from fusekit.config import Config
from fusekit.library import open_library
from fusekit.spec import parse_text
from fusekit.store import Store, key_of
from fusekit_cli.main import main
from tests.cli.standin import NAME, Harm, past_the_end, pointers, run
from tests.runtime.samples import CUBIN


@pytest.mark.usefixtures("compared")
def test_a_right_result_is_ok(machine: Any, capsys: Any) -> None:
    machine()
    code, document = run(capsys, "made/fc1", "--check", "--time", "--cluster-margin", "2")
    assert code == 0
    assert document["name"] == NAME
    assert document["ok"] is True
    assert 0 < document["error"]["fro"] < 2.5e-3
    assert document["error"]["max_scaled"] <= 1
    assert document["problem"] == {"E": 3, "M": 150, "N": 256, "K": 64}
    assert document["ms"] == 2.0
    assert document["tflops"] == pytest.approx(2 * 145 * 256 * 64 / 2e-3 * 1e-12)
    assert document["host_us"] > 0
    assert 0 < document["peak_share"] < 1


def wrong_row(outputs: dict[str, Any]) -> None:
    last = outputs["offsets"][0] - 1
    outputs["y"][last, 100:] = outputs["y"][last - 1, 100:]


def spare_row(outputs: dict[str, Any]) -> None:
    outputs["preactivation"][-1, 3] = 0


def left_out(outputs: dict[str, Any]) -> None:
    outputs["y"][7, 5] = 0xFFFF


def before_the_start(outputs: dict[str, Any]) -> None:
    ctypes.memset(outputs["y"].ctypes.data - 2, 0, 2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (wrong_row, "y: WRONG"),
        (spare_row, "preactivation: row 149, which no group owns, was written to"),
        (left_out, "y: 1 elements were not written, the first at 7, 5"),
        (past_the_end, "y: the 4096 bytes after the buffer were written to"),
        (before_the_start, "y: the 4096 bytes before the buffer were written to"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_result_is_noticed(
    machine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, harm: Harm, message: str, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 0)
    machine(harm)
    code, document = run(capsys, NAME, "--check")
    assert code == 1
    assert document["ok"] is False
    assert any(message in problem for problem in document["problems"])
    assert main(["run", NAME, "--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


CODED = """
schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
quant = {{ out = "fp8-block", transpose = true, keep = {keep} }}
activation = {{ kind = "swiglu" }}
tile = [128, 256]
problem = {{ E = 3, M = 300, N = 416, K = 64 }}
"""
CODED_SHAPES = {
    "x": (300, 64), "w": (3, 416, 64), "y": (300, 208), "y_q": (300, 208), "y_s": (2, 300), "y_t": (208, 768),
    "y_ts": (6, 208), "offsets": (3,),
}  # fmt: skip


def wrong_code(outputs: dict[str, Any]) -> None:
    outputs["y_t"][200, 3] ^= 1


def spare_code(outputs: dict[str, Any]) -> None:
    outputs["y_q"][-1, 3] = 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("harm", "messages"),
    [
        (lambda outputs: None, ()),
        (wrong_code, ("y_t: 1 elements of tokens 0 to ", "y_t: ")),
        (spare_code, ("y_q: 1 elements written, of no group's, the first at (299, 3)",) * 2),
    ],
)
def test_results_as_fp8_values(install: Any, capsys: Any, keep: bool, harm: Harm, messages: tuple[str, ...]) -> None:
    text = CODED.format(keep=str(keep).lower())
    (spec,) = parse_text(text, "made", "made.toml")
    kernel = signature(spec)
    tensors = tuple(argument for argument in kernel.arguments if isinstance(argument, TensorArgument))
    whole = pointers(tensors, *kernel.dims, skip_if_zero=("M",))
    install(text, whole)(harm, {name: CODED_SHAPES[name] for name in (tensor.name for tensor in tensors)})
    code, document = run(capsys, "made/fc1", "--check")
    if not messages:
        assert (code, document["ok"], document["problems"]) == (0, True, [])
    else:
        assert code == 1
        assert any(line.startswith(messages[0 if keep else 1]) for line in document["problems"])


def test_without_rows_nothing_is_launched_and_all_is_well(machine: Any, capsys: Any) -> None:
    fake = machine(rows=0)
    code, document = run(capsys, "made", "--check", "--rows", "0", "--time")
    assert code == 0
    assert document["problem"]["M"] == 0
    assert document["tflops"] is None
    assert not fake.launches


def test_text_for_people(machine: Any, capsys: Any) -> None:
    machine()
    assert main(["run", "made/*", "--check", "--time"]) == 0
    text = capsys.readouterr().out
    assert f"{NAME} (sm_90a) on FAKE H200, E=3 M=150 N=256 K=64: ok" in text
    assert "2 ms, " in text
    assert " us a launch" in text


def test_where_it_ran_is_noted(machine: Any, capsys: Any) -> None:
    machine()
    store = open_library().store
    (listed,) = store.names(NAME)
    assert store.ran(listed.record.key) == []
    assert run(capsys, "made/fc1", "--check")[0] == 0
    assert store.ran(listed.record.key) == ["FAKE H200"]


def test_device_memory_is_given_back(machine: Any, capsys: Any) -> None:
    fake = machine()
    run(capsys, "made/fc1", "--check", "--time")
    assert not fake.memory
    assert fake.loaded == 0


def test_what_cannot_run_says_why(machine: Any, capsys: Any) -> None:
    machine()
    assert main(["run", "made/fc1", "--rows", str(2**31)]) == 2
    assert "takes at most 2147483647; give fewer --rows" in capsys.readouterr().err
    assert main(["run", "made/other"]) == 3
    assert "fusekit build made.toml/other" in capsys.readouterr().err
    machine().devices = 0
    assert main(["run", "made/fc1"]) == 4
    assert "the driver sees no GPU" in capsys.readouterr().err
    machine().version = 11000
    assert main(["run", "made/fc1"]) == 4
    assert "CUDA 11.0" in capsys.readouterr().err
    machine().capability = (8, 0)
    assert main(["run", "made/fc1"]) == 4
    assert "expected a device of sm_90a, found device 0 (FAKE H200, sm_80)" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["lost a byte", "other bytes", "another cubin", "another entry"])
def test_a_damaged_store_is_never_launched_from(machine: Any, capsys: Any, tmp_path: Path, damage: str) -> None:
    fake, store = machine(), Store.open(Config(store=tmp_path))
    (named,) = store.names("made/*")
    entry = store.find_entry(named.record.key)
    assert entry is not None
    path = store.roots[0].blob_path(entry.cubin_sha256)
    if damage == "another entry":
        path = store.roots[0].entry_path(entry.key)
        fields = {"arch": "sm_100a"}
        other = replace(entry, key=key_of(fields), fields=fields, launch={**entry.launch, **fields})
        store.publish(other, CUBIN)
        data = store.roots[0].entry_path(other.key).read_bytes()
    else:
        whole = path.read_bytes()
        data = {"lost a byte": whole[:-1], "other bytes": whole[:-1] + b"!", "another cubin": whole * 2}[damage]
    path.chmod(0o644)
    path.write_bytes(data)
    assert main(["run", "made/fc1", "--check"]) == 1
    message = capsys.readouterr().err
    assert str(path) in message
    assert "build" in message
    assert not fake.launches
    assert fake.loaded == 0
