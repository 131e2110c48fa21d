"""The way from a name to a loaded kernel: manifest, verified bytes, driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusekit.abi import LaunchRecord, RecordError
from fusekit.config import Config
from fusekit.errors import ArchMismatchError, IntegrityError, NotBuiltError
from fusekit.runtime.devices import Devices, archs_of
from fusekit.runtime.driver import Driver
from fusekit.runtime.kernel import Kernel
from fusekit.runtime.select import choose
from fusekit.store import NameRecord, Store


class Library:
    """The kernels of the layered stores. Opening one reads nothing and needs no GPU; the first `load` starts the
    driver.

    driver: for tests; None takes cuda.bindings at first use.
    """

    def __init__(self, store: Store, driver: Driver | None = None) -> None:
        self.store = store
        self._driver = driver
        self._devices: Devices | None = None

    @property
    def devices(self) -> Devices:
        """The GPUs of this process. Raises DriverError where there is no usable driver or GPU."""
        if self._devices is None:
            self._devices = Devices(self._driver or Driver())
        return self._devices

    def load(
        self, name: str, arch: str | None = None, device: int | None = None, problem: Mapping[str, int] | None = None
    ) -> Kernel:
        """The kernel `name`, loaded on `device` now and on other devices when their tensors come. Never compiles.

        name: ``file/kernel@variant``, or ``file/kernel``: then fusekit.runtime.select picks the variant for `problem`
        (E, M, N, K; default: the spec's). arch: the cubin's; default: the device's. device: an ordinal; default: that
        of the current context, else 0.

        Raises NotBuiltError (with the build command), ArchMismatchError, IntegrityError or DriverError.
        """
        found, ordinal = self._find(name, arch, device, problem)
        stored = self.store.load(found.key)
        if stored is None:
            raise NotBuiltError.of(found.name, found.arch, f"its name leads to entry {found.key}, which is missing")
        entry, cubin = stored
        try:
            record = LaunchRecord.from_json(dict(entry.launch))
        except RecordError as error:
            raise IntegrityError(f"{found.name}: launch record: {error}", key=found.key) from error
        if record.arch != found.arch:
            raise IntegrityError(
                f"{found.name} is filed under {found.arch}, its launch record is for {record.arch}; rebuild it",
                key=found.key,
            )
        return Kernel(self.devices, found.name, record, cubin, found.defaults, ordinal, found.spec)

    def find(
        self, name: str, arch: str | None = None, device: int | None = None, problem: Mapping[str, int] | None = None
    ) -> NameRecord:
        """The name record that `load` would load, with the same errors."""
        return self._find(name, arch, device, problem)[0]

    def _find(
        self, name: str, arch: str | None, device: int | None, problem: Mapping[str, int] | None
    ) -> tuple[NameRecord, int]:
        # What no store has is said first: that needs no driver.
        elsewhere = sorted({listing.record.arch for listing in self.store.names(name)})
        if not elsewhere:
            # Let a damaged record speak before calling it missing.
            listing = self.store.listing(name)
            if listing.problems:
                raise IntegrityError(listing.problems[0])
            raise NotBuiltError.of(name, arch)
        devices = self.devices
        ordinal = devices.current() if device is None else device
        target = devices.get(ordinal)
        wanted = (arch,) if arch is not None else archs_of(target.capability)
        for candidate in wanted:
            variants = self._variants(name, candidate)
            if variants:
                return choose(variants, problem), ordinal
        if arch is not None:
            raise NotBuiltError.of(name, arch, f"only for {', '.join(elsewhere)}")
        stored = ", ".join(elsewhere)
        raise ArchMismatchError(
            f"'{name}' is in the store for {stored}; expected a device of {stored}, found {target}; build it for this"
            f" one with: fusekit build {name} --arch {wanted[0]}",
            expected=stored,
            found=target.arch,
        )

    def _variants(self, name: str, arch: str) -> list[NameRecord]:
        if "@" in name:
            record = self.store.find_name(name, arch)
            return [] if record is None else [record]
        return self.store.variants(name, arch)

    def close(self) -> None:
        """Gives the primary contexts back; kernels of this library must have been unloaded or be left alone."""
        if self._devices is not None:
            self._devices.close()
            self._devices = None

    def __repr__(self) -> str:
        return f"<Library over {', '.join(str(layer.root) for layer in self.store.layers)}>"


def open_library(config: Config | None = None, *, driver: Any = None) -> Library:
    """The library over the stores of `config`; None reads the environment (FUSEKIT_STORE, FUSEKIT_STORES).

    driver: a Driver that is started already; None starts one at the first `load`.
    """
    return Library(Store.open(Config.from_environment() if config is None else config), driver)
