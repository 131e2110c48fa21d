"""What a program has made of its modules before it compiles, and a compile process would not see."""

import importlib
import sys

import pytest

from fusekit.compiler import values
from fusekit.compiler.foreign import Foreign
from fusekit.errors import BuildError

KERNEL = """
import helper_of_values as helper
from helper_of_values import scale as scaled
import os, enum
FACTOR = 2.0
ROWS = int(os.environ.get("ROWS_OF_VALUES", "4"))
UNUSED = 1
CACHE = {}
TABLE = {"a": (1, 2)}
class Base:
    STAGES = 3
    memory = {}
    def stages(self): return self.STAGES
class Kernel(Base):
    def __call__(self, x): return helper.BIAS + scaled(x) * FACTOR + ROWS + TABLE["a"][0] + self.stages()
def run(x, kernel=Kernel()): return kernel(x)
def launch(x): CACHE[x] = run
"""
HELPER = "BIAS = 1\nSCALE = 5\ndef scale(x): return x * SCALE\ndef other(x): return x\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "kernel_of_values.py").write_text(KERNEL)
    (tmp_path / "helper_of_values.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("kernel_of_values", "helper_of_values")
    values._bindings.cache_clear()

    def fresh():
        for name in names:
            sys.modules.pop(name, None)
        return importlib.import_module(names[0])

    yield fresh
    for name in names:
        sys.modules.pop(name, None)


def change(module, what):
    names = {"k": module, "helper": module.helper}
    exec(what, names)


SAME = {"kernel_of_values:ROWS": 4}


@pytest.mark.parametrize("root", ["run", "Kernel"])
def test_what_the_source_says_is_not_repeated(module, root):
    called = getattr(module(), root)
    assert values.reached((called() if root == "Kernel" else called,), Foreign()) == SAME


@pytest.mark.parametrize("what", ["k.CACHE[1] = 2", "k.UNUSED = 2", "k.Base.memory['x'] = 1", "k.another = 1"])
def test_what_the_kernel_does_not_reach_may_change(module, what):
    loaded = module()
    change(loaded, what)
    assert values.reached((loaded.run,), Foreign()) == SAME


@pytest.mark.parametrize(
    ("what", "label", "fresh"),
    [
        ("k.FACTOR = 3.0", "kernel_of_values.FACTOR is 3.0", "2.0"),
        ("k.FACTOR = 2", "kernel_of_values.FACTOR is 2 ", "2.0"),
        ("k.ROWS = 8", "kernel_of_values.ROWS is 8", "4"),
        ("k.TABLE['a'] = (2, 2)", "kernel_of_values.TABLE is ", '"dict"'),
        ("k.Base.STAGES = 4", "kernel_of_values.Base.STAGES is 4", "3"),
        ("k.Kernel.STAGES = 4", "kernel_of_values.Kernel.STAGES is 4", "what its source says"),
        ("helper.BIAS = 7", "helper_of_values.BIAS is 7", "1"),
        ("helper.SCALE = 7", "helper_of_values.SCALE is 7", "5"),
        ("k.scaled = helper.other", "kernel_of_values.scaled is ", "helper_of_values:scale"),
    ],
)
def test_a_change_is_refused_after_a_fresh_import(module, what, label, fresh):
    before = module()
    change(before, what)
    there = values.reached((before.run,), Foreign())
    values.check((before.run,), there, Foreign())
    with pytest.raises(BuildError) as caught:
        values.check((module().run,), there, Foreign())
    message = str(caught.value)
    assert message.startswith(label)
    assert fresh in message
    assert "give the function the value as an argument, or compile with cute.compile" in message


def test_a_variable_that_was_read_at_import_is_a_value(module, monkeypatch):
    monkeypatch.setenv("ROWS_OF_VALUES", "16")
    there = values.reached((module().run,), Foreign())
    monkeypatch.delenv("ROWS_OF_VALUES")
    with pytest.raises(BuildError, match=r"ROWS is 16 .* and 4 after a fresh import"):
        values.check((module().run,), there, Foreign())
