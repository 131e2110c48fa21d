"""The lock of a project, `fusekit.lock`: which builds a name may mean, by key and digests.

It is one file, written and signed as a whole, so that no old part can be mixed with new ones. As in The Update
Framework, whose snapshot and timestamp roles it joins, it has a serial and may expire: a store remembers the highest
serial that it has seen of a lock and refuses a lower one, or another lock of the same serial. A name that is not in it
is not loaded. `fusekit lock` writes it, `fusekit sync` makes a machine hold what it lists, and a library that keeps to
it loads nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusekit.errors import IntegrityError, UsageError
from fusekit.store import names
from fusekit.store.documents import parse
from fusekit.store.entries import Entry
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
_MEMBERS = ("expires", "id", "kernels", "schema", "serial", "toolchains", "tuning")
_ID = re.compile(r"[0-9a-f]{32}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,199}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, order=True)
class Build:
    """One build of a kernel. toolchain: the label of its compiler. bytes: of the cubin. launch_sha256: digest of the
    launch record's canonical JSON.
    """

    toolchain: str
    key: str
    cubin_sha256: str
    bytes: int
    launch_sha256: str

    @classmethod
    def of(cls, toolchain: str, entry: Entry) -> Build:
        return cls(toolchain, entry.key, entry.cubin_sha256, entry.cubin_bytes, entry.launch_sha256)


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
        listed = [build for builds in self.kernels.values() for build in builds if build.key == entry.key]
        if not any(build == Build.of(build.toolchain, entry) for build in listed):
            what = "has another cubin or launch record than it lists" if listed else "is not listed there"
            raise IntegrityError(
                f"entry {entry.key} {what}, in {self.path}; get the lock or the kernel again, the latter with `fusekit "
                "sync`",
                key=entry.key,
            )

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


def read_lock(path: Path, trust: Trust | None = None) -> Lock:
    """The lock in the file `path`; with `trust`, refused before it is parsed unless one of its keys signed it. Its
    expiry is not checked.

    Raises UsageError if there is no such file, IntegrityError if it is no lock, SignatureError if it is not trusted.
    """
    data = read_signed(path, "lock", LIMIT, trust, "`fusekit lock` writes one, from a fusekit.toml")
    try:
        return _lock(parse(data, LIMIT), path, sha256(data))
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise IntegrityError(
            f"{path} is no lock ({type(error).__name__}: {error}); get it again, or write it: `fusekit lock`"
        ) from None


def read_signed(path: Path, what: str, limit: int, trust: Trust | None, remedy: str = "check the path") -> bytes:
    """The content of the file `path`; with `trust`, one of its keys signed it. what: what it should be, such as `lock`.

    Raises UsageError if there is no such file, IntegrityError for one of more than `limit` bytes, SignatureError if it
    is not trusted.
    """
    with given_file(path, what, remedy) as (file, status):
        if status.st_size > limit:
            raise IntegrityError(f"{path} has {status.st_size} bytes; a {what} has at most {limit}; check the path")
        data = file.read(limit)
    if trust is not None:
        signatures = read_signatures(((key.id, signature_path(path, key.id)) for key in trust.keys), read_file)
        trust.check(what, data, signatures, path)
    return data


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


def _lock(document: Any, path: Path, digest: str) -> Lock:
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
    kernels = dict(_kernels(document["kernels"], toolchains))
    tuning = {names.check_arch(arch): table for arch, table in document["tuning"].items()}
    if not all(map(is_digest, tuning.values())):
        raise ValueError("a tuning table has no digest")
    return Lock(
        document["id"], document["serial"],
        None if expires is None else datetime.strptime(expires, _TIME).replace(tzinfo=UTC),
        toolchains, tuning, kernels, path, digest,
    )  # fmt: skip


def _kernels(by_arch: Any, toolchains: Mapping[str, Any]) -> Iterator[tuple[Where, tuple[Build, ...]]]:
    for arch, kernels in by_arch.items():
        names.check_arch(arch)
        for name, builds in kernels.items():
            names.split(name)
            listed = tuple(Build(toolchain=label, **build) for label, build in sorted(builds.items()))
            for build in listed:
                digests = (build.key, build.cubin_sha256, build.launch_sha256)
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
