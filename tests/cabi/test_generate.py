"""What an export consists of, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fusekit import cabi
from fusekit.abi import Dim, LaunchRecord, PointerParameter, ScalarArgument, TensorArgument
from fusekit.cabi import Exported, generate
from fusekit.errors import UsageError
from tests.runtime.samples import record

from .launcher import CUBIN, WARNINGS, compile_shared, complete


def one(name: str = "sample/fc1@128x160-c2x1", cubin: bytes = CUBIN) -> Exported:
    return Exported(name, complete(record()), cubin)


def check_names(shared: Path, prefix: str) -> None:
    """Every public name of the object begins with the prefix, and it uses nothing that it must not."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run(["nm", "-D", "--defined-only", shared], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines() if " T " in line or " D " in line or " B " in line]
    assert names
    assert all(name.startswith(f"{prefix}_") for name in names if not name.startswith(("_init", "_fini")))
    undefined = subprocess.run(["nm", "-D", "-u", shared], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\bcu[A-Z]|exit|abort|printf\b(?<!vsnprintf)(?<!snprintf)", undefined)


def check_no_state(folder: Path, texts: Mapping[str, str], prefix: str) -> None:
    """No variable that can change: no data or bss of the object's own."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        pytest.skip("gcc or nm is not installed")
    for name, text in texts.items():
        (folder / name).write_text(text)
    built = folder / f"{prefix}.o"
    subprocess.run(["gcc", "-std=c11", "-fPIC", "-c", folder / f"{prefix}.c", "-o", built], check=True)
    listed = subprocess.run(["nm", built], capture_output=True, text=True, check=True).stdout
    # d: with relocations, constant all the same ("relro"); what could be written would be in .data or .bss.
    sections = subprocess.run(["objdump", "-t", built], capture_output=True, text=True, check=True).stdout
    assert listed
    changing = [line for line in sections.splitlines() if re.search(r" O (\.data|\.bss)\s", line)]
    assert changing == []


def test_every_public_name_begins_with_the_prefix(tmp_path):
    check_names(compile_shared(tmp_path, [one()], "mylib"), "mylib")


def test_there_is_no_state(tmp_path):
    check_no_state(tmp_path, generate([one()], "mylib"), "mylib")


def test_two_exports_in_one_program(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    for prefix in ("first", "second"):
        for name, text in generate([one()], prefix).items():
            (tmp_path / name).write_text(text)
    main = tmp_path / "main.c"
    main.write_text(
        '#include "first.h"\n#include "second.h"\n#include <complex.h>\n#include <string.h>\n'
        "int main(void) {\n"
        "    first_driver *one;\n    second_error error;\n    second_driver *other;\n"
        "    if (first_driver_open(&one, NULL) == FIRST_OK) first_driver_close(one);\n"
        "    if (second_driver_open(&other, &error) == SECOND_OK) { second_driver_close(other); return 0; }\n"
        "    return error.status == SECOND_NO_DRIVER && strlen(error.text) > 0 ? 0 : 1;\n}\n"
    )
    program = tmp_path / "program"
    command = ["gcc", "-std=c11", *WARNINGS, main, tmp_path / "first.c", tmp_path / "second.c", "-ldl", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([program], check=False).returncode in (0, 1)


def test_the_same_export_twice_is_the_same_text():
    assert generate([one()]) == generate([one()])


def test_one_cubin_under_two_names_is_embedded_once():
    texts = generate([one("sample/fc1@1"), one("sample/fc2@1")])
    assert texts["fusekit.c"].count("static const uint64_t fk_cubin_") == 1
    texts = generate([one("sample/fc1@1"), one("sample/fc2@1", CUBIN + b"2")])
    assert texts["fusekit.c"].count("static const uint64_t fk_cubin_") == 2


def test_variants_of_one_kernel_are_distinct():
    header = generate([one("sample/fc1@128x160-c2x1"), one("sample/fc1@64x64-c1x1"), one("sample/fc2@1")])["fusekit.h"]
    assert "fusekit_sample_fc1_128x160_c2x1_launch(" in header
    assert "fusekit_sample_fc1_64x64_c1x1_launch(" in header
    assert "fusekit_sample_fc2_launch(" in header


def test_awkward_names_compile(tmp_path):
    launch = complete(
        LaunchRecord(
            arch="sm_90",
            arguments=(
                TensorArgument("double", "input", "f32", ("A", "m"), ("double.stride0", 1)),
                TensorArgument("a", "output", "f32", ("A",), (1,)),
                ScalarArgument("priority", "i32"),
                ScalarArgument("register", "f32", float("-inf")),
            ),
            dims=(Dim("A"), Dim("m", maximum=2**63 - 1)),
            parameters=(),
            grid=(1, 1, 1),
            block=(32, 1, 1),
        )
    )
    for language in ("c11", "c++17"):
        compile_shared(tmp_path, [Exported("odd/kernel-1@x", launch, CUBIN)], "odd", language, ("-O0",))


MEETING = (
    (("x", "x_stride0"), ("M", "K")), (("int", "int_"), ("M", "K")), (("x", "dim_a"), ("A", "a")),
    (("x", "y"), ("INT", "int")), (("NULL", "errno"), ("EOF", "eof")), (("priority", "priority_"), ("M", "K")),
)  # fmt: skip


@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_names_that_meet_in_c_compile(tmp_path, language):
    kernels = []
    for number, (arguments, dims) in enumerate(MEETING):
        launch = LaunchRecord(
            symbol="kernel", arch="sm_90a", dims=tuple(map(Dim, dims)), constraints=(), grid=(1, 1, 1),
            block=(128, 1, 1), parameters=tuple(PointerParameter(f"p{at}", name, 8 * at)
                                                for at, name in enumerate(arguments)),
            arguments=tuple(TensorArgument(name, "input", "bf16", dims, (f"{name}.stride0", 1)) for name in arguments),
        )  # fmt: skip
        kernels.append(Exported(f"a/b{number}@c", launch, CUBIN))
    compile_shared(tmp_path, kernels, "odd", language, ("-O0",))


@pytest.mark.parametrize("prefix", ["", "9x", "a-b", "int", "_x", "fk", "namespace", "stdint", "cuda"])
def test_a_prefix_that_is_none(prefix):
    with pytest.raises(
        UsageError, match=r"prefix '.*(is no keyword of C or C\+\+|inside the launcher|would hide it); choose another"
    ):
        generate([one()], prefix)


def test_nothing_to_export():
    with pytest.raises(UsageError, match="name at least one"):
        generate([])


def test_names_that_would_collide():
    with pytest.raises(UsageError, match=r"sample/fc-1@1 and sample/fc_1@1 would both be called sample_fc_1_1"):
        generate([one("sample/fc_1@1"), one("sample/fc-1@1")])


def test_the_page_for_other_languages_names_every_function_of_the_driver():
    source = (Path(cabi.__file__).parent / "driver.c").read_text()
    page = (Path(__file__).parents[2] / "docs" / "launch-record.md").read_text()
    names = re.findall(r'X\(\w+, "(cu\w+)"', source)
    assert len(names) > 25
    assert [name for name in names if f"{name}(" not in page] == []
