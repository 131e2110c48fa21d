"""What memoised functions remember, at level 1 of the cache: a run that leaves traces out does not fill them."""

import sys
import types

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from tests.cute import reader
from tests.cute import reader_values as values
from tests.cute.rig import Rig
from tests.cute.subject import Subject

pytestmark = pytest.mark.usefixtures("device")

SOURCE = """
import functools, os, threading
from tests.cute import reader_values as values

@functools.lru_cache
def memoised(number):
    return number + values.BEHIND_CACHE + int(os.getenv("READER_MEMO", "1")) + int(open(values.__file__).read(0) or 1)

def elsewhere():
    thread = threading.Thread(target=memoised, args=(1,))
    thread.start()
    thread.join()

def nothing(): pass

before = nothing

def reads():
    before()
    return memoised(1)
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    module, file = types.ModuleType("memoising"), tmp_path / "memoising.py"
    file.write_text(SOURCE)
    monkeypatch.setitem(sys.modules, "memoising", module)
    exec(compile(SOURCE, file, "exec"), vars(module))
    monkeypatch.setattr(reader, "reads", module.reads)
    return module


def second():
    return reader.compile_reader(64)


def recorded(folder, *calls):
    """The second call of a process, which finds what the first one had computed; asked as in a process of its own."""
    rig = Rig(folder / "store", folder / "report")
    assert rig.counted(lambda: [call() for call in calls], level=1)[1] == len(calls)
    return Subject(folder, second)


def test_what_a_recorded_trace_computed_may_be_missing(module, tmp_path):
    subject = recorded(tmp_path, reader.compile_reader, second)
    assert not subject.traced()
    module.memoised.cache_clear()
    assert not subject.traced()


CHANGES = {
    "a global": lambda patch, module: patch.setattr(values, "BEHIND_CACHE", 2),
    "a variable": lambda patch, module: patch.setenv("READER_MEMO", "2"),
    "a result": lambda patch, module: (patch.setattr(values, "BEHIND_CACHE", 2), module.memoised(1), patch.undo()),
    "the function": lambda patch, module: patch.setattr(module, "memoised", lambda number: 7),
    "a function that it calls": lambda patch, module: patch.setattr(module, "int", lambda text: 7, raising=False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_it_was_computed_from_may_not_change(name, module, tmp_path):
    subject = recorded(tmp_path, reader.compile_reader, second)
    module.memoised.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[name](patch, module)
        assert subject.traced()


def test_a_file_that_it_read_may_not_change(module, tmp_path, monkeypatch):
    (tmp_path / "number").write_text("1")
    monkeypatch.setattr(values, "__file__", str(tmp_path / "number"))
    subject = recorded(tmp_path, reader.compile_reader, second)
    module.memoised.cache_clear()
    assert not subject.traced()
    (tmp_path / "number").write_text("2")
    assert subject.traced()


def test_what_was_computed_outside_a_trace_has_to_be_there(module, tmp_path):
    module.memoised(1)
    subject = recorded(tmp_path, reader.compile_reader, second)
    assert not subject.traced()
    module.memoised.cache_clear()
    assert "what memoising:memoised remembers changed" in subject.traced()


def test_what_was_computed_from_values_that_changed_since_has_to_be_there(module, tmp_path, monkeypatch):
    def other():
        monkeypatch.setenv("READER_MEMO", "2")
        return second()

    subject = recorded(tmp_path, reader.compile_reader, other)
    assert not subject.traced()
    module.memoised.cache_clear()
    assert "what memoising:memoised remembers changed" in subject.traced()


def test_what_was_computed_with_other_options_has_to_be_there(module, tmp_path):
    """A function may ask the DSL for them."""
    subject = recorded(tmp_path, lambda: reader.compile_reader(options="--opt-level=1"), second)
    assert not subject.traced()
    module.memoised.cache_clear()
    assert "what memoising:memoised remembers changed" in subject.traced()


def test_what_another_thread_computed_in_the_meantime_is_in_no_record(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "before", module.elsewhere)
    assert "Thread.start of threading.py runs" in Subject(tmp_path, second).never_served()
