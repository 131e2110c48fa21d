"""Compile processes: blind, reusable, replaceable, and gone afterwards."""

import os
import time
from pathlib import Path

import pytest

from fusekit.compiler.pool import Worker, run
from fusekit.compiler.worker import Job
from fusekit.errors import BuildError


@pytest.fixture
def misbehaving(tilecopy):
    import misbehaving

    return misbehaving


@pytest.fixture
def worker(tmp_path):
    with Worker(tmp_path) as made:
        yield made


def test_a_process_outlives_a_failure_and_is_replaced_after_its_death(misbehaving, worker, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    with pytest.raises(BuildError, match=r"IndexError: .*defect of the kernel's family module") as caught:
        worker.compile(Job("a", misbehaving.defective, None))
    assert "in defective" in caught.value.__notes__[0]
    with pytest.raises(BuildError, match=r"ValueError: \[\] ''") as caught:
        worker.compile(Job("a", misbehaving.tells, None))
    assert str(tmp_path) in str(caught.value)  # it works in its scratch folder

    with pytest.raises(BuildError, match=r"died of file/kernel@v \(SIGSEGV\); its last words: .*a last word") as caught:
        worker.compile(Job("file/kernel@v", misbehaving.dies, None))
    assert caught.value.name == "file/kernel@v"
    with pytest.raises(BuildError, match=r"died of b \(exit code 7\)"):
        worker.compile(Job("b", misbehaving.leaves, None))

    done = worker.compile(Job("c", misbehaving.good, None))
    assert done.compiled.proof["launches"] >= 8
    assert done.seconds > 0


def test_a_planner_that_cannot_be_imported_is_an_error(worker, tilecopy, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "vanishing.py").write_text("def plan(spec):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    import vanishing

    (tmp_path / "elsewhere" / "vanishing.py").unlink()
    with pytest.raises(BuildError, match=r"cannot load its kernel: ModuleNotFoundError: .*vanishing"):
        worker.compile(Job("a", vanishing.plan, None))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_leaving_early_ends_what_still_runs(misbehaving, tmp_path):
    planners = {"hangs": misbehaving.hangs, "fails": misbehaving.defective}
    outcomes = run(list(planners), 2, lambda worker, name: worker.compile(Job(name, planners[name], str(tmp_path))))
    assert next(outcomes)[0] == "fails"
    mark = Path(tmp_path, "hanging")
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    outcomes.close()
    assert not alive(int(mark.read_text()))


def test_every_item_is_answered_once(tmp_path):
    items = list(range(20))
    answers = dict(run(items, 3, lambda worker, item: 10 // (item % 4)))
    assert sorted(answers) == items
    assert answers[1] == 10
    assert isinstance(answers[4], ZeroDivisionError)


def test_nothing_to_do_starts_nothing():
    assert list(run([], 4, lambda worker, item: item)) == []
