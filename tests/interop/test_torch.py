"""Kernels as PyTorch operators, as far as PyTorch shows them without a GPU: schema, shapes and types of results."""

from __future__ import annotations

import pytest

from fusekit.abi import Dim, LaunchRecord, TensorArgument
from fusekit.dtypes import ARGUMENTS, DTYPES
from fusekit.errors import ArgumentError
from tests.abi.test_schema_2 import whole
from tests.runtime.samples import fake_for, load

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")


def test_types_have_the_bytes_of_the_launch_records():
    assert set(ARGUMENTS) - set(interop.DTYPES) <= {"e8m0", "e2m1x2"}  # which older versions lack
    assert all(dtype.itemsize == DTYPES[name].bytes for name, dtype in interop.DTYPES.items())


def test_results_of_several_launches_are_known_without_launching():
    kernel, fake = load(whole(), fake_for(whole(), others={"second": [(0, 8)]}))
    call = interop.operator(kernel, "fusekit_test::whole")
    with torch._subclasses.FakeTensorMode():
        y = call(
            torch.empty((300, 128), dtype=torch.bfloat16), torch.empty((4, 320, 128), dtype=torch.bfloat16),
            torch.empty((4,), dtype=torch.int32), 1.5,
        )  # fmt: skip
    assert (tuple(y.shape), y.dtype) == ((300, 160), torch.bfloat16)
    assert not fake.launches


def test_results_of_8_bits():
    launch_record = LaunchRecord(
        arch="sm_90a",
        arguments=(
            TensorArgument("x", "input", "e4m3", ("M",), (1,)), TensorArgument("y", "output", "e5m2", ("M",), (1,)),
        ),
        dims=(Dim("M"),), parameters=(), grid=(1, 1, 1), block=(32, 1, 1), symbol="kernel",
    )  # fmt: skip
    call = interop.operator(load(launch_record, fake_for(launch_record))[0], "fusekit_test::fp8")
    with torch._subclasses.FakeTensorMode():
        assert call(torch.empty((64,), dtype=torch.float8_e4m3fn)).dtype == torch.float8_e5m2


def test_a_name_stands_for_one_kernel():
    launch_record = whole()
    kernel, _ = load(launch_record, fake_for(launch_record, others={"second": [(0, 8)]}))
    interop.operator(kernel, "fusekit_test::one")
    interop.operator(kernel, "fusekit_test::one")  # again, as in a notebook
    with pytest.raises(ArgumentError, match="fusekit_test::one is another kernel, or has another cluster_margin"):
        interop.operator(kernel, "fusekit_test::one", cluster_margin=2)
    other, _ = load(launch_record, fake_for(launch_record, others={"second": [(0, 8)]}))
    other.digest = "of other code"
    with pytest.raises(ArgumentError, match="fusekit_test::one is another kernel"):
        interop.operator(other, "fusekit_test::one")
