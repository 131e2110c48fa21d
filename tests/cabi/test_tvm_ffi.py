"""A library of TVM-FFI functions, called from PyTorch, JAX, C++ and Rust: over a stand-in driver, Python's launches."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.cabi import Exported, generate_tvm_ffi
from fusekit.errors import UsageError
from fusekit.spec import find
from fusekit_cli.export_tvm_ffi import FLAGS, compiled
from tests.layers.samples import library
from tests.layers.test_layer import TYPES
from tests.records import read_record
from tests.runtime.samples import Torchlike

from .launcher import CUBIN, WARNINGS, complete
from .layers import exported
from .test_layer_ranks import Both, given_to_c

libinfo = pytest.importorskip("tvm_ffi.libinfo")
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
NOWHERE = 4096  # where a tensor of PyTorch without elements counts as given
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def run(command: list[Any], given: str = "", **environment: Any) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, env=settings, timeout=300
    )  # fmt: skip


def built(*command: Any) -> None:
    done = run(list(command))
    assert done.returncode == 0, done.stderr


class Library:
    """The exported library, the layer in it, a stand-in for libcuda.so.1, and what that was handed."""

    def __init__(self, folder: Path, opened: Any, fake: Any, layer: Any, more: Sequence[Exported] = ()) -> None:
        self.folder, self.runtime = folder, Path(libinfo.find_libtvm_ffi()).parent
        self.headers = [f"-isystem{path}" for path in libinfo.include_paths()]
        self.fake, self.layer = fake, layer
        of_layer, kernels = exported(opened, layer)
        self.text, self.functions = generate_tvm_ffi([*kernels, *more], [of_layer], [each.name for each in more])
        self.file = folder / "libmoe.so"
        self.file.write_bytes(compiled(self.text))
        launches = [step for kernel in (*kernels, *more) for step in kernel.record.launches]
        rows = (
            " ".join([step.symbol, *(f"{each.offset} {each.size}" for each in sorted(step.parameters, key=_offset))])
            for step in launches
        )
        (folder / "kernels.txt").write_text("\n".join(rows))
        (folder / "driver").mkdir()
        built("gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", HERE / "stand_in.c", "-o",
              folder / "driver" / "libcuda.so.1")  # fmt: skip
        self.shim = folder / "on_cuda.so"
        built("gcc", "-O1", "-shared", "-fPIC", *self.headers, HERE / "on_cuda.c", f"-L{self.runtime}", "-ltvm_ffi",
              "-o", self.shim)  # fmt: skip

    def run(self, *command: Any, given: str = "") -> tuple[str, list[list[str]]]:
        """What a program printed, and the launches and allocations that the driver was asked for. given: its input."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        done = run(
            [*command], given, LD_LIBRARY_PATH=f"{self.folder / 'driver'}:{self.folder}:{self.runtime}",
            STAND_IN_LOG=log, STAND_IN_KERNELS=self.folder / "kernels.txt", JAX_PLATFORMS="cpu",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, [line.split() for line in log.read_text().splitlines()]

    def expected(
        self, which: str, tokens: int, addresses: dict[str, int], stream: int, padded: int = 0, **settings: Any
    ) -> list[list[str]]:
        """The launches of Python on this memory. padded: the stride of the rows of y."""
        dims, layer = self.layer.dims(tokens), self.layer
        buffers = layer.inputs(which) | layer.outputs(which)
        given = {
            name: Torchlike(each.extents(dims), TYPES[each.dtype], addresses[name])
            for name, each in buffers.items()
            if name in addresses
        }
        if padded:
            given["y"] = replace(given["y"], strides=(padded, 1))
        for name in ("kept", "scratch"):
            if which != "inference" or name == "scratch":
                given[name] = Torchlike((1 << 40,), "torch.uint8", addresses[name])
        self.fake.launches.clear()
        (layer.bind_backward if which == "backward" else layer.bind_forward)(**given, **settings)(stream)
        return logged(self.fake)


def logged(fake: Any) -> list[list[str]]:
    """Launches as the stand-in writes them."""
    return [
        [each.function[0], *map(str, each.grid), str(each.stream), b"".join(each.parameters).hex()]
        for each in fake.launches
    ]


def _offset(parameter: Any) -> Any:
    return parameter.offset


@pytest.fixture(scope="module")
def exported_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tvm_ffi")
    opened, fake = library(folder / "store", next(spec.layer for spec in find(["layer"]) if "." in spec.name))
    spec = find(["quickstart/moe-fc1"])[0]
    fc1 = Exported(spec.full_name, complete(read_record(spec)), CUBIN, spec.defaults())
    return Library(folder, opened, fake, opened.layer("layer/moe"), [fc1])


def test_the_source_has_no_warnings(exported_library, tmp_path):
    (tmp_path / "moe.c").write_text(exported_library.text)
    command = ["gcc", *FLAGS[:1], *WARNINGS, "-Wno-unused-function", "-fsyntax-only", *exported_library.headers]
    built(*command, tmp_path / "moe.c")


def test_pytorch_calls_layers_and_kernels(exported_library):
    pytest.importorskip("torch")
    program = HERE / "call_tvm_ffi.py"
    out, log = exported_library.run(sys.executable, program, "torch", exported_library.file, exported_library.shim)
    result = json.loads(out)
    at = result["addresses"]
    forward = exported_library.expected("forward", 100, at, 77)
    launches = [line for line in log if line[0] != "allocate"]
    want = [
        *forward, *forward,
        *exported_library.expected("forward", 100, at | {"y": at["other"]}, 77),
        *exported_library.expected("forward", 100, at | {"y": at["wide"]}, 77, padded=576),
        *exported_library.expected("inference", 100, at, 77, cluster_margin=5),
        *exported_library.expected(
            "backward", 100, {name: where for name, where in at.items() if name != "dx"} | {"scratch": at["more"]}, 77,
            in_place=True,
        ),
    ]  # fmt: skip
    assert launches[:-2] == want
    (fc1, scaled) = launches[-2:]
    assert fc1[:5] == scaled[:5] == ["kernel", "132", "1", "1", "77"] and fc1[5] != scaled[5]  # another scalar
    texts = [
        ("ValueError", "layer/moe: kept has 0 bytes; the pass needs"),
        ("ValueError", "layer/moe: scratch has"),
        ("ValueError", "layer/moe: the forward pass needs router, too; it is NULL"),
        ("ValueError", "layer_moe_forward: x has DLPack's dtype (2, 32, 1); it must be bf16, (4, 16, 1)"),
        ("ValueError", "layer/moe: router has 256 at dim 1; it must have 512 there"),
        ("ValueError", "layer/moe: kept begins at"),
        ("ValueError", "layer_moe_forward: argument 5 is no tensor, number or None"),
        ("ValueError", "layer/moe: y has 512 at dim 0; it must have 100 there"),
        ("ValueError", "layer_moe_forward: 9 arguments; it takes at most 8"),
        ("ValueError", "cluster_margin is 500; it must be 0 to 131"),
        ("MemoryError", "aten::empty"),  # PyTorch without CUDA is the environment's allocator
        ("ValueError", "layer_moe_inference: no tensor is given; it takes those of a CUDA device"),
        ("ValueError", "layer_moe_kept_bytes takes one argument, the number of tokens from 0 to 2147483647"),
        ("ValueError", "quickstart_moe_fc1: offsets is missing; it is argument 3, a tensor of rank 1"),
        ("ValueError", "quickstart/moe-fc1"),
        ("ValueError", "quickstart_moe_fc1: act_alpha is argument 4; it must be a number, or None"),
    ]
    for got, (kind, text) in zip(result["refused"], texts, strict=True):
        assert got is not None and text in got[1], (got, text)
        assert got[0] == kind, got


def test_jax_calls_a_layer(exported_library):
    if importlib.util.find_spec("jax_tvm_ffi") is None:
        pytest.skip("jax-tvm-ffi is not installed")
    program = HERE / "call_tvm_ffi.py"
    out, log = exported_library.run(sys.executable, program, "jax", exported_library.file, exported_library.shim)
    at = json.loads(out)["addresses"]
    assert [line for line in log if line[0] != "allocate"] == exported_library.expected("inference", 100, at, 0)


def of_example(exported_library: Library, log: list[list[str]]) -> None:
    """An example allocates the tensors in their order, then scratch memory."""
    allocated = [int(line[1]) for line in log if line[0] == "allocate"]
    names = dict(zip(("x", "router", "w1", "w2", "y", "scratch"), allocated, strict=True))
    want = exported_library.expected("inference", 1000, names, 0)
    assert [line for line in log if line[0] != "allocate"] == want


def test_cpp_calls_a_layer_with_scratch_memory_of_the_environment(exported_library):
    program = exported_library.folder / "of_cpp"
    built("g++", "-std=c++17", "-Wall", "-Werror", *exported_library.headers, EXAMPLES / "c" / "layer_tvm_ffi.cpp",
          f"-L{exported_library.runtime}", "-ltvm_ffi", "-ldl", "-o", program)  # fmt: skip
    of_example(exported_library, exported_library.run(program, exported_library.file)[1])


def test_rust_calls_a_layer(exported_library):
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    program = exported_library.folder / "of_rust"
    built("rustc", "--edition", "2021", "-L", exported_library.folder, "-L", exported_library.runtime, "-o", program,
          EXAMPLES / "rust" / "layer_tvm_ffi.rs")  # fmt: skip
    of_example(exported_library, exported_library.run(program)[1])


def test_a_layer_over_ranks_takes_them_as_words_of_the_host(tmp_path):
    pytest.importorskip("torch")
    both = Both(tmp_path, "choices-overlap")
    ranked = both.open(300, 400)
    exported_library = Library(tmp_path, both.library, both.fake, ranked[0])
    calls, windows = [], [ranked[0].sizes().windows[name] for name in both.record.windows]
    for number, (layer, which) in enumerate((layer, which) for layer in ranked for which in ("forward", "backward")):
        c = given_to_c(layer)
        words = [c.rank, c.timeout, c.capacity, c.rows, c.checked.data, c.side_stream, *c.events]
        words += [word for each in c.windows[: len(windows)] for word in (each.bytes, *each.addresses[: both.ranks])]
        buffers, dims = layer.inputs(which) | layer.outputs(which), layer.dims(tokens := 10 * number)
        shapes = {name: (each.extents(dims), TYPES[each.dtype]) for name, each in buffers.items()}
        calls.append({"which": which, "tokens": tokens, "ranks": words, "tensors": shapes})
    program = HERE / "call_tvm_ffi.py"
    out, log = exported_library.run(
        sys.executable, program, "ranks", exported_library.file, exported_library.shim, given=json.dumps(calls)
    )
    results, want = json.loads(out), []
    for call, result in zip(calls, results["calls"], strict=True):
        layer, at = ranked[call["ranks"][0]], {"device": call["ranks"][0]}
        sizes = layer.sizes(call["tokens"])
        assert result["bytes"] == [getattr(sizes, call["which"]), sizes.kept, *windows]
        both.fake.launches.clear()
        both.fake.stream_contexts[77] = 1000 + at["device"]
        given = {
            name: Torchlike(shape, dtype, result["addresses"][name] or NOWHERE, **at)
            for name, (shape, dtype) in call["tensors"].items()
        }
        memory = {
            name: Torchlike((1 << 40,), "torch.uint8", result["addresses"][name], **at) for name in ("kept", "scratch")
        }
        (layer.bind_backward if call["which"] == "backward" else layer.bind_forward)(**given, **memory)(77)
        want += 2 * logged(both.fake)
    assert [line for line in log if line[0] != "allocate"] == want
    texts = [
        "ranks has 27 words; it must have 28, 8 and 5 for each of 4 windows",
        "layers_choices_overlap_backward: ranks must be a tensor of the CPU, int64, contiguous, of rank 1",
        "ranks has 0 words; it must have 28",
        "rank is 4; it must be 0 to 3",
        "word 1 of ranks is 4294967296; it must have 32 bits",
        "_kept_bytes takes the number of tokens, the capacity and, if it is given, rows, each from 0",
        "layers_choices_overlap_sent_bytes takes one argument, the capacity, from 0",
        "capacity is 0; it must be the most tokens of a rank",
    ]
    for got, text in zip(results["refused"], texts, strict=True):
        assert got is not None and got[0] == "ValueError" and text in got[1], (got, text)


def test_the_functions_are_listed(exported_library):
    assert [str(each) for each in exported_library.functions][:2] == [
        "prepare(device)",
        "quickstart_moe_fc1(x, w, y, offsets, act_alpha?, act_limit?, act_up_offset?, cluster_margin?)",
    ]


def test_names_that_meet_are_refused(exported_library):
    spec = find(["quickstart/moe-fc1"])[0]
    kernel = Exported("quickstart/prepare", complete(read_record(spec)), CUBIN)
    text, functions = generate_tvm_ffi([kernel], (), [kernel.name])
    assert functions[1].name == "quickstart_prepare" and "__tvm_ffi_##symbol" in text
    with pytest.raises(UsageError, match="two functions would be called prepare"):
        generate_tvm_ffi([replace(kernel, name="prepare")], (), ["prepare"])
