"""Level 1 of the cache: code may ask whether two objects are one, so it counts which are, beside what they hold."""

import sys
import types

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.cute.reads import shared
from tests.cute import leaver
from tests.cute.subject import Subject, filled
from tests.soak import sample

pytestmark = pytest.mark.usefixtures("device")

SOURCE = """
import functools

class Config:
    def __init__(self): self.size = 1

def factory():
    def relu(): return 1
    return relu

def switch(self):
    HELD[0] = Config()
    return ask(self)

@functools.cache
def default(): return DEFAULT

def ask(self): return {question}

DEFAULT, RELU, OLD = Config(), factory(), Config
ALIAS, HELD, SET, TABLE = DEFAULT, [DEFAULT], {{DEFAULT, 2, "3"}}, {{DEFAULT: 1}}
"""


def other(name, make):
    """A global becomes an equal object."""
    return lambda module, kernel: setattr(module, name, make(module))


def argument(make):
    return lambda module, kernel: setattr(kernel, "state", make(module))


def held(module, kernel):
    module.HELD[0] = module.Config()


def class_again(module, kernel):
    exec(SOURCE.partition("def factory")[0], vars(module))
    module.OLD = module.Config


# What is asked -> (the code, the argument's object, what makes another one of it).
CASES = {
    "an argument and a global": ("self.state is DEFAULT", "DEFAULT", argument(lambda module: module.Config())),
    "an argument in a list": ("self.state in HELD", "DEFAULT", argument(lambda module: module.Config())),
    "an argument in a set": ("self.state in SET", "DEFAULT", argument(lambda module: module.Config())),
    "a key of a dict": ("TABLE.get(self.state, 7)", "DEFAULT", argument(lambda module: module.Config())),
    "a function": ("self.state is RELU", "RELU", argument(lambda module: module.factory())),
    "the class of an argument": ("isinstance(self.state, Config)", "DEFAULT", class_again),
    "two globals": ("ALIAS is DEFAULT", "RELU", other("ALIAS", lambda module: module.Config())),
    "a global in another": ("HELD[0] is DEFAULT", "RELU", held),
    "what is remembered": ("default() is DEFAULT", "RELU", other("DEFAULT", lambda module: module.Config())),
    "an argument that is": ("default() is self.state", "DEFAULT", argument(lambda module: module.Config())),
    "two classes": ("isinstance(DEFAULT, OLD)", "RELU", other("OLD", lambda module: type(
        "Config", (), {name: each for name, each in vars(module.Config).items() if name != "__dict__"}
    ))),
}  # fmt: skip
FAST = (
    "what is remembered",
    "an argument and a global",
    "the class of an argument",
    "a global in another",
    "an argument in a set",
)


@pytest.fixture
def load(monkeypatch, tmp_path):
    def load(question, reads="ask"):
        module, file = types.ModuleType("identical"), tmp_path / "identical.py"
        file.write_text(SOURCE.format(question=f"int({question})"))
        monkeypatch.setitem(sys.modules, "identical", module)
        exec(compile(file.read_text(), file, "exec"), vars(module))
        monkeypatch.setattr(leaver, "leaves", getattr(module, reads))
        return module

    return load


@pytest.mark.parametrize("name", sample(CASES, *FAST))
def test_an_equal_object_that_is_another_one_is_traced(name, load, tmp_path):
    question, state, change = CASES[name]
    module, kernel = load(question), leaver.Kernel()
    kernel.state = getattr(module, state)
    subject = filled(tmp_path, lambda: leaver.compiled(kernel))
    change(module, kernel)
    assert subject.traced()


def test_equal_objects_that_were_made_again_are_not_traced(load, tmp_path):
    """In another process all of them are others, and the same of them are one."""
    kernel = leaver.Kernel()
    kernel.state = load("self.state is DEFAULT").DEFAULT
    subject = filled(tmp_path, lambda: leaver.compiled(kernel))
    kernel.state = load("self.state is DEFAULT").DEFAULT
    assert not subject.traced()


def test_a_trace_that_puts_another_object_in_the_place_of_an_equal_one_is_traced_each_time(load, tmp_path):
    kernel = leaver.Kernel()
    kernel.state = load("HELD[0] is DEFAULT", "switch").RELU
    never = Subject(tmp_path, lambda: leaver.compiled(kernel)).never_served()
    assert "the trace changes which of the objects that it reads are one" in never


def test_shared_objects_are_told_by_their_places():
    first, second = {1: 0, 2: 1, 3: 2}, {7: 0, 2: 1}
    assert shared([first, second]) == shared([{11: 0, 12: 1, 13: 2}, {17: 0, 12: 1}])
    assert shared([first, second]) != shared([first, {7: 0, 3: 1}])
    assert shared([first, second]) != shared([first, {2: 0, 7: 1}])
    assert shared([first, second]) != shared([first, {7: 0, 8: 1}]) == shared([])
