"""`fusekit export --lang tvm-ffi` over a store of test kernels."""

import ctypes
import shutil

import pytest

from tests.runtime.samples import publish

pytest.importorskip("tvm_ffi")


@pytest.fixture
def stocked(fusekit):
    publish(fusekit.root)
    return fusekit


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_it_writes_a_library_and_lists_its_functions(stocked, tmp_path):
    result = stocked("export", "--lang", "tvm-ffi", "out/moe.so", "sample/fc1", "--json").json
    assert (result["file"], result["kernels"], result["layers"]) == ("out/moe.so", ["sample/fc1@128x160-c2x1"], [])
    assert [each["name"] for each in result["functions"]] == ["prepare", "sample_fc1"]
    assert result["functions"][1]["arguments"][-1] == "cluster_margin?"
    assert ctypes.CDLL(str(tmp_path / "out" / "moe.so")).__tvm_ffi_sample_fc1


def test_a_compiler_that_fails_or_is_not_there(stocked, tmp_path):
    command = ("export", "--lang", "tvm-ffi", "moe.so", "sample/fc1")
    folder = tmp_path / "bin"
    folder.mkdir()
    assert "there is no cc, gcc or clang; install gcc" in stocked(*command, PATH=str(folder), code=1).err
    (folder / "cc").symlink_to(shutil.which("false"))
    assert "cc failed; put a compiler for C11 first in PATH" in stocked(*command, PATH=str(folder), code=1).err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "give at least one NAME"),
        (("sample/fc1", "--sign", "key"), "leave --sign out"),
        (("sample/fc1", "--prefix", "moe"), "give --lang c"),
        (("sample/fc1", "--loader"), "give --lang c"),
    ],
)
def test_options_that_make_no_sense(stocked, words, text):
    assert text in stocked("export", "--lang", "tvm-ffi", "moe.so", *words, code=2).err
