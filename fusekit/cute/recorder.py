"""Records which code a trace runs, and what that reads of modules, files and the environment."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

from fusekit.cute.digest import UnnamedError
from fusekit.cute.files import ABSENT
from fusekit.cute.libraries import is_dsl, is_library, is_library_module, is_unsteady
from fusekit.cute.reads import Root, read
from fusekit.cute.values import NOTHING, digest

# Files of libraries whose code reads the machine, when other code than the DSL's calls it.
_MACHINE = re.compile(
    r"(^|/)(random|secrets|uuid|tempfile|subprocess|socket|datetime|_strptime|platform|shutil|glob|pathlib|fileinput"
    r"|getpass|sched|time|selectors|ssl|hardware_info)\.py$"
    r"|/(multiprocessing|concurrent|asyncio|pathlib|urllib|http|sqlite3)/|/cuda/|/numpy/random/|/torch/(random|_C|backends|autograd|amp)"
)

_DEVICE = re.compile(r"/(hardware_info|runtime/cuda)\.py$")  # of the DSL

_MACHINE_EVENTS = frozenset({
    "os.listdir", "os.scandir", "glob.glob", "subprocess.Popen", "socket.connect", "pickle.find_class",
})  # fmt: skip

_OF_EVERY_MODULE = frozenset({
    "__file__", "__name__", "__path__", "__spec__", "__loader__", "__package__", "__doc__", "__class__", "__dict__",
    "__all__", "__module__", "__code__", "__func__", "__self__", "__wrapped__", "__signature__", "__text_signature__",
})  # fmt: skip


class Record:
    """spaces: code that ran -> its globals, a tuple of dicts. environment: name -> value (None: unset). files: opened
    to be read. attributes: of modules, that builtins read, with digests of their values.
    """

    def __init__(self) -> None:
        self.spaces: dict[CodeType, list[dict[str, Any]]] = {}
        self.environment: dict[str, str | None] = {}
        self.files: set[str] = set()
        self.attributes: dict[Root, str | None] = {}

    def joined(self, others: Iterable[Record]) -> Record:
        """All that was recorded here and in `others`. Raises UnnamedError if they read a variable with two values."""
        record = Record()
        for each in (self, *others):
            for code, spaces in each.spaces.items():
                known = record.spaces.setdefault(code, [])
                known += [space for space in spaces if not any(space is other for other in known)]
            for name, value in each.environment.items():
                if record.environment.setdefault(name, value) != value:
                    raise UnnamedError(f"the variable {name} is read with two values")
            record.files |= each.files
            record.attributes = {**each.attributes, **record.attributes}
        return record


class Recorder(Record):
    """Records, in one thread, which code runs and what is read, between `start` and `stop`.

    counted: codes whose runs are counted, in `runs`. doubt: why no level 1 can come of it.
    """

    def __init__(self, counted: Iterable[CodeType] = ()) -> None:
        super().__init__()
        self.runs = dict.fromkeys(map(id, counted), 0)
        self.doubt = ""
        self._thread = threading.get_ident()
        self._seen: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}

    def start(self) -> None:
        if _listener().recorder is not None or sys.getprofile() is not None:
            raise UnnamedError("another profiler runs")
        self._stop = _monitor(self._started) if sys.version_info >= (3, 12) else _profile(self._started)
        _listener().recorder = self
        self._environ = _record_environment(self._read)
        self._builtins = _record_attributes(self._attribute)

    def stop(self) -> None:
        if _listener().recorder is self:
            _listener().recorder = None
            self._builtins()
            self._environ()
            self._stop()

    def _read(self, name: Any, value: Any) -> None:
        if name is None:
            self.doubt = self.doubt or "the environment is written, or read whole"
        elif isinstance(name, bytes):
            self.doubt = self.doubt or "the environment is read as bytes"
        elif name.startswith("CUTE_DSL_") and _asks_the_dsl():
            pass  # those that matter to it are in the key
        elif self.environment.setdefault(name, value) != value:
            self.doubt = f"the variable {name} is read with two values"

    def _attribute(self, module: ModuleType, name: Any) -> None:
        if threading.get_ident() != self._thread or not isinstance(name, str) or name in _OF_EVERY_MODULE:
            return
        if is_unsteady(name):
            self.doubt = self.doubt or f"{name} of {module.__name__} is read"
        root = module.__name__, name
        if root in self.attributes or sys.modules.get(root[0]) is not module:
            return
        self.attributes[root] = None
        if not is_library_module(root[0]):
            with contextlib.suppress(UnnamedError):
                value = read(root)
                self.attributes[root] = ABSENT if value is NOTHING else digest(value)

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return  # a descriptor, of a file that was opened before
        if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            self.files.add(path)
        elif ".pyc" not in path:
            self.doubt = self.doubt or f"{path} is written"

    def _started(self, code: CodeType, frame: Any) -> bool:
        """Notes that `code` runs in `frame`. Returns whether later runs have to be seen."""
        mark = id(code), id(frame.f_globals)
        if threading.get_ident() != self._thread:
            return True
        if mark[0] in self.runs:
            self.runs[mark[0]] += 1
        if mark in self._seen:
            return True
        path = code.co_filename
        if path == "<string>":  # as dataclasses and named tuples write it
            home = str(frame.f_globals.get("__name__"))
            if home.startswith("namedtuple_") or is_library_module(home):
                return True
        if is_library(path):
            if is_dsl(path):
                if _DEVICE.search(path) and not self.doubt:
                    self.doubt = f"{code.co_qualname} reads the device"
                    return True
                return _DEVICE.search(path) is not None
            if _MACHINE.search(path) or code.co_qualname == "Thread.start":  # other threads are not recorded
                caller = frame.f_back
                while caller is not None and is_library(caller.f_code.co_filename):
                    if is_dsl(caller.f_code.co_filename):
                        return True
                    caller = caller.f_back
                self.doubt = self.doubt or f"{code.co_qualname} of {os.path.basename(path)} runs"  # noqa: PTH119
                return True
            return False
        spaces = self.spaces.setdefault(code, [])
        space = frame.f_globals
        if not any(each is space for each in spaces):
            if code.co_name == "<module>" and frame.f_back is not None and is_dsl(frame.f_back.f_code.co_filename):
                if not spaces:
                    del self.spaces[code]
                return True  # the DSL compiles what it has rewritten
            spaces.append(space)
        self._seen[mark] = code, space
        return True


class _Listener:
    """Hears which files are opened, for the recorder that is active."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def hear(self, event: str, arguments: Any) -> None:
        if self.recorder is None:
            return
        if event == "open":
            self.recorder.opened(*arguments)
        elif event in _MACHINE_EVENTS:
            self.recorder.doubt = self.recorder.doubt or f"{event} is called"


@functools.cache
def _listener() -> _Listener:
    listener = _Listener()
    sys.addaudithook(listener.hear)  # which cannot be removed; it does nothing between traces
    return listener


def _asks_the_dsl() -> bool:
    """Whether the code that reads a variable is the DSL's."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename) and not is_dsl(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_dsl(frame.f_code.co_filename)


def _record_environment(read: Callable[[Any, Any], None]) -> Callable[[], None]:
    kind = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def getitem(self: Any, key: Any) -> Any:
        try:
            value = get(self, key)
        except KeyError:
            read(key, None)
            raise
        read(key, value)
        return value

    def iterator(self: Any) -> Any:
        read(None, None)
        return iterate(self)

    def length(self: Any) -> int:
        read(None, None)
        return len_(self)

    def text(self: Any) -> str:
        read(None, None)
        return repr_(self)

    len_, repr_ = kind.__len__, kind.__repr__
    set_, delete = kind.__setitem__, kind.__delitem__

    def setitem(self: Any, key: Any, value: Any) -> None:
        read(None, None)
        set_(self, key, value)

    def delitem(self: Any, key: Any) -> None:
        read(None, None)
        delete(self, key)

    kind.__getitem__, kind.__iter__ = getitem, iterator  # type: ignore[method-assign]
    kind.__len__, kind.__repr__ = length, text  # type: ignore[method-assign]
    kind.__setitem__, kind.__delitem__ = setitem, delitem  # type: ignore[method-assign]

    def restore() -> None:
        kind.__getitem__, kind.__iter__ = get, iterate  # type: ignore[method-assign]
        kind.__len__, kind.__repr__ = len_, repr_  # type: ignore[method-assign]
        kind.__setitem__, kind.__delitem__ = set_, delete  # type: ignore[method-assign]

    return restore


def _record_attributes(note: Callable[[ModuleType, str], None]) -> Callable[[], None]:
    """Let `note` hear what the builtins read of modules, by names that need not be in the code."""
    getattr_, hasattr_ = builtins.getattr, builtins.hasattr
    if not (type(getattr_) is type(hasattr_) is types.BuiltinFunctionType):
        raise UnnamedError("getattr or hasattr is replaced")

    def getattr(value: Any, name: Any, *default: Any, **named: Any) -> Any:
        if isinstance(value, ModuleType):
            note(value, name)
        return getattr_(value, name, *default, **named)

    def hasattr(value: Any, name: Any, **named: Any) -> bool:
        if isinstance(value, ModuleType):
            note(value, name)
        return hasattr_(value, name, **named)

    builtins.getattr, builtins.hasattr = getattr, hasattr

    def restore() -> None:
        builtins.getattr, builtins.hasattr = getattr_, hasattr_

    return restore


def _profile(started: Callable[[CodeType, Any], bool]) -> Callable[[], None]:
    ignored: dict[int, CodeType] = {}  # by their ids: the hash of a code is computed each time

    def event(frame: Any, kind: str, _: Any) -> None:
        if kind == "call" and id(frame.f_code) not in ignored and not started(frame.f_code, frame):
            ignored[id(frame.f_code)] = frame.f_code

    sys.setprofile(event)
    return lambda: sys.setprofile(None)


def _monitor(started: Callable[[CodeType, Any], bool]) -> Callable[[], None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool = next((each for each in (4, 3, 5, 1) if monitoring.get_tool(each) is None), None)
    if tool is None:
        raise UnnamedError("other profilers run")

    def event(code: CodeType, _: int) -> Any:
        return None if started(code, sys._getframe(1)) else monitoring.DISABLE

    monitoring.use_tool_id(tool, "fusekit")
    monitoring.register_callback(tool, monitoring.events.PY_START, event)
    monitoring.set_events(tool, monitoring.events.PY_START)

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)

    return stop
