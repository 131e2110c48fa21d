"""The cache: what a compilation is filed under, looking it up, publishing it. It never breaks the program."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fusekit.config import CuteConfig
from fusekit.cute import arguments, report
from fusekit.cute.blobs import machine_fields, open_remote, open_store, packed, unpacked
from fusekit.cute.dependencies import Trace, times_refused, why_not
from fusekit.cute.digest import UnnamedError
from fusekit.cute.dsl import VERSIONS, Artifact, Call, version
from fusekit.cute.effects import Effects, apply
from fusekit.cute.memos import Proofs
from fusekit.cute.names import record_of
from fusekit.cute.replaced import Replaced
from fusekit.cute.state import process_state
from fusekit.cute.tracing import Untried
from fusekit.cute.values import Walk
from fusekit.errors import FusekitError, IntegrityError, NotBuiltError, StoreError
from fusekit.store import Entry, Store, key_of
from fusekit.store.entries import DEPENDENCIES, HOST_OBJECT, KIND
from fusekit.store.keys import sha256

if TYPE_CHECKING:
    from fusekit.share.remote import Remote

_SCHEMA = "3"
"""Version of the fields below and of the blob, raised when their meaning changes."""
_RULES = "4"
"""Of what is recorded with a trace, and what is refused: raised when they change."""
_PREFIX_DIGITS = 16
_PATIENCE = 120.0
"""Seconds that a process waits for another one that compiles the same: less than a program is thought to hang."""
_MANIFESTS = 8  # of one key, the newest first
_REFUSALS = 2
"""A call whose trace could not be recorded so often is only traced: to record takes longer than it."""
_OF_ONE_CALL = ("function", "tvm-ffi")
"""Fields that differ between calls with the same options and settings."""


class _Thread(threading.local):
    """What of a call is handed on in this thread. key: of the entry that served it. why: there was no hit without a
    trace. ready: the hit. checked: what would be one, and is traced to be compared. refused: how often its trace could
    not be recorded.
    """

    key = ""
    why = ""
    refused = 0
    ready: Any = None
    checked: Any = None


@dataclass(frozen=True, slots=True)
class _Ready:
    call: Untried
    manifest: dict[str, Any]
    entry: Entry
    blob: bytes
    begin: float


class Cache:
    """Answers the DSL's calls from the store of `cute`. Each call that the DSL compiles is a miss."""

    def __init__(self, cute: CuteConfig) -> None:
        self.cute = cute
        self._replaced, self._proofs = Replaced(), Proofs()
        self._thread = _Thread()
        self._remote: tuple[int, Remote] | None = None  # and the process that opened it
        self._silent = ""  # why the remote is not asked again

    def serve(self, call: Call) -> Generator[Any, Any, None]:
        """Answers `call`: see `dsl.Serve`. Raises nothing but NotBuiltError, with FUSEKIT_MISS=error."""
        begin, why, key, fields = time.perf_counter(), "", "", dict[str, str]()
        ready, self._thread.ready = self._thread.ready, None
        if ready is not None:
            function = self._from(ready, call)
            if function is not None:
                yield function
                return
            call.retraced(*ready.call.trace())
        try:
            why = call.not_served() or self._unknown()
            if not why:
                fields = self._fields(call)
                key = key_of(fields)
                call.be_anew()
        except Exception as error:
            key, why = "", _text(error)
        if not key:
            self._miss(call, why)
            yield (yield None)
            return
        hit, why = self._hit(call, key, begin)
        if hit is None and self.cute.miss == "error" and not self.cute.remote:
            self._miss(call, f"{why}{self._thread.why}", key)
        release = self._lock(key) if hit is None else None
        try:
            if release is not None:  # another process may have compiled it meanwhile
                hit, why = self._hit(call, key, begin)
            if hit is None and self.cute.remote:
                hit, why = self._hit(call, key, begin, remote=True)
            if hit is not None:
                self._thread.key = key
                yield hit
                return
            self._miss(call, f"{why}{self._thread.why}", key)
            begin = time.perf_counter()
            function = yield None
            if self._publish(call, key, fields, function, time.perf_counter() - begin):
                self._thread.key = key
            yield function
        finally:
            if release is not None:
                release()

    # -- without a trace ----------------------------------------------------------------------------------------------

    def untraced(self, call: Untried) -> Generator[Any, Any, None]:
        """Answers `call` before it is traced: see `tracing.Untraced`. Raises nothing."""
        state = self._thread
        state.key, state.why, state.ready, state.checked, state.refused = "", "", None, None, 0
        release, trace, key, fields, walk = None, None, "", dict[str, str](), None
        begin = time.perf_counter()
        try:
            if self.cute.level == 1 and not (call.not_served() or self._unknown()):
                with _uncollected():
                    walk = call.arguments(self._replaced)
                shared = {**self._machine, **call.fields(self._replaced)}
                fields = {
                    **shared,
                    "arguments": walk.hexdigest(),
                    "schema": _SCHEMA,
                    "rules": _RULES,
                    KIND: DEPENDENCIES,
                }
                key = key_of(fields)
                if self._ready(call, key, walk, begin):
                    yield True
                    return
                if state.refused < _REFUSALS:
                    release = None if state.checked else self._lock(key)
                    if release is not None and self._ready(call, key, walk, begin):
                        yield True
                        return
                    shared = {name: value for name, value in shared.items() if name not in _OF_ONE_CALL}
                    trace, effects = Trace(walk, shared, self._proofs), Effects(call["full_args"])
                    trace.start()
        except Exception as error:
            trace, state.why = None, f"; {_text(error)}"
        try:
            yield None
            manifest = None
            if trace is not None:
                trace.stop()
                try:
                    changes = effects.changes()
                    with effects.undone():
                        after = call.arguments(self._replaced)
                    if walk is None or after.hexdigest() != walk.hexdigest():
                        raise UnnamedError("the trace changes its arguments")
                    if process_state() != fields["state"]:
                        raise UnnamedError("the trace changes settings of Python, of logging or of a library")
                    manifest = {**trace.manifest(after), **call.traced(), "effects": changes}
                except Exception as error:
                    manifest = trace.refused(_text(error), state.refused + 1)
                    state.why = f"; it will be traced each time: {_text(error)}"
                    if self.cute.miss == "warn":
                        self._say(f"{call.name} will be traced each time: {_text(error)}")
            yield None
            if state.checked and state.key and state.checked["key"] != state.key:
                self._say(f"{call.name}: its trace gives another one than was expected; that record is removed")
                self._note(call, key, fields, manifest and {**manifest, "key": state.key}, state.checked)
            elif manifest is not None and state.key:
                self._note(call, key, fields, {**manifest, "key": state.key})
            yield None
        finally:
            if trace is not None:
                trace.stop()
            if release is not None:
                release()

    def _ready(self, call: Untried, key: str, walk: Walk, begin: float) -> bool:
        """Whether a trace that the store knows would give the same now, and its result is there."""
        reason = ""
        for manifest in self._manifests(key):
            if "refused" in manifest:
                self._thread.refused, reason = times_refused(manifest), manifest["refused"]
                continue
            with _uncollected():
                reason = why_not(manifest, walk)
            if reason:
                continue
            kernel = self._store.load(manifest["key"])
            if kernel is None:
                continue
            if self.cute.verify and random.random() < self.cute.verify:
                self._thread.checked = manifest
                return False
            apply(call["full_args"], manifest["effects"])
            call.pretend(manifest)
            self._thread.ready = _Ready(call, manifest, *kernel, begin)
            return True
        self._thread.why = f"; {reason}" if reason else ""
        return False

    def _from(self, ready: _Ready, call: Call) -> Any:
        """The function of a trace that was left out; None if it cannot be loaded."""
        try:
            call.tvm_ffi = ready.call.tvm_ffi
            if call.not_served():
                return None
            artifact = unpacked(ready.blob, ready.entry)
            ir = artifact.ir
            function = call.load(artifact.host, lambda: zlib.decompress(ir), artifact.files, artifact.facts)
        except Exception as error:
            if self.cute.miss == "warn":
                self._say(f"{call.name} is traced: {_text(error)}")
            return None
        saved = ready.entry.seconds + ready.manifest["seconds"] - (time.perf_counter() - ready.begin)
        report.hit(self.cute.report, max(0.0, saved), ready.entry.key)
        return function

    def _manifests(self, key: str) -> list[dict[str, Any]]:
        stored = self._store.load(key)
        return [] if stored is None else json.loads(zlib.decompress(stored[1]))

    def _note(
        self, call: Untried, key: str, fields: dict[str, str], manifest: dict[str, Any] | None, wrong: Any = None
    ) -> None:
        """Put a manifest before the others of its key, and take a wrong one out."""
        try:
            stored = self._store.load(key)
            known = [] if stored is None else json.loads(zlib.decompress(stored[1]))
            new = [] if manifest is None else [manifest]
            if manifest is not None and "refused" in manifest:
                known = [each for each in known if "refused" not in each]
            known = [each for each in known if each != wrong and (not new or _same(each) != _same(new[0]))]
            manifests = [*new, *known][:_MANIFESTS]
            seconds = manifests[0]["seconds"] if manifests else 0.0
            blob = zlib.compress(json.dumps(manifests, sort_keys=True).encode(), 1)
            entry = Entry(key, fields, sha256(blob), len(blob), {DEPENDENCIES: {}}, {}, {}, {}, seconds)

            def refuse(other: Entry) -> None:
                if stored is not None and other.cubin_sha256 == stored[0].cubin_sha256:
                    raise IntegrityError(f"entry {key} is replaced")

            self._store.inspecting(refuse).publish(entry, blob)
        except Exception as error:
            if self.cute.miss == "warn":
                self._say(f"{call.name}: its dependencies are not stored: {_text(error)}")

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _unknown(self) -> str:
        return "" if version().startswith(VERSIONS) else f"CuTe DSL {version()} is not known to this fusekit"

    def _fields(self, call: Call) -> dict[str, str]:
        return {**self._machine, **call.fields(self._replaced), "schema": _SCHEMA, KIND: HOST_OBJECT}

    @cached_property
    def _machine(self) -> dict[str, str]:
        return machine_fields()

    # -- the store ----------------------------------------------------------------------------------------------------

    @cached_property
    def _store(self) -> Store:
        return open_store(self.cute)

    def _hit(self, call: Call, key: str, begin: float, *, remote: bool = False) -> tuple[Any, str]:
        """(the loaded function or None, why there is none)."""
        try:
            kernel = self._fetched(call, key) if remote else self._store.load(key)
            if kernel is None:
                return None, f"{report.ABSENT}{' or at the remote' if remote else ''}"
            entry, blob = kernel
            artifact = unpacked(blob, entry)
            ir = artifact.ir
            function = call.load(artifact.host, lambda: zlib.decompress(ir), artifact.files, artifact.facts)
            if self.cute.verify and random.random() < self.cute.verify:
                function = self._compared(call, entry, artifact) or function
            call.remember(function)
        except Exception as error:
            return None, _text(error)
        report.hit(self.cute.report, max(0.0, entry.seconds - (time.perf_counter() - begin)), key)
        return function, ""

    def _fetched(self, call: Call, key: str) -> tuple[Entry, bytes] | None:
        """What the remote has under `key`, which goes into the store. A remote that fails is not asked again."""
        from fusekit.share.push_pull import fetch

        if self._silent:
            raise StoreError(self._silent)
        try:
            if self._remote is None or self._remote[0] != os.getpid():  # connections do not outlive a fork
                self._remote = os.getpid(), open_remote(self.cute)
            kernel = fetch(self._store, self._remote[1], key)
        except IntegrityError:
            raise
        except Exception as error:
            self._silent = _text(error)
            raise
        if kernel is not None:
            with contextlib.suppress(Exception):  # a store that cannot be written
                self._store.publish(*kernel[:2], kernel[2])
                self._store.publish_name(record_of(kernel[0], call.function), kernel[0])
        return None if kernel is None else kernel[:2]

    def _compared(self, call: Call, entry: Entry, stored: Artifact) -> Any:
        """Compile a hit as well. What the DSL gave, which replaces the entry, if that differs; else None."""
        if stored.facts["function"] != call["function_name"]:
            return None  # elements of a tensor are in the name, and so in the code
        begin = time.perf_counter()
        function = call.compile()
        artifact = call.artifact(function, stored.facts["prefix"])
        if (artifact.host, artifact.files) == (stored.host, stored.files):
            return None
        self._say(f"{call.name}: the entry {entry.key} is not what the DSL compiles; it is replaced")

        def refuse(other: Entry) -> None:
            if other.cubin_sha256 == entry.cubin_sha256:
                raise IntegrityError(f"entry {entry.key} was compared, and differs")

        store = self._store.inspecting(refuse)
        seconds = time.perf_counter() - begin
        store.publish(*packed(entry.key, dict(entry.fields), artifact, arguments.written(call), seconds))
        return function

    def _lock(self, key: str) -> Callable[[], None] | None:
        """What releases the lock of `key`; None without one: locks save work, and nothing else."""
        held = contextlib.ExitStack()
        with contextlib.suppress(Exception):
            held.enter_context(self._store.lock(key, _PATIENCE))
            return held.close
        return None

    def _publish(self, call: Call, key: str, fields: dict[str, str], function: Any, seconds: float) -> bool:
        """Store `function`. Whether that was done."""
        try:
            call.remember(function)
            artifact = call.artifact(function, f"fusekit{key[:_PREFIX_DIGITS]}")
            entry = self._store.publish(*packed(key, fields, artifact, arguments.written(call), seconds))
            self._store.publish_name(record_of(entry, call.function), entry)
        except Exception as error:
            report.not_stored(self.cute.report, key, _text(error))
            if self.cute.miss == "warn":
                self._say(f"{call.name}: not stored: {_text(error)}")
            return False
        return True

    # -- reports ------------------------------------------------------------------------------------------------------

    def _miss(self, call: Call, why: str, key: str = "") -> None:
        report.miss(self.cute.report, key, why)
        if self.cute.miss == "error":
            raise NotBuiltError(
                f"{call.name} would be compiled ({why}), and FUSEKIT_MISS is error; run the program once without it and"
                " with a store that can be written: FUSEKIT_STORE",
                name=call.name,
            )
        if self.cute.miss == "warn":
            self._say(f"{call.name} is compiled: {why}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a program may have closed it
            sys.stderr.write(f"fusekit: {text}\n")


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What a walk makes goes when it ends: to look for cycles in it meanwhile takes longer than the walk."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _same(manifest: dict[str, Any]) -> dict[str, Any]:
    """What of a manifest says when it holds."""
    return {name: value for name, value in manifest.items() if name not in ("seconds", "key")}


def _text(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, FusekitError | UnnamedError) else f"{type(error).__name__}: {text}"
