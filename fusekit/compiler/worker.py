"""A compile process: takes one kernel after the other from its parent, sends each back compiled and proven, or an
error.

It is forked with a socket to speak over, in a scratch folder that the DSL may fill. fusekit.compiler.options says which
environment it has.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fusekit.compiler import dsl, foreign, values
from fusekit.compiler.fakes import FAKES
from fusekit.compiler.hostfunction import TracePlan
from fusekit.compiler.options import LINE_INFO, compile_options, has_lineinfo
from fusekit.compiler.places import with_keys, with_places
from fusekit.compiler.reads import Watch, check
from fusekit.compiler.symbols import symbol_of
from fusekit.compiler.toolchain import SUPPORTED, check_loaded, describe, distributions
from fusekit.compiler.trace import Compiled, compile_plan
from fusekit.errors import BuildError, FusekitError, ToolchainError, install
from fusekit.plan.operations import operation
from fusekit.spec import ExternSpec
from fusekit.store.keys import with_spec

COMPILER = ("cutlass.cute", "llvmlite.binding")
"""What a kernel is compiled and proven with."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel. planner: a function that can be imported by name; called with `spec`. name: for messages. fields: the
    key fields that it is compiled for, which an executor's process compares with its own. home: (module of the source,
    architecture, the environment variables that it reads as NAME=VALUE) of a foreign kernel, whose process compiles
    nothing else.
    """

    name: str
    planner: Callable[[Any], TracePlan] | None
    spec: Any
    fields: Mapping[str, str] | None = None
    home: tuple[str, ...] | None = None


def alone(spec: Any) -> Any:
    """The spec as a kernel is compiled from it, whatever layer it is of."""
    return replace(spec, layer=None) if getattr(spec, "layer", None) is not None else spec


@dataclass(frozen=True, slots=True)
class Done:
    """A finished job. seconds: to trace, compile and prove. toolchain: of the process that did it."""

    compiled: Compiled
    seconds: float
    toolchain: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a compile process sends back; memory: bytes that it holds after the job."""

    result: Done | FusekitError
    memory: int


def serve(socket: int, cache: Path | None, watch: Watch | None) -> None:
    """Works until the parent hangs up. socket: file descriptor of this end. cache: keeps digests of files. watch: of
    what a foreign source reads.
    """
    connection: Connection[Any, Any] = Connection(socket)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        except Exception as error:
            text = f"a compile process cannot load its kernel: {type(error).__name__}: {error}"
            connection.send(Answer(BuildError(text), _memory()))
            continue
        connection.send(Answer(_work(job, cache, watch), _memory()))


def plan(spec: Any) -> TracePlan:
    """What to trace for `spec`. Imports the DSL."""
    row = operation(spec.op)
    if row is None:
        raise BuildError(f"op {spec.op!r} has no kernels; install the package that has it")
    launch: TracePlan = row.load("planner")(spec)
    return launch if isinstance(spec, ExternSpec) else replace(launch, symbol=symbol_of(spec))


def _work(job: Job, cache: Path | None, watch: Watch | None) -> Done | FusekitError:
    """The kernel, or what failed; first of all what its key does not name, of which anything else may come."""
    done = _compiled(job, cache)
    if watch is not None and job.fields is not None and isinstance(job.spec, ExternSpec):
        try:
            check(watch, job.spec, dict(job.fields), foreign.Foreign(cache))
        except BuildError as error:
            return error
    return done


def _compiled(job: Job, cache: Path | None) -> Done | FusekitError:
    start = time.perf_counter()
    try:
        _same_spec(job)
        _import_compiler()
        launch = (job.planner or plan)(job.spec)
        if has_lineinfo(job.fields):
            launch = launch.with_option(LINE_INFO)
        if isinstance(job.spec, ExternSpec) and FAKES in job.spec.params:
            called = launch.function, *launch.arguments, *launch.keywords.values()
            values.check(called, job.spec.params.get(values.VALUES, {}), foreign.Foreign(cache))
        compiled = compile_plan(launch, Path.cwd())
        versions = distributions(cache)
        check_loaded(versions)
    except FusekitError as error:
        return with_keys(with_places(error), job.spec)
    except ImportError as error:  # what is imported for a kernel is the compiler, or made for one version of it
        return unusable(_described(error))
    except MemoryError:
        return BuildError(f"{job.name}: the compile process reached its limit of memory; use fewer --jobs")
    except Exception as error:
        failure = BuildError(f"{_described(error)}; this is a defect of the kernel's planner")
        failure.add_note(traceback.format_exc())
        return failure
    toolchain = describe(versions)
    if job.fields is not None and job.home is not None:
        toolchain["foreign"] = foreign.describe(dict(job.fields))
    return Done(compiled, round(time.perf_counter() - start, 3), toolchain)


def _same_spec(job: Job) -> None:
    """Raises BuildError where the builder read the spec differently than the sources here do."""
    if job.fields is None:
        return
    options = compile_options(job.spec.arch, lineinfo=has_lineinfo(job.fields))
    here = with_spec({"options": options}, job.spec.device_spec())
    there = {label: value for label, value in job.fields.items() if label == "options" or label.startswith("spec.")}
    odd = sorted(label for label in {*here, *there} if here.get(label) != there.get(label))
    if odd:
        package = Path(__file__).parents[1]
        raise BuildError(
            f"{job.name}: {', '.join(odd)}: the process that builds has not run the sources of fusekit that are in"
            f" {package} now; start it again; if that does not help its byte code is of other sources: find {package}"
            " -name __pycache__ -prune -exec rm -r {} +"
        )


def unusable(why: str) -> ToolchainError:
    """The error for a compiler that is installed and cannot be imported."""
    return ToolchainError(
        f"the compiler cannot be imported: {why}; fusekit is made for nvidia-cutlass-dsl {SUPPORTED}, and "
        f"{distributions()['nvidia-cutlass-dsl']} is installed here; {install('build', '--force-reinstall')}"
    )


def _import_compiler() -> None:
    try:
        for module in COMPILER:
            import_module(module)
        dsl.check()
    except (Exception, SystemExit) as error:  # a broken installation fails in any way
        raise unusable(_described(error)) from error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _memory() -> int:
    """Bytes of memory that this process holds."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
