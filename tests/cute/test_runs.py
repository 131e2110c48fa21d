"""The folder of a run of `fusekit exec --with`: processes that end late, killed runs, paths in what was compiled."""

import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusekit.cute import carried, runs
from fusekit.store import process
from tests.cute.carriage import COUNTS, begin, compile_with, ran, units
from tests.cute.command import EXECUTE, ROOT

pytestmark = pytest.mark.usefixtures("temporary")


def test_processes_that_are_left_keep_their_folder(root, temporary, tmp_path):
    """SIGTERM ends `exec` when the program itself has ended."""
    script = (
        "while kill -0 $$; do sleep 0.02; done; echo $TRITON_CACHE_DIR; while [ ! -e stop ]; do sleep 0.05; done; ls $0"
    )
    env = os.environ | {"FUSEKIT_STORE": str(root), "PYTHONPATH": str(ROOT)}
    command = (*EXECUTE[:-1], "--with", "triton", "--", "sh", "-c", f"({script}) 2>&- &", str(temporary))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        folder = Path(process.stdout.readline().strip())
        process.terminate()
        process.wait(60)
        assert process.returncode == 0 and folder.is_dir()
        (tmp_path / "stop").touch()
        assert process.stdout.read() == f"{folder.parent.name}\n"


# -- what ends late, and what is left ----------------------------------------------------------------------------------

DAEMON = """
import os, sys, time
from pathlib import Path
from tests.cute import cached
folder = Path(os.environ["TRITON_CACHE_DIR"])
(folder / "late").mkdir()
if os.fork() or os.setsid() and os.fork():
    os._exit(0)
for descriptor in range(3):
    os.dup2(os.open("/dev/null", os.O_RDWR), descriptor)
for index in range(50):
    (folder / "late" / f"{index}.tmp").write_text("")
    time.sleep(0.02)
cached.triton(folder, "whole")
"""
ORPHANING = (
    sys.executable, "-c", "import sys; from fusekit_cli import exec as command; command._PR_SET_CHILD_SUBREAPER = 0;"
    "from fusekit_cli.main import main; sys.exit(main(['exec', '--with', 'triton', '--', *sys.argv[1:]]))",
)  # fmt: skip
"""`exec` where the system does not tell it of processes whose parent has ended."""


@pytest.mark.parametrize("execute", [(*EXECUTE[:-1], "--with", "triton", "--"), ORPHANING], ids=["told", "not told"])
def test_what_ends_after_the_program_is_waited_for(root, run, temporary, execute):
    done = run(sys.executable, "-c", DAEMON, execute=execute)
    assert (done.code, COUNTS.search(done.err)[1]) == (0, "; triton 1 compiled, 0 carried"), done.err
    assert units(root) == ["whole"]
    assert list(temporary.iterdir()) == []


def test_what_is_written_while_the_folder_is_removed_goes_as_well(root, temporary, monkeypatch):
    carriage = begin(root, "triton")
    folder, rmdir, late = Path(carriage.variables["TRITON_CACHE_DIR"]), os.rmdir, [*range(5)]

    def beaten(path, **options):
        if late and folder.exists():
            (folder / str(late.pop())).touch()
        return rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", beaten)
    carriage.remove()
    assert (late, list(temporary.iterdir()), carriage.troubles) == ([], [], [])


def test_a_process_that_stays_keeps_its_folder(root, temporary, monkeypatch):
    monkeypatch.setattr(runs, "_PATIENCE", 0.1)
    carriage = begin(root, "triton")
    with subprocess.Popen(("sleep", "100"), env=os.environ | carriage.variables) as process:
        while not Path(f"/proc/{process.pid}/environ").read_bytes():  # it is there a moment after the process
            time.sleep(0.01)
        carriage.store()
        carriage.remove()
        (trouble,) = carriage.troubles
        assert f"stays, as process {process.pid} uses it; a later run with --with removes it" in trouble
        process.kill()
    assert len(list(temporary.iterdir())) == 1
    os.close(carriage._run.lock)  # as the end of `exec` does
    assert ran(root, "triton", "k")[2] == []
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_removed_when_its_program_has_ended(root, temporary, tmp_path):
    script = "echo $TRITON_CACHE_DIR; while [ ! -e stop ]; do sleep 0.05; done; ls $TRITON_CACHE_DIR/.. > out; exit 0"
    env = os.environ | {"FUSEKIT_STORE": str(root), "PYTHONPATH": str(ROOT)}
    command = (*EXECUTE[:-1], "--with", "triton", "--", "sh", "-c", script)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        left = Path(process.stdout.readline().strip()).parent
        process.kill()
        process.wait(60)
        ran(root, "triton", "k")
        assert list(temporary.glob("fusekit-with-*")) == [left]
        (tmp_path / "stop").touch()
        process.stdout.read()  # ends with the program
    assert (tmp_path / "out").read_text() == "triton\n"
    for _ in range(100):  # a shell may close its output before it has ended
        ran(root, "triton", "k")
        if not left.exists():
            break
        time.sleep(0.05)
    assert list(temporary.glob("fusekit-with-*")) == []


def graphs(carriage, *names):
    """Whether what was laid out for `names` found what was tuned for it in the folder of this run."""
    compile_with(carriage, "inductor", *names)
    folder = Path(carriage.variables["TORCHINDUCTOR_CACHE_DIR"])
    return [(folder / name[:2] / f"{name}.best_config").is_file() for name in names]


def test_what_names_the_folder_of_another_run_leads_to_this_one(root, temporary):
    ran(root, "inductor", "first")
    ran(root, "inductor", "second")  # in another set, of another folder
    carriage = begin(root, "inductor")
    assert carriage.troubles == []
    assert graphs(carriage, "first", "second") == [True, True]
    carriage.store()
    carriage.remove()
    assert (carriage.troubles, list(temporary.iterdir())) == ([], [])
    assert [unit for unit in units(root) if unit.endswith(".best_config")] == [
        "fi/first.best_config", "se/second.best_config",
    ]  # fmt: skip


def test_the_folder_is_made_where_it_was_on_another_machine(root, temporary, tmp_path, monkeypatch):
    job = tmp_path / "job" / "7"
    job.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(job))
    ran(root, "inductor", "first")
    shutil.rmtree(tmp_path / "job")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    carriage = begin(root, "inductor")
    assert graphs(carriage, "first") == [True]
    carriage.remove()
    assert not (tmp_path / "job").exists() and list(temporary.iterdir()) == []


def test_a_folder_that_cannot_be_made_means_another_compilation(root, tmp_path, monkeypatch, temporary):
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(job))
    ran(root, "inductor", "first")
    shutil.rmtree(job)
    job.write_text("a file is there")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    compiled, _, (trouble,) = ran(root, "inductor", "first")
    assert compiled == ["first"] and "is not used" in trouble
    assert job.read_text() == "a file is there"


def test_of_runs_at_the_same_time_one_has_the_folder_of_before(root, temporary):
    ran(root, "inductor", "first")
    one, two = begin(root, "inductor"), begin(root, "inductor")
    for carriage, own in ((two, False), (one, True)):
        assert graphs(carriage, "first") == [own]
        carriage.store()
        carriage.remove()
        assert not carriage.troubles
    assert list(temporary.iterdir()) == []


def test_the_link_of_a_killed_run_is_removed(root, temporary, tmp_path):
    dangling, outside = temporary / "fusekit-with-old", temporary / "fusekit-with-other"
    dangling.symlink_to(temporary / "fusekit-with-gone")
    outside.symlink_to(tmp_path / "nothing")
    ran(root, "triton", "k")
    assert list(temporary.iterdir()) == [outside]


def test_nothing_else_is_removed(root, temporary, tmp_path, monkeypatch):
    def abandoned(name, mode=0o700, host=None):
        folder = temporary / name
        folder.mkdir()
        (folder / "file").touch()
        if host is not None:
            (folder / ".fusekit-run").write_text(host)
        folder.chmod(mode)
        return folder

    here = process.host()
    kept = [
        abandoned("fusekit-with-unmarked"), abandoned("fusekit-with-others", 0o777, here),
        abandoned("fusekit-with-elsewhere", host="0123456789ab"), abandoned("fusekit-with-nowhere", host="0" * 12),
        abandoned("other", host=here),
    ]  # fmt: skip
    outside = tmp_path / "outside"
    shutil.copytree(abandoned("template", host=here), outside)
    (temporary / "fusekit-with-link").symlink_to(outside)
    marked = abandoned("fusekit-with-marker")
    (marked / ".fusekit-run").symlink_to(outside / ".fusekit-run")
    busy = abandoned("fusekit-with-busy", host=here)
    gone = abandoned("fusekit-with-gone", host=here)
    (gone / "link").symlink_to(outside)
    (gone / "protected").mkdir()
    (gone / "protected" / "file").touch()
    (gone / "protected").chmod(0o500)
    before = sorted(temporary.iterdir())
    with (busy / "file").open("r+b") as file:
        file.write(b"code")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            monkeypatch.setattr(os, "getpid", lambda: 0)  # of another process
            ran(root, "triton", "k")
            monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert sorted(temporary.iterdir()) == [path for path in before if path != gone]
    assert sorted(path.name for path in outside.iterdir()) == [".fusekit-run", "file"]
    ran(root, "triton", "k")
    assert not busy.exists() and all(path.exists() for path in (*kept, marked))


def test_ctrl_c_while_a_set_is_laid_out_leaves_nothing(root, temporary, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(carried.Carriage, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(root, "triton")
    assert list(temporary.iterdir()) == []
