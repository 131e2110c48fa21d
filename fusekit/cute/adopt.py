"""From an entry of `fusekit exec` to a kernel with a name: its launch record, read from its host code and proved.

Such a kernel is launched without the DSL, as one that was built from a spec. The program's Python is not needed: the
entry has the IR, and what the run-time arguments were traced with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusekit.compiler import cubin as cubins
from fusekit.compiler import extern, fakes, hostcode
from fusekit.compiler.capture import tables_of
from fusekit.compiler.leaves import POINTER, TENSOR, leaves
from fusekit.compiler.options import compile_options
from fusekit.compiler.prove import prove
from fusekit.compiler.recorder import HostFunction
from fusekit.compiler.sources import Sources
from fusekit.compiler.toolchain import distributions
from fusekit.cute import images
from fusekit.cute.blobs import ARGUMENTS, TOOLCHAIN, unpacked
from fusekit.errors import BuildError, FusekitError, UsageError
from fusekit.plan.arch import FOREIGN
from fusekit.plan.operations import operation
from fusekit.spec.extern import EXTERN, ROLES, ExternSpec
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit.store.entries import ADOPTED, CUBIN_FORMAT, HOST_DIGITS, HOST_OBJECT, KIND
from fusekit.store.keys import common_fields, sha256, with_spec
from fusekit.store.names import split

NAMESPACE = "adopted"
_PREFIX = "fusekit"
_GIVEN = tuple(role for role in ROLES if role != "workspace")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A kernel that an entry became. name, arch, key: its own; of: the name of the entry; entry: in the store; is_new:
    it was not there before.
    """

    name: str
    arch: str
    key: str
    of: str
    entry: Entry
    is_new: bool


def name_of(of: str, given: str = "", *, alone: bool = True) -> str:
    """The full name for the kernel of the entry called `of`: `given` (FILE/KERNEL), which is of one entry `alone` or
    has the digits of each as its variant; without it one of `NAMESPACE`.
    """
    file, kernel, digits = split(of)
    if not given:
        return f"{NAMESPACE}/{file}.{kernel}@{digits}"
    if "/" not in given:
        raise UsageError(f"--as {given}: a name is FILE/KERNEL, such as --as mine/{given}")
    if "@" in given:
        if not alone:
            raise UsageError(f"--as {given}: several entries cannot have one full name; give FILE/KERNEL")
        return given
    return f"{given}@base" if alone else f"{given}@{digits}"


def adopt(store: Store, found: NameRecord, name: str, roles: Mapping[str, str] | None = None) -> Adopted:
    """Read and prove the launch record of the entry that `found` names, and publish it with its cubin as `name`.

    Parameters
    ----------
    store : Store
        What has the entry, and gets the kernel.
    found : NameRecord
        A name that `fusekit exec` gave.
    name : str
        A full name, `file/kernel@variant`.
    roles : mapping of str to str, optional
        `input`, `output` or `inout` for tensors and pointers by their names. Others are `inout`: the entry does not
        tell them.

    Raises
    ------
    BuildError
        The entry cannot be adopted: its arguments or its host code are more than a launch record can say, or it was
        compiled by other distributions than are installed.
    ProofError
        The record is not what the host code launches.
    UsageError
        A role of no argument, or for an entry that is none of `fusekit exec`.
    """
    file, kernel, _ = split(name)
    if HOST_OBJECT not in found.spec:
        raise UsageError(f"{found.name} is nothing that fusekit exec compiled; `fusekit ls` shows what is in the store")
    stored = store.load(found.key)
    if stored is None or stored[0].fields.get(KIND) != HOST_OBJECT:
        raise BuildError(f"{found.name}: its entry is gone; run the program again: fusekit exec -- PROGRAM")
    entry, blob = stored
    spec = _spec(entry, file, kernel, found, roles or {})
    fields = _fields(entry, spec)
    key = key_of(fields)
    kernel_entry, is_new = store.ensure(key, lambda: _built(spec, key, fields, entry, blob))
    # What is shown of it names the program's function; `_function` stands for that here.
    label = found.spec[HOST_OBJECT]
    shown = replace(spec, source=f"{label['module']}:{label['function']}").canonical()
    store.publish_name(NameRecord(name, spec.arch, key, shown, spec.defaults()), kernel_entry)
    return Adopted(name, spec.arch, key, found.name, kernel_entry, is_new)


def _function(**arguments: Any) -> None:
    """Has the arguments of any host function; what was compiled from that is in the entry."""


def _spec(entry: Entry, file: str, kernel: str, found: NameRecord, roles: Mapping[str, str]) -> ExternSpec:
    """The entry as a captured call, whose roles are given. Raises BuildError, UsageError."""
    recorded = entry.launch[HOST_OBJECT].get(ARGUMENTS, {"why": "it was stored by an older fusekit; compile it again"})
    if "why" in recorded:
        raise BuildError(f"{found.name}: {recorded['why']}")
    if entry.arch not in FOREIGN:
        raise BuildError(f"{found.name} is for {entry.arch}; launch records are for {', '.join(FOREIGN)}")
    params = {fakes.FAKES: [], "keywords": dict(recorded["leaves"]), "symbols": recorded["symbols"]}
    source = f"{__name__}:{_function.__name__}"
    function, args, keywords = fakes.read(source, params)
    traced = leaves(function, args, keywords)
    tables = tables_of(traced)
    memory = [leaf.name for leaf in traced if leaf.kind in (TENSOR, POINTER)]
    for name, role in roles.items():
        if role not in _GIVEN:
            raise UsageError(f"--role {name}={role}: a role is one of {', '.join(_GIVEN)}")
        if name not in memory:
            raise UsageError(f"--role {name}={role}: {found.name} has the tensors {', '.join(memory) or 'none'}")
        tables[name]["role"] = role
    return ExternSpec(
        file=file, kernel=kernel, op=EXTERN, arch=entry.arch, source=source, params=params, sweep={}, lift={},
        arguments=tables, dims={}, distributions=(), files=(), env=(), ran_on=(), summary=f"Adopted: {found.name}",
    )  # fmt: skip


def _fields(entry: Entry, spec: ExternSpec) -> dict[str, str]:
    """The key fields: the entry, what its arguments mean, and the code that reads records."""
    installed = distributions()
    compiled = {label.removeprefix(TOOLCHAIN): version for label, version in entry.fields.items() if TOOLCHAIN in label}
    if compiled != installed:
        raise BuildError(
            f"it was compiled by {_words(compiled)}, and {_words(installed)} is installed here; adopt it with what"
            " compiled it, or run the program again"
        )
    row = operation(EXTERN)
    assert row is not None
    sources = Sources().closure(row.modules)
    common = common_fields(arch=spec.arch, toolchain=installed, options=compile_options(spec.arch), sources=sources)
    return with_spec(common, {ADOPTED.removeprefix("spec."): entry.key, "arguments": spec.arguments})


def entry_of(store: Store, kernel: Entry) -> NameRecord | None:
    """The name of the entry that `kernel` was made of; None if the store has it no more."""
    key = json.loads(kernel.fields[ADOPTED])
    names = [listed.record for listed in store.names(f"*@{key[:HOST_DIGITS]}", kernel.arch)]
    return next((each for each in names if each.key == key and HOST_OBJECT in each.spec), None)


def fields_now(store: Store, record: NameRecord, of: NameRecord) -> dict[str, str]:
    """The key fields of the adopted kernel `record`, if it were made of `of` now. Raises BuildError."""
    entry = store.find_entry(of.key)
    if entry is None:
        raise BuildError(f"{of.name}: its entry is gone; run the program again: fusekit exec -- PROGRAM")
    roles = {name: table["role"] for name, table in record.spec["arguments"].items() if table.get("role") in _GIVEN}
    return _fields(entry, _spec(entry, *split(record.name)[:2], of, roles))


def _words(versions: Mapping[str, str]) -> str:
    return " ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _built(spec: ExternSpec, key: str, fields: dict[str, str], of: Entry, blob: bytes) -> tuple[Entry, bytes]:
    """The kernel's entry, and its cubin."""
    begin = time.perf_counter()
    plan = extern.plan(spec)
    with images.module_of(unpacked(blob, of).ir) as module:
        cubin = images.cubin_of(module)
        plan, record = hostcode.read(module, plan, cubin)
        code = images.object_of(module, _PREFIX)
    sizes = {step.symbol: [parameter.size for parameter in step.parameters] for step in record.launches}
    proof = prove(plan, record, HostFunction(code, _PREFIX, cubin, sizes), sha256(cubin))
    proof["seconds"] = seconds = round(time.perf_counter() - begin, 3)
    taken = [cubins.read(cubin, step.symbol).resources(step.dynamic_shared) for step in record.launches]
    most = max(taken, key=lambda resources: (resources["spill_bytes"], resources["registers"]))
    most |= {"cubin_format": cubin[CUBIN_FORMAT]}
    launch = record.to_json()
    return Entry(key, fields, sha256(cubin), len(cubin), launch, most, proof, of.toolchain, seconds), cubin


def adopt_all(
    store: Store, chosen: Sequence[NameRecord], given: str = "", roles: Mapping[str, str] | None = None
) -> tuple[list[Adopted], dict[str, Exception]]:
    """`adopt` each of `chosen`; what became of them, and why others failed, by the names of their entries."""
    done: list[Adopted] = []
    failed: dict[str, Exception] = {}
    for found in chosen:
        try:
            done.append(adopt(store, found, name_of(found.name, given, alone=len(chosen) == 1), roles))
        except UsageError:
            raise
        except FusekitError as error:
            failed[found.name] = error
    return done, failed
