"""Facts about models of GPUs, by which variants are chosen and launches are compared with the device's peak.

Sources: NVIDIA's data sheets of A100, H100, H200, H20 and GH200 (dense bf16 tensor throughput, half of what they give
with sparsity; memory bandwidth); multiprocessors as the driver reports them (CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model. `sms`: multiprocessors. `tflops`: dense bf16 TFLOP/s. `gbs`: memory bandwidth in GB/s (1e9 bytes)."""

    sms: int
    tflops: float
    gbs: float

    def part(self, sms: int) -> Gpu:
        """So many multiprocessors of it, with their share of the rest: a MIG slice."""
        return Gpu(sms, self.tflops * sms / self.sms, self.gbs * sms / self.sms)

    @property
    def sm_rate(self) -> float:
        """TFLOP/s of one multiprocessor."""
        return self.tflops / self.sms


# By what the driver's device name contains; the first match counts, so the more specific stand first.
GPUS = {
    "GH200 144G": Gpu(132, 989, 4900),
    "GH200": Gpu(132, 989, 4000),
    "H200 NVL": Gpu(132, 835, 4800),
    "H200": Gpu(132, 989, 4800),
    "H100 NVL": Gpu(132, 835, 3900),
    "H100 PCIe": Gpu(114, 756, 2000),
    "H100": Gpu(132, 989, 3350),
    "H20": Gpu(78, 148, 4000),
    "A100-SXM4-40GB": Gpu(108, 312, 1555),
    "A100-SXM4-80GB": Gpu(108, 312, 2039),
}
REFERENCE = GPUS["H200"]  # the one that the model's constants were measured on


def gpu_of(device_name: str) -> Gpu | None:
    """The row of the device that the driver calls `device_name`; None for one that the table lacks."""
    return next((row for name, row in GPUS.items() if name in device_name), None)


def part_of(device_name: str, sms: int) -> Gpu:
    """The row to choose variants by for a device with so many multiprocessors, which may be a part of a GPU."""
    row = gpu_of(device_name) or REFERENCE
    return row if sms == row.sms else row.part(sms)
