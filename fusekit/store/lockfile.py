"""Locks: which builds a name may mean, by key and digests. A project has `fusekit.lock`; a folder of locks, such as
`cache_manifests` of the packaged kernels or `locks` in a wheel, one for each architecture and toolchain.

It is one file, written and signed as a whole, so that no old part can be mixed with new ones. As in The Update
Framework, whose snapshot and timestamp roles it joins, it has a serial and may expire: a store remembers the highest
serial that it has seen of a lock and refuses a lower one, or another lock of the same serial. A name that is not in it
is not loaded. `fusekit lock` writes it, `fusekit sync` makes a machine hold what it lists, and a library that keeps to
it loads nothing else. A lock of a folder has no history: its id is a digest of its content, and its serial is 1.

Read as locks of a folder, too: the cache manifests of fusekit 0.1 (schema 1, without launch records) and of early 0.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusekit.errors import IntegrityError, SignatureError, StoreError, UsageError
from fusekit.store import names
from fusekit.store.documents import parse
from fusekit.store.entries import Entry, toolchain_label
from fusekit.store.files import read_file
from fusekit.store.given import given_file
from fusekit.store.keys import is_digest, sha256
from fusekit.store.signature import read_signatures

if TYPE_CHECKING:
    from fusekit.store.names import NameRecord
    from fusekit.store.signature import Trust

SCHEMA = 1
LIMIT = 64 << 20
"""Largest lock accepted, in bytes."""
_FORMER = ("arch", "kernels", "schema", "toolchain")  # members of a cache manifest
_MEMBERS = ("expires", "id", "kernels", "schema", "serial", "toolchains", "tuning")
_ID = re.compile(r"[0-9a-f]{32}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,199}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, order=True)
class Build:
    """One build of a kernel. toolchain: the label of its compiler. bytes: of the cubin. launch_sha256: digest of the
    launch record's canonical JSON; empty in a cache manifest of fusekit 0.1.
    """

    toolchain: str
    key: str
    cubin_sha256: str
    bytes: int
    launch_sha256: str

    @classmethod
    def of(cls, toolchain: str, entry: Entry) -> Build:
        return cls(toolchain, entry.key, entry.cubin_sha256, entry.cubin_bytes, entry.launch_sha256)

    def differs(self, other: Build) -> str | None:
        """What is not the same, "cubin" or "launch record", as far as both say."""
        if (self.cubin_sha256, self.bytes) != (other.cubin_sha256, other.bytes):
            return "cubin"
        unlike = self.launch_sha256 != other.launch_sha256 and "" not in (self.launch_sha256, other.launch_sha256)
        return "launch record" if unlike else None

    def digest(self, part: str) -> str:
        """That of the part which `differs` names."""
        return self.cubin_sha256 if part == "cubin" else self.launch_sha256


Where = tuple[str, str]
"""Full name and architecture."""


@dataclass(frozen=True, slots=True)
class Lock:
    """What a lock lists. id: of all versions of this lock. expires: UTC; None: never. toolchains: distribution ->
    version, by label. tuning: SHA-256 of the tuning table by architecture. path, digest: of the file it was read from.
    """

    id: str
    serial: int
    expires: datetime | None
    toolchains: Mapping[str, Mapping[str, str]]
    tuning: Mapping[str, str]
    kernels: Mapping[Where, tuple[Build, ...]]
    path: Path = field(default=Path("fusekit.lock"), compare=False)
    digest: str = field(default="", compare=False)

    @classmethod
    def of_folder(cls, arch: str, toolchain: Mapping[str, str], kernels: Mapping[str, Build]) -> Lock:
        """The lock of a folder: one architecture, one toolchain (distribution -> version), kernels by full name."""
        builds = {(name, arch): (build,) for name, build in sorted(kernels.items())}
        lock = cls("", 1, None, {toolchain_label(toolchain): dict(toolchain)}, {}, builds)
        return replace(lock, id=sha256(lock.to_bytes())[:32])

    def to_bytes(self) -> bytes:
        """The bytes of its file: sorted, indented, one value a line, so that a diff shows each change."""
        kernels: dict[str, dict[str, Any]] = {}
        for (name, arch), builds in self.kernels.items():
            kernels.setdefault(arch, {})[name] = {
                build.toolchain: {
                    "key": build.key, "cubin_sha256": build.cubin_sha256, "bytes": build.bytes,
                    "launch_sha256": build.launch_sha256,
                }
                for build in builds
            }  # fmt: skip
        document = {
            "schema": SCHEMA,
            "id": self.id,
            "serial": self.serial,
            "expires": None if self.expires is None else self.expires.strftime(_TIME),
            "toolchains": {label: dict(versions) for label, versions in self.toolchains.items()},
            "tuning": dict(self.tuning),
            "kernels": kernels,
        }
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    def same_content(self, other: Lock) -> bool:
        """Whether both list the same builds, whatever their serials."""
        return (self.toolchains, self.tuning, self.kernels) == (other.toolchains, other.tuning, other.kernels)

    def check_current(self) -> None:
        """Raises IntegrityError once the lock has expired."""
        if self.expires is not None and datetime.now(UTC) >= self.expires:
            raise IntegrityError(
                f"{self.path} expired at {self.expires.strftime(_TIME)}: newer builds may have replaced what it lists; "
                "get the present lock, or write one: `fusekit lock --expires DAYS`"
            )

    def check_entry(self, entry: Entry) -> None:
        """Raises IntegrityError unless some name may mean this very build."""
        listed = [(name, build) for (name, _), builds in self.kernels.items() for build in builds
                  if build.key == entry.key]  # fmt: skip
        differing = [build.differs(Build.of(build.toolchain, entry)) for _, build in listed]
        if None in differing:
            return
        if listed:
            again = " ".join(sorted({name for name, _ in listed}))
            why = (
                f"has another {differing[0]} than {self.path} lists; get the lock again, or the kernel: `fusekit rm "
                f"{again}`, then `fusekit sync`"
            )
        else:
            why = f"is not listed in {self.path}; get the lock again, or the kernel, with `fusekit sync`"
        raise IntegrityError(f"entry {entry.key} {why}", key=entry.key)

    def keys(self, name: str, arch: str) -> list[str]:
        """The keys that a name may point to, those of the newest toolchain first."""
        builds = sorted(
            self.kernels.get((name, arch), ()),
            key=lambda build: [int(part) for part in re.findall(r"[0-9]+", build.toolchain)],
            reverse=True,
        )
        return [build.key for build in builds]

    def check_name(self, record: NameRecord) -> None:
        """Raises IntegrityError unless `record` points to a build that the lock lists for its name."""
        keys = self.keys(record.name, record.arch)
        if record.key not in keys:
            listed = f"lists {', '.join(key[:12] for key in keys)} for it" if keys else "does not list it"
            raise IntegrityError(
                f"{record.name} for {record.arch} points to {record.key[:12]}, and {self.path} {listed}; `fusekit "
                "sync` gets what it lists",
                key=record.key,
            )


def lock_file(arch: str, toolchain: Mapping[str, str]) -> str:
    """The name of the file of a lock in a folder."""
    return f"{arch}-{toolchain_label(toolchain)}.json"


def read_lock(path: Path, trust: Trust | None = None, *, folder: bool = False) -> Lock:
    """The lock in the file `path`; with `trust`, refused before it is parsed unless one of its keys signed it. Its
    expiry is not checked. folder: it may be a lock of a folder, which is signed as a manifest and so never stands in
    for a project's, or a cache manifest.

    Raises UsageError if there is no such file, IntegrityError if it is no lock, SignatureError if it is not trusted.
    """
    with given_file(path, "lock", "check the path, or write it: `fusekit lock`") as (file, status):
        if status.st_size > LIMIT:
            raise IntegrityError(f"{path} has {status.st_size} bytes; a lock has at most {LIMIT}; check the path")
        data = file.read(LIMIT)
    if trust is not None:
        _check_signed(data, path, trust, folder)
    try:
        document = parse(data, LIMIT)
        former = folder and isinstance(document, dict) and sorted(document) == [*_FORMER]
        first = former and document["schema"] == 1
        return _lock(_converted(document) if former else document, path, sha256(data), first)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise IntegrityError(
            f"{path} is no lock ({type(error).__name__}: {error}); get it again, or write it: `fusekit lock"
            f"{' --write' if folder else ''}`"
        ) from None


def _check_signed(data: bytes, path: Path, trust: Trust, folder: bool) -> None:
    signatures = read_signatures(((key.id, signature_path(path, key.id)) for key in trust.keys), read_file)
    kind, other = ("manifest", "lock") if folder else ("lock", "manifest")
    try:
        trust.check(kind, data, signatures, path)
    except SignatureError as error:
        try:
            trust.check(other, data, signatures, path)
        except SignatureError:
            raise error from None
        if not folder:
            raise SignatureError(
                f"{path} is signed as a lock of a folder: it has no history, and only comparisons take it; give a "
                "project's lock, which `fusekit lock --sign KEY` writes from a fusekit.toml"
            ) from None


def differences(
    lock: Lock, entry_of: Callable[[str], Entry | None],
    name_of: Callable[[str, str], NameRecord | None] | None = None,
) -> Iterator[tuple[Where, str, str]]:  # fmt: skip
    """((name, arch), key, problem) of each build of `lock` that is missing or different. entry_of: by key. name_of: by
    full name and architecture; a name must then be there, and point to one of its builds.
    """
    for where, builds in sorted(lock.kernels.items()):
        name, arch = where
        try:
            if name_of is not None:
                record = name_of(name, arch)
                if record is None:
                    raise IntegrityError(f"{name} for {arch} is in the lock and is not there; get it again")
                lock.check_name(record)
            for build in builds:
                entry = entry_of(build.key)
                if entry is None:
                    raise IntegrityError(f"{name} for {arch} by {build.toolchain} is in the lock and not here; sync it")
                lock.check_entry(entry)
        except (IntegrityError, StoreError) as error:
            yield where, getattr(error, "key", None) or builds[0].key, str(error)


def signature_path(path: Path, key_id: str) -> Path:
    """The file of the signature of a key over the lock `path`."""
    return path.with_name(f"{path.name}.{key_id}.sig")


def check_seen(lock: Lock, memory: bytes | None, where: object) -> bytes | None:
    """What to remember of `lock` where `memory` was remembered; None: nothing new. where: name of the memory.

    Raises IntegrityError for a lower serial, or for another lock of the same one.
    """
    now = (json.dumps({"serial": lock.serial, "sha256": lock.digest}, sort_keys=True) + "\n").encode()
    if memory is None:
        return now
    try:
        seen = json.loads(memory)
        serial, digest = int(seen["serial"]), str(seen["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise IntegrityError(f"{where} is no serial of a lock; it is damaged; remove it") from None
    if lock.serial < serial:
        raise IntegrityError(
            f"{lock.path} has serial {lock.serial}, and serial {serial} of it was used here: it is older; get the "
            f"present one (`fusekit lock` gives it a new serial), or remove {where} to go back on purpose"
        )
    if lock.serial == serial and lock.digest != digest:
        raise IntegrityError(
            f"{lock.path} has serial {serial}, and another lock of that serial was used here; two were written apart; "
            "write it again with `fusekit lock`"
        )
    return None if lock.serial == serial else now


def _converted(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A cache manifest as the document of a lock."""
    schema, versions = manifest["schema"], manifest["toolchain"]
    if schema not in (1, 2):
        raise ValueError(f"its schema is {schema!r}, and this fusekit reads 1 and 2 of cache manifests")
    label, without = toolchain_label(versions), {"launch_sha256": ""} if schema == 1 else {}
    kernels = {name: {label: without | build} for name, build in manifest["kernels"].items()}
    return {
        "schema": SCHEMA, "id": "0" * 32, "serial": 1, "expires": None, "tuning": {},
        "toolchains": {label: versions}, "kernels": {manifest["arch"]: kernels},
    }  # fmt: skip


def _lock(document: Any, path: Path, digest: str, first: bool) -> Lock:
    if not isinstance(document, dict) or sorted(document) != [*_MEMBERS]:
        raise ValueError(f"it has {', '.join(map(str, document))}, and must have {', '.join(_MEMBERS)}")
    if document["schema"] != SCHEMA or type(document["schema"]) is not int:
        raise ValueError(f"its schema is {document['schema']!r}, and this fusekit reads {SCHEMA}")
    if not _ID.fullmatch(document["id"]) or type(document["serial"]) is not int or document["serial"] < 1:
        raise ValueError(f"its id is {document['id']!r} and its serial {document['serial']!r}")
    expires = document["expires"]
    toolchains = {
        _checked(label, _WORD): {_checked(name, _WORD): _checked(version, _WORD) for name, version in versions.items()}
        for label, versions in document["toolchains"].items()
    }
    kernels = dict(_kernels(document["kernels"], toolchains, first))
    tuning = {names.check_arch(arch): table for arch, table in document["tuning"].items()}
    if not all(map(is_digest, tuning.values())):
        raise ValueError("a tuning table has no digest")
    return Lock(
        document["id"], document["serial"],
        None if expires is None else datetime.strptime(expires, _TIME).replace(tzinfo=UTC),
        toolchains, tuning, kernels, path, digest,
    )  # fmt: skip


def _kernels(by_arch: Any, toolchains: Mapping[str, Any], first: bool) -> Iterator[tuple[Where, tuple[Build, ...]]]:
    for arch, kernels in by_arch.items():
        names.check_arch(arch)
        for name, builds in kernels.items():
            names.split(name)
            listed = tuple(Build(toolchain=label, **build) for label, build in sorted(builds.items()))
            for build in listed:
                digests = [build.key, build.cubin_sha256]
                digests += [] if first and build.launch_sha256 == "" else [build.launch_sha256]
                if build.toolchain not in toolchains or not all(map(is_digest, digests)):
                    raise ValueError(f"{name} has {build}")
                if type(build.bytes) is not int or build.bytes <= 0:
                    raise ValueError(f"{name} has {build.bytes!r} bytes")
            if not listed:
                raise ValueError(f"{name} has no build")
            yield (name, arch), listed


def _checked(text: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is neither a name nor a version")
    return text
