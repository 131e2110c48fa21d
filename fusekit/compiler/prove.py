"""The proof: on many argument sets, the launch record gives what the DSL's own host code would launch.

Compared are every defined byte of every kernel parameter (a tensor map field by field first, so that a difference has a
name), grid, block, cluster, dynamic shared memory, stream, symbol and the launch attributes. The first difference ends
the build with a ProofError.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    RecordError,
    TensorMapParameter,
)
from fusekit.abi.expr import evaluate
from fusekit.abi.parameters import INTEGER_BYTES, Parameter
from fusekit.abi.tensormap import DEFINED_BYTES, ENCODER_BITS, decode, encode
from fusekit.compiler.hostcall import check_plan, pack
from fusekit.compiler.plan import TracePlan
from fusekit.compiler.recorder import HostFunction, RecordedLaunch
from fusekit.compiler.samples import ArgumentSet, argument_sets, expected_map
from fusekit.errors import ProofError

LAUNCHES = 64  # about 25 ms

# cudaLaunchAttributeID
_COOPERATIVE = 2
_CLUSTER = 4
_PROGRAMMATIC_SERIALIZATION = 6
# cudaFuncAttribute
_MAX_DYNAMIC_SHARED = 8
_PREFERRED_CARVEOUT = 9
_NON_PORTABLE_CLUSTER = 14
_PORTABLE_CLUSTER = 8


def prove(
    plan: TracePlan, record: LaunchRecord, host: HostFunction, seed: str, launches: int = LAUNCHES
) -> dict[str, Any]:
    """Compares `record` (complete) with `host` on at least `launches` argument sets drawn from `seed`.

    Returns the proof as JSON: the number of launches, the parameters compared, which edges were among the argument
    sets, and a SHA-256 over all compared values. Raises ProofError naming the parameter, the field, both values and the
    argument set.
    """
    check_plan(plan)
    digest = hashlib.sha256()
    sets = argument_sets(record, seed, launches)
    for arguments in sets:
        launch = host.call(pack(plan, arguments), arguments.values["sm_count"])
        comparison = _Comparison(arguments)
        comparison.launch(record, launch)
        for parameter, data in zip(record.parameters, launch.parameters, strict=True):
            comparison.parameter(parameter, data)
        digest.update(json.dumps([arguments.label, comparison.seen], sort_keys=True).encode())
    return {
        "launches": len(sets),
        "parameters": [parameter.name for parameter in record.parameters],
        "edges": [arguments.label for arguments in sets if arguments.edge],
        "seed": seed,
        "digest": digest.hexdigest(),
    }


class _Comparison:
    """Compares one launch; `seen` collects every value that was compared, in order."""

    def __init__(self, arguments: ArgumentSet) -> None:
        self.seen: list[Any] = []
        self._arguments = arguments

    def same(self, subject: str, field: str, recorded: Any, launched: Any) -> None:
        """`recorded`: what the launch record says; `launched`: what the DSL's host code asked for."""
        if recorded != launched:
            what = f"{subject}: {field}" if field else subject
            raise ProofError(
                f"{what} is {recorded} in the launch record and {launched} in the DSL's own launch; mend the record in"
                f" the kernel's family module. Argument set {self._arguments}",
                parameter=subject,
            )
        self.seen.append([subject, field, recorded])

    def launch(self, record: LaunchRecord, launch: RecordedLaunch) -> None:
        values = self._arguments.values
        self.same("symbol", "", record.symbol, launch.symbol)
        self.same("stream", "", self._arguments.stream, launch.stream)
        for axis, extent, launched in zip("xyz", record.grid, launch.grid, strict=True):
            self.same("grid", axis, evaluate(extent, values), launched)
        self.same("block", "", record.block, launch.block)
        self.same("dynamic shared memory", "", record.dynamic_shared, launch.dynamic_shared)
        self._attributes(record, launch)

    def _attributes(self, record: LaunchRecord, launch: RecordedLaunch) -> None:
        left = dict(launch.launch_attributes)
        cluster = struct.unpack_from("<3I", left.pop(_CLUSTER)) if _CLUSTER in left else (1, 1, 1)
        self.same("cluster", "", record.cluster, cluster)
        for name, number in (
            ("cooperative", _COOPERATIVE), ("programmatic_stream_serialization", _PROGRAMMATIC_SERIALIZATION),
        ):  # fmt: skip
            value = struct.unpack_from("<i", left.pop(number))[0] if number in left else 0
            self.same("attributes", name, record.attributes.get(name, 0), value)
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
        x, y, z = record.cluster
        if x * y * z > _PORTABLE_CLUSTER or record.attributes.get("non_portable_cluster_size_allowed", 0):
            recorded = record.attributes.get("non_portable_cluster_size_allowed", 0)
            self.same("attributes", "non_portable_cluster_size_allowed", recorded, permitted)
        for number, value in kernel.items():
            self.same("attributes", f"kernel attribute {number}", "absent", value)

    def parameter(self, parameter: Parameter, data: bytes) -> None:
        values = self._arguments.values
        name = parameter.name
        if isinstance(parameter, TensorMapParameter):
            self._tensor_map(parameter, data)
        elif isinstance(parameter, PointerParameter):
            self.same(name, "address", values[f"{parameter.argument}.address"], int.from_bytes(data, "little"))
        elif isinstance(parameter, IntegerParameter):
            recorded = evaluate(parameter.value, values)
            size = INTEGER_BYTES[parameter.dtype]
            self.same(name, "value", recorded, int.from_bytes(data[:size], "little", signed=True))
        elif isinstance(parameter, FloatParameter):
            # As bits: -0.0 and 0.0 differ, and so would two NaNs.
            self.same(name, "value", struct.pack("<f", self._arguments.floats[parameter.argument]).hex(), data.hex())

    def _tensor_map(self, parameter: TensorMapParameter, data: bytes) -> None:
        recorded = expected_map(parameter, self._arguments.values)
        try:
            launched = decode(data)
        except RecordError as error:
            raise ProofError(
                f"{parameter.name}: {error}. Argument set {self._arguments}", parameter=parameter.name
            ) from error
        expected, found = recorded.fields(), launched.fields()
        for field in expected | found:
            self.same(parameter.name, field, expected.get(field, "absent"), found.get(field, "absent"))
        masked = bytearray(data[:DEFINED_BYTES])
        word = int.from_bytes(masked[8:12], "little") & ~ENCODER_BITS
        masked[8:12] = word.to_bytes(4, "little")
        self.same(parameter.name, "descriptor bytes", encode(recorded)[:DEFINED_BYTES].hex(), masked.hex())
