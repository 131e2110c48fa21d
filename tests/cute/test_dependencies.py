"""Level 1 of the cache: what a trace reads, and that no trace is left out when one of these values changes."""

import builtins
import functools
import math
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from cutlass import cute

from fusekit.cute import cache
from fusekit.cute.digest import UnnamedError
from fusekit.cute.values import digest
from fusekit.errors import NotBuiltError
from tests.cute import reader
from tests.cute import reader_values as values
from tests.cute.rig import Rig
from tests.cute.subject import Subject, filled

pytestmark = pytest.mark.usefixtures("device")
TRACE = cache.Trace


@pytest.fixture(scope="module")
def filled_subject(tmp_path_factory):
    reader.memoised.cache_clear()
    return filled(tmp_path_factory.mktemp("reader"), reader.compile_reader)


@pytest.fixture
def subject(filled_subject):
    reader.memoised.cache_clear()
    return filled_subject


def put(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def item(owner, key, value):
    return lambda patch: patch.setitem(owner, key, value)


def in_place(patch):
    patch.setattr(reader, "ARRAY", reader.ARRAY.copy())
    reader.ARRAY[1] = 7


def list_in_place(patch):
    patch.setattr(reader, "LIST", reader.LIST.copy())
    reader.LIST[0] = 2


def in_the_cell(patch):
    patch.setattr(reader.CLOSURE.__closure__[0], "cell_contents", [7])


def remembered(patch):
    """A memoised function that has run with another value."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr(values, "BEHIND_CACHE", 7)
        reader.memoised(1)


def of_the_dsl(patch):
    original = cute.arch.thread_idx
    patch.setattr(cute.arch, "thread_idx", lambda **named: original(**named))


def code_of_a_string(patch):
    space = {"values": values}
    exec("def method(self): return 2", space)
    patch.setattr(reader.Base, "method", space["method"])


class Called:
    def __call__(self):
        return 1


def subclass(patch):
    patch.setattr(reader, "Sub", type("Sub", (reader.Sub,), {"inherited": 2, "__module__": reader.__name__}))


def file(patch):
    patch.setattr(reader, "DATA", __file__)


CHANGES = {
    "a global": put(reader, "GLOBAL", 2),
    "an item of a dict, in place": item(reader.TABLE, "a", 2),
    "an item more": item(reader.TABLE, "b", 2),
    "an item of a list, in place": list_in_place,
    "an array, in place": in_place,
    "a variable through an alias": lambda patch: patch.setenv("READER_ALIAS", "2"),
    "a variable by getenv": lambda patch: patch.setenv("READER_DIRECT", "2"),
    "a name computed at run time": put(values, "COMPUTED", 2),
    "the name that is computed": put(reader, "NAME", "BEHIND_CACHE"),
    "another file": file,
    "an argument of a partial": put(reader, "PART", functools.partial(pow, 3)),
    "a member of a metaclass": put(reader.Meta, "extra", 2),
    "one of a base class": put(reader.Base, "inherited", 2),
    "one that hides it": lambda patch: patch.setattr(reader.Sub, "inherited", 2, raising=False),
    "a method": put(reader.Base, "method", lambda self: 2),
    "code of a string": code_of_a_string,
    "a subclass": subclass,
    "a descriptor's attribute": put(reader.Holder.__dict__["described"], "number", 2),
    "a slot behind a property": put(reader.HOLDER, "slot", 2),
    "a property": put(reader.Holder, "computed", property(lambda self: 9)),
    "the value of an enumeration": put(reader.Choice.ONE, "_value_", 2),
    "a default of a dataclass": lambda patch: patch.setattr(reader.Options.__init__, "__defaults__", (2, None)),
    "what is behind lru_cache": put(values, "BEHIND_CACHE", 2),
    "what lru_cache remembers": remembered,
    "a default": lambda patch: patch.setattr(reader.with_default, "__defaults__", (2,)),
    "a default of a keyword": lambda patch: patch.setitem(reader.with_default.__kwdefaults__, "named", 2),
    "a default, in place": lambda patch: patch.setitem(reader.with_default.__kwdefaults__, "kept", [2]),
    "a closure's list": in_the_cell,
    "an attribute of a function": put(reader.with_default, "mark", 2),
    "a builtin": put(builtins, "max", min),
    "a global that hides a builtin": lambda patch: patch.setattr(reader, "max", min, raising=False),
    "an attribute behind __getattr__": item(values._LAZY, "lazy", 2),
    "one that hides it from __getattr__": lambda patch: patch.setattr(values, "lazy", 2, raising=False),
    "an object of a module": put(values.nested, "NUMBER", 2),
    "a name for hasattr": lambda patch: patch.setattr(values, "OPTIONAL", 2, raising=False),
    "a function of the DSL": of_the_dsl,
    "a class of the DSL": lambda patch: patch.setattr(
        cute.core, "_Layout", type("Layout", (), {"__module__": "other"})
    ),
    "an object that the DSL would call": put(cute.arch, "thread_idx", Called()),
    "an attribute of a library": lambda patch: patch.setattr(sys, "argv", ["--fast"]),
    "a function of a library": lambda patch: patch.setattr(math, "prod", lambda values: 7),
    "an annotation of a class": lambda patch: patch.setitem(reader.Options.__annotations__, "bias", float),
    "a constant of the DSL": lambda patch: patch.setattr(cute.arch, "WARP_SIZE", 64),
}


# Where the reason is not that the value of a global changed.
REASONS = {
    "an array, in place": "reader:ARRAY changed",
    "a variable through an alias": "variable READER_ALIAS changed",
    "a variable by getenv": "variable READER_DIRECT changed",
    "a function of the DSL": "no record",
    "a constant of the DSL": "no record",
    "a class of the DSL": "no record",
    "an object that the DSL would call": "a Called, which no key can name",
    "an attribute of a library": "module sys has other values",
    "a function of a library": "module math has other values",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changed_is_traced(name, subject, monkeypatch):
    CHANGES[name](monkeypatch)
    assert REASONS.get(name, "tests.cute.reader") in subject.traced()


def test_what_did_not_change_is_not_traced(subject, monkeypatch):
    for change in CHANGES.values():
        with monkeypatch.context() as patch:
            change(patch)
    reader.memoised.cache_clear()
    assert not subject.traced()


def test_the_error_has_the_reason(subject, monkeypatch):
    monkeypatch.setattr(reader, "GLOBAL", 2)
    with pytest.raises(NotBuiltError, match=r"it is not in the store; value tests\.cute\.reader:GLOBAL changed"):
        subject.rig.run(reader.compile_reader, level=1, miss="error")


def test_an_edited_file_is_traced(subject, monkeypatch, tmp_path):
    text = Path(values.__file__).read_text()
    monkeypatch.setattr(values, "__file__", str(tmp_path / "reader_values.py"))
    Path(values.__file__).write_text(text)
    reader.memoised.cache_clear()
    assert not subject.traced()
    Path(values.__file__).write_text(f"{text}# edited\n")
    assert subject.traced()


def test_names_of_the_dsl_in_the_body_of_a_class_are_no_globals(monkeypatch, tmp_path):
    subject = filled(tmp_path, functools.partial(reader.compile_reader, function=reader.structured))
    for name in ("ifexp_then_block_0", "ifexp_else_block_0"):
        with monkeypatch.context() as patch:
            patch.setattr(reader, name, lambda: 2, raising=False)
            assert "reader has other names" in subject.traced()
    monkeypatch.setattr(reader, "LIST", [])
    assert "reader:LIST changed" in subject.traced()


IN_DOUBT = {
    "a clock": "import time\ndef reads(): return int(time.time() * 0) + 1",
    "random numbers": "import random\ndef reads(): return random.randint(1, 1)",
    "a file system": "import os\ndef reads(): return 1 + os.path.exists('/nowhere')",
    "what is printed": "def reads(): print(end=''); return 1",
    "a string that is evaluated": "def reads(): return eval('1')",
    "the whole environment": "import os\ndef reads(): return 1 + 0 * len(dict(os.environ))",
    "a global that it changes": "COUNT = [0]\ndef reads(): COUNT[0] += 1; return COUNT[0] * 0 + 1",
    "a clock by another name": "from time import time as clock\ndef reads(): return int(clock() * 0) + 1",
    "a file system by another name": "from os.path import exists as e\ndef reads(): return 1 + e('/nowhere')",
    "a clock by a computed name": "import time\ndef reads(): return int(getattr(time, 'ti' + 'me')() * 0) + 1",
    "an address": "def reads(): return 1 + 0 * id(reads)",
    "a hash, which is salted": "def reads(): return 1 + 0 * hash('a')",
    "a variable that it sets": "import os\ndef reads(): os.environ['READER_SET'] = '1'; return 1",
    "a file that it writes": "import sys\ndef reads(): open(sys.argv[0], 'w').close(); return 1",
    "a module that it looks up": "import inspect\ndef reads(): return len(inspect.getmodule(reads).__name__)",
    "all subclasses": "def reads(): return 1 + 0 * len(int.__subclasses__())",
    "state of C": "import random\nR = type('R', (random.Random,), {})()\ndef reads(): return 1 + 0 * len(str(R))",
    "a generator": "N = iter((n for n in (1, 2)))\ndef reads(): return next(N)",
    "a context": "import contextvars\nV = contextvars.ContextVar('V', default=1)\ndef reads(): return V.get()",
    "a name in sys.modules": "import sys\ndef reads(): return 1 + 0 * len(sys.modules)",
}


REASONS_OF_DOUBT = {
    "a clock": "reads names time",
    "random numbers": "Random.randint of random.py runs",
    "a file system": "reads names exists",
    "what is printed": "reads names print",
    "a string that is evaluated": "reads names eval",
    "the whole environment": "the environment is written, or read whole",
    "a global that it changes": "the trace changes doubtful:COUNT",
    "a clock by another name": "doubtful:clock: time of time is at hand",
    "a file system by another name": "doubtful:e: exists of genericpath is at hand",
    "a clock by a computed name": "time of time is read",
    "an address": "reads names id",
    "a hash, which is salted": "reads names hash",
    "a variable that it sets": "the environment is written, or read whole",
    "a file that it writes": "/",
    "a module that it looks up": "reads imports what getmodule is given",
    "all subclasses": "reads names __subclasses__",
    "state of C": "doubtful:R: doubtful.R has state that only C code sees",
    "a generator": "doubtful:N: builtins.generator has state that only C code sees",
    "a context": "doubtful:V: _contextvars.ContextVar has no name for a key",
    "a name in sys.modules": "reads imports what modules is given",
}


@pytest.mark.parametrize("name", IN_DOUBT)
def test_what_is_in_doubt_is_traced_each_time(name, monkeypatch, tmp_path):
    module = types.ModuleType("doubtful")
    monkeypatch.setitem(sys.modules, "doubtful", module)
    exec(compile(IN_DOUBT[name], "doubtful.py", "exec"), vars(module))
    monkeypatch.setattr(reader, "reads", module.reads)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "written")])
    why = Subject(tmp_path, reader.compile_reader).never_served()
    assert f"it will be traced each time: {REASONS_OF_DOUBT[name]}" in why


def test_a_trace_that_cannot_be_recorded_is_recorded_twice_at_most(monkeypatch, tmp_path):
    """To record takes longer than to trace. An edit of the code is a reason to try again."""
    module, file = types.ModuleType("doubtful"), tmp_path / "doubtful.py"
    monkeypatch.setitem(sys.modules, "doubtful", module)
    file.write_text(IN_DOUBT["a clock"])
    exec(compile(file.read_text(), file, "exec"), vars(module))
    monkeypatch.setattr(reader, "reads", module.reads)
    recorded = []
    monkeypatch.setattr(cache, "Trace", lambda walk, *rest: recorded.append(walk) or TRACE(walk, *rest))
    rig = Rig(tmp_path / "store", tmp_path / "report")
    assert [rig.counted(reader.compile_reader, level=1) for _ in range(4)] == [(0, 1), (1, 0), (1, 0), (1, 0)]
    assert len(recorded) == 2
    file.write_text("def reads(): return 1")
    assert rig.counted(reader.compile_reader, level=1) == (1, 0)
    assert len(recorded) == 3


def test_what_a_slot_holds_is_never_passed_over():
    class Tensor:
        def __init__(self, size):
            self.size = size

    class Holder:
        __slots__ = ("held",)

        def __init__(self, held):
            self.held = held

    Tensor.__module__, Tensor.__qualname__ = "torch", "Tensor"  # which it is not: it has no device
    for held in (Tensor(1), Tensor(2)):
        with pytest.raises(UnnamedError, match=r"held: .*device"):
            digest(Holder(held))
