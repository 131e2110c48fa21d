"""Compile processes that are kept: used again, given up when they may be out of date, and gone with their owner."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fusekit.compiler import kept
from fusekit.compiler.worker import Job
from fusekit.errors import BuildError

HERE = Path(__file__).parent


@pytest.fixture
def misbehaving(tilecopy):
    import misbehaving

    return misbehaving


@pytest.fixture(autouse=True)
def none_before_and_after():
    kept.end(at_once=True)
    yield
    kept.end(at_once=True)


def process(misbehaving):
    """Which compile process a kernel gets."""
    with kept.one() as ((compiler,), _), pytest.raises(BuildError) as caught:
        compiler.compile(Job("a", misbehaving.tells_its_process, None))
    return int(re.search(r"process (\d+)", str(caught.value))[1])


def server():
    (processes,) = kept._all()
    return processes._server._process.pid


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid):
    """Also as what nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_serves_until_what_it_imported_may_be_old(misbehaving, monkeypatch):
    assert not kept._all()
    first = process(misbehaving)
    assert process(misbehaving) == first
    before = server()
    monkeypatch.syspath_prepend(HERE / "other")
    second = process(misbehaving)
    assert second != first and server() != before and not alive(before)
    with kept.own(1) as used:
        kept.end()
        assert alive(server()) and process(misbehaving) != second
        assert used in kept._all() and len(kept._all()) == 2
    assert used not in kept._all()


def test_they_end_when_nothing_was_compiled_for_some_time(misbehaving, monkeypatch):
    process(misbehaving)
    before, folder = server(), Path(kept._all()[0]._folder.name)
    monkeypatch.setattr(kept, "IDLE_SECONDS", 0.1)
    process(misbehaving)
    until(lambda: not alive(before) and not folder.exists())
    assert not kept._all()


def test_only_a_process_that_works_is_stopped(misbehaving, tmp_path):
    first = process(misbehaving)
    with kept.one() as (_, stop):
        stop()
    assert process(misbehaving) == first
    with kept.one() as ((compiler,), stop):
        errors = []

        def hangs():
            try:
                compiler.compile(Job("a", misbehaving.hangs, tmp_path))
            except BuildError as error:
                errors.append(error)

        thread = threading.Thread(target=hangs)
        thread.start()
        until((tmp_path / "hanging").exists)
        stop()
        thread.join(20)
    assert "a: the build was stopped" in str(errors)
    assert process(misbehaving) != first


OWNER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
import misbehaving
from fusekit.compiler import kept
from fusekit.compiler.worker import Job

def use():
    with kept.one() as ((compiler,), _):
        try:
            compiler.compile(Job("a", misbehaving.defective, None))
        except Exception as error:
            assert "IndexError" in str(error), error

use()
(own,) = kept._all()
pid, folder = own._server._process.pid, own._folder.name
way = sys.argv[1]
if way == "exits":
    print(pid, folder, 0, flush=True)
    sys.exit()
child = os.fork()
if child == 0:
    if way == "a fork exits":
        sys.exit()
    if way == "a fork compiles":
        assert not kept._all()
        use()
        assert kept._all()[0]._server._process.pid != pid
        sys.exit()
    time.sleep(100)
if way == "is killed":
    print(pid, folder, child, flush=True)
    time.sleep(100)
assert os.waitpid(child, 0)[1] == 0
assert os.path.isdir(folder)
use()
assert kept._all() == [own] and own._server._process.pid == pid
print(pid, folder, 0, flush=True)
"""


@pytest.mark.parametrize("way", ["exits", "is killed", "a fork exits", "a fork compiles"])
def test_they_belong_to_their_owner(tilecopy, way):
    """They end with it, though a fork lives on; and a fork has none of them, takes none away, and may have its own."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, way, HERE], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        pid, folder, child = owner.stdout.readline().split()
        pid, child = int(pid), int(child)
        assert not child or (alive(pid) and alive(child))
        if child:
            owner.kill()
        owner.wait(30)
        until(lambda: not alive(pid))
        assert not child or alive(child)
        assert child or (owner.returncode == 0 and not Path(folder).exists())
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        if child:
            os.kill(child, 9)
