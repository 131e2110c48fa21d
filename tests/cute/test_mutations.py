"""Level 1 of the cache: a package that a trace reads is edited, installed in another way, loaded again, or changed by
what a program does with it. Nothing that changes what would be compiled is left out.
"""

import importlib
import importlib.abc
import importlib.util
import logging
import os
import pickle
import py_compile
import sys
import threading
import types
import zipfile

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.cute import cache
from tests.cute import leaver, reader
from tests.cute import reader_values as values
from tests.cute.subject import Subject, filled
from tests.soak import sample

pytestmark = pytest.mark.usefixtures("device")

FILES = {
    "__init__.py": "",
    "stars.py": "STAR = 1\n",
    "helper.py": """
import abc, contextlib, dataclasses, enum, functools, logging, os, typing

SCALE, FLAG, RATIO, ZERO, ORDER = 2, 1, 1.5, 0.0, {"a": 1, "b": 2}
AT_IMPORT = os.environ.get("MUTANT_IMPORT", "1")
SPACE = {"__builtins__": {}}
exec("def of_a_string(): return 1", SPACE)

class Flag(enum.IntFlag):
    ONE = 1

@dataclasses.dataclass(frozen=True)
class Options:
    bias: int = 1
    sizes: tuple = (1, 2)

class Point(typing.NamedTuple):
    x: int = 1

class Base:
    size = 1
    def __call__(self): return self.size

class Sub(Base):
    size = 2

class Other(Base):
    size = 3

class Cached:
    start = 1
    @functools.cached_property
    def value(self): return self.start
    @functools.cache
    def kept(self): return self.start

def generic(number, factor=SCALE): return number * factor

@contextlib.contextmanager
def context():
    yield SCALE

class Shape(abc.ABC): pass
class Square: pass

@functools.cache
def kept(): return 1

PART, LOGGER = functools.partial(generic, 1), logging.getLogger("mutant")
PART.mark = kept.mark = 1
CUSTOM = {"__builtins__": {"one": 1}, "__name__": __name__}
exec("def custom(): return one", CUSTOM)

def counter():
    count = 1
    def read(): return count
    def add():
        nonlocal count
        count += 1
    return read, add

READ, ADD = counter()
CALLED, POINT, CACHED = Sub(), Point(), Cached()
CACHED.value
""",
    "kern.py": """
import functools, json, sys
from mutant import helper as H
from mutant.helper import SCALE, Options, context
from mutant.stars import *

def reads():
    with context() as scale:
        total = scale
    numbers = (
        SCALE, H.SCALE, STAR, H.FLAG is True, isinstance(H.FLAG, float), H.RATIO > 1, str(H.ZERO) == "-0.0",
        list(H.ORDER)[0] == "a", int(H.AT_IMPORT), H.SPACE["of_a_string"](), H.Flag.ONE.value, Options().bias,
        len(Options().sizes), H.POINT.x, H.CALLED(), H.CACHED.value, H.CACHED.kept(), H.generic(1), H.READ(),
        len(json.dumps([1])), H.PART.mark, H.kept.mark, H.PART.func.__name__ == "generic", len(H.generic.__doc__ or ""),
        len(H.Base.__doc__ or ""), H.Base.__name__ == "Base", H.LOGGER.isEnabledFor(10), sys.flags.optimize,
        isinstance(H.Square(), H.Shape), H.CUSTOM["custom"](),
    )
    return functools.reduce(lambda total, number: total * 31 + number, map(int, numbers), total) % 1_000_003
""",
}  # fmt: skip


def written(folder, **edits):
    """The package, with texts in its files replaced. edits: file -> (text, new)."""
    for name, text in FILES.items():
        old, new = edits.get(name.partition(".")[0], ("", ""))
        assert old in text
        (folder / "mutant").mkdir(parents=True, exist_ok=True)
        (folder / "mutant" / name).write_text(text.replace(old, new) if old else text)
    return folder


def forgotten(patch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "mutant"]:
        patch.delitem(sys.modules, name)
    importlib.invalidate_caches()


def loaded(patch):
    """The package as a new process has it."""
    forgotten(patch)
    patch.setattr(reader, "reads", importlib.import_module("mutant.kern").reads)
    return sys.modules["mutant.helper"]


def compile_reader():
    return reader.compile_reader()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(written(folder / "source")))
        loaded(patch)
        return filled(folder, compile_reader)


def path(make):
    """A path of imports."""

    def change(patch, folder):
        patch.syspath_prepend(str(make(folder)))
        loaded(patch)

    return change


def edit(**edits):
    return path(lambda folder: written(folder, **edits))


def zipped(**edits):
    def make(folder):
        written(folder / "unpacked", **edits)
        with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
            for name in FILES:
                archive.write(folder / "unpacked" / "mutant" / name, f"mutant/{name}")
        return folder / "packed.zip"

    return path(make)


def bytecode(folder):
    written(folder)
    for source in (folder / "mutant").iterdir():
        py_compile.compile(str(source), f"{source}c")
        source.unlink()
    return folder


def linked(folder):
    written(folder / "real")
    (folder / "links").mkdir()
    (folder / "links" / "mutant").symlink_to(folder / "real" / "mutant")
    return folder / "links"


class Editable(importlib.abc.MetaPathFinder):
    """As build backends install a package that is edited: its name leads to a folder."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name != "mutant":
            return None
        place = self.folder / "mutant"
        return importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )


def editable(**edits):
    def change(patch, folder):
        patch.setattr(sys, "meta_path", [Editable(written(folder, **edits)), *sys.meta_path])
        loaded(patch)

    return change


def reloaded(**edits):
    """The files are edited while the program runs, and a module is loaded again."""

    def change(patch, folder):
        patch.syspath_prepend(str(written(folder)))
        helper = loaded(patch)
        written(folder, **edits)
        os.utime(folder / "mutant" / "helper.py", (1, 1))  # no bytecode of the same second
        importlib.reload(helper)

    return change


def edited_and_not_loaded(patch, folder):
    patch.syspath_prepend(str(written(folder)))
    loaded(patch)
    written(folder, helper=("SCALE, FLAG", "SCALE,FLAG"))


def variable(patch, folder):
    patch.setenv("MUTANT_IMPORT", "2")
    patch.syspath_prepend(str(written(folder)))
    loaded(patch)


def then(act):
    """The package as it was, and what a program does with it."""

    def change(patch, folder):
        patch.syspath_prepend(str(written(folder)))
        act(patch, loaded(patch))

    return change


def put(name, value):
    return then(lambda patch, helper: patch.setattr(helper, name, value))


def string(code):
    return then(lambda patch, helper: exec(code, helper.SPACE))


def in_a_thread(patch, helper):
    thread = threading.Thread(target=helper.ADD)
    thread.start()
    thread.join()


def by_value(patch, helper):
    """A function that came by its code, as pickles of functions by value do: its globals are no module."""
    code = helper.generic.__code__
    patch.setattr(helper, "generic", types.FunctionType(code, {}, "generic", (3,)))


def kept_before(patch, helper):
    """A cached method has run with another value."""
    helper.Cached.start = 7
    helper.CACHED.kept()
    helper.Cached.start = 1


LEFT_OUT, TRACED = False, True
CHANGES = {
    "nothing": (edit(), LEFT_OUT),
    "a comment": (edit(helper=("SPACE = {", "# the same\nSPACE = {")), TRACED),
    "a global that is imported": (edit(helper=("= 2, 1, 1.5", "= 3, 1, 1.5")), TRACED),
    "a global by a star": (edit(stars=("1", "2")), TRACED),
    "a value of another type": (edit(helper=("= 2, 1, 1.5", "= 2, True, 1.5")), TRACED),
    "an equal value of another type": (put("FLAG", 1.0), TRACED),
    "minus zero": (put("ZERO", -0.0), TRACED),
    "the order of a dict": (put("ORDER", {"b": 2, "a": 1}), TRACED),
    "a variable read at import": (variable, TRACED),
    "a zipped package": (zipped(), LEFT_OUT),
    "an edited one": (zipped(helper=("return 1\"", "return 2\"")), TRACED),
    "bytecode without sources": (path(bytecode), TRACED),
    "a linked folder": (path(linked), LEFT_OUT),
    "an editable install": (editable(), LEFT_OUT),
    "an edited one of these": (editable(stars=("1", "2")), TRACED),
    "a module loaded again, of which others keep classes": (reloaded(), TRACED),
    "an edited one, loaded again": (reloaded(helper=("= 2, 1, 1.5", "= 3, 1, 1.5")), TRACED),
    "an edited one, not loaded again": (edited_and_not_loaded, TRACED),
    "a string that was executed": (string("def of_a_string(): return 2"), TRACED),
    "the same string, again": (string("def of_a_string(): return 1"), LEFT_OUT),
    "a count of another thread": (then(in_a_thread), TRACED),
    "a default of a dataclass": (edit(helper=("bias: int = 1", "bias: int = 2")), TRACED),
    "one that hides it": (then(lambda patch, helper: patch.setattr(helper.Options, "sizes", (1,))), TRACED),
    "a default of a named tuple": (edit(helper=("x: int = 1", "x: int = 2")), TRACED),
    "another named tuple": (then(lambda patch, helper: patch.setattr(helper, "POINT", helper.Point(2))), TRACED),
    "the class of an object": (
        then(lambda patch, helper: patch.setattr(helper.CALLED, "__class__", helper.Other)), TRACED,
    ),
    "an attribute that is gone": (then(lambda patch, helper: patch.delattr(helper.Sub, "size")), TRACED),
    "an attribute of an object": (
        then(lambda patch, helper: patch.setattr(helper.CALLED, "size", 7, raising=False)), TRACED,
    ),
    "what cached_property keeps": (
        then(lambda patch, helper: patch.setitem(vars(helper.CACHED), "value", 7)), TRACED,
    ),
    "what it comes from": (then(lambda patch, helper: patch.setattr(helper.Cached, "start", 7)), TRACED),
    "what a cached method keeps": (then(kept_before), TRACED),
    "a default that is another": (
        then(lambda patch, helper: patch.setattr(helper.generic, "__defaults__", (7,))), TRACED,
    ),
    "a function by value": (then(by_value), TRACED),
    "a function of the standard library": (
        then(lambda patch, helper: patch.setattr(sys.modules["json"], "dumps", lambda value: "")), TRACED,
    ),
    "an attribute of a partial": (then(lambda patch, helper: patch.setattr(helper.PART, "mark", 2)), TRACED),
    "one of a memoised function": (then(lambda patch, helper: patch.setattr(helper.kept, "mark", 2)), TRACED),
    "the name of a function": (then(lambda patch, helper: patch.setattr(helper.generic, "__name__", "x")), TRACED),
    "its documentation": (then(lambda patch, helper: patch.setattr(helper.generic, "__doc__", "x")), TRACED),
    "the name of a class": (then(lambda patch, helper: setattr(helper.Base, "__name__", "x")), TRACED),
    "documentation of a class": (then(lambda patch, helper: patch.setattr(helper.Base, "__doc__", "x")), TRACED),
    "the level of a logger": (then(lambda patch, helper: patch.setattr(helper.LOGGER, "level", 10)), TRACED),
    "that of its parent": (then(lambda patch, helper: patch.setattr(logging.getLogger(), "level", 10)), TRACED),
    "all loggers": (then(lambda patch, helper: patch.setattr(helper.LOGGER.manager, "disable", 60)), TRACED),
    "a class that is registered": (then(lambda patch, helper: helper.Shape.register(helper.Square)), TRACED),
    "builtins of a function's own": (
        then(lambda patch, helper: patch.setitem(helper.CUSTOM["__builtins__"], "one", 2)), TRACED,
    ),
    "flags of Python": (
        then(lambda patch, helper: patch.setattr(sys, "flags", types.SimpleNamespace(optimize=1))), TRACED,
    ),
    "a new global that nothing reads": (
        then(lambda patch, helper: patch.setattr(helper, "lonely", 1, raising=False)), LEFT_OUT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_package_is_traced(name, recorded, monkeypatch, tmp_path):
    change, traced = CHANGES[name]
    change(monkeypatch, tmp_path)
    why = recorded.traced()
    assert bool(why) == traced, why


BY_NAME = {
    "globals": "COMPUTED = values.COMPUTED\ndef reads(): return globals()['COM' + NAME[3:]]",
    "vars": "def reads(): return vars(values)[NAME]",
    "__dict__": "def reads(): return values.__dict__[NAME]",
    "attrgetter": "import operator\ndef reads(): return operator.attrgetter(NAME)(values)",
    "attrgetter, by another name": "from operator import attrgetter as get\ndef reads(): return get(NAME)(values)",
    "getattr": "def reads(): return getattr(values, NAME)",
    "getattr, by another name": "get = getattr\ndef reads(): return get(values, NAME)",
    "getattr in a table": "TABLE = {'get': getattr}\ndef reads(): return TABLE['get'](values, NAME)",
    "getattr that a module has kept": "getattr = getattr\ndef reads(): return getattr(values, NAME)",
    "getattr as a default": "def reads(get=getattr): return get(values, NAME)",
    "getattr in a closure": "def closure(get): return lambda: get(values, NAME)\nreads = closure(getattr)",
    "getattr as a member": "class Kind: get = staticmethod(getattr)\ndef reads(): return Kind.get(values, NAME)",
    "getattr that is handed on": "import functools\ndef reads(): return functools.reduce(getattr, [NAME], values)",
    "getattr in a partial": "import functools\nP = functools.partial(getattr, values)\ndef reads(): return P(NAME)",
    "vars, by another name": "from builtins import vars as v\ndef reads(): return v(values)[NAME]",
    "__getattribute__": "def reads(): return object.__getattribute__(values, NAME)",
    "it, by another name": "get = object.__getattribute__\ndef reads(): return get(values, NAME)",
    "that of a module": "get = type(values).__getattribute__\ndef reads(): return get(values, NAME)",
    "a bound one": "get = values.__getattribute__\ndef reads(): return get(NAME)",
    "eval, by another name": "run = eval\ndef reads(): return run('values.' + NAME)",
    "exec, by another name": "run = exec\ndef reads(): s = {'v': values}; run('n = v.' + NAME, s); return s['n']",
    "import_module": "from importlib import import_module as im\ndef reads(): return getattr(im(HOME), NAME)",
    "import_module, and a name": "from importlib import import_module as im\ndef reads(): return im(HOME).COMPUTED",
    "__import__": "im = __import__\ndef reads(): return im(HOME, fromlist=['x']).COMPUTED",
    "sys.modules": "import sys\nM = sys.modules\ndef reads(): return M[HOME].COMPUTED",
    "a dict of a module": "D = vars(values)\ndef reads(): return D[NAME]",
    "get of one": "get = vars(values).get\ndef reads(): return get(NAME)",
    "a format": "def reads(): return int('{0.COMPUTED}'.format(values))",
    "a class in a pickle": "import pickle\nP = pickle.dumps(K)\ndef reads(): return pickle.loads(P).number",
    "a function in a pickle": "import pickle\nP = pickle.dumps(values.computed)\ndef reads(): return pickle.loads(P)()",
    "a function in a list": "L = [values.computed]\ndef reads(): return L[0]()",
    "a weak reference": "import weakref\nW = weakref.ref(values.Kind)\ndef reads(): return W().number",
    "subclasses": "S = object.__subclasses__\ndef reads(): return [k for k in S() if k.__module__ == HOME][0].number",
    "inspect": "from inspect import getattr_static as get\ndef reads(): return get(values, NAME)",
    "a frame": "import sys\nf = sys._getframe\ndef reads(): return f(0).f_globals['values'].COMPUTED",
    "type": "def reads(): return type('New', (values.Kind,), {}).number",
    "a match": "def reads():\n    match values:\n        case object(COMPUTED=number): return number",
}  # fmt: skip


FAST = (
    "globals", "attrgetter, by another name", "getattr, by another name", "getattr as a default", "import_module",
    "eval, by another name", "it, by another name", "a format", "a class in a pickle",
)  # fmt: skip


@pytest.mark.parametrize("name", sample(BY_NAME, *FAST))
def test_what_is_read_by_a_computed_name_is_traced_when_it_changes(name, monkeypatch, tmp_path):
    """Or each time."""
    module, file = types.ModuleType("computing"), tmp_path / "computing.py"
    file.write_text(f"""
from tests.cute import reader_values as values
NAME, HOME = "COMPUTED", values.__name__
K = values.Kind
{BY_NAME[name]}
del K
""")
    monkeypatch.setitem(sys.modules, "computing", module)
    exec(compile(file.read_text(), file, "exec"), vars(module))
    monkeypatch.setattr(reader, "reads", module.reads)
    subject = Subject(tmp_path, compile_reader)
    if "it will be traced each time" in subject.never_served():
        return
    (tmp_path / "filled").mkdir()
    subject = filled(tmp_path / "filled", compile_reader)
    monkeypatch.setattr(values, "COMPUTED", 2)
    monkeypatch.setattr(values.Kind, "number", 2)
    if hasattr(module, "COMPUTED"):
        monkeypatch.setattr(module, "COMPUTED", 2)
    assert subject.traced()


def test_an_object_that_was_pickled_counts_by_what_it_holds(monkeypatch, tmp_path):
    kernel = leaver.Kernel()
    subject = filled(tmp_path, lambda: leaver.compiled(pickle.loads(pickle.dumps(kernel))))
    kernel.state = [2]
    assert "no record" in subject.traced()
    kernel.state = [1]
    assert not subject.traced()


def test_two_threads_get_the_same(monkeypatch, tmp_path):
    subject, untraced, original = filled(tmp_path, compile_reader), [], cache.Cache._from
    monkeypatch.setattr(cache.Cache, "_from", lambda *args: untraced.append(original(*args)) or untraced[-1])

    def work():
        threads = [threading.Thread(target=compile_reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert subject.rig.counted(work, level=1) == (2, 0)
    assert len(untraced) == 2 and None not in untraced


def test_a_folder_of_the_dsl_changes_nothing(monkeypatch, tmp_path):
    subject = filled(tmp_path, compile_reader)
    monkeypatch.setenv("CUTE_DSL_CACHE_DIR", "/nowhere")
    assert not subject.traced()
