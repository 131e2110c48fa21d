"""Medians, host time, and the share of a device's peak, on plain numbers."""

import time

import pytest

from fusekit.bench.roofline import Work, gemm_work
from fusekit.bench.timing import ROUND, host_us, median
from fusekit.choice.gpus import Gpu
from tests.plans import gemm_spec


def test_a_median_of_an_even_count_lies_between_the_two_in_the_middle():
    assert median([7.0, 1.0, 3.0]) == 3.0
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_host_time_is_that_of_one_call_without_waits_and_warm_up(monkeypatch):
    clock, calls = [0], []

    def work():
        calls.append(None)
        clock[0] += 2500 if len(calls) > ROUND else 10**9

    def wait():
        clock[0] += 10**6

    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    assert host_us(work, wait, rounds=3, warm_up=1) == 2.5
    assert len(calls) == 4 * ROUND


@pytest.mark.parametrize(
    ("flops", "moved", "rate", "share"), [(10, 1, 1.0, 0.5), (10, 1, 2.0, 0.25), (1, 30, 1.0, 0.75)]
)
def test_the_share_is_of_the_peak_that_binds(flops, moved, rate, share):
    """10 TFLOP/s and 20 GB/s, in 2 ms."""
    assert Work(flops * 10**9, moved * 10**6, rate).share(2.0, Gpu(132, 10, 20)) == pytest.approx(share)


def test_weights_of_groups_without_rows_are_not_read():
    spec = gemm_spec().canonical()
    work = gemm_work(spec, rows=100, groups=8, busy=3, n=64, k=32)
    assert work == Work(2 * 100 * 64 * 32, 2 * (100 * 32 + 3 * 64 * 32 + 100 * 64))


def test_mxfp4_weights_are_read_as_half_bytes_with_a_scale_for_32():
    spec = gemm_spec(tile=(16, 128), quant="in=mxfp4-weights").canonical()
    work = gemm_work(spec, rows=100, groups=8, busy=3, n=192, k=256)
    assert work == Work(2 * 100 * 192 * 256, 2 * 100 * (256 + 192) + 3 * 192 * (128 + 8), 1.0)


def test_fp8_weights_are_read_as_bytes_with_their_scales_and_multiplied_in_16_bits():
    spec = gemm_spec(tile=(16, 64), quant="in=fp8-weights").canonical()
    work = gemm_work(spec, rows=100, groups=8, busy=3, n=192, k=256)
    assert work == Work(2 * 100 * 192 * 256, 2 * 100 * (256 + 192) + 3 * (192 * 256 + 4 * 2 * 2), 1.0)
