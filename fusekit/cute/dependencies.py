"""What a trace depends on beside its key: recorded while the DSL traces, and compared before a later one is left out.

A trace is a function of its arguments and of what the code that runs reads. Recorded are: each code object that ran
outside the libraries, the values of the globals that it names and the attributes of modules that it names, its files,
the variables of the environment and the files that were read. Values count whole: objects with their attributes,
functions with code, defaults and closures, classes with all members. Code that ran and is in none of these values, and
whatever else is in doubt, raises UnnamedError: then there is no level 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fusekit.cute.bytecode import deleted_names, stored_names
from fusekit.cute.digest import UnnamedError
from fusekit.cute.files import ABSENT, file_digest, secret, source_digest, variable_digest
from fusekit.cute.libraries import home, is_library
from fusekit.cute.memos import NO_NAME, Proof, Proofs, remembered
from fusekit.cute.reads import Reads, Root, cannot_change, libraries_digest, names_digest, read
from fusekit.cute.recorder import Record, Recorder
from fusekit.cute.values import NOTHING, Walk

_MOST_FORESEEN = 20_000  # objects that are read before a trace


class Trace:
    """One trace that is recorded: made before it, with the walk over the function and its arguments.

    fields: of its key, without what is of its call alone. proofs: of what functions remember.
    """

    def __init__(self, arguments: Walk, fields: Mapping[str, str], proofs: Proofs) -> None:
        self._before = Reads(strict=False)
        self._before.walked(arguments)
        self._before.settle(_MOST_FORESEEN)
        self._arguments, self._fields, self._proofs = arguments, fields, proofs
        memoised = [each for known in self._before.memos.values() for each, _ in known]
        self._recorder = Recorder(code for each in memoised if (code := getattr(each.__wrapped__, "__code__", None)))
        self._begin = 0.0
        self.seconds = 0.0

    def start(self) -> None:
        """Begin to record. Raises UnnamedError if that cannot be done."""
        self._wall, self._begin = time.time_ns(), time.perf_counter()
        self._recorder.start()

    def stop(self) -> None:
        """Stop it."""
        self._recorder.stop()
        self.seconds = time.perf_counter() - self._begin

    def manifest(self, arguments: Walk) -> dict[str, Any]:
        """What the trace read, as JSON types. arguments: the same walk, after it. Raises UnnamedError if something in
        it has no name.
        """
        if self._recorder.doubt:
            raise UnnamedError(self._recorder.doubt)
        if self._arguments.memos:
            raise UnnamedError("methods of an argument are memoised")
        record = self._recorder.joined(())
        reads = self._reads(record, arguments)
        found = [
            self._proofs.find(function, results, self._fields)
            for root in reads.memos
            for function, results in self._before.memos.get(root, [])
        ]
        if proofs := list(dict.fromkeys(proof for each in found for proof in each.values())):
            with contextlib.suppress(UnnamedError):  # what one of them read is not as it was
                joined = record.joined(proof.record for proof in proofs)
                return self._written(joined, self._reads(joined, arguments), proofs)
        return self._written(record, reads, ())

    def _reads(self, record: Record, arguments: Walk) -> Reads:
        reads = Reads(strict=True)
        reads.walked(arguments)
        reads.attributes |= {name for _, name in record.attributes}
        for code, spaces in record.spaces.items():
            for space in spaces:
                reads.add(code, space)
        reads.settle()
        reads.check(record.spaces)
        return reads

    def _written(self, record: Record, reads: Reads, proofs: Sequence[Proof]) -> dict[str, Any]:
        """The manifest of this trace and of those in `proofs`, whose results it found. Raises UnnamedError."""
        before = dict(self._before.values)
        for proof in proofs:
            if why := why_not(proof.manifest):
                raise UnnamedError(why)
            for place, value in proof.manifest["values"].items():
                module, _, name = place.rpartition(":")
                if before.get((module, name)) is None:
                    before[module, name] = value
        stored = {name for code in record.spaces for name in stored_names(code)}
        deleted = {name for code in record.spaces for name in deleted_names(code)}
        for root, value in record.attributes.items():
            if before.get(root) is None and root[1] not in stored and "setattr" not in stored:
                before[root] = value
        for root, value in reads.values.items():
            if root not in before and root[1] not in stored and cannot_change(root):
                continue
            # What the DSL puts into the body of a class is stored and read there, by names that are no globals.
            if value == ABSENT and root not in before and not {root[1], "delattr"} & deleted and not reads.computes:
                continue
            if before.get(root) is None:
                raise UnnamedError(f"{root[0]}:{root[1]} was not foreseen")
            if before[root] != value:
                raise UnnamedError(f"the trace changes {root[0]}:{root[1]}")
        memos = {root: self._memos(root, reads, proofs) for root in reads.memos}
        modules, files = self._files(record, reads)
        computes = bool(reads.computes)
        manifest = {
            "attributes": sorted(reads.attributes),
            "computes": computes,
            "values": {f"{module}:{name}": value for (module, name), value in reads.values.items()},
            "names": {name: names_digest(module, reads.attributes, computes) for name, module in reads.modules.items()},
            "libraries": {
                name: libraries_digest(module, reads.attributes, whole=computes)
                for name, module in reads.libraries.items()
            },
            "modules": modules,
            "files": files,
            "environment": {
                name: secret(value) for name, value in record.environment.items() if not name.startswith("CUTE_DSL_")
            },
            "memos": {f"{root[0]}:{root[1]}": pair for root, pair in memos.items()},
            "seconds": self.seconds,
        }
        for root, now in reads.memos.items():
            for (function, first), (_, last) in zip(self._before.memos[root], now, strict=True):
                new = {key: result for key, result in last.items() if key not in first}
                self._proofs.add(function, new, Proof(self._fields, record, manifest))
        return manifest

    def _memos(self, root: Root, reads: Reads, proofs: Sequence[Proof]) -> tuple[list[Any], list[Any]]:
        """What the functions in a value remembered before, without what `proofs` have computed, and after."""
        name, before, after = f"{root[0]}:{root[1]}", self._before.memos.get(root, []), reads.memos[root]
        if [id(each) for each, _ in before] != [id(each) for each, _ in after]:
            raise UnnamedError(f"what {name} remembers was not foreseen")
        needed = []
        for (function, first), (_, last) in zip(before, after, strict=True):
            if NO_NAME in first.values():
                raise UnnamedError(f"what {name} remembers has no name for a key")
            code = getattr(function.__wrapped__, "__code__", None)
            if len(last.keys() - first.keys()) > self._recorder.runs.get(id(code), 0):
                raise UnnamedError(f"what {name} remembers was computed elsewhere")
            proved = self._proofs.find(function, first, self._fields) if proofs else {}
            needed.append({key: result for key, result in first.items() if proved.get(key) not in proofs})
        return needed, [last for _, last in after]

    def refused(self, why: str, times: int) -> dict[str, Any]:
        """What is kept of a trace that has no manifest, until one of its files changes."""
        files = {code.co_filename: file_digest(code.co_filename) for code in self._recorder.spaces}
        return {"refused": why, "times": times, "files": files, "seconds": 0.0}

    def _files(self, record: Record, reads: Reads) -> tuple[dict[str, str], dict[str, str]]:
        """(module -> digest, path -> digest) of what the code that ran is from, and of what it opened."""
        modules, files = dict(reads.modules), dict[str, str]()
        homes = {str(path): name for name, module in list(sys.modules.items()) if (path := home(module))}
        paths = {code.co_filename for code in record.spaces}
        for spaces in record.spaces.values():
            for space in spaces:
                name = str(space.get("__name__"))
                if name in sys.modules:
                    modules[name] = sys.modules[name]
        for path in paths | record.files:
            if path.startswith("<") or (path not in paths and is_library(os.path.abspath(path))):  # noqa: PTH100
                continue
            if path.startswith(("/proc/", "/sys/", "/dev/")):
                raise UnnamedError(f"{path} is read")
            if path in homes:
                if not is_library(path):
                    modules[homes[path]] = sys.modules[homes[path]]
            elif not path.endswith(".pyc"):
                files[os.path.abspath(path)] = file_digest(path)  # noqa: PTH100
        for path in [*files, *(str(home(module)) for module in modules.values())]:
            with contextlib.suppress(OSError):
                status = os.stat(path)  # noqa: PTH116
                if max(status.st_mtime_ns, status.st_ctime_ns) >= self._wall:
                    raise UnnamedError(f"{path} changed while it was traced")
        return {name: source_digest(module) for name, module in modules.items()}, files


def times_refused(manifest: Mapping[str, Any]) -> int:
    """How often a trace from the files that there are now could not be recorded."""
    now = "refused" in manifest and all(file_digest(path) == known for path, known in manifest["files"].items())
    return int(manifest["times"]) if now else 0


def why_not(manifest: Mapping[str, Any]) -> str:
    """Why a trace that is as `manifest` says would not give the same now; "" if it would."""
    for name, expected in manifest["modules"].items():
        if name not in sys.modules:
            return f"module {name} is not imported"
        if source_digest(sys.modules[name]) != expected:
            return f"file of module {name} changed"
    for name, expected in manifest["environment"].items():
        if variable_digest(name) != expected:
            return f"variable {name} changed"
    for path, expected in manifest["files"].items():
        if file_digest(path) != expected:
            return f"file {path} changed"
    attributes, computes = set(manifest["attributes"]), manifest["computes"]
    for name, expected in manifest["libraries"].items():
        module = sys.modules.get(name)
        if module is None or libraries_digest(module, attributes, whole=computes) != expected:
            return f"module {name} has other values"
    for name, expected in manifest["names"].items():
        module = sys.modules.get(name)
        if module is None or names_digest(module, attributes, computes) != expected:
            return f"module {name} has other names"
    digests = dict[int, _Digest]()
    for place, expected in manifest["values"].items():
        if why := _why_not_value(place, expected, manifest["memos"].get(place), digests):
            return why
    return ""


_Digest = tuple[Any, str, list[Any]]
"""A value, its digest, and the memoised functions in it."""


def _why_not_value(place: str, expected: str, memos: Any, digests: dict[int, _Digest]) -> str:
    module, _, name = place.rpartition(":")
    if module not in sys.modules:
        return f"module {module} is not imported"
    value = read((module, name))
    if value is NOTHING:
        return "" if expected == ABSENT else f"value {place} is gone"
    try:
        if id(value) not in digests:  # a value may be a global of many modules
            walk = Walk()
            walk(value)
            digests[id(value)] = value, walk.hexdigest(), walk.memos
        _, found, functions = digests[id(value)]
        if found != expected:
            return f"value {place} changed"
        if functions:
            before, after = memos
            for function, first, last in zip(functions, before, after, strict=True):
                now = remembered(function)
                # What the trace itself added may be missing: it would be computed from what was recorded.
                if any(now.get(key) != result for key, result in first.items() if key in last) or any(
                    now[key] != result or result == NO_NAME for key, result in last.items() if key in now
                ):
                    return f"what {place} remembers changed"
    except (UnnamedError, RecursionError) as error:
        return f"value {place}: {error}"
    return ""
