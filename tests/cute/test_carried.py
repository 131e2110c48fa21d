"""`fusekit exec --with`: caches of other packages, in the store, by programs that compile as those packages do."""

import ctypes
import errno
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from fusekit.config import Config, CuteConfig
from fusekit.cute import carried, packages, processor
from fusekit.cute.explain import explained
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select, sign_selection
from fusekit.store import Store
from fusekit.store.signature import generate
from tests.cute import cached
from tests.cute.carriage import COUNTS, PYTHON, begin, compile_with, ran, units
from tests.cute.command import EXECUTE

pytestmark = pytest.mark.usefixtures("temporary")


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
