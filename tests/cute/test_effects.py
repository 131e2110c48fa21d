"""What a trace leaves on its arguments, at level 1 of the cache."""

import copy

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.cute.leftout import LeftOut
from fusekit.errors import FusekitError
from tests.cute import leaver
from tests.cute.rig import Rig
from tests.cute.subject import Subject, filled

pytestmark = pytest.mark.usefixtures("device")


def left(folder, monkeypatch, leaves):
    """The objects of a call that was traced, and of one that was not."""
    monkeypatch.setattr(leaver, "leaves", leaves)
    rig = Rig(folder / "store", folder / "report")
    (_, traced), (counts, untraced) = (rig.run(leaver.compile_leaver, level=1) for _ in range(2))
    assert counts == (1, 0)
    assert not Subject(folder, leaver.compile_leaver).traced()
    return traced, untraced


@pytest.mark.parametrize("leaves", [leaver.plain, leaver.changed], ids=["new", "changed"])
def test_plain_data_is_left_again(leaves, monkeypatch, tmp_path):
    traced, untraced = left(tmp_path, monkeypatch, leaves)
    assert list(vars(untraced).items()) == list(vars(traced).items())


def test_an_object_with_plain_data_is_left_again(monkeypatch, tmp_path):
    traced, untraced = left(tmp_path, monkeypatch, leaver.params)
    assert type(untraced.params) is leaver.Params
    assert list(vars(untraced.params)) == list(vars(traced.params))
    assert (untraced.params.size, untraced.params.table) == (7, {"tiles": [1, 2], 3: (4, None)})
    assert type(untraced.params.count) is LeftOut


def test_a_value_of_the_dsl_is_there_and_cannot_be_read(monkeypatch, tmp_path):
    traced, untraced = left(tmp_path, monkeypatch, leaver.layouts)
    assert list(vars(untraced)) == list(vars(traced))
    assert untraced.layout is not None
    assert untraced.both[0] == 1
    assert not hasattr(untraced.layout, "__extract_mlir_values__")
    assert copy.deepcopy(untraced)
    with pytest.raises(FusekitError, match=r"Kernel\.layout\.shape is read, .*fusekit exec --level 2 traces each time"):
        _ = untraced.layout.shape


def test_another_trace_of_the_object_finds_that_it_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(leaver, "leaves", leaver.asks)

    def work():
        kernel = leaver.Kernel()
        return [str(leaver.compiled(kernel).ir_module) for _ in range(2)]

    rig = Rig(tmp_path / "store", tmp_path / "report")
    (cold, traced), (warm, untraced) = (rig.run(work, level=1) for _ in range(2))
    assert (cold, warm) == ((0, 2), (2, 0))
    assert untraced == traced
    assert traced[0] != traced[1]


REFUSED = {
    leaver.elsewhere: "a tests.cute.leaver.Params on an argument, which is elsewhere as well",
    leaver.a_list_elsewhere: "a builtins.list on an argument, which is elsewhere as well",
    leaver.two_places: "a tests.cute.leaver.Params on an argument, which is elsewhere as well",
    leaver.itself: "a tests.cute.leaver.Kernel on an argument, which is elsewhere as well",
    leaver.finalised: "a tests.cute.leaver.Counted on an argument",
    leaver.constructed: "a tests.cute.leaver.Made on an argument",
    leaver.slots: "a tests.cute.leaver.Slots on an argument",
    leaver.number: "a tests.cute.leaver.Number on an argument",
    leaver.local: "a tests.cute.leaver.local.<locals>.Local on an argument",
    leaver.function: "a builtins.function on an argument",
    leaver.watched: "a tests.cute.leaver.Params on an argument",
    leaver.removed: "the trace removes the attribute state",
    leaver.in_place: "the trace changes its arguments",
}


@pytest.mark.parametrize("leaves", REFUSED, ids=lambda leaves: leaves.__name__)
def test_what_cannot_be_left_again_is_traced_each_time(leaves, monkeypatch, tmp_path):
    monkeypatch.setattr(leaver, "leaves", leaves)
    assert REFUSED[leaves] in Subject(tmp_path, leaver.compile_leaver).never_served()


CHANGES = {
    "its class": lambda patch: patch.setattr(leaver.Params, "extra", 1, raising=False),
    "how it is made": lambda patch: patch.setattr(leaver.Params, "__init__", lambda self, count, size: None),
    "another class": lambda patch: patch.setattr(leaver, "Params", type("Params", (leaver.Params,), {})),
    "what leaves it": lambda patch: patch.setattr(leaver, "leaves", leaver.layouts),
}


def test_a_change_of_what_is_left_is_traced(monkeypatch, tmp_path):
    monkeypatch.setattr(leaver, "leaves", leaver.params)
    subject = filled(tmp_path, leaver.compile_leaver)
    for name, change in CHANGES.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            assert subject.traced(), name
    assert not subject.traced()
