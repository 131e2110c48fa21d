"""Level 1 of the cache: changes that only Python's data model shows, or settings of libraries, are seen in all that a
trace can read; what cannot be seen is refused.
"""

import collections
import json
import logging
import sys
import types
import warnings

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.cute.bytecode import why_unsteady
from tests.cute import reader
from tests.cute.subject import Subject, filled
from tests.soak import sample

pytestmark = pytest.mark.usefixtures("device")


def to(code):
    """A change by code in the module of the case."""
    return lambda module, patch: exec(code, vars(module))


# What reads -> (the module, a change that has it read something else).
CHANGES = {
    "order of attributes": (
        "class K: pass\nO = K(); O.a, O.b = 1, 2\ndef reads(): return list(O.__dict__)[0] == 'a'",
        to("del O.a; O.a = 1"),
    ),
    "order of members": (
        "class K:\n a, b = 1, 2\ndef reads(): return [n for n in vars(K) if n in 'ab'][0] == 'a'",
        to("del K.a; K.a = 1"),
    ),
    "order of annotations": (
        "class K:\n a: int\n b: int\ndef reads(): return list(K.__annotations__)[0] == 'a'",
        to("K.__annotations__ = {'b': int, 'a': int}"),
    ),
    "order of a set of numbers": ("S = {0, 8}\ndef reads(): return list(S)[0]", to("S = {8, 0}")),
    "length of a deque": (
        "import collections\nD = collections.deque([1], 2)\ndef reads(): return D.maxlen",
        to("D = collections.deque([1], 3)"),
    ),
    "a class of defaultdicts": (
        "import collections\nclass D(collections.defaultdict): pass\nO = D(int)\n"
        "def reads(): return O.default_factory() == 0",
        to("O = D(str)"),
    ),
    "a class of complex numbers": ("class C(complex): pass\nO = C(1)\ndef reads(): return O.real", to("O = C(2)")),
    "a text that hides itself": (
        "class S(str):\n def __str__(self): return ''\nO = S('a')\ndef reads(): return O.startswith('a')",
        to("O = S('b')"),
    ),
    "a number that does": ("class S(int):\n def __int__(self): return 1\nO = S(2)\ndef reads(): return O + 0",
    to("O = S(3)")),
    "a tuple that does": (
        "class S(tuple):\n def __iter__(self): return iter(())\nO = S((1,))\ndef reads(): return O[0]",
        to("O = S((2,))"),
    ),
    "a dict that does": (
        "class S(dict):\n def keys(self): return []\n __iter__ = keys\nO = S(a=1)\ndef reads(): return O['a']",
        to("O = S(a=2)"),
    ),
    "a class of staticmethods": (
        "class M(staticmethod): pass\ndef make(n): return lambda: n\nKNOWN = make(1)\nclass K: f = M(KNOWN)\n"
        "def reads(): return K.f() + KNOWN()", to("K.f = M(make(2))"),
    ),
    "a private slot of a base": (
        "class P:\n __slots__ = '__x',\n def __init__(self, x): self.__x = x\n def get(self): return self.__x\n"
        "class S(P): __slots__ = ()\nO = S(1)\ndef reads(): return O.get()", to("O = S(2)"),
    ),
    "a slot that a member hides": (
        "class P: __slots__ = 'x',\nclass S(P): x = 5\nO = S(); P.x.__set__(O, 1)\ndef reads(): return P.x.__get__(O)",
        to("P.x.__set__(O, 2)"),
    ),
    "a slot of another class": (
        "class S: __slots__ = 'a', 'b'\nO = S(); O.a, O.b = 1, 2\nclass K: get = S.a\n"
        "def reads(): return K.__dict__['get'].__get__(O)", to("K.get = S.b"),
    ),
    "documentation of a property": (
        "class K:\n @property\n def x(self): return 1\ndef reads(): return K.x.__doc__ is None",
        to("K.x.__doc__ = 'x'"),
    ),
    "an attribute of a cached property": (
        "import functools\nclass K:\n @functools.cached_property\n def x(self): pass\n"
        "def reads(): return getattr(vars(K)['x'], 'mark', 1)", to("vars(K)['x'].mark = 2"),
    ),
    "an object in a slice": (
        "class K:\n n = 1\n def __repr__(self): return ''\nS = slice(K())\ndef reads(): return S.stop.n",
        to("S.stop.n = 2"),
    ),
    "a handler of a logger": (
        "import logging\nL = logging.getLogger('model')\ndef reads(): return len(L.handlers)",
        lambda module, patch: patch.setattr(module.L, "handlers", [logging.NullHandler()]),
    ),
    "a logger by its name": (
        "import logging\ndef reads(): return logging.getLogger('models').level",
        lambda module, patch: patch.setattr(logging.getLogger("models"), "level", 10),
    ),
    "warnings that are errors": (
        "import warnings\ndef reads():\n try: warnings.warn('x')\n except UserWarning: return 2\n return 1",
        lambda module, patch: (
            patch.setattr(warnings, "filters", [("error", None, Warning, None, 0)]), warnings._filters_mutated()
        ),
    ),
    "names in an array": (
        "import numpy as np\nA = np.zeros(2, [('a', 'i4')])\ndef reads(): return A.dtype.names[0] == 'a'",
        to("A = np.zeros(2, [('b', 'i4')])"),
    ),
    "a scalar of NumPy": (
        "import numpy as np\nA = np.float32(1)\ndef reads(): return isinstance(A, np.ndarray)",
        to("A = np.array(1, 'f4')"),
    ),
    "an array that is constant": (
        "import numpy as np\nA = np.ones(2)\ndef reads(): return A.flags.writeable", to("A.flags.writeable = False"),
    ),
    "the bound of a type variable": (
        "import typing\nT = typing.TypeVar('T', bound=int)\ndef reads(): return T.__bound__ is int",
        to("T = typing.TypeVar('T', bound=str)"),
    ),
    "an object in an annotation": (
        "import typing\nclass M: n = 1\nclass K:\n x: typing.Annotated[int, M()]\ndel M\n"
        "def reads(): return K.__annotations__['x'].__metadata__[0].n",
        to("K.__annotations__['x'].__metadata__[0].n = 2"),
    ),
    "a class in one": (
        "import typing\nclass M: n = 1\ndef f(x: typing.Optional[M]): pass\ndel M\n"
        "def reads(): return f.__annotations__['x'].__args__[0].n", to("f.__annotations__['x'].__args__[0].n = 2"),
    ),
    "the origin of a generic class": (
        "import typing\nclass G(typing.Generic[typing.TypeVar('T')]): n = 1\nA = G[int]\ndel G\n"
        "def reads(): return A.n",
        to("A.__origin__.n = 2"),
    ),
    "a generic base": (
        "import typing\nclass G(typing.Generic[typing.TypeVar('T')]): pass\ndef make(t):\n class K(G[t]): pass\n"
        " return K\n"
        "K = make(int)\ndef reads(): return K.__orig_bases__[0].__args__[0] is int", to("K = make(str)"),
    ),
    "an annotation that is text": (
        "import cutlass\nfrom cutlass import cute\nAlias = cutlass.Int32\n@cute.jit\n"
        "def f(x: 'Alias'): return 1 if isinstance(x, int) else 2\ndef reads(): return f(3)",
        to("Alias = cutlass.Constexpr"),
    ),
    "a dataclass that was made": (
        "import dataclasses\nK = dataclasses.make_dataclass('K', [('a', int, 1)])\ndef reads(): return K.a",
        to("K.a = 2"),
    ),
    "an abstract class that was": (
        "import abc\nK = abc.ABCMeta('K', (), {'a': 1})\ndef reads(): return K.a", to("K.a = 2"),
    ),
    "an attribute of a library's class": (
        "import collections\ndef reads(): return getattr(collections.UserDict, 'mark', 1)",
        lambda module, patch: patch.setattr(collections.UserDict, "mark", 2, raising=False),
    ),
    "a method of one": (
        "import collections\nO = collections.UserDict(a=1)\ndef reads(): return len(O)",
        lambda module, patch: patch.setattr(collections.UserDict, "__len__", lambda self: 7),
    ),
    "an attribute of a library's function": (
        "import json\ndef reads(): return getattr(json.dumps, 'mark', 1)",
        lambda module, patch: patch.setattr(json.dumps, "mark", 2, raising=False),
    ),
    "a default of one": (
        "import json\ndef reads(): return len(json.dumps([1, 2]))",
        lambda module, patch: patch.setitem(json.dumps.__kwdefaults__, "indent", 7),
    ),
    "another function of a library": (
        "import json\ndef reads(): return json.dumps('1') == 1",
        lambda module, patch: patch.setattr(json, "dumps", json.loads),
    ),
    "a class of operations of the DSL": (
        "from cutlass.cute.nvgpu.tcgen05 import copy\ndef reads(): return len(copy._LdBase.admissible_archs)",
        lambda module, patch: patch.setattr(
            module.copy._LdBase, "admissible_archs", module.copy._LdBase.admissible_archs[:1]
        ),
    ),
    "a mark of a context manager": (
        "import contextlib\n@contextlib.contextmanager\ndef f(): yield\nf.mark = 1\ndef reads(): return f.mark",
        to("f.mark = 2"),
    ),
    "precision of decimal numbers": (
        "import decimal\ndef reads(): return len(str(decimal.Decimal(1) / 3))",
        lambda module, patch: patch.setattr(module.decimal.getcontext(), "prec", 5),
    ),
    "what NumPy prints": (
        "import numpy as np\ndef reads(): return len(str(np.array([1 / 3])))",
        lambda module, patch: patch.setattr(np, "get_printoptions", lambda: {"precision": 3}),
    ),
    "a module that computes attributes": (
        "from tests.cute import reader_values as values\ndef reads(): return values.COMPUTED",
        lambda module, patch: patch.setattr(
            module.values, "__class__", type("Module", (types.ModuleType,), {"COMPUTED": property(lambda self: 7)})
        ),
    ),
    "the qualified name of an inner function": (
        "def f():\n def g(): pass\n return g\ndef reads(): return len(f().__qualname__)",
        lambda module, patch: patch.setattr(module.f, "__code__", module.f.__code__.replace(co_consts=tuple(
            each.replace(co_qualname="q") if isinstance(each, types.CodeType) else each
            for each in module.f.__code__.co_consts
        ))),
    ),
    "a number that is none": ("N = float('nan')\nL = [N]\ndef reads(): return N in L", to("N = float('nan')")),
    "a cell of two functions": (
        "def make(n=1):\n def get(): return n\n def put(x):\n  nonlocal n\n  n = x\n return get, put\n"
        "GET, PUT = make()\n"
        "def reads():\n PUT(5); n = GET(); PUT(1)\n return n", to("GET = make()[0]"),
    ),
    "attributes of two objects": (
        "class K: pass\nA, B = K(), K(); A.n = 1; B.__dict__ = A.__dict__\ndef reads():\n"
        " A.n = 5; n = B.n; A.n = 1\n return n",
        to("B = K(); B.n = 1"),
    ),
    "a class registered in the place of its twin": (
        "import abc\nclass A(abc.ABC): pass\ndef make():\n class K: pass\n return K\n"
        "X, Y = make(), make(); A.register(X)\n"
        "O, P = X(), Y()\ndef reads(): return isinstance(O, A)", to("O, P = P, O"),
    ),
    "a class that is a sequence": (
        "import collections.abc\nclass K: pass\nO = K()\ndef reads(): return isinstance(O, collections.abc.Sequence)",
        to("collections.abc.Sequence.register(K)"),
    ),
    "how objects are copied": (
        "import copy, copyreg\nclass K: n = 1\nO = K()\ndef reads(): return copy.copy(O).n",
        to("copyreg.pickle(K, lambda value: (K, ()))"),
    ),
    "a flag without a name": (
        "import re\nF = re.RegexFlag(1 << 20)\ndef reads(): return F.value >> 20", to("F = re.RegexFlag(1 << 21)"),
    ),
    "a variable of the DSL": (
        "import os\ndef reads(): return len(os.environ.get('CUTE_DSL_CACHE_DIR', ''))",
        lambda module, patch: patch.setenv("CUTE_DSL_CACHE_DIR", "/nowhere"),
    ),
    "a file in the folder": (
        "def reads(): return int(open('number').read())", lambda module, patch: patch.chdir("../other"),
    ),
}  # fmt: skip

REFUSED = {
    "itertools": ("import itertools\nclass R(itertools.repeat): pass\nO = R(1)\ndef reads(): return next(O)",
    "only C code sees"),
    "__dict__ that hides": (
        "class K:\n @property\n def __dict__(self): return {}\nO = K()\ndef reads(): return 1 if O else 2",
        "only C code sees",
    ),
    "len of the environment": ("import os\ndef reads(): return len(os.environ)", "read whole"),
    "text of the environment": ("import os\ndef reads(): return len(repr(os.environ))", "read whole"),
    "the folder": ("import os\ndef reads(): return len(os.path.abspath('x'))", "names abspath"),
    "a clock": ("from time import localtime\ndef reads(): return localtime().tm_year", "localtime"),
    "a thread": (
        "import threading\nN, out = 1, []\ndef work(): out.append(N)\n"
        "def reads(): t = threading.Thread(target=work); t.start(); t.join(); return out.pop()", "Thread.start",
    ),
    "what was remembered for equal objects": (
        "import functools\nclass K: pass\nA, B, V = K(), K(), [1]\n@functools.cache\ndef f(k): return V[0]\n"
        "f(A); V[0] = 2; f(B); V[0] = 1\ndef reads(): return f(A)", "remembers has no name",
    ),
    "a tensor in a global": (
        "import numpy as np\nfrom cutlass.cute.runtime import from_dlpack\nA = np.zeros((2, 3), 'f4')\n"
        "T = from_dlpack(A)\n"
        "def reads(): return T.shape[0]", "a tensor that is no argument of its own",
    ),
    "a change of a library": ("import sys\ndef reads(): sys.argv.append(''); return len(sys.argv)",
    "changes the module sys"),
    "a change of its class": (
        "import collections\ndef reads():\n k = collections.UserDict\n k.mark = getattr(k, 'mark', 0) + 1\n"
        " return k.mark",
        "the trace changes the module collections",
    ),
    "a change of a logger": (
        "import logging\ndef reads(): logging.getLogger('m').setLevel(logging.getLogger('m').level + 1); return 1",
        "the trace changes the module logging",
    ),
}  # fmt: skip


def held(text, name, folder):
    """The module `name` with this text, as a new process has it."""
    module, file = types.ModuleType(name), folder / f"{name}.py"
    file.write_text(text)
    sys.modules[name] = module
    exec(compile(text, file, "exec"), vars(module))
    return module


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Loads the module of a case, whose `reads` decides what is compiled."""
    for name, number in (("here", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(number)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setitem(sys.modules, "held", None)

    def load(text):
        module = held(text, "held", tmp_path)
        monkeypatch.setattr(reader, "reads", lambda: 1)
        monkeypatch.setattr(reader, "reads", module.reads)
        return module

    return load


FAST = (
    "order of attributes", "a private slot of a base", "a text that hides itself", "an annotation that is text",
    "another function of a library", "a dataclass that was made", "a cell of two functions",
    "precision of decimal numbers",
    "a file in the folder", "a logger by its name", "a class of operations of the DSL", "an object in an annotation",
)  # fmt: skip


@pytest.mark.parametrize("name", sample(CHANGES, *FAST))
def test_a_change_that_only_the_data_model_shows_is_traced(name, load, tmp_path, monkeypatch):
    text, change = CHANGES[name]
    module = load(text)
    before = module.reads()
    (tmp_path / "filled").mkdir()
    subject = filled(tmp_path / "filled", reader.compile_reader)
    with pytest.MonkeyPatch.context() as patch:
        change(module, patch)
        if name not in ("how objects are copied", "what NumPy prints"):
            assert module.reads() != before
        assert subject.traced()


@pytest.mark.parametrize("name", sample(REFUSED, "a thread", "a change of a library", "a tensor in a global"))
def test_what_cannot_be_seen_is_traced_each_time(name, load, tmp_path):
    text, why = REFUSED[name]
    load(text)
    assert why in Subject(tmp_path, reader.compile_reader).never_served()


def test_names_of_the_driver_are_no_part_of_a_trace():
    code = compile("driver.cuDeviceGetAttribute", "", "eval")
    assert "names cuDeviceGetAttribute" in why_unsteady(code)
