"""Opens stores, and loads kernels and layers by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from fusekit.config import Config
from fusekit.errors import (
    ArgumentError,
    DriverError,
    IntegrityError,
    NotBuiltError,
    UsageError,
)
from fusekit.runtime.allocators import Allocator, check_allocator
from fusekit.runtime.devices import Devices, ordinal_of
from fusekit.runtime.driver import Driver
from fusekit.runtime.finding import candidates, choose, named, readable
from fusekit.runtime.log import debug_log
from fusekit.runtime.usage import Held
from fusekit.runtime.wake import Waking

if TYPE_CHECKING:
    from fusekit.abi import LaunchRecord
    from fusekit.abi.layer_record import LayerKernel
    from fusekit.choice import tuning
    from fusekit.exchange import Ranks
    from fusekit.layers import Layer, LayerOptions
    from fusekit.layers.kernels import LayerKernels
    from fusekit.runtime.checked import Checks, OffsetsProblem
    from fusekit.runtime.kernel import Kernel
    from fusekit.runtime.usage import MemoryUse
    from fusekit.store import NameRecord, Store


class Library:
    """The kernels and layers of a store. Opening one reads nothing and needs no GPU; the first `load` starts the
    driver.

    Parameters
    ----------
    store : Store or Config
        A store, or its configuration, which is opened at first use.
    driver : Driver, optional
        A driver for tests. Default: that of cuda.bindings, at first use.
    checked : bool, optional
        Kernels check on the device that their `offsets` do not decrease and are within the rows; see `problems`.
    allocator : Allocator or "torch", optional
        Allocates workspaces and scratch memory of kernels: an object with the methods of
        fusekit.runtime.allocators.Allocator, or PyTorch's caching allocator. Default: the driver.
    """

    def __init__(
        self, store: Store | Config, driver: Driver | None = None, *, checked: bool = False,
        allocator: Allocator | Literal["torch"] | None = None,
    ) -> None:  # fmt: skip
        check_allocator(allocator)
        self._allocator = allocator
        self._source = store
        self._store = None if isinstance(store, Config) else store
        self._driver = driver
        self._devices: Devices | None = None
        self._first = threading.Lock()  # several threads may need the devices at once
        self._checked = checked
        self._checks: Checks | None = None
        self._tuning: dict[str, tuning.Tuning] = {}
        self._held = Held()
        self.opened: set[tuple[str, int]] = set()  # keys of the entries that were loaded, and the devices
        # Of equal layers, as long as one of them lives: 48 blocks of a model load and plan once.
        self.layer_kernels: WeakValueDictionary[Any, LayerKernels] = WeakValueDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the configuration: a copy opens the store and starts the driver itself."""
        return partial(Library, checked=self._checked, allocator=self._allocator), (self._source, self._driver)

    @property
    def store(self) -> Store:
        """The store, over all its roots."""
        if self._store is None:
            from fusekit.store import Store

            assert isinstance(self._source, Config)
            store = Store.open(self._source)
            if self._source.lock is not None:
                from fusekit.store.lockfile import read_lock

                store = store.keeping_to(read_lock(self._source.lock, store.trust))
            self._store = store
        return self._store

    @property
    def devices(self) -> Devices:
        """The GPUs of this process. Raises DriverError if there is no usable driver or GPU."""
        if self._devices is None:
            with self._first:
                if self._devices is None:
                    config = self._source if isinstance(self._source, Config) else None
                    options = {} if config is None else {"debug": config.debug, "nvtx": config.nvtx}
                    self._devices = Devices(self._driver or Driver(**options), self._allocator)
        return self._devices

    def load(
        self, name: str, arch: str | None = None, device: int | None = None, problem: Mapping[str, int] | None = None
    ) -> Kernel:
        """Load a kernel on `device`; on other devices it is loaded at its first launch there. Never compiles.

        Parameters
        ----------
        name : str
            ``file/kernel@variant``, or ``file/kernel``: then a tuning table, or the model of fusekit.choice.variants,
            chooses the variant for `problem`.
        arch : str, optional
            Architecture of the cubin, such as ``sm_90a``. Default: that of the device.
        device : int, optional
            Ordinal of the GPU. Default: that of the current context, else 0.
        problem : mapping of str to int, optional
            Sizes: E, M, N, K of a GEMM; E, M, K, T of `quantise`; T or M, and H, of a token kernel. Default: those of
            the spec.

        Returns
        -------
        Kernel
            The loaded kernel.

        Raises
        ------
        NotBuiltError
            No root of the store has the kernel, or `checks/offsets` for a checked library. The message has the build
            command.
        ArgumentError
            A name, problem or device of the wrong type or range.
        UsageError
            `name` is a layer, a file or a glob, or the variants of the kernel do not compute the same.
        ArchMismatchError
            The store has the kernel for other architectures.
        IntegrityError, DriverError
            A damaged file; no usable driver or GPU.
        """
        _check_name(name)
        device = None if device is None else ordinal_of(device)
        waking = Waking(device) if self._devices is None and self._driver is None else None
        try:
            # Everything that needs no driver is done before the first call of it.
            guess = self._read_ahead(name, arch, problem)
            found, ordinal = self._find(name, arch, device, problem)
            record, cubin = guess[1:] if guess is not None and guess[0] == found else self._read(found)
            return self._open(found, record, cubin, ordinal)
        finally:
            if waking is not None:
                waking.wait()

    def load_record(self, found: NameRecord, device: int | None = None) -> Kernel:
        """Load the kernel of `found`, a result of `find`, even if its name points to a new build since; device and
        errors as for `load`.
        """
        (found,) = readable(self.store, self.devices.driver, [found])
        record, cubin = self._read(found)
        ordinal = self.devices.current() if device is None else ordinal_of(device)
        return self._open(found, record, cubin, ordinal)

    def load_key(self, kernel: LayerKernel, key: str, arch: str, device: int | None = None) -> Kernel:
        """Load the kernel of entry `key`, which the record of a layer names; device and errors as for `load`."""
        from fusekit.store import NameRecord
        from fusekit.store.entries import CUDA13
        from fusekit.store.files import quietly

        found = NameRecord(kernel.name, arch, key, {}, kernel.defaults)
        if self._checked or self.devices.driver.version < CUDA13:  # who looks at its spec, and at other builds of it
            named = quietly(self.store.find_name, kernel.name, arch)
            found = named if named is not None and named.key == key else found
            (found,) = readable(self.store, self.devices.driver, [found])
        record, cubin = self._read(found)
        entry = self.store.find_entry(key) if found.key == key else None
        if entry is not None and entry.launch_sha256 != kernel.launch:
            raise IntegrityError(
                f"{kernel.name}: entry {key} has another launch record than the layer was built with; build the layer"
                " again",
                key=key,
            )
        return self._open(found, record, cubin, self.devices.current() if device is None else ordinal_of(device))

    def layer(
        self, name: str, arch: str | None = None, device: int | Literal["cpu"] | None = None, *,
        ranks: Ranks | None = None, tokens: int | None = None, rows: int | None = None,
    ) -> Layer:  # fmt: skip
        """Open a layer. Loads no kernel yet.

        Parameters
        ----------
        name : str
            ``file/layer``.
        arch, device
            As for `load`. The device of a layer over ranks is that of its rank. "cpu": the layer computes its
            definition, slowly, on tensors in host memory; then `name` may be of a spec file that was not built, also
            ``FILE.toml/layer``.
        ranks : Ranks, optional
            The ranks of a layer with expert parallelism.
        tokens, rows : int, optional
            For a layer over ranks: most tokens of a rank in one pass, and most rows that its experts receive; see
            fusekit.layers.ranked.

        Returns
        -------
        Layer
            The layer; it loads its kernels at first use.

        Raises
        ------
        NotBuiltError
            No root of the store has a kernel of it.
        UsageError
            `name` is not a layer.
        ArgumentError
            An argument of the wrong type or range.
        """
        from fusekit.layers import open_layer

        _check_name(name)
        if isinstance(device, str) and device == "cpu":
            from fusekit.cpu import cpu_layer

            for key, value in {"arch": arch, "ranks": ranks, "tokens": tokens, "rows": rows}.items():
                if value is not None:
                    raise ArgumentError(f'a layer with device="cpu" takes no {key}; leave it out', argument=key)
            return cpu_layer(self, name)
        return open_layer(self, name, arch, device, ranks=ranks, tokens=tokens, rows=rows)

    def layers(self) -> dict[str, LayerOptions]:
        """Name -> options, of every layer in the store."""
        from fusekit.layers import layers_of

        return layers_of(self.store)

    def _open(self, found: NameRecord, record: LaunchRecord, cubin: bytes, ordinal: int) -> Kernel:
        from fusekit.runtime.kernel import Kernel

        self.opened.add((found.key, ordinal))
        if (log := debug_log()) is not None:
            from fusekit.store.files import quietly

            where = next((root.path for root in self.store.roots if quietly(root.entry, found.key)), "no root")
            log.debug("loading %s (%s) on device %d: entry %s of %s", found.name, found.arch, ordinal, found.key, where)
        if self._checked:
            from fusekit.runtime.checked import CHECK, CheckedKernel, Checks, checkable

            if checkable(record):
                if self._checks is None:
                    plain = Library(self.store, self.devices.driver)
                    plain._devices, plain._held = self.devices, self._held
                    self._checks = Checks(self.devices, lambda device: plain.load(CHECK, device=device))
                arguments = (self.devices, found.name, record, cubin, found.defaults, ordinal, found.spec)
                return self._held.add(CheckedKernel(*arguments, self._checks))
        return self._held.add(Kernel(self.devices, found.name, record, cubin, found.defaults, ordinal, found.spec))

    def memory(self) -> list[MemoryUse]:
        """Device memory that loaded kernels use besides tensors, kernel by kernel, device by device, stream by stream.

        Windows of layers over ranks and `kept` and `scratch` of layers are not in it: the caller allocates them.

        Returns
        -------
        list of MemoryUse
            Bytes of code, workspaces and scratch.
        """
        return self._held.rows()

    def trim(self) -> int:
        """Unload the kernels whose objects are gone: theirs, and those of their bound launches and layers.

        Waits for the devices of those kernels, so no thread may capture a stream of theirs meanwhile. A graph that was
        captured launches a kernel without its object: keep the object, or the layer, for as long as the graph.

        Returns
        -------
        int
            Bytes of code, workspaces and scratch that were freed.

        Raises
        ------
        DriverError
            This thread captures a stream, or an earlier launch failed.
        """
        return self._held.trim()

    def problems(self) -> list[OffsetsProblem]:
        """Errors in the `offsets` of launches since the last call, one for each kernel and stream.

        Does not synchronize: a launch that has not finished is reported by a later call. Raises UsageError if the
        library was not opened with ``checked=True``.
        """
        if not self._checked:
            raise UsageError("this library does not check; open it with open_library(checked=True)")
        return [] if self._checks is None else self._checks.problems()

    def _read_ahead(
        self, name: str, arch: str | None, problem: Mapping[str, int] | None
    ) -> tuple[NameRecord, LaunchRecord, bytes] | None:
        """The kernel that `load` returns if the device has the only architecture that the store has it for."""
        import fusekit.runtime.kernel  # noqa: F401 (while the driver starts)

        found = self._guess(name, arch, problem)
        return None if found is None else (found, *self._read(found))

    def _guess(self, name: str, arch: str | None, problem: Mapping[str, int] | None) -> NameRecord | None:
        """The name record of `arch`, or of the only architecture that the store has, as far as no device decides."""
        archs = {listing.record.arch for listing in self.store.names(name)}
        if arch is None and len(archs) == 1:
            (arch,) = archs
        variants = [] if arch is None else self.variants(name, arch)
        return choose(self.store, self._tuning, variants, problem, None) if variants else None

    def _read(self, found: NameRecord) -> tuple[LaunchRecord, bytes]:
        """Launch record and cubin of `found`, checked."""
        from fusekit.runtime.wellformed import launch_record

        if found.spec:
            from fusekit.choice.variants import check_name

            check_name(found)
        stored = self.store.load(found.key)
        if stored is None:
            raise NotBuiltError.of(found.name, found.arch, f"its name points to entry {found.key}, which is missing")
        entry, cubin = stored
        try:
            record = launch_record(entry)
        except IntegrityError as error:
            raise IntegrityError(f"{found.name}: {error}", key=found.key) from error
        if record.arch != found.arch:
            raise IntegrityError(
                f"{found.name} is stored under {found.arch}, and its launch record is for {record.arch}; rebuild it",
                key=found.key,
            )
        return record, cubin

    def find(
        self, name: str, arch: str | None = None, device: int | None = None, problem: Mapping[str, int] | None = None
    ) -> NameRecord:
        """The name record that `load` would load, with the same errors.

        Without a driver, that of `arch`, or of the only architecture that the store has it for, for its usual device.
        """
        _check_name(name)
        try:
            return self._find(name, arch, device, problem)[0]
        except DriverError:
            found = self._guess(name, arch, problem) if self._devices is None and device is None else None
            if found is None:
                raise
            return found

    def _find(
        self, name: str, arch: str | None, device: int | None, problem: Mapping[str, int] | None
    ) -> tuple[NameRecord, int]:
        variants, ordinal, target = candidates(self.store, lambda: self.devices, name, arch, device)
        return choose(self.store, self._tuning, variants, problem, target), ordinal

    def variants(self, name: str, arch: str) -> list[NameRecord]:
        """The name records of `name` for `arch`: all variants of a kernel, or one for a full name; empty if there are
        none.
        """
        _check_name(name)
        return named(self.store, name, arch)

    def close(self) -> None:
        """Release the primary contexts. Kernels of this library must not be used afterwards."""
        if self._checks is not None:
            self._checks.close()
            self._checks = None
        if self._devices is not None:
            self._devices.close()
            self._devices = None

    def __repr__(self) -> str:
        return f"<Library over {', '.join(str(root.path) for root in self.store.roots)}>"


def load(
    name: str, arch: str | None = None, device: int | None = None, problem: Mapping[str, int] | None = None
) -> Kernel:
    """`Library.load` of the default library."""
    return default_library().load(name, arch, device, problem)


def default_library() -> Library:
    """The library over the store of the environment (FUSEKIT_STORE, FUSEKIT_STORES), the same in all of a process."""
    return _over(Config.given(None))


@cache
def _over(config: Config) -> Library:
    return Library(config)


def _check_name(name: Any) -> None:
    ArgumentError.unless(str, "name", name, "text such as 'quickstart/linear'; `fusekit ls` lists what the store has")


def open_library(
    config: Config | None = None, *, driver: Any = None, checked: bool = False,
    allocator: Allocator | Literal["torch"] | None = None, project: str | os.PathLike[str] | None = None,
) -> Library:  # fmt: skip
    """Open the store of `config`.

    Parameters
    ----------
    config : Config, optional
        Default: that of the environment (FUSEKIT_STORE, FUSEKIT_STORES), and of `project`.
    driver : Driver, optional
        A started driver. Default: one is started at the first `load`.
    checked, allocator
        As for `Library`.
    project : path, optional
        A fusekit.toml, or its folder, for what the environment does not say. Without it none is read.

    Returns
    -------
    Library
        Its kernels and layers.

    Raises
    ------
    ArgumentError
        `config` is not a Config, or `allocator` not an Allocator; both `config` and `project`.
    UsageError
        A path in the environment that cannot be used, or an error in the project file.
    """
    if project is not None:
        if config is not None:
            raise ArgumentError(
                "config and project: a project completes the configuration of the environment; give one of them",
                argument="project",
            )
        from fusekit.project import read_project

        config = Config.from_environment(project=read_project(project))
    return Library(Config.given(config), driver, checked=checked, allocator=allocator)
