"""What a trace depends on beside its key: recorded while the DSL traces, and compared before a later one is left out.

A trace is a function of its arguments and of what the code that runs reads. Recorded are: each code object that ran
outside the libraries, the values of the globals that it names and the attributes of modules that it names, its files,
the variables of the environment and the files that were read. Values count whole: objects with their attributes,
functions with code, defaults and closures, classes with all members, and which of all these are one object. Code that
ran and is in none of these values, and whatever else is in doubt, raises UnnamedError: then there is no level 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusekit.cute.bytecode import deleted_names, stored_names
from fusekit.cute.digest import UnnamedError
from fusekit.cute.files import ABSENT, file_digest, secret, source_digest, variable_digest
from fusekit.cute.libraries import home, is_library
from fusekit.cute.memos import NO_NAME, Proof, Proofs, common, remembered, ties
from fusekit.cute.reads import Reads, Root, cannot_change, libraries_digest, names_digest, read, shared
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
        self._libraries = self._before.of_libraries()
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
                return self._written(joined, self._reads(joined, arguments), arguments, proofs)
        return self._written(record, reads, arguments, ())

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

    def _written(self, record: Record, reads: Reads, arguments: Walk, proofs: Sequence[Proof]) -> dict[str, Any]:
        """The manifest of this trace and of those in `proofs`, whose results it found. Raises UnnamedError."""
        before = dict(self._before.values)
        for proof in proofs:
            if why := why_not(proof.manifest):
                raise UnnamedError(why)
            for place, value in proof.manifest["values"].items():
                if before.get(_root(place)) is None:
                    before[_root(place)] = value
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
        self._check_objects(reads, arguments)
        if changed := [name for name, now in self._before.of_libraries().items() if now != self._libraries.get(name)]:
            raise UnnamedError(f"the trace changes the module {min(changed)}")
        memos = {root: self._memos(root, reads, proofs) for root in reads.memos}
        objects = Walk()
        _walk(objects, [read(root) for _, root in sorted((_place(root), root) for root in reads.values)])
        found = {
            id(function): (_place(root), at)
            for root, functions in reads.memos.items()
            for at, (function, _) in enumerate(functions)
        }
        modules, files = self._files(record, reads)
        computes = bool(reads.computes)
        manifest = {
            "attributes": sorted(reads.attributes),
            "computes": computes,
            "values": {_place(root): value for root, value in reads.values.items()},
            "objects": objects.hexdigest(),
            "common": common(arguments, objects),
            "names": {name: names_digest(module, reads.attributes, computes) for name, module in reads.modules.items()},
            "libraries": {
                name: libraries_digest(module, reads.attributes, whole=computes)
                for name, module in reads.libraries.items()
            },
            "modules": modules,
            "files": files,
            "environment": {name: secret(value) for name, value in record.environment.items()},
            "memos": {_place(root): pairs for root, pairs in memos.items()},
            "order": [found[id(function)] for function in objects.memos],
            "ties": [ties(function, (objects, arguments)) for function in objects.memos],
            "seconds": self.seconds,
        }
        for root, now in reads.memos.items():
            for (function, first), (_, last) in zip(self._before.memos[root], now, strict=True):
                new = {key: result for key, result in last.items() if key not in first}
                self._proofs.add(function, new, Proof(self._fields, record, manifest))
        return manifest

    def _check_objects(self, reads: Reads, arguments: Walk) -> None:
        before = self._before.objects
        both = [root for root in reads.objects if root in before and self._before.values[root] is not None]
        was, now = (
            shared([walk.places, *(objects[root] for root in both)])
            for walk, objects in ((self._arguments, before), (arguments, reads.objects))
        )
        if was != now:
            raise UnnamedError("the trace changes which of the objects that it reads are one")

    def _memos(self, root: Root, reads: Reads, proofs: Sequence[Proof]) -> list[tuple[Any, Any]]:
        """What each function in a value remembered before, without what `proofs` have computed, and after."""
        name, before, after = _place(root), self._before.memos.get(root, []), reads.memos[root]
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
            kept = {key: result for key, result in first.items() if proved.get(key) not in proofs}
            needed.append((kept, last))
        return needed

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
                files[path] = file_digest(path)  # as it was opened: from another folder it may be another one
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


def why_not(manifest: Mapping[str, Any], arguments: Walk | None = None) -> str:
    """Why a trace that is as `manifest` says would not give the same now; "" if it would.

    arguments: of the call. Without them it is not asked which objects are both in them and in what the trace read.
    """
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
    objects = Walk()
    with contextlib.suppress(KeyError, UnnamedError, RecursionError):
        _walk(objects, [read(_root(place)) for place in sorted(manifest["values"])])
        memos = [manifest["memos"][place][at] for place, at in manifest["order"]]
        if objects.hexdigest() == manifest["objects"] and not _forgotten(objects.memos, memos):
            if arguments is not None and common(arguments, objects) != manifest["common"]:
                return "the arguments hold other objects of those that it reads"
            walks = (objects,) if arguments is None else (objects, arguments)
            for function, expected in zip(objects.memos, manifest["ties"], strict=True):
                if any(expected.get(key, tied)[: len(walks)] != tied for key, tied in ties(function, walks).items()):
                    return f"what {function.__qualname__} remembers holds other objects"
            return ""
    return _why_not_values(manifest)


def _walk(objects: Walk, values: Iterable[Any]) -> None:
    """One walk over all that a trace reads: which of it are one object is in the digest."""
    for value in values:
        if value is NOTHING:
            objects.put(ABSENT)
        else:
            objects(value)


def _place(root: Root) -> str:
    return f"{root[0]}:{root[1]}"


def _root(place: str) -> Root:
    module, _, name = place.rpartition(":")
    return module, name


def _why_not_values(manifest: Mapping[str, Any]) -> str:
    """The first value that is not as it was."""
    for place, expected in manifest["values"].items():
        module, name = _root(place)
        if module not in sys.modules:
            return f"module {module} is not imported"
        value, walk = read((module, name)), Walk()
        try:
            if value is not NOTHING:
                walk(value)
            if (ABSENT if value is NOTHING else walk.hexdigest()) != expected:
                return f"value {place} {'is gone' if value is NOTHING else 'changed'}"
            if _forgotten(walk.memos, manifest["memos"].get(place, ())):
                return f"what {place} remembers changed"
        except (UnnamedError, RecursionError) as error:
            return f"value {place}: {error}"
    return "other objects that it reads are one"


def _forgotten(functions: Sequence[Any], memos: Sequence[Any]) -> bool:
    """Whether memoised functions do not remember what they did: for each, before the trace and after it."""
    for function, (first, last) in zip(functions, memos, strict=True):
        now = remembered(function)
        # What the trace itself added may be missing: it would be computed from what was recorded.
        if any(now.get(key) != result for key, result in first.items() if key in last) or any(
            now[key] != result or result == NO_NAME for key, result in last.items() if key in now
        ):
            return True
    return False
