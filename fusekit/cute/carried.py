"""`fusekit exec --with`: what Triton, DeepGEMM and inductor compile, carried in the store.

They have caches of their own, in folders that environment variables name. Before a program runs, what the store has
for this machine is laid out in a folder of that run; when all of its processes have ended, what is new there goes into
the store as one more set. What is a hit is decided by the keys of those packages alone. A set is kept under what these
keys leave out, and what it must not be used without: see `fusekit.cute.packages`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fusekit.config import CuteConfig
from fusekit.cute.blobs import open_remote, open_store
from fusekit.cute.packages import GROUP, PACKAGES, Package, fields_of, is_whole, versions_of
from fusekit.cute.runs import RunFolder, sweep
from fusekit.errors import FusekitError, IntegrityError, NotBuiltError, StoreError
from fusekit.store import Entry, NameRecord, key_of
from fusekit.store.entries import CARRIED
from fusekit.store.keys import sha256
from fusekit.store.listing import recorded

_FILE = "carried"
"""Of the names of the sets, `carried/<package>@<fields>-<content>`."""
_DIGITS = 16
_SET_BYTES = 256 << 20  # of the files of a set, as far as a unit allows: they are held in memory
_LENGTH = 8  # bytes
_PATIENCE = 60.0  # seconds that a run waits for another one that stores

_MARK = b"@folder of the run@"
"""In the sets, where Triton has an absolute path."""

_PASSING = re.compile(r"tmp|tmp\.pid_.*|tmp[a-z0-9_]{8}|.*\.tmp|.*\.lock|locks|precompiled_headers|__pycache__|\..*")
"""Names of files and folders that are of one run, or too large and quickly made."""


@dataclass(slots=True)
class _Load:
    """What is carried for `package` in one run. known: names of the sets that were laid out; units: of those."""

    package: Package
    folder: Path
    fields: dict[str, str]
    known: set[tuple[str, str]] = field(default_factory=set)
    units: set[str] = field(default_factory=set)

    @property
    def pattern(self) -> str:
        return f"{_FILE}/{self.package.name}@{key_of(self.fields)[:_DIGITS]}-*"


class Carriage:
    """The caches of `packages` for one run of `command` with `environ`. Raises nothing.

    variables: to be set for the run. troubles: why something is not carried.
    """

    def __init__(
        self, cute: CuteConfig, packages: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.variables: dict[str, str] = {}
        self.troubles: list[str] = []
        self._cute, self._loads = cute, list[_Load]()
        self._run: RunFolder | None = None
        try:
            wanted = [package for name in packages if self._is_free(package := PACKAGES[name], environ)]
            if not wanted:
                return
            versions = versions_of(command, environ, wanted)
            sweep()
            self._run = RunFolder()
            folder = self._run.path
            if os.statvfs(folder).f_flag & os.ST_NOEXEC:
                raise StoreError(f"{folder.parent} allows no code to be run from it; name another folder: TMPDIR")
            self._store = open_store(cute)
            for package in wanted:
                self._begin(_Load(package, folder / package.name, fields_of(package, versions)))
        except Exception as error:
            self.troubles.append(f"nothing is carried: {_text(error)}")
        except BaseException:  # Ctrl-C
            self.remove()
            raise

    def _is_free(self, package: Package, environ: Mapping[str, str]) -> bool:
        own = next((variable for variable in package.variables if environ.get(variable)), None)
        if own is not None:
            self.troubles.append(
                f"{package.name} is not carried: {own} names a folder of yours, which is used as it is; to carry it:"
                f" env -u {own} fusekit exec --with {package.name} -- CMD"
            )
        return own is None

    def _begin(self, load: _Load) -> None:
        name = load.package.name
        try:
            load.folder.mkdir()
            self._pull(load)
            for where in sorted(self._sets(load)):
                try:
                    stored = self._of(load, where)
                    files = _unpacked(stored)
                    if load.package.named and self._run is not None:
                        self._run.stand_for(Path(str(stored[0].launch[CARRIED].get("folder", ""))))
                except (FusekitError, OSError, ValueError, zlib.error) as error:
                    # Its content is compiled and stored again.
                    self.troubles.append(f"{where[0]} is not used: {_text(error)}")
                    continue
                for unit in files.keys() - load.units:
                    for path, data in files[unit].items():
                        _write(load, path, data)
                    load.units.add(unit)
                load.known.add(where)
        except Exception as error:
            shutil.rmtree(load.folder, ignore_errors=True)
            self.troubles.append(f"{name} is not carried: {_text(error)}")
            return
        self._loads.append(load)
        self.variables |= dict.fromkeys(load.package.variables, str(load.folder))

    def _pull(self, load: _Load) -> None:
        """Take what the remote has, and the store lacks."""
        if not self._cute.remote:
            return
        from fusekit.share.push_pull import pull

        try:
            pull(self._store, open_remote(self._cute), (load.pattern,))
        except NotBuiltError:
            pass  # it has none
        except Exception as error:
            self.troubles.append(f"{load.package.name}: the remote is not asked: {_text(error)}")

    def _sets(self, load: _Load) -> set[tuple[str, str]]:
        """Names and architecture of the sets in all roots that can be read."""
        found = set[tuple[str, str]]()
        for root in self._store.roots:
            with contextlib.suppress(FusekitError):
                found.update(recorded(root, load.pattern))
        return found

    def _of(self, load: _Load, where: tuple[str, str]) -> tuple[Entry, bytes]:
        """The set that the name `where` points to, if it is one for this machine."""
        record = self._store.find_name(*where)
        stored = None if record is None else self._store.load(record.key)
        if stored is None:
            raise IntegrityError("it points to nothing that the store has")
        _check(stored[0], load)
        return stored

    def store(self) -> str:
        """Store what is new. Returns what was carried and compiled, for the report."""
        parts = []
        if self._run is not None:
            self._run.settle()
        for load in self._loads:
            package = load.package
            try:
                new = _new(load)
                compiled, carried = (sum(map(bool, map(package.counted.match, units))) for units in (new, load.units))
                parts.append(f"; {package.name} {compiled} compiled, {carried} carried")
                if new:
                    self._publish(load, new)
            except Exception as error:
                self.troubles.append(f"what {package.name} compiled is not stored: {_text(error)}")
        return "".join(parts)

    def _publish(self, load: _Load, new: dict[str, list[str]]) -> None:
        # Of runs at the same time, one stores after the other, and only what those before have not.
        with self._store.lock(key_of(load.fields), _PATIENCE):
            for where in self._sets(load) - load.known:
                with contextlib.suppress(FusekitError):  # what is damaged is stored again
                    for unit in self._of(load, where)[0].launch[CARRIED]["units"]:
                        new.pop(unit, None)
            for units in _batches(load.folder, new):
                entry, blob = _packed(load, units)
                entry = self._store.publish(entry, blob)
                content = entry.cubin_sha256[:_DIGITS]
                name = load.pattern.replace("*", content)
                spec = {CARRIED: {"package": load.package.name, "units": len(units)}}
                self._store.publish_name(NameRecord(name, entry.arch, entry.key, spec, {}), entry)

    def remove(self) -> None:
        """Remove the folder of the run, which no process uses any more."""
        if self._run is not None and (why := self._run.remove()):
            self.troubles.append(f"{self._run.path} stays, as {why}; a later run with --with removes it")


def _files(folder: Path) -> Iterator[str]:
    """The paths of plain files below `folder` that are to be kept, sorted."""
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _PASSING.fullmatch(name))
        for name in sorted(names):
            path = Path(top) / name
            if not _PASSING.fullmatch(name) and path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _new(load: _Load) -> dict[str, list[str]]:
    """The paths of the files of each whole unit that was not laid out."""
    units = dict[str, list[str]]()
    for path in _files(load.folder):
        unit = load.package.unit.match(path)
        if unit is not None and unit[1] not in load.units:
            units.setdefault(unit[1], []).append(path)
    return {unit: paths for unit, paths in units.items() if is_whole(load.package, load.folder, paths)}


def _batches(folder: Path, units: Mapping[str, Sequence[str]]) -> Iterator[dict[str, dict[str, bytes]]]:
    """The files of `units`, as one set or several."""
    batch, size, base = dict[str, dict[str, bytes]](), 0, json.dumps(str(folder))[1:-1].encode()
    for unit, paths in sorted(units.items()):
        files = {path: (folder / path).read_bytes() for path in paths}
        for path in paths:
            if path.rpartition("/")[2].startswith(GROUP):
                files[path] = files[path].replace(base, _MARK)
        length = sum(map(len, files.values()))
        if batch and size + length > _SET_BYTES:
            yield batch
            batch, size = {}, 0
        batch[unit] = files
        size += length
    if batch:
        yield batch


def _write(load: _Load, path: str, data: bytes) -> None:
    if path.rpartition("/")[2].startswith(GROUP):
        data = data.replace(_MARK, json.dumps(str(load.folder))[1:-1].encode())
    target = load.folder / path
    try:
        file = target.open("xb")
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.open("xb")
    with file:
        file.write(data)


def _packed(load: _Load, units: Mapping[str, Mapping[str, bytes]]) -> tuple[Entry, bytes]:
    """A set's entry and blob: the length of a table, the table of units, paths and sizes as JSON, the files."""
    sizes = {unit: {path: len(data) for path, data in files.items()} for unit, files in units.items()}
    table = json.dumps(sizes).encode()
    parts = (
        len(table).to_bytes(_LENGTH, "little"),
        table,
        *(data for each in units.values() for data in each.values()),
    )
    blob = zlib.compress(b"".join(parts), 1)
    fields = {**load.fields, "content": sha256(blob)}
    toolchain = {"python": load.fields["python"], "machine": load.fields["system"]}
    launch = {CARRIED: {"units": [*units], "folder": str(load.folder.parent)}}
    return Entry(key_of(fields), fields, sha256(blob), len(blob), launch, {}, {}, toolchain, 0.0), blob


def _unpacked(stored: tuple[Entry, bytes]) -> dict[str, dict[str, bytes]]:
    entry, blob = stored
    data = memoryview(zlib.decompress(blob))
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    units: dict[str, dict[str, bytes]] = {}
    for unit, sizes in json.loads(bytes(data[_LENGTH:at])).items():
        for path, size in sizes.items():
            parts = PurePosixPath(path).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
                raise IntegrityError(f"entry {entry.key} has a file {path!r}, which is no path in its folder")
            units.setdefault(unit, {})[path] = bytes(data[at : at + size])
            at += size
    if at != len(data) or [*units] != entry.launch[CARRIED]["units"]:
        raise IntegrityError(f"entry {entry.key} has other files than its table says")
    return units


def _check(entry: Entry, load: _Load) -> None:
    # Names and entries are checked apart, and anybody's name may point anywhere.
    if {**entry.fields, "content": ""} != {**load.fields, "content": ""}:
        raise IntegrityError(f"it points to the entry {entry.key}, which is of another package or machine")


def _text(error: Exception) -> str:
    if isinstance(error, FusekitError):
        return str(error)
    return (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
