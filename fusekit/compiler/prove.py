"""The proof: on many argument sets, the launch record gives what the DSL's own host code would launch.

Compared are every defined byte of every kernel parameter (a tensor map field by field first, so that a difference has a
name), grid, block, cluster, dynamic shared memory, stream, symbol and the launch attributes. The first difference ends
the build with a ProofError.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusekit.abi import FloatParameter, IntegerParameter, LaunchRecord, RecordError, TensorMapParameter
from fusekit.abi.events import LAUNCH_COMPLETION, PROGRAMMATIC
from fusekit.abi.expr import evaluate, evaluate_address
from fusekit.abi.floats import is_nan
from fusekit.abi.parameters import Parameter, Scalar, StructParameter
from fusekit.abi.tensormap import DEFINED_BYTES, ENCODER_BITS, decode, encode, encode_raw
from fusekit.compiler.hostcall import check_plan, pack
from fusekit.compiler.hostfunction import HostStream, TracePlan
from fusekit.compiler.recorder import HostFunction, RecordedLaunch
from fusekit.compiler.samples import ArgumentSet, argument_sets, expected_map
from fusekit.errors import ProofError

LAUNCHES = 64  # about 25 ms

# cudaLaunchAttributeID
_COOPERATIVE = 2
_CLUSTER = 4
_PROGRAMMATIC_SERIALIZATION = 6
_PREFERRED_CLUSTER = 11
_EVENTS = {7: PROGRAMMATIC, 12: LAUNCH_COMPLETION}
# cudaFuncAttribute
_MAX_DYNAMIC_SHARED = 8
_PREFERRED_CARVEOUT = 9
_NON_PORTABLE_CLUSTER = 14
_PORTABLE_CLUSTER = 8


def prove(
    plan: TracePlan, record: LaunchRecord, host: HostFunction, seed: str, launches: int = LAUNCHES
) -> dict[str, Any]:
    """Compares `record` (complete) with `host` on at least `launches` argument sets drawn from `seed`.

    Returns the proof as JSON: the number of argument sets, the parameters compared, which edges and boundaries were
    among the sets, and a SHA-256 over all compared values. Raises ProofError naming the parameter, the field, both
    values and the argument set.
    """
    check_plan(plan)
    digest = hashlib.sha256()
    sets = argument_sets(record, seed, launches)
    if not any(isinstance(host_argument, HostStream) for host_argument in plan.host_arguments):
        sets = [
            replace(sample, stream=0) for sample in sets
        ]  # the default one, which a launcher replaces with its stream
    steps = record.launches
    for arguments in sets:
        recorded = host.call(pack(plan, arguments), arguments.values["sm_count"])
        seen = compare(steps, recorded, arguments)
        digest.update(json.dumps([arguments.label, seen], sort_keys=True).encode())
    return {
        "launches": len(sets),
        "parameters": [parameter.name for step in steps for parameter in step.parameters],
        "edges": [arguments.label for arguments in sets if arguments.edge],
        "seed": seed,
        "digest": digest.hexdigest(),
    }


def compare(steps: Sequence[LaunchRecord], recorded: Sequence[RecordedLaunch], arguments: ArgumentSet) -> list[Any]:
    """Every value compared, in order: of each launch of a record, and what the host code made. Raises ProofError."""
    comparison = _Comparison(arguments)
    queued = [step for step in steps if step.when == 1 or evaluate(step.when, arguments.values)]
    comparison.same("launches", "", len(queued), len(recorded))
    for step, launch in zip(queued, recorded, strict=True):
        comparison.launch(step, launch)
        for parameter, data in zip(step.parameters, launch.parameters, strict=True):
            comparison.parameter(parameter, data)
    return comparison.seen


class _Comparison:
    """Compares one launch; `seen` collects every value that was compared, in order."""

    def __init__(self, arguments: ArgumentSet) -> None:
        self.seen: list[Any] = []
        self._arguments = arguments

    def same(self, subject: str, field: str, recorded: Any, launched: Any) -> None:
        """`recorded`: what the launch record has; `launched`: what the DSL's host code asked for."""
        if recorded != launched:
            what = f"{subject}: {field}" if field else subject
            raise ProofError(
                f"{what} is {recorded} in the launch record and {launched} in the DSL's own launch; the host code"
                f" was not read right. Argument set {self._arguments}",
                parameter=subject,
            )
        self.seen.append([subject, field, recorded])

    def launch(self, record: LaunchRecord, launch: RecordedLaunch) -> None:
        values = self._arguments.values
        self.same("symbol", "", record.symbol, launch.symbol)
        self.same("stream", "", self._arguments.stream, launch.stream)
        for axis, extent, launched in zip("xyz", record.grid, launch.grid, strict=True):
            self.same("grid", axis, evaluate(extent, values), launched)
        self.same("block", "", tuple(evaluate(extent, values) for extent in record.block), launch.block)
        shared = evaluate(record.dynamic_shared, values)
        self.same("dynamic shared memory", "", shared, launch.dynamic_shared)
        self._attributes(record, launch)

    def _attributes(self, record: LaunchRecord, launch: RecordedLaunch) -> None:
        left = dict(launch.launch_attributes)
        cluster = struct.unpack_from("<3I", left.pop(_CLUSTER)) if _CLUSTER in left else (1, 1, 1)
        self.same("cluster", "", record.cluster, cluster)
        if _PREFERRED_CLUSTER in left or record.preferred_cluster:
            asked = struct.unpack_from("<3I", left.pop(_PREFERRED_CLUSTER, bytes(12)))
            self.same("preferred cluster", "", record.preferred_cluster, asked)
        for name, number in (
            ("cooperative", _COOPERATIVE), ("programmatic_stream_serialization", _PROGRAMMATIC_SERIALIZATION),
        ):  # fmt: skip
            value = struct.unpack_from("<i", left.pop(number))[0] if number in left else 0
            self.same("attributes", name, record.attributes.get(name, 0), value)
        events = {event.kind: event for event in record.events}
        for number, kind in _EVENTS.items():
            if (event := events.get(kind)) is None and number not in left:
                continue
            asked = struct.unpack_from("<qii" if kind == PROGRAMMATIC else "<qi", left.pop(number, bytes(16)))
            values = self._arguments.values
            given = (values[event.argument], event.flags, event.at_block_start) if event is not None else "absent"
            self.same("events", kind, given, (*asked, 0)[:3])
        for number in left:
            self.same("attributes", f"launch attribute {number}", "absent", "set")
        kernel = dict(launch.kernel_attributes)
        kernel.pop(_MAX_DYNAMIC_SHARED, None)  # the DSL allows all there is; a launcher allows what the record asks for
        self.same(
            "attributes", "preferred_shared_memory_carveout",
            record.attributes.get("preferred_shared_memory_carveout", -1), kernel.pop(_PREFERRED_CARVEOUT, -1),
        )  # fmt: skip
        # The DSL permits clusters above the portable size for every kernel; a record needs that only where it has one.
        permitted = kernel.pop(_NON_PORTABLE_CLUSTER, 0)
        largest = max(math.prod(record.cluster), math.prod(record.preferred_cluster))
        if largest > _PORTABLE_CLUSTER or record.attributes.get("non_portable_cluster_size_allowed", 0):
            recorded = record.attributes.get("non_portable_cluster_size_allowed", 0)
            self.same("attributes", "non_portable_cluster_size_allowed", recorded, permitted)
        for number, value in kernel.items():
            self.same("attributes", f"kernel attribute {number}", "absent", value)

    def parameter(self, parameter: Parameter, data: bytes) -> None:
        if isinstance(parameter, TensorMapParameter):
            self._tensor_map(parameter, data)
        elif isinstance(parameter, StructParameter):
            for item in parameter.fields:
                self._scalar(parameter.name, item, data[item.offset : item.offset + item.size])
        else:
            self._scalar("", parameter, data)

    def _scalar(self, struct_name: str, parameter: Scalar, data: bytes) -> None:
        """A parameter of its own, or a field of the struct called `struct_name`."""
        values = self._arguments.values
        name, prefix = (struct_name, f"{parameter.name} ") if struct_name else (parameter.name, "")
        if isinstance(parameter, IntegerParameter):
            size, signed = parameter.size, parameter.dtype[0] == "i"
            launched = int.from_bytes(data[:size], "little", signed=signed)
            self.same(name, f"{prefix}value", evaluate(parameter.value, values), launched)
        elif isinstance(parameter, FloatParameter):
            # As bits: -0.0 and 0.0 differ. What a NaN holds means nothing, and differs between processors.
            value = parameter.evaluate(self._arguments.floats, values)
            if parameter.argument:
                value = self._arguments.floats[parameter.argument]
            bits = [parameter.to_bytes(value), data[: parameter.size]]
            shown = ["NaN" if is_nan(item, parameter.dtype) else item.hex() for item in bits]
            self.same(name, f"{prefix}value", *shown)
        else:
            address = values[f"{parameter.argument}.address"] + evaluate_address(parameter.shift, values)
            self.same(name, f"{prefix}address", address % 2**64, int.from_bytes(data, "little"))

    def _tensor_map(self, parameter: TensorMapParameter, data: bytes) -> None:
        recorded = expected_map(parameter, self._arguments.values)
        raw = parameter.encoding == "raw"
        try:
            if raw:
                recorded = decode(encode_raw(recorded))  # what its fields hold
            launched = decode(data)
        except RecordError as error:
            raise ProofError(
                f"{parameter.name}: {error}. Argument set {self._arguments}", parameter=parameter.name
            ) from error
        expected, actual = recorded.fields(), launched.fields()
        for field in expected | actual:
            self.same(parameter.name, field, expected.get(field, "absent"), actual.get(field, "absent"))
        masked = bytearray(data[:DEFINED_BYTES])
        word = int.from_bytes(masked[8:12], "little") & ~ENCODER_BITS
        masked[8:12] = word.to_bytes(4, "little")
        encoded = encode_raw(recorded) if raw else encode(recorded)
        self.same(parameter.name, "descriptor bytes", encoded[:DEFINED_BYTES].hex(), masked.hex())
