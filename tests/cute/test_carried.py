"""`fusekit exec --with`: caches of other packages, in the store, by programs that compile as those packages do."""

import ctypes
import errno
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fusekit.config import Config, CuteConfig
from fusekit.cute import carried, packages, processor, runs
from fusekit.cute.carried import Carriage
from fusekit.cute.explain import explained
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select, sign_selection
from fusekit.store import Store, process
from fusekit.store.entries import CARRIED
from fusekit.store.signature import generate
from tests.cute import cached
from tests.cute.command import EXECUTE, ROOT

PYTHON = (sys.executable, "program.py")
COUNTS = re.compile(r"fusekit: 0 hits, 0 misses, 0\.0 s saved(.*)\n")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where folders of runs are; no variable of the packages is set."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    for package in packages.PACKAGES.values():
        for variable in package.variables:
            monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


def begin(root, *names, config=None, environ=None, **settings):
    """A run over the store in `root`."""
    return Carriage(CuteConfig(config or Config(store=root), **settings), names, PYTHON, environ or dict(os.environ))


def compile_with(carriage, package, *names):
    """Which of `names` are compiled in that run."""
    folder = Path(carriage.variables[cached.VARIABLES[package]])
    return [name for name in names if getattr(cached, package)(folder, name)]


def ran(root, package, *names, **settings):
    """(what a run compiled, what its report says, its troubles)."""
    carriage = begin(root, package, **settings)
    compiled, text = compile_with(carriage, package, *names), carriage.store()
    carriage.remove()
    return compiled, text, carriage.troubles


def units(root):
    """The units of all sets in the store."""
    keys = [listed.record.key for listed in Store(root).names()]
    return sorted(unit for key in keys for unit in Store(root).find_entry(key).launch[CARRIED]["units"])


@pytest.mark.parametrize(
    ("package", "each", "stored"),
    [
        ("triton", 1, ["first", "second"]),
        ("deepgemm", 1, ["cache/kernel.first.0123", "cache/kernel.second.0123"]),
        ("inductor", 3, ["fi/cfirst.main.so", "se/csecond.main.so", "triton/0/FIRST", "triton/0/SECOND"]),
    ],
)
def test_a_second_run_compiles_nothing(root, run, temporary, package, each, stored):
    program = (sys.executable, "-m", "tests.cute.cached", package, "first", "second")
    execute = (*EXECUTE[:-1], "--with", package, "--")
    for compiled in (True, False):
        done = run(*program, execute=execute)
        assert (done.out, done.code) == (f"{[compiled, compiled]}\n", 0), done.err
        new, old = (2 * each, 0) if compiled else (0, 2 * each)
        assert done.err == f"fusekit: 0 hits, 0 misses, 0.0 s saved; {package} {new} compiled, {old} carried\n"
    assert list(temporary.iterdir()) == []
    kept = units(root)
    assert set(kept) >= set(stored) and len([unit for unit in kept if not unit.endswith(".best_config")]) == 2 * each
    assert not [unit for unit in kept if "tmp" in unit or "lock" in unit]
    assert not Store(root).verify(full=True, inspect=WELLFORMED).bad


def test_sglang_gives_deepgemm_another_variable(root):
    variables = begin(root, "deepgemm").variables
    assert variables["SGLANG_DG_CACHE_DIR"] == variables["DG_JIT_CACHE_DIR"]


def test_a_folder_of_the_user_is_left_alone(root, run, tmp_path):
    command = (sys.executable, "-m", "tests.cute.cached", "triton", "k")
    own = str(tmp_path / "own")
    done = run(*command, execute=(*EXECUTE[:-1], "--with", "triton,inductor", "--"), TRITON_CACHE_DIR=own)
    assert (done.out, [path.name for path in Path(own).iterdir()]) == ("[True]\n", ["k"])
    assert "triton is not carried: TRITON_CACHE_DIR names a folder of yours" in done.err
    assert "env -u TRITON_CACHE_DIR fusekit exec --with triton -- CMD" in done.err
    assert COUNTS.search(done.err)[1] == "; inductor 0 compiled, 0 carried"
    assert not root.exists()


@pytest.mark.parametrize("names", ["tritan", "triton,nvrtc", "triton;inductor"])
def test_an_unknown_package_is_an_error_before_the_program_runs(run, names):
    done = run("echo", "ran", execute=(*EXECUTE[:-1], "--with", names, "--"))
    assert (done.code, done.out) == (2, "")
    assert "is not known; it takes one or more of these: --with triton,deepgemm,inductor" in done.err


def test_runs_that_overlap_store_nothing_twice(root):
    first, second = begin(root, "triton"), begin(root, "triton")
    assert compile_with(first, "triton", "a", "b") == ["a", "b"]
    assert compile_with(second, "triton", "b", "c") == ["b", "c"]
    assert first.store() == second.store() == "; triton 2 compiled, 0 carried"
    assert units(root) == ["a", "b", "c"]
    assert ran(root, "triton", "a", "b", "c") == ([], "; triton 0 compiled, 3 carried", [])


def test_runs_that_end_together_store_nothing_twice(root, monkeypatch):
    first, second = begin(root, "triton"), begin(root, "triton")
    for carriage in (first, second):
        compile_with(carriage, "triton", "a", "b")
    publish, others, waited = Store.publish, [], []

    def slowly(store, *arguments):
        if not others:
            others.append(threading.Thread(target=second.store))
            others[0].start()
            others[0].join(0.5)
            waited.append(others[0].is_alive())
        return publish(store, *arguments)

    monkeypatch.setattr(Store, "publish", slowly)
    first.store()
    others[0].join(60)
    assert (units(root), waited, first.troubles, second.troubles) == (["a", "b"], [True], [], [])


def test_sets_have_a_size(root, monkeypatch):
    monkeypatch.setattr(carried, "_SET_BYTES", 2500)
    names = [f"k{index}" for index in range(5)]
    ran(root, "triton", *names)
    assert len(Store(root).names()) == 5 and units(root) == names
    assert ran(root, "triton", *names)[0] == []


MACHINE = {
    "a GPU": ("gpus", lambda: processor.Gpus("sm_90", ("NVIDIA H200",))),
    "another model of it": ("gpus", lambda: processor.Gpus("cpu", ("NVIDIA H20",))),
    "another system": ("system", lambda: "Linux x86_64 glibc 2.17"),
    "another package": ("versions_of", lambda *_: {"python": "cp311", "triton": "9", "torch": "-"}),
    "another Python": ("versions_of", lambda *_: {"python": "cp312", "triton": "-", "torch": "-"}),
    "another processor": ("cpu", lambda: "flags: avx"),
}


@pytest.mark.parametrize(("what", "value"), MACHINE.values(), ids=MACHINE)
def test_another_machine_has_sets_of_its_own(root, monkeypatch, what, value):
    monkeypatch.setattr(carried, "versions_of", lambda *_: {"python": "cp311", "triton": "-", "torch": "-"})
    for package in ("triton", "inductor"):
        assert ran(root, package, "k")[0] == ["k"]
    monkeypatch.setattr(carried if what == "versions_of" else packages, what, value)
    # Triton compiles nothing for the processor.
    assert ran(root, "triton", "k")[0] == ([] if what == "cpu" else ["k"])
    assert ran(root, "inductor", "k")[0] == ["k"]


def test_why_a_set_is_laid_out(root, monkeypatch):
    ran(root, "inductor", "k")
    (listed,) = Store(root).names()
    found = explained(CuteConfig(Config(store=root)), listed.record)
    assert (found.status, found.differs) == ("hit", ()), found
    assert found.reason.endswith("by: fusekit exec --with inductor -- CMD")
    monkeypatch.setattr(packages, "gpus", lambda: processor.Gpus("cpu", ("NVIDIA H200",)))
    found = explained(CuteConfig(Config(store=root)), listed.record)
    assert (found.status, [(row.field, row.stored, row.now) for row in found.differs]) == (
        "miss", [("gpus", "", "NVIDIA H200")],
    )  # fmt: skip


def test_gpus_are_those_of_nvml(monkeypatch):
    class Nvml:
        def __init__(self, *kinds):
            self.kinds, self.open = kinds, 0

        # ruff: noqa: N802 - as NVML names them
        def nvmlInit_v2(self):
            self.open += 1
            return 0

        def nvmlShutdown(self):
            self.open -= 1

        def nvmlDeviceGetCount_v2(self, count):
            count._obj.value = len(self.kinds)
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index, device):
            device._obj.value = index + 1
            return 0

        def nvmlDeviceGetName(self, device, name, size):
            name.value = self.kinds[device.value - 1][0].encode()
            return 0

        def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
            major._obj.value, minor._obj.value = self.kinds[device.value - 1][1:]
            return 0

    h200, a100 = ("NVIDIA H200", 9, 0), ("NVIDIA A100", 8, 0)
    for kinds, expected in (
        ((), ("cpu", ())),
        ((h200, h200), ("sm_90", ("NVIDIA H200",))),
        ((h200, a100), ("mixed", ("NVIDIA A100", "NVIDIA H200"))),
    ):
        nvml = Nvml(*kinds)
        monkeypatch.setattr(ctypes, "CDLL", lambda name, nvml=nvml: nvml)
        assert (processor.gpus(), nvml.open) == (expected, 0)

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert processor.gpus() == ("cpu", ())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python3.11", "x.py"), "python3.11"),
        (("nice", "-n", "1", "python3.11", "x.py"), "python3.11"),
        (("serve", "model"), "python3.11"),
        (("env-serve",), "python3"),
        (("long-serve",), "python3.11"),
        (("nice", "x.sh"), "python3"),
    ],
)
def test_versions_are_of_the_python_that_the_program_starts(tmp_path, command, expected):
    folder = tmp_path / "bin"
    texts = {
        "python3.11": "", "python3": "", "nice": "", "serve": f"#!{folder}/python3.11\n", "x.sh": "#!/bin/sh\n",
        "env-serve": "#!/usr/bin/env python3\n", "long-serve": f"#!/bin/sh\n'''exec' \"{folder}/python3.11\" \"$0\"\n",
    }  # fmt: skip
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    assert packages._python(command, {"PATH": str(folder)}) == str(folder / expected)


def test_versions_are_those_that_the_program_sees(tmp_path):
    (tmp_path / "triton-9.8.dist-info").mkdir()
    (tmp_path / "triton-9.8.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.8\n")
    (tmp_path / "json.py").write_text("1 / 0")  # the folder of the call does not count
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "path")}
    (tmp_path / "path").symlink_to(tmp_path / "triton")
    (tmp_path / "triton").mkdir()
    shutil.move(tmp_path / "triton-9.8.dist-info", tmp_path / "triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        versions = packages.versions_of(PYTHON, environ, [packages.PACKAGES["triton"]])
    assert versions["triton"] == "9.8" and f"{sys.version_info[0]}{sys.version_info[1]}" in versions["python"]


def test_a_program_without_a_python_runs_as_it_is(root, run):
    done = run("/bin/echo", "ran", execute=(*EXECUTE[:-1], "--with", "triton", "--"), PATH="/nowhere")
    assert (done.code, done.out) == (0, "ran\n")
    assert "nothing is carried: no Python is found that /bin/echo could start; put it on PATH" in done.err
    assert not root.exists()


# -- units ------------------------------------------------------------------------------------------------------------


def test_what_was_not_finished_is_not_stored(root, tmp_path):
    carriage = begin(root, "triton", "deepgemm", "inductor")
    triton, deepgemm, inductor = (Path(carriage.variables[each]) for each in cached.VARIABLES.values())
    cached.write(triton / "KILLED" / "kernel.ttir", b"stage")
    cached.write(triton / "STUB" / "launcher.so", cached.ELF[:-1])
    cached.write(triton / "TUNED" / "k.autotune.json", b"{}")
    cached.write(deepgemm / "cache" / "kernel.old.1" / "kernel.cubin", cached.ELF + b"12345678")
    cached.write(inductor / "ab" / "cab.so", cached.ELF + b"1234567")  # a byte of its table of sections is missing
    cached.write(inductor / "ab" / "cab.cpp", b"int main")
    cached.write(inductor / "ab" / ".12.34.tmp", b"")
    cached.write(tmp_path / "elsewhere" / "secret.py", b"not of the cache")
    (inductor / "ab" / "link.py").symlink_to(tmp_path / "elsewhere" / "secret.py")
    assert carriage.store() == (
        "; triton 1 compiled, 0 carried; deepgemm 0 compiled, 0 carried; inductor 0 compiled, 0 carried"
    )
    assert units(root) == ["TUNED", "ab/cab.cpp"]
    carriage.remove()


def test_groups_name_the_folder_of_their_run(root):
    ran(root, "triton", "k")
    blob = b"".join(data for name in Store(root).names() for data in [Store(root).load(name.record.key)[1]])
    carriage = begin(root, "triton")
    folder = Path(carriage.variables["TRITON_CACHE_DIR"])
    paths = json.loads((folder / "k" / "__grp__kernel.json").read_text())["child_paths"]
    assert paths["kernel.cubin"] == str(folder / "k" / "kernel.cubin")
    assert str(folder.parent.parent).encode() not in carried.zlib.decompress(blob)


# -- a store, and what is wrong with it --------------------------------------------------------------------------------


def test_bundles_and_remotes_have_the_sets(root, tmp_path):
    for package in ("triton", "inductor"):
        ran(root, package, "k")
    store = Store(root)
    export_bundle(store, select(store, ("carried",)), tmp_path / "bundle")
    assert import_bundle(Store(tmp_path / "a"), tmp_path / "bundle", inspect=WELLFORMED).entries == 2
    push(store, select(store, ("carried/*",)), Remote(str(tmp_path / "remote")))
    assert pull(Store(tmp_path / "b"), Remote(str(tmp_path / "remote")), inspect=WELLFORMED).names == 2
    for other in ("a", "b"):
        assert ran(tmp_path / other, "triton", "k") == ([], "; triton 0 compiled, 1 carried", [])
        assert ran(tmp_path / other, "inductor", "k") == ([], "; inductor 0 compiled, 3 carried", [])
    # Their union, in a third.
    assert ran(tmp_path / "b", "triton", "k", "l")[0] == ["l"]
    push(Store(tmp_path / "b"), select(Store(tmp_path / "b")), Remote(str(tmp_path / "remote")))
    pull(Store(tmp_path / "a"), Remote(str(tmp_path / "remote")), inspect=WELLFORMED)
    assert ran(tmp_path / "a", "triton", "k", "l")[0] == []
    Store(root).discard(Store(root).recorded("carried/triton").keys())
    assert ran(root, "triton", "k")[0] == ["k"] and ran(root, "inductor", "k")[0] == []


def test_a_remote_gives_what_the_store_lacks(root, tmp_path):
    ran(root, "triton", "k")
    push(Store(root), select(Store(root)), Remote(str(tmp_path / "remote")))
    assert ran(tmp_path / "other", "triton", "k", remote=str(tmp_path / "remote")) == (
        [], "; triton 0 compiled, 1 carried", [],
    )  # fmt: skip
    assert ran(tmp_path / "other", "inductor", "k", remote=str(tmp_path / "remote"))[2] == []
    compiled, _, (trouble,) = ran(tmp_path / "third", "triton", "k", remote="nosuchprotocol://x")
    assert compiled == ["k"] and trouble.startswith("triton: the remote is not asked: ")


def test_sets_of_others_are_not_laid_out(root):
    ran(root, "triton", "k")
    (path,) = root.glob("entries/*/*.json")
    path.chmod(0o666)
    compiled, text, troubles = ran(root, "triton", "k")
    assert (compiled, text) == (["k"], "; triton 1 compiled, 0 carried")
    assert troubles[0].startswith("carried/triton@") and "is not used: " in troubles[0]


def test_trusted_keys_cover_the_sets(root, tmp_path):
    generate(tmp_path / "key")
    trusting = Config(store=root, trusted_keys=(tmp_path / "key.pub",))
    ran(root, "triton", "k")
    compiled, _, troubles = ran(root, "triton", "k", config=trusting)
    assert compiled == ["k"] and "is not used" in troubles[0] and "what triton compiled is not stored" in troubles[1]
    store = Store.open(Config(store=root, signing_key=tmp_path / "key"))
    sign_selection(store, select(store))
    assert ran(root, "triton", "k", config=trusting) == ([], "; triton 0 compiled, 1 carried", [])


def test_a_damaged_set_is_compiled_and_stored_again(root):
    ran(root, "triton", "a", "b")
    (blob,) = root.glob("blobs/sha256/*/*")
    blob.chmod(0o644)
    blob.write_bytes(bytes(reversed(blob.read_bytes())))
    compiled, _, troubles = ran(root, "triton", "a", "b")
    assert compiled == ["a", "b"] and len(troubles) == 1
    assert ran(root, "triton", "a", "b")[:2] == ([], "; triton 0 compiled, 2 carried")


@pytest.mark.parametrize("path", ["../out", "/out", "k/../../out", "", "k/\0"])
def test_a_set_writes_nowhere_else(root, temporary, tmp_path, path):
    carriage = begin(root, "triton")
    (load,) = carriage._loads
    entry, blob = carried._packed(load, {"k": {path: b"x"}})
    carriage._store.publish(entry, blob)
    name = load.pattern.replace("*", "0")
    carriage._store.publish_name(carried.NameRecord(name, entry.arch, entry.key, {}, {}), entry)
    carriage.remove()
    before = sorted(map(str, tmp_path.rglob("*")))
    carriage = begin(root, "triton")
    assert "which is no path in its folder" in carriage.troubles[0] and carriage._loads[0].units == set()
    carriage.remove()
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_a_name_that_points_to_a_set_of_another_machine_is_refused(root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packages, "system", lambda: "another")
        ran(root, "triton", "k")
    (listed,) = Store(root).names()
    carriage = begin(root, "triton")
    name = carriage._loads[0].pattern.replace("*", "0")
    entry = Store(root).find_entry(listed.record.key)
    Store(root).publish_name(carried.NameRecord(name, entry.arch, entry.key, {}, {}), entry)
    compiled, _, (trouble,) = ran(root, "triton", "k")
    assert compiled == ["k"] and "which is of another package or machine" in trouble
    assert ran(root, "triton", "k")[0] == []


def test_a_store_that_cannot_be_written_is_read(root, tmp_path):
    ran(root, "triton", "k")
    (tmp_path / "file").touch()
    config = Config(store=tmp_path / "file" / "store", read_only_roots=(root,))
    compiled, text, (trouble,) = ran(root, "triton", "k", "l", config=config)
    assert (compiled, text) == (["l"], "; triton 1 compiled, 1 carried")
    assert trouble.startswith("what triton compiled is not stored: ")


# -- a disk, and what is wrong with it ---------------------------------------------------------------------------------


def test_a_disk_that_is_full_leaves_the_program_its_own_folder(root, run, temporary):
    carriage = begin(root, "triton", "inductor")
    cached.triton(Path(carriage.variables["TRITON_CACHE_DIR"]), "large", 1 << 20)
    carriage.store()
    carriage.remove()
    limited = ("sh", "-c", 'ulimit -f 256; exec "$@"', "sh", *EXECUTE[:-1], "--with", "triton,inductor", "--")
    script = (
        "import os; names = os.listdir(os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/..');"
        "print('TRITON_CACHE_DIR' in os.environ, [name for name in names if name[0] != '.'])"
    )
    done = run(sys.executable, "-c", script, execute=limited)
    assert (done.out, done.code) == ("False ['inductor']\n", 0), done.err
    assert f"triton is not carried: {os.strerror(errno.EFBIG)}" in done.err
    assert COUNTS.search(done.err)[1] == "; inductor 0 compiled, 0 carried"
    assert list(temporary.iterdir()) == []


def test_a_set_that_does_not_fit_is_not_stored(root, run):
    # What is compiled fits, and all of it together does not.
    names = [f"k{index}" for index in range(9)]
    program = (
        f"import sys; from pathlib import Path; from tests.cute import cached; import os\nfor name in {names}:\n    "
    )
    program += "cached.triton(Path(os.environ['TRITON_CACHE_DIR']), name, 30_000)"
    limited = ("sh", "-c", 'ulimit -f 128; exec "$@"', "sh", *EXECUTE[:-1], "--with", "triton", "--")
    done = run(sys.executable, "-c", program, execute=limited)
    assert done.code == 0 and "; triton 9 compiled, 0 carried\n" in done.err
    assert (
        "fusekit: what triton compiled is not stored: " in done.err
        and os.strerror(errno.EFBIG).lower() in done.err.lower()
    )
    assert Store(root).names() == []


def test_a_folder_that_runs_no_code_is_not_used(root, temporary, monkeypatch):
    class Mounted:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: Mounted)
    carriage = begin(root, "triton")
    assert (carriage.variables, carriage.store()) == ({}, "")
    assert carriage.troubles == [
        f"nothing is carried: {temporary} allows no code to be run from it; name another folder: TMPDIR"
    ]


def test_a_missing_folder_for_runs_is_no_error(root, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
        carriage = begin(root, "triton")
    assert carriage.variables == {} and carriage.troubles[0].startswith("nothing is carried: ")


# -- processes ---------------------------------------------------------------------------------------------------------


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
    assert list(temporary.iterdir()) == [] or not dangling.is_symlink()
    assert outside.is_symlink()


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


@pytest.mark.parametrize(("dsl", "miss", "line"), [(True, "", False), (True, "warn", True), (False, "warn", False)])
def test_a_python_without_fusekit_is_no_mistake(run, tmp_path, dsl, miss, line):
    for name in ("fusekit", "cutlass")[: 1 + dsl]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    script = tmp_path / "program.py"
    script.write_text("import sys\nsys.path[1:] = [p for p in sys.path[1:] if 'site-packages' not in p]\n"
                      "try: import cutlass\nexcept ImportError: pass")  # fmt: skip
    done = run(sys.executable, str(script), execute=(*EXECUTE[:-1], "--with", "triton", "--"), FUSEKIT_MISS=miss)
    assert (done.code, done.out) == (0, "")
    assert ("the cache is off" in done.err) is line, done.err
