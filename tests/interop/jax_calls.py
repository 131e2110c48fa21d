"""Kernels inside jax.jit on XLA's CPU, over a fake driver: XLA itself hands on buffers and attributes.

`test_jax.py` runs it.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import Dim, LaunchRecord, LaunchStep, PointerParameter, ScalarArgument, TensorArgument
from fusekit.errors import ArgumentError
from tests.abi.test_schema_2 import whole
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import fake_for, load

jax = pytest.importorskip("jax", reason="JAX is not installed")
jax.config.update("jax_num_cpu_devices", 3)  # as in jax_rank_layers.py, in the same process
jnp = jax.numpy
STREAM = 0x77
_NUMBERS = itertools.count()


@pytest.fixture
def operator(monkeypatch):
    """operator(record, driver, scalars...) -> a function for jax.jit. XLA's CPU has no streams."""
    from fusekit.interop import jax as interop

    monkeypatch.setattr(interop.xla, "stream_of", lambda frame: (None, STREAM))

    def make(record: LaunchRecord, fake: FakeDriver, **scalars: Any) -> Any:
        kernel, _ = load(record, fake)
        return interop.operator(kernel, f"fusekit_test_{next(_NUMBERS)}", platform="cpu", **scalars)

    return make


def arrays(m: int = 300, k: int = 128, e: int = 4, i: int = 160) -> dict[str, Any]:
    return {
        "x": jnp.ones((m, k), jnp.bfloat16), "w": jnp.ones((e, 2 * i, k), jnp.bfloat16),
        "offsets": jnp.ones((e,), jnp.int32),
    }  # fmt: skip


def whole_driver() -> FakeDriver:
    return fake_for(whole(), others={"second": [(0, 8)]}, devices=3)


def scale_of(launched: Any) -> float:
    """The float of the struct: act_alpha * 1.5."""
    return struct.unpack_from("<f", launched.parameters[-1], 16)[0]


def test_a_call_queues_every_launch_on_xlas_buffers(operator):
    fake = whole_driver()
    call = jax.jit(operator(whole(), fake, act_alpha=1.5))
    y = call(**arrays())
    assert (y.shape, str(y.dtype)) == ((300, 160), "bfloat16")
    first, second = fake.launches
    assert (first.stream, second.stream, second.grid) == (STREAM, STREAM, (3, 1, 1))
    (written,) = struct.unpack("<Q", second.parameters[0])
    assert struct.unpack("<Q", first.parameters[3]) == (written,)
    assert written % 16 == 0 and scale_of(first) == 2.25


def test_every_device_is_made_ready_before_the_first_execution(operator):
    """XLA may capture that one, on any device."""
    fake = whole_driver()
    jax.jit(operator(whole(), fake, act_alpha=1.5)).lower(**arrays())
    assert {device for _, device in fake.settings} == {0, 1, 2}
    assert not fake.launches


def test_a_scalar_of_a_call_is_an_attribute(operator):
    fake = whole_driver()
    call = operator(whole(), fake, act_alpha=1.5)
    both = jax.jit(lambda given: call(**given, act_alpha=-2) + call(**given, act_limit=7.0) + call(**given))
    both(arrays()).block_until_ready()
    first = [launched for launched in fake.launches if launched.function[0] == "kernel"]  # of calls in any order
    got = sorted((scale_of(launched), *struct.unpack("<f", launched.parameters[6])) for launched in first)
    assert len(fake.launches) == 6
    assert got == [(-3.0, float("inf")), (2.25, 7.0), (2.25, float("inf"))]


def test_wrong_scalars_and_names(operator):
    call = operator(whole(), whole_driver(), act_alpha=1.5)
    with pytest.raises(ArgumentError, match="act_alpha is 'x'"):
        call(**arrays(), act_alpha="x")
    with pytest.raises(ArgumentError, match=r"act_alpha is .*; it must be an f32 number"):
        jax.jit(lambda alpha: call(**arrays(), act_alpha=alpha))(1.0)
    with pytest.raises(ArgumentError, match="takes x, w, offsets, act_limit, act_alpha; missing: none; unknown: beta"):
        call(**arrays(), beta=1)


def test_a_guard_is_an_error_of_the_computation(operator):
    fake = whole_driver()
    call = jax.jit(operator(whole(), fake, act_alpha=1.5))
    with pytest.raises(Exception, match="too many tiles; got M = 6400"):
        call(**arrays(m=6400)).block_until_ready()
    assert not fake.launches


def test_values_of_8_and_4_bits_and_several_results(operator):
    types = {"a": "e4m3", "b": "e5m2", "c": "e8m0", "d": "e2m1x2"}
    second = LaunchStep((PointerParameter("out", "d_out", 0),), (1, 1, 1), (32, 1, 1), symbol="second")
    launch_record = LaunchRecord(
        arch="sm_90a",
        arguments=(
            *(TensorArgument(name, "input", dtype, ("M",), (1,)) for name, dtype in types.items()),
            *(TensorArgument(f"{name}_out", "output", dtype, ("M",), (1,)) for name, dtype in types.items()),
            ScalarArgument("shift", "i32", 3),
        ),
        dims=(Dim("M"),), parameters=(PointerParameter("d", "d", 0),), grid=("shift", 1, 1), block=(32, 1, 1),
        symbol="kernel", then=(second,),
    )  # fmt: skip
    fake = fake_for(launch_record, others={"second": [(0, 8)]}, devices=3)
    call = operator(launch_record, fake)
    given = {
        "a": jnp.float8_e4m3fn, "b": jnp.float8_e5m2, "c": jnp.float8_e8m0fnu, "d": jnp.uint8,
    }  # fmt: skip
    got = jax.jit(lambda: call(**{name: jnp.zeros((64,), dtype) for name, dtype in given.items()}, shift=5))()
    assert [str(each.dtype) for each in got] == ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint8"]
    assert [launched.grid for launched in fake.launches] == [(5, 1, 1), (1, 1, 1)]


def test_an_argument_in_place_is_refused(operator):
    arguments = tuple(
        replace(item, role="inout") if isinstance(item, TensorArgument) and item.written else item
        for item in whole().arguments
    )
    with pytest.raises(ArgumentError, match="in place"):
        operator(replace(whole(), arguments=arguments), whole_driver())
