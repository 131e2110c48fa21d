"""Scratch folders go with the process that made them, or with a later one; nothing else goes with them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fusekit.compiler.scratch import ABANDONED_SECONDS, Scratch, remove_abandoned
from tests.soak import sample

OLD = time.time() - ABANDONED_SECONDS - 60


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def names(folder):
    return [path.name for path in folder.iterdir()]


def created(path, age=OLD):
    (path / "worker-0").mkdir(parents=True)
    (path / "worker-0" / "file").write_text("x")
    os.utime(path, (age, age))
    return path


def test_a_scratch_folder_goes(temporary):
    with Scratch("build") as folder:
        assert names(temporary) == [Path(folder).name]
    assert not names(temporary)


def test_what_a_killed_process_left_goes_with_the_next(temporary):
    created(temporary / "fusekit-build-abcd1234")
    created(temporary / "fusekit-executor-abcd_234")
    with Scratch("build") as folder:
        assert names(temporary) == [Path(folder).name]


def test_what_is_in_use_young_or_not_ours_stays(temporary, tmp_path):
    created(temporary / "fusekit-build-young000", time.time())
    others = ("fusekit-build-x", "fusekit-builds", "fusekit-build-ABCD1234", "fusekit-other-abcd1234", "build-abcd1234")
    for name in others:
        created(temporary / name)
    (temporary / "fusekit-build-aplainfi").write_text("")
    os.utime(temporary / "fusekit-build-aplainfi", (OLD, OLD))
    with Scratch("build") as used:
        os.utime(used, (OLD, OLD))
        remove_abandoned(temporary)
        assert Path(used).is_dir()
        assert len(names(temporary)) == len(others) + 3


def test_links_are_not_followed(temporary, tmp_path):
    treasure = created(tmp_path / "treasure")
    (temporary / "fusekit-build-linked00").symlink_to(treasure)
    abandoned = created(temporary / "fusekit-build-abcd1234")
    (abandoned / "worker-0" / "link").symlink_to(treasure)
    (abandoned / "worker-1").symlink_to(treasure)
    os.utime(abandoned, (OLD, OLD))
    remove_abandoned(temporary)
    assert names(temporary) == ["fusekit-build-linked00"]
    assert (treasure / "worker-0" / "file").read_text() == "x"


def test_folders_of_others_stay(temporary, monkeypatch):
    created(temporary / "fusekit-build-abcd1234")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    remove_abandoned(temporary)
    assert names(temporary) == ["fusekit-build-abcd1234"]


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], most=1))
def test_a_build_that_is_stopped_leaves_nothing(temporary, tmp_path, number):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fusekit_cli.main import main; sys.exit(main(['build', 'gpt-oss-20b', '--jobs', '1']))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(temporary)}
    environment |= {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
    environment["FUSEKIT_STORE"] = str(tmp_path / "store")
    build = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert "1/" in build.stderr.readline()  # the first kernel is there, the next one is being compiled
    assert list(temporary.glob("fusekit-build-*"))
    build.send_signal(number)
    _, message = build.communicate(timeout=60)
    assert build.returncode == 128 + number
    assert f"interrupted ({number.name})" in message
    assert not list(temporary.glob("fusekit-*"))
    assert not list(temporary.glob("tmp*"))
