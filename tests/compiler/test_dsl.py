"""The private parts of the CuTe DSL: what a build and `fusekit doctor` say of a version that lacks one."""

import pytest

from fusekit.compiler import self_test, worker
from fusekit.compiler.build import BuildReport, Failed
from fusekit.errors import ToolchainError
from fusekit_cli.doctor import _compiler

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
from cutlass.base_dsl.dsl import BaseDSL


def test_a_version_without_a_part_is_named(monkeypatch):
    worker._import_compiler()
    monkeypatch.delattr(BaseDSL, "_func")
    with pytest.raises(ToolchainError, match=r"AttributeError: .*_func.*made for nvidia-cutlass-dsl 4\.8, and "):
        worker._import_compiler()


def test_doctor_builds_a_kernel_before_it_says_yes(monkeypatch):
    failure = Failed(self_test.KERNEL, "sm_90a", "the CuTe DSL refuses the kernel")
    monkeypatch.setattr(self_test, "execute", lambda *_, **__: BuildReport(failed=[failure]))
    answer = _compiler()
    assert (answer["ok"], answer["problem"]) == (False, "quickstart/linear: the CuTe DSL refuses the kernel")
    assert answer["toolchain"]
