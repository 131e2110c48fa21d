"""Which build of which variant a name means on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fusekit.errors import ArchMismatchError, DriverError, IntegrityError, UsageError, how_to_build, some
from fusekit.runtime.devices import Device, Devices, archs_of
from fusekit.runtime.driver import Driver, version_text
from fusekit.runtime.log import debug_log

if TYPE_CHECKING:
    from fusekit.choice import tuning
    from fusekit.store import NameRecord, Store


def named(store: Store, name: str, arch: str) -> list[NameRecord]:
    """The name records of `name` for `arch`: all variants of a kernel, or one for a full name; empty if there are
    none.
    """
    if "@" in name:
        record = store.find_name(name, arch)
        return [] if record is None else [record]
    return store.variants(name, arch)


def candidates(
    store: Store, start: Callable[[], Devices], name: str, arch: str | None, device: int | None
) -> tuple[list[NameRecord], int, Device]:
    """The variants of a kernel that the device can run, its ordinal, and the device; errors as for `Library.load`.
    `start` gives the devices: a missing kernel is an error before the driver starts.
    """
    known = [listing.record for listing in store.names(name)]
    elsewhere = sorted({record.arch for record in known})
    if known and known[0].name.startswith(f"{name}."):
        kernels = sorted({record.name.partition("@")[0] for record in known})
        raise UsageError(
            f"'{name}' is a layer of {len(kernels)} kernels; library.layer('{name}') binds and launches it; to load"
            f" one of its kernels, name that: '{kernels[0]}'"
        )
    if not elsewhere:
        # The error of a damaged record comes before that of a missing one.
        listing = store.listing(name)
        if listing.problems:
            raise IntegrityError(listing.problems[0])
        raise store.not_built(name, arch)
    if arch is not None and arch not in elsewhere:
        raise store.not_built(name, arch, f"only for {', '.join(elsewhere)}")
    devices = start()
    ordinal = devices.current() if device is None else device
    target = devices.get(ordinal)
    wanted = (arch,) if arch is not None else archs_of(target.capability)
    for candidate in wanted:
        variants = named(store, name, candidate)
        if variants:
            return readable(store, devices.driver, variants), ordinal, target
    stored = ", ".join(elsewhere)
    _, remedy = how_to_build(name, wanted[0])
    raise ArchMismatchError(
        f"'{name}' is in the store for {stored}; expected a device of {stored}, found {target}; {remedy}",
        expected=stored,
        found=target.arch,
    )


def readable(store: Store, driver: Driver, variants: list[NameRecord]) -> list[NameRecord]:
    """Those of `variants` that the driver reads, each with the key of its last build that it reads. Raises DriverError
    if it reads none.
    """
    builds = (store.readable(variant, driver.version) for variant in variants)
    if read := [build for build in builds if build is not None]:
        return read
    first = variants[0]
    kernel, lowest = first.name.partition("@")[0], store.lowest_driver(first)
    stored = store.variants(kernel, first.arch)
    others = [other.name for other in stored if store.readable(other, driver.version) is not None]
    toolchain = first.summary.get("toolchain") or "an unknown toolchain"
    major = driver.version // 1000
    _, remedy = how_to_build(first.name, first.arch)
    raise DriverError(
        f"the NVIDIA driver supports CUDA {version_text(driver.version)}; {first.name} ({first.arch}) was built by"
        f" {toolchain} for CUDA {version_text(lowest)} or newer, and no build of it is for an older one;"
        + (f" load {some(others)}, which this driver reads, or" if others else "")
        + f" update the driver, or where the DSL's library of CUDA {major} is installed (nvidia-cutlass-dsl-libs-cu"
        f"{major}), {remedy}",
        name="CUDA_ERROR_INSUFFICIENT_DRIVER",
    )


def choose(
    store: Store, tables: dict[str, tuning.Tuning], variants: list[NameRecord], problem: Mapping[str, int] | None,
    device: Device | None,
) -> NameRecord:  # fmt: skip
    """The variant for `problem` on `device`; without a device it is a guess. tables: the tuning by architecture, as
    far as it was read.
    """
    from fusekit.choice import tuning
    from fusekit.choice.gpus import part_of
    from fusekit.choice.variants import explained

    arch = variants[0].arch
    if len(variants) > 1 and arch not in tables:
        tables[arch] = tuning.load(store, arch)
    name, gpu = (None, None) if device is None else (device.name, part_of(device.name, device.sm_count))
    chosen, why = explained(variants, problem, tables.get(arch), name, gpu)
    if device is not None and (log := debug_log()) is not None:
        log.debug(
            "%s (%s): %s among %d, for %s", chosen.name, arch, why, len(variants), problem or "the spec's problem"
        )
    return chosen
