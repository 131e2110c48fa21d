"""A loaded kernel: arguments in, one driver launch out.

The path of a call: pick address, shape, strides, dtype and device off every tensor; look the signature up among the
plans made so far; fill a block with the addresses; launch. Checks and expressions run only for a signature not seen
before. The path takes no lock, allocates no device memory and asks the driver nothing (a default stream costs one
question: which context is current).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from fusekit.abi import LaunchRecord, RecordError, ScalarArgument, evaluate
from fusekit.abi.elf import check_cubin
from fusekit.errors import ArgumentError, DriverError, IntegrityError, whole
from fusekit.runtime.binding import bind, check_names, check_scalar, pairs
from fusekit.runtime.debug import description
from fusekit.runtime.devices import Device, Devices, check_arch
from fusekit.runtime.driver import MINIMUM_VERSION, Driver
from fusekit.runtime.handle import SharedHandle
from fusekit.runtime.launch import Launch, Launches, filled, launch, launch_parts
from fusekit.runtime.launch_plan import LaunchPlan, Loaded, Settings, active_clusters
from fusekit.runtime.log import debug_log
from fusekit.runtime.peers import check_windows, placed, spread
from fusekit.runtime.recent import Recent
from fusekit.runtime.streams import handle_of
from fusekit.runtime.tensors import Meta, describe, read, unhashable
from fusekit.runtime.usage import Resources
from fusekit.runtime.workspace import Scratch, Workspaces
from fusekit.store.entries import CUBIN_FORMAT, lowest_driver

# Signatures whose plan is kept, about 14 KB each. Token counts differ from step to step.
_PLANS_KEPT = 512
_Scalars = list[float | int]


class Kernel(SharedHandle):
    """A kernel from a store, loaded on `device`, and on other devices when their tensors first come.

    It may be called from several threads. A copy is the kernel itself.

    Attributes
    ----------
    name, arch : str
    record : LaunchRecord
    digest : str
        SHA-256 of the cubin.
    spec : dict
        Canonical form.
    defaults : dict
        Values of scalars that a call need not give.
    usage : Resources
        Its device memory; `Library.memory` sums up.
    """

    again = "pickle its name, and load it there: library.load(name)"

    def __init__(
        self, devices: Devices, name: str, record: LaunchRecord, cubin: bytes, defaults: Mapping[str, Any], device: int,
        spec: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.arch = record.arch
        self.record = record
        self.device = device
        self.digest = hashlib.sha256(cubin).hexdigest()
        self.spec = dict(spec or {})
        self.defaults = dict(defaults)
        self.margin = check_margin(self.defaults.pop("cluster_margin", 0))
        self._devices = devices
        self._driver = devices.driver
        self._tensors = tuple(tensor.name for tensor in record.tensors)
        self._written = {tensor.name for tensor in record.tensors if tensor.written}
        self._scalars = record.scalars
        self._peers = bool(record.peers)
        self._integers = tuple(index for index, scalar in enumerate(record.scalars) if scalar.is_integer)
        self._deciding = tuple(index for index, scalar in enumerate(record.scalars) if scalar.name in record.deciding)
        self._scalar_defaults = tuple(_default(scalar, self.defaults) for scalar in record.scalars)
        # One list for every call that gives no scalar: by its identity a block knows that it holds them already.
        known: _Scalars = [value for value in self._scalar_defaults if value is not None]
        self._default_scalars = known if len(known) == len(record.scalars) else None
        self._plans: Recent[Any, LaunchPlan] = Recent(_PLANS_KEPT)
        self.resources = Resources(name, len(cubin), devices)
        self._loaded = self.resources.loaded
        # Both before the driver sees the cubin: its own errors would not say what was expected.
        first = devices.get(device)
        check_arch(record.arch, first, name)
        counts = check_cubin(cubin, [step.symbol for step in record.launches], name)
        if (lowest := lowest_driver(cubin[CUBIN_FORMAT])) > MINIMUM_VERSION:
            self._driver.require(lowest, f"{name} (a cubin of CUDA {lowest // 1000}'s format)")
        devices.refuse_capture(first, f"loading {name}")
        with (
            self._devices.active(first),
            self._devices.apart(),
        ):  # the driver tells a kernel's parameters only inside a context
            self.resources.library, self._kernels = _load(self._driver, name, record, cubin, counts)
        try:
            self._prepare(first)
        except BaseException:
            self.unload()
            raise

    def __repr__(self) -> str:
        return f"<Kernel {self.name} for {self.arch}>"

    def __call__(
        self, *, stream: Any = None, cluster_margin: int | None = None, priority: int | None = None,
        sm_count: int | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Queues a launch on `stream`, on the device of the tensors.

        Parameters
        ----------
        stream : int, object with ``__cuda_stream__``, "legacy" or None
            None: the current stream of the tensors' framework (PyTorch, CuPy, or one with DLPack's exchange API), else
            the legacy default stream.
        cluster_margin : int, optional
            Reserved clusters: the launch leaves their SMs to other kernels. Default: the spec's.
        priority : int, optional
            Of this launch's blocks, as in cuStreamCreateWithPriority: lower is sooner. Default: the stream's.
        sm_count : int, optional
            The multiprocessors that the grid of a persistent kernel is made for. Default: those of the stream, which
            are all of the device's, or those of its green context.
        **arguments : tensor or number
            The record's tensors and scalars by name, with their shapes and dtypes; outputs, too.

        Raises
        ------
        ArgumentError
            Names the argument.
        DriverError
            If the driver refuses the launch.
        """
        handle = stream if type(stream) is int else handle_of(stream, arguments.values())
        plan, addresses, scalars = self._resolve(arguments, cluster_margin, priority, sm_count)
        if plan.skip:
            return
        plan = plan.on(handle, self._devices)
        if plan.then:
            launch_parts(filled(plan, addresses, scalars), handle)
            return
        block = plan.take(addresses)
        plan.fill(block, addresses, scalars)
        launch(plan, block, handle)
        plan.spare.append(block)

    def bind(
        self, *, cluster_margin: int | None = None, priority: int | None = None, sm_count: int | None = None,
        **arguments: Any,
    ) -> Launch:  # fmt: skip
        """Checks and packs the arguments once, for many launches on the same memory. Otherwise as a call."""
        kind = Launches if self.record.then else Launch
        return kind(self, arguments, (cluster_margin, priority, sm_count))

    def prepare(self, device: int) -> None:
        """Loads the kernel on one more device, as the first launch there would; a capture cannot.

        Parameters
        ----------
        device : int
            Ordinal.

        Raises
        ------
        ArchMismatchError, DriverError
        ArgumentError
            If the kernel was unloaded.
        """
        self._prepare(self._devices.get(device))

    def is_ready(self, device: int) -> bool:
        """Whether the kernel is loaded on this device."""
        return device in self._loaded

    @property
    def plans_made(self) -> int:
        """How many combinations of shapes, strides and options were new so far: such a call costs about ten others."""
        return self._plans.remembered

    def current_device(self) -> int:
        """The ordinal of the device of this thread's current context; 0 without one."""
        return self._devices.current()

    def unload(self) -> None:
        """Unloads the kernel and frees its memory. Launches afterwards raise ArgumentError."""
        self._plans.clear()
        self.resources.unload()

    def _resolve(
        self, arguments: dict[str, Any], cluster_margin: int | None, priority: int | None, sm_count: int | None
    ) -> tuple[LaunchPlan, list[int], _Scalars]:
        """The plan for these arguments, the tensors' addresses, the scalars. On the launch path: no checks here."""
        if self._peers:
            arguments = self.spread(arguments)
        addresses: list[int] = []
        key: list[Any] = [cluster_margin, priority, sm_count]
        try:
            for name in self._tensors:
                tensor = arguments[name]
                addresses.append(tensor.data_ptr())
                key.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
        except (AttributeError, KeyError):  # not tensors as PyTorch has them, or not all of them
            addresses, metas = self._read(arguments)
            key[3:] = metas
        if len(arguments) == len(self._tensors) and self._default_scalars is not None:
            scalars = self._default_scalars
        else:
            scalars = self._read_scalars(arguments)
        if self._integers:
            key += [scalars[index] for index in self._integers]
        if self._deciding:  # as text: 0.0 equals -0.0, and a NaN not itself
            key += [float(scalars[index]).hex() for index in self._deciding]
        signature = tuple(key)
        try:
            plan = self._plans[signature]
        except KeyError:
            settings = Settings(
                self.margin if cluster_margin is None else check_margin(cluster_margin), check_priority(priority),
                check_sm_count(sm_count),
            )  # fmt: skip
            plan = self._plan(key[3 : 3 + len(self._tensors)], settings, scalars)
            self._plans.remember(signature, plan)
            if (log := debug_log()) is not None:
                log.debug("new plan: %s", description(plan))
        except TypeError:
            check_margin(0 if cluster_margin is None else cluster_margin)
            check_priority(priority)
            check_sm_count(sm_count)
            raise unhashable(key[3:], self._tensors) from None
        return plan, addresses, scalars

    def spread(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """`arguments` by the names of the record's tensors and scalars."""
        return spread(self.record, arguments, self._driver, self.name) if self._peers else arguments

    def _read(self, arguments: dict[str, Any]) -> tuple[list[int], list[Meta]]:
        addresses: list[int] = []
        metas: list[Meta] = []
        for name in self._tensors:
            if name not in arguments:
                check_names(self.record, arguments, self.defaults, self.name)
            address, meta = self.read(name, arguments[name])
            addresses.append(address)
            metas.append(meta)
        return addresses, metas

    def read(self, name: str, tensor: Any) -> tuple[int, Meta]:
        """Address and meta of the argument for the tensor `name`. Raises ArgumentError."""
        return read(tensor, name, self._driver, name in self._written)

    def _read_scalars(self, arguments: dict[str, Any]) -> _Scalars:
        """The scalars in the record's order. Raises ArgumentError, also for a wrong number of arguments."""
        given = 0
        values: _Scalars = []
        for scalar, default in zip(self._scalars, self._scalar_defaults, strict=True):
            if scalar.name in arguments:
                given += 1
                values.append(check_scalar(scalar, arguments[scalar.name]))
            elif default is not None:
                values.append(default)
        if len(arguments) != len(self._tensors) + given or len(values) != len(self._scalars):
            check_names(self.record, arguments, self.defaults, self.name)
        return values

    def _plan(self, metas: list[Any], settings: Settings, scalars: _Scalars) -> LaunchPlan:
        try:
            return self._new_plan(metas, settings, scalars)
        except RecordError as error:  # a divisor of 0, made of this call's numbers
            raise ArgumentError(f"{self.name} cannot be launched on these arguments: {error}") from error

    def _new_plan(self, metas: list[Any], settings: Settings, scalars: _Scalars) -> LaunchPlan:
        views = [describe(meta, name) for meta, name in zip(metas, self._tensors, strict=True)]
        given, views = views, placed(self.record, views) if self._peers else views
        bound = bind(self.record, views)
        loaded = self._prepare(self._devices.get(self.device if bound.device < 0 else bound.device))
        most = loaded.device.sm_count
        if settings.sm_count is not None and settings.sm_count > most:
            raise ArgumentError(
                f"sm_count is {settings.sm_count}; {loaded.device} has {most} multiprocessors, so it must be 1 to"
                f" {most}",
                argument="sm_count",
            )
        most = settings.sm_count or most
        if settings.margin >= most:
            raise ArgumentError(
                f"cluster_margin is {settings.margin}; "
                + (f"{loaded.device} has" if settings.sm_count is None else "sm_count is")
                + f" {most} multiprocessors, so it must be 0 to {most - 1}",
                argument="cluster_margin",
            )
        integers = {self._scalars[index].name: int(scalars[index]) for index in self._integers}
        if self._peers:
            check_windows(self.record, given, {**bound.env, **integers})
        floats = {self._scalars[at].name: self._scalars[at].rounded(scalars[at]) for at in self._deciding}
        overlaps = pairs(self.record, views, bound)
        plans = [
            LaunchPlan(self._driver, record, part, bound, overlaps, settings, integers, floats)
            for record, part in zip(self.record.launches, (loaded, *loaded.then), strict=True)
        ]
        plan, *then = [plan for plan in plans if not plan.skip] or plans[:1]
        plan.followed_by(then)
        return plan

    def _prepare(self, device: Device) -> Loaded:
        """Loads the kernel on `device`, now and not lazily; sets shared memory; makes workspaces."""
        loaded = self._loaded.get(device.ordinal)
        if loaded is not None:
            return loaded
        if self.resources.library is None:
            raise ArgumentError(f"{self.name} was unloaded; load it again before launching it")
        check_arch(self.arch, device, self.name)
        if self._loaded:  # the first device was asked when the kernel was loaded
            self._devices.refuse_capture(device, f"{self.name}: loading on {device}")
        with self._devices.active(device), self._devices.apart():
            functions = [
                self._function(record, kernel, device)
                for record, kernel in zip(self.record.launches, self._kernels, strict=True)
            ]
            clusters = None
            if self.record.reads("active_clusters"):
                clusters = active_clusters(self._driver, self.record.launches[-1], functions[-1], device)
            scratch = Scratch(self._devices, device, self.name) if self.record.scratch != 0 else None
            workspaces = self._workspaces(device)
            loaded, *then = (
                Loaded(
                    self.name, device, handle, workspaces, scratch, clusters, self._most_shared(record, kernel, device)
                )
                for record, kernel, handle in zip(self.record.launches, self._kernels, functions, strict=True)
            )
            loaded.then = tuple(then)
        kept = self._loaded.setdefault(device.ordinal, loaded)
        if kept is not loaded and loaded.workspaces is not None:  # another thread was first
            loaded.workspaces.close()
        return kept

    def _function(self, record: LaunchRecord, kernel: Any, device: Device) -> Any:
        """The function of one launch on `device`, its attributes set."""
        api, check, kinds = self._driver.api, self._driver.check, self._driver.api.CUfunction_attribute
        fixed = record.dynamic_shared
        most = fixed if isinstance(fixed, int) else self._most_shared(record, kernel, device)
        settings = {"MAX_DYNAMIC_SHARED_SIZE_BYTES": most}
        if record.attributes.get("non_portable_cluster_size_allowed"):
            settings["NON_PORTABLE_CLUSTER_SIZE_ALLOWED"] = 1
        if "preferred_shared_memory_carveout" in record.attributes:
            settings["PREFERRED_SHARED_MEMORY_CARVEOUT"] = record.attributes["preferred_shared_memory_carveout"]
        for name, value in settings.items():
            check(
                api.cuKernelSetAttribute(getattr(kinds, f"CU_FUNC_ATTRIBUTE_{name}"), value, kernel, device.handle),
                f"{self.name}: cuKernelSetAttribute {name} = {value} on {device}",
            )
        return check(api.cuKernelGetFunction(kernel), f"{self.name}: cuKernelGetFunction on {device}")

    def _most_shared(self, record: LaunchRecord, kernel: Any, device: Device) -> int:
        """Bytes that a block can have besides its own, where the arguments decide how many it asks for; else 0."""
        if isinstance(record.dynamic_shared, int):
            return 0
        api, check = self._driver.api, self._driver.check
        kind = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        own = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        every = int(check(api.cuDeviceGetAttribute(kind, device.handle), "cuDeviceGetAttribute"))
        return every - int(check(api.cuKernelGetAttribute(own, kernel, device.handle), "cuKernelGetAttribute"))

    def _workspaces(self, device: Device) -> Workspaces | None:
        size = evaluate(self.record.workspace, {"sm_count": device.sm_count})
        if size <= 0:
            return None
        return Workspaces(self._devices, device, size, self.record.workspace_zeroed, self.name)


def check_margin(value: Any) -> int:
    """`value` as a cluster margin; ArgumentError unless it is an integer of at least 0."""
    number = whole(value)
    if number is None or not 0 <= number < 2**31:
        raise ArgumentError(
            f"cluster_margin is {value!r}; it must be an integer from 0: the clusters left to other kernels",
            argument="cluster_margin",
        )
    return number


def check_priority(value: Any) -> int | None:
    """`value` as a launch priority; ArgumentError unless it is None or an integer of 32 bits."""
    number = whole(value)
    if value is not None and (number is None or not -(2**31) <= number < 2**31):
        raise ArgumentError(
            f"priority is {value!r}; it must be None (the stream's) or an integer, lower being sooner",
            argument="priority",
        )
    return number


def check_sm_count(value: Any) -> int | None:
    """`value` as the multiprocessors of a launch; ArgumentError unless it is None or an integer of at least 1."""
    number = whole(value)
    if value is not None and (number is None or number < 1):
        raise ArgumentError(
            f"sm_count is {value!r}; it must be None (all that the stream has) or an integer from 1: the"
            " multiprocessors that the grid is made for",
            argument="sm_count",
        )
    return number


def _default(scalar: ScalarArgument, defaults: Mapping[str, Any]) -> float | int | None:
    """The spec's default, else the record's; None where the caller must give a value."""
    value = defaults.get(scalar.name, scalar.default)
    if value in ("inf", "-inf"):  # infinity travels through JSON as a string
        value = float(value)
    return None if value is None else check_scalar(scalar, value)


def _load(
    driver: Driver, name: str, record: LaunchRecord, cubin: bytes, counts: Mapping[str, int | None]
) -> tuple[Any, list[Any]]:
    """The library, and the kernel of each launch. counts: of each one's parameters, by symbol."""
    api, check = driver.api, driver.check
    library = check(api.cuLibraryLoadData(cubin, None, None, 0, None, None, 0), f"{name}: cuLibraryLoadData")
    try:
        kernels = []
        for step in record.launches:
            kernel = check(api.cuLibraryGetKernel(library, step.symbol.encode()), f"{name}: cuLibraryGetKernel")
            _check_parameters(driver, name, step, kernel, counts[step.symbol])
            kernels.append(kernel)
    except (DriverError, IntegrityError):
        api.cuLibraryUnload(library)
        raise
    return library, kernels


def _check_parameters(driver: Driver, name: str, record: LaunchRecord, kernel: Any, count: int | None) -> None:
    """The driver's account of the parameters against the record's: a cubin of another build ends here.

    count: how many the cubin has (None: unknown, so as many as the record), for the driver has no function for that
    before CUDA 13, and compute-sanitizer reports a call that fails.
    """
    expected = sorted((parameter.offset, parameter.size, parameter.name) for parameter in record.parameters)
    layout = []
    for index in range(len(expected) if count is None else count):
        offset, size = driver.check(driver.api.cuKernelGetParamInfo(kernel, index), f"{name}: cuKernelGetParamInfo")
        layout.append((int(offset), int(size)))
    if layout != [(offset, size) for offset, size, _ in expected]:
        record_says = ", ".join(f"{label}@{offset}+{size}" for offset, size, label in expected)
        driver_says = ", ".join(f"{offset}+{size}" for offset, size in layout)
        raise IntegrityError(
            f"{name}: the launch record's parameters ({record_says}) are not the cubin's ({driver_says}); the entry was"
            " put together from two builds; rebuild it"
        )
