"""From a trace plan to a proven kernel: cubin, complete launch record, resources, proof. Needs the DSL, but no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord
from fusekit.compiler import cubin as cubins
from fusekit.compiler.options import compile_options
from fusekit.compiler.plan import TracePlan
from fusekit.compiler.prove import prove
from fusekit.compiler.recorder import HostFunction
from fusekit.errors import BuildError, ToolchainError

_PREFIX = "fusekit"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, ready to be published. launch, resources and proof are JSON."""

    cubin: bytes
    launch: dict[str, Any]
    resources: dict[str, Any]
    proof: dict[str, Any]


def compile_plan(plan: TracePlan, scratch: Path) -> Compiled:
    """Traces, compiles and proves `plan` for its record's architecture. The DSL leaves files in `scratch`, a
    folder, which is the current one meanwhile.

    Not thread-safe, as the DSL is not. Raises BuildError when the DSL refuses the kernel or the cubin does not fit the
    record, ProofError when the record is wrong, ToolchainError when the DSL is missing.
    """
    image, symbol, host_object = _trace(plan, scratch)
    facts = cubins.read(image, symbol)
    record = complete(plan.record, facts)
    host = HostFunction(host_object, _PREFIX, image, [parameter.size for parameter in facts.parameters])
    seed = hashlib.sha256(image).hexdigest()
    proof = prove(plan, record, host, seed)
    return Compiled(image, record.to_json(), facts.resources(record.dynamic_shared), proof)


def complete(record: LaunchRecord, facts: cubins.Cubin) -> LaunchRecord:
    """`record` with the cubin's symbol and parameter offsets; raises BuildError when the two lists of parameters
    differ.
    """
    asked = [parameter.size for parameter in record.parameters]
    found = [parameter.size for parameter in facts.parameters]
    if asked != found:
        listed = ", ".join(f"{parameter.name} {parameter.size}" for parameter in record.parameters)
        raise BuildError(
            f"launch record: parameters of {listed} bytes; the cubin's have {', '.join(map(str, found))}; list"
            " each kernel"
            " parameter once, in order, and pass numbers and addresses one by one"
        )
    x, y, z = record.block
    if facts.max_threads and x * y * z > facts.max_threads:
        raise BuildError(f"launch record: block {x}x{y}x{z}; the cubin allows {facts.max_threads} threads")
    parameters = tuple(
        replace(parameter, offset=place.offset)
        for parameter, place in zip(record.parameters, facts.parameters, strict=True)
    )
    completed = replace(record, symbol=facts.symbol, parameters=parameters)
    completed.check_complete()
    return completed


def _trace(plan: TracePlan, scratch: Path) -> tuple[bytes, str, bytes]:
    """(cubin, kernel symbol, host object)."""
    try:
        from cutlass import cute
    except ImportError as error:
        raise ToolchainError(f"the CuTe DSL cannot be imported ({error}); pip install 'fusekit[build]'") from error
    try:
        with contextlib.chdir(scratch):
            compiled = cute.compile(plan.function, *plan.arguments, options=compile_options(plan.record.arch))
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(
            f"the CuTe DSL refuses the kernel: {_ANSI.sub('', str(error)).strip() or repr(error)}"
        ) from error
    image = compiled.artifacts.CUBIN
    if not image:
        raise ToolchainError(
            "the CuTe DSL gave no cubin; this fusekit does not know its version; install nvidia-cutlass-dsl 4.8"
        )
    symbols = list(compiled.kernel_info)
    if len(symbols) != 1:
        raise BuildError(f"the host function launches {len(symbols)} kernels; a spec is exactly one; launch one")
    return bytes(image), symbols[0], _host_object(compiled)


def _host_object(compiled: Any) -> bytes:
    # The DSL's engine looks up the host object's CUDA entry points before it writes it out, and finds them only when
    # its own runtime library is visible in the whole process. None of them is called.
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    for path in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep):
        if path:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    try:
        host_object: bytes = compiled.dump_to_object(_PREFIX)
    except Exception as error:
        raise ToolchainError(
            f"the CuTe DSL cannot write its host object: {_ANSI.sub('', str(error)).strip()}"
        ) from error
    return host_object
