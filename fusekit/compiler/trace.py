"""From a trace plan to a proven kernel: cubin, complete launch record, resources, proof. Needs the DSL, but no GPU."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord, render
from fusekit.compiler import cubin as cubins
from fusekit.compiler import dsl, hardware, hostcode, lift
from fusekit.compiler.cubin import RESERVED_SHARED
from fusekit.compiler.hostfunction import Lifted, TracePlan
from fusekit.compiler.lift import LIFT_VALUES
from fusekit.compiler.options import compile_options
from fusekit.compiler.prove import prove
from fusekit.compiler.recorder import HostFunction
from fusekit.errors import BuildError, ToolchainError, install

_PREFIX = "fusekit"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, ready to be published. launch, resources and proof are JSON."""

    cubin: bytes
    launch: dict[str, Any]
    resources: dict[str, Any]
    proof: dict[str, Any]


def compile_plan(plan: TracePlan, scratch: Path) -> Compiled:
    """Traces, compiles, reads and proves `plan` for its architecture. The DSL leaves files in `scratch`, a
    folder, which is the current one meanwhile.

    resources are those of one of the kernels that are launched: the one that spills most, or takes most registers. Not
    thread-safe, as the DSL is not. Raises BuildError when the DSL refuses the kernel or no record can say what its host
    code does, ProofError when the record is wrong, ToolchainError when the DSL is missing.
    """
    if plan.again is not None:
        traced, record, proof = _proved_without_device(plan, plan.again, scratch)
    else:
        traced, record, proof = _proved(plan, scratch)
    if plan.lifted is not None:
        record, proof = _lifted(plan.lifted, traced.cubin, record, proof, scratch)
    taken = [cubins.read(traced.cubin, launch.symbol).resources(launch.dynamic_shared) for launch in record.launches]
    most = max(taken, key=lambda resources: (resources["spill_bytes"], resources["registers"]))
    return Compiled(traced.cubin, record.to_json(), most, proof)


def _proved(plan: TracePlan, scratch: Path) -> tuple[Traced, LaunchRecord, dict[str, Any]]:
    traced = trace(plan, scratch)
    start = time.perf_counter()
    plan, record = hostcode.read(traced.module, plan, traced.cubin)
    proof = prove(plan, record, traced.host(record), hashlib.sha256(traced.cubin).hexdigest())
    return traced, record, {**proof, "seconds": round(time.perf_counter() - start, 3)}


def _proved_without_device(
    plan: TracePlan, again: Callable[[], TracePlan], scratch: Path
) -> tuple[Traced, LaunchRecord, dict[str, Any]]:
    """`_proved`; what the source or its function asks of the device becomes a variable of the record."""
    with hardware.answering(LIFT_VALUES[0], plan.asked) as asked:
        traced, record, proof = _proved(plan, scratch)
    if not asked:
        return traced, record, proof
    (expr, cluster), *others = asked.items()
    if others or cluster != math.prod(record.launches[-1].cluster if expr == hardware.CLUSTERS else (1,)):
        raise BuildError(
            "the source and its host function ask the device for several things; a launch record can have one of them,"
            " the count of multiprocessors, or that of the launch's own clusters; give the host function the others as"
            " arguments"
        )
    try:
        with hardware.answering(LIFT_VALUES[1]):
            record, proof = _lifted(Lifted(expr, LIFT_VALUES, again()), traced.cubin, record, proof, scratch)
    except BuildError as error:
        raise BuildError(
            f"the source or its host function asks the device for {render(expr)}, and makes of it what a launch record"
            f" cannot say: {error}; give it the number as an argument"
        ) from error
    return traced, record, proof


def _lifted(
    lifted: Lifted, cubin: bytes, record: LaunchRecord, proof: dict[str, Any], scratch: Path
) -> tuple[LaunchRecord, dict[str, Any]]:
    """The record with the lifted variable, and its two proofs as one."""
    traced, other, again = _proved(lifted.plan, scratch)
    first, second = lifted.values
    if traced.cubin != cubin:
        raise BuildError(
            f"lift: the cubin for {second} is not the one for {first}; only what no kernel depends on can be lifted;"
            " sweep it instead"
        )
    digest = hashlib.sha256((proof["digest"] + again["digest"]).encode()).hexdigest()
    both = {**proof, "launches": proof["launches"] + again["launches"], "digest": digest}
    both["seconds"] = max(proof["seconds"], again["seconds"])
    return lift.unify((record, other), lifted.values, lifted.expr), both


@dataclass(frozen=True, slots=True)
class Traced:
    """What the DSL made of a plan. module: its host code in MLIR's LLVM dialect; host_object: the same, compiled.
    ptx: empty unless the plan's options keep it.
    """

    cubin: bytes
    module: Any
    host_object: bytes
    ptx: str

    def host(self, record: LaunchRecord) -> HostFunction:
        """The host code, to run the launches of `record`."""
        sizes = {launch.symbol: [parameter.size for parameter in launch.parameters] for launch in record.launches}
        return HostFunction(self.host_object, _PREFIX, self.cubin, sizes)


def trace(plan: TracePlan, scratch: Path) -> Traced:
    """Compiles `plan` with the DSL. Raises BuildError and ToolchainError as `compile_plan` does."""
    try:
        from cutlass import cute
    except ImportError as error:
        raise ToolchainError(f"the CuTe DSL cannot be imported ({error}); {install('build')}") from error
    try:
        with contextlib.chdir(scratch), dsl.target(plan.signature.arch, RESERVED_SHARED), dsl.naming(plan.symbol):
            options = f"{compile_options(plan.signature.arch)} {plan.options}"
            compiled = cute.compile(plan.function, *plan.arguments, **plan.keywords, options=options)
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(
            f"the CuTe DSL refuses the kernel: {dsl.without_colours(str(error)) or repr(error)}"
        ) from error
    cubin = dsl.cubin(compiled, plan.signature.arch)
    return Traced(cubin, dsl.host_module(compiled), dsl.host_object(compiled, _PREFIX), dsl.ptx(compiled))
