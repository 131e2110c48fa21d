"""The cache behind `cute.compile`: what is a hit, what is a miss, and what a hit returns. In this process."""

import dataclasses
import errno
import functools
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cutlass import cute
from cutlass.base_dsl.compiler import Compiler, EnableTVMFFI
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fusekit.compiler import dsl as compiler_dsl
from fusekit.compiler import toolchain
from fusekit.config import Config, CuteConfig
from fusekit.cute import blobs, cache, dsl, install
from fusekit.errors import NotBuiltError, UsageError
from fusekit.store import Store
from fusekit.store.publishing import Disk
from fusekit.store.signature import generate
from tests.cute import kernels
from tests.cute.rig import ORIGINAL, Rig

HIT, MISS = (1, 0), (0, 1)
PARTS = ("", "-libs-cu12", "-libs-cu13")


@pytest.fixture(scope="module", autouse=True)
def device():
    with compiler_dsl.target("sm_90a", 1024):
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with the kernel as it is."""
    root = tmp_path_factory.mktemp("filled") / "store"
    rig = Rig(root, root.parent / "report")
    assert rig.counted() == MISS
    assert rig.counted() == HIT
    return root


@pytest.fixture
def rig(tmp_path, filled):
    shutil.copytree(filled, tmp_path / "store")
    return Rig(tmp_path / "store", tmp_path / "report")


@pytest.fixture
def empty(tmp_path):
    return Rig(tmp_path / "store", tmp_path / "report")


# -- what changes what is compiled, and what does not


def edited(text, new):
    """The kernel of an edited copy of the module."""
    source = Path(kernels.__file__).read_text()
    assert text in source

    def change(monkeypatch, folder):
        (folder / "kernels.py").write_text(source.replace(text, new))
        spec = importlib.util.spec_from_file_location(kernels.__name__, folder / "kernels.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, kernels.__name__, module)
        spec.loader.exec_module(module)
        return module.compile_kernel

    return change


def setting(name, value):
    return lambda monkeypatch, folder: monkeypatch.setattr(kernels, name, value)


def variable(name, value):
    def change(monkeypatch, folder):
        kernels.cached.cache_clear()
        monkeypatch.setenv(name, value)

    return change


def file(monkeypatch, folder):
    (folder / "number").write_text("18")
    monkeypatch.setenv("CACHE_FILE", str(folder / "number"))


def options(text):
    return lambda monkeypatch, folder: functools.partial(kernels.compile_kernel, text)


def of_the_class(owner, name, value):
    return lambda monkeypatch, folder: monkeypatch.setattr(owner, name, value)


def made_as_it_runs(code):
    """What the kernel reads comes from code that is a string."""

    def change(monkeypatch, folder):
        space = {"kernels": kernels}
        exec(code, space)
        monkeypatch.setattr(kernels, "ADD", space["add"])

    return change


def replaced_compiler(number):
    """A package replaces a method of the DSL's compiler."""

    def change(monkeypatch, folder):
        original = Compiler.compile

        @functools.wraps(original)
        def compile(self, *args, **kwargs):
            assert number
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Compiler, "compile", compile)

    return change


def unpickled(monkeypatch, folder):
    kernel = pickle.loads(pickle.dumps(kernels.Kernel()))
    return lambda: cute.compile(kernel, kernels.fake())


def with_options(bias):
    def work():
        kernel = kernels.Kernel()
        kernel.options = kernels.Options(bias)
        return cute.compile(kernel, kernels.fake())

    return lambda monkeypatch, folder: work


def other_thread(monkeypatch, folder):
    def work():
        thread = threading.Thread(target=kernels.compile_kernel)
        thread.start()
        thread.join()

    return work


def other_thread_index(monkeypatch, folder):
    original = cute.arch.thread_idx
    monkeypatch.setattr(cute.arch, "thread_idx", lambda **named: (original(**named)[1],) * 3)


def default_of_the_dataclass(monkeypatch, folder):
    monkeypatch.setattr(kernels, "Options", dataclasses.make_dataclass("Options", [("bias", int, 2)]))


CHANGES = {
    "nothing": (lambda monkeypatch, folder: None, HIT),
    "a global": (setting("SCALE", 4), MISS),
    "a name computed at run time": (setting("WIDTH", 64), MISS),
    "a function in a table": (setting("TABLE", {"f": lambda x: x * 4}), MISS),
    "the same function, anew": (setting("TABLE", {"f": lambda x: x * 3}), HIT),
    "a closure": (setting("ADD", kernels.operation(20)), MISS),
    "the same closure, anew": (setting("ADD", kernels.operation(19)), HIT),
    "code of a string": (made_as_it_runs("def add(x): return x + 21"), MISS),
    "the same in code of a string": (made_as_it_runs("def add(x): return x + 19"), HIT),
    "an attribute of a class": (of_the_class(kernels.Config, "FACTOR", 6), MISS),
    "one of a base class": (of_the_class(kernels.Base, "K", 8), MISS),
    "a method's class": (of_the_class(kernels.Kernel, "K", 9), MISS),
    "a default of a dataclass": (default_of_the_dataclass, MISS),
    "a field": (with_options(3), MISS),
    "the same field": (with_options(1), HIT),
    "a variable read in the trace": (variable("CACHE_LATE", "14"), MISS),
    "a variable behind lru_cache": (variable("CACHE_CACHED", "12"), MISS),
    "a variable that nothing reads": (variable("CACHE_NOTHING", "1"), HIT),
    "a file": (file, MISS),
    "an edited line": (edited("return x + k", "return x - k"), MISS),
    "a comment, in another folder": (edited("return x + k", "return x + k  # the same"), HIT),
    "a line above": (edited("SCALE = 2", "\n\n\nSCALE = 2"), HIT),
    "an object that was pickled": (unpickled, HIT),
    "another thread": (other_thread, HIT),
    "a function of the DSL, in the trace": (other_thread_index, MISS),
    "one of its compiler": (replaced_compiler(1), MISS),
    "the level of optimisation": (options("--opt-level=1"), MISS),
    "an option of ptxas": (options("--ptxas-options=-v"), MISS),
    "line information": (options("--generate-line-info"), MISS),
    "a cubin that is kept": (options("--keep-cubin --dump-dir=/tmp"), MISS),
    "a variable of the DSL": (variable("CUTE_DSL_SOMETHING", "1"), MISS),
    "a folder of the DSL": (variable("CUTE_DSL_CACHE_DIR", "/nowhere"), HIT),
    "another CUDA toolkit": (variable("CUDA_HOME", "/nowhere"), MISS),
}


# What another one shows as well.
LONG = {
    "the same function, anew", "the same in code of a string", "one of a base class", "a method's class",
    "a variable that nothing reads", "an option of ptxas", "the same field", "an object that was pickled",
    "a line above", "a folder of the DSL",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_a_miss_or_a_right_hit(name, rig, monkeypatch, tmp_path, capsys, soak):
    if name in LONG and not soak:
        pytest.skip("only with --soak")
    change, expected = CHANGES[name]
    if name == "a cubin that is kept":
        change = options(f"--keep-cubin --dump-dir={tmp_path}")
    work = change(monkeypatch, tmp_path) or kernels.compile_kernel
    try:
        # A hit is compiled as well, and its host object compared.
        assert rig.counted(work, verify=1.0) == expected
    finally:
        kernels.cached.cache_clear()
    assert "is not what the DSL compiles" not in capsys.readouterr().err


def test_a_mock_in_the_compiler_has_no_name_for_a_key(rig, monkeypatch, capsys):
    original = Compiler.compile
    mock = MagicMock(side_effect=lambda *args, **kwargs: original(compiler, *args, **kwargs))
    compiler = CuTeDSL._get_dsl().compiler_provider
    monkeypatch.setattr(Compiler, "compile", mock)
    assert rig.counted(miss="warn") == MISS
    assert "replaced by a MagicMock, which no key can name" in capsys.readouterr().err
    assert len(list(rig.root.glob("entries/*/*.json"))) == 1


def test_two_functions_that_replace_the_same_are_two_keys(empty, monkeypatch):
    for number, expected in ((1, MISS), (2, MISS), (1, HIT)):
        with monkeypatch.context() as patch:
            replaced_compiler(number)(patch, None)
            assert empty.counted() == expected


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (cache, "_cpu", lambda: "another processor"),
        (cache.platform, "machine", lambda: "riscv64"),
        (cache.platform, "python_version_tuple", lambda: ("3", "99", "0")),
        (toolchain, "distributions", lambda: {f"nvidia-cutlass-dsl{part}": "4.8.1+local.0" for part in PARTS}),
    ],
    ids=["processor", "machine", "Python", "toolchain"],
)  # fmt: skip
def test_another_machine_is_another_key(rig, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    assert rig.counted() == MISS


def test_checks_of_launches_are_in_the_key(empty):
    """They are added after the passes, to functions for tvm-ffi."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    for selectors, expected in ((set(), MISS), ({"launch-check"}, MISS), (set(), HIT), ({"launch-check"}, HIT)):
        compiler = cute.compile[EnableTVMFFI]
        compiler._compile_options._debug_selectors = selectors
        work = functools.partial(compiler, kernels.Kernel(), kernels.fake())
        assert empty.counted(work, verify=1.0) == expected


def test_a_compiler_of_another_package_is_not_served(empty, monkeypatch, capsys):
    compiler = CuTeDSL._get_dsl().compiler_provider

    class Special(type(compiler)):
        pass

    monkeypatch.setattr(compiler, "__class__", Special)
    assert empty.counted(miss="warn") == MISS
    assert "it is compiled by tests.cute.test_cache, which is no part of the DSL" in capsys.readouterr().err


def test_an_unknown_version_of_the_dsl_compiles(rig, monkeypatch, capsys):
    monkeypatch.setattr(cutlass, "__version__", "5.0.0")
    assert rig.counted(miss="warn") == MISS
    assert "CuTe DSL 5.0.0 is not known to this fusekit" in capsys.readouterr().err


def test_a_stream_by_its_address_is_in_no_key(empty):
    assert empty.counted(lambda: kernels.compile_scale(0x7F001000)) == MISS
    assert empty.counted(lambda: kernels.compile_scale(0x7F002000)) == HIT


def test_the_specs_of_tvm_ffi_are_in_the_key(empty, monkeypatch):
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    converter = importlib.import_module("cutlass.cute._tvm_ffi_args_spec_converter")
    tvm_ffi = functools.partial(kernels.compile_kernel, "--enable-tvm-ffi")
    assert empty.counted(tvm_ffi) == MISS
    assert empty.counted() == MISS  # without
    assert empty.counted(tvm_ffi, verify=1.0) == HIT
    original = converter._convert_single_arg

    def changed(*args):
        param = original(*args)
        param.data_alignment = 64
        return param

    monkeypatch.setattr(converter, "_convert_single_arg", changed)
    assert empty.counted(tvm_ffi) == MISS


# -- what a hit returns


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """What stands in for the DSL's runtime library and the driver below it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    library = tmp_path_factory.mktemp("driver") / "driver.so"
    source = Path(__file__).with_name("driver.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_hit_is_called_as_what_the_dsl_returns(driver, tmp_path):
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    # In a process in which the DSL's own library was not loaded.
    command = [sys.executable, "-m", "tests.cute.calls", driver, tmp_path]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True)


def test_files_that_options_ask_for_are_there(empty, tmp_path):
    """As for the DSL's own kernel that finds out how many clusters are active."""
    counted, kept = [], []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        options = f"--keep-cubin --keep-ptx --dump-dir={folder}"
        counts, function = empty.run(functools.partial(kernels.compile_kernel, options))
        counted.append(counts)
        kept.append([{path.name: path.read_bytes() for path in folder.iterdir()}, function.__cubin__, function.__ptx__])
    assert counted == [MISS, HIT]
    assert kept[0] == kept[1]
    files, cubin, ptx = kept[0]
    assert sorted(files.values()) == sorted([cubin, ptx.encode()])
    assert empty.counted() == MISS  # without the files
    (tmp_path / "third").write_text("no folder")
    options = f"--keep-cubin --keep-ptx --dump-dir={tmp_path / 'third'}"
    assert empty.counted(functools.partial(kernels.compile_kernel, options)) == MISS  # and the DSL says nothing


def test_a_symbol_that_is_not_there_is_none(rig):
    _, function = rig.run()
    assert function.engine.raw_lookup("no_such_symbol") is None
    assert function.engine.raw_lookup(f"_mlir_{function.prefix}_cuda_init")


def test_a_function_for_tvm_ffi_is_one(empty):
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    work = functools.partial(kernels.compile_kernel, "--enable-tvm-ffi")
    (_, cold), (_, warm) = empty.run(work), empty.run(work)
    assert type(cold).__mro__ == type(warm).__mro__[1:]
    assert type(warm).__name__ == type(cold).__name__
    for function in (cold, warm):
        with pytest.raises(Exception, match=r"(?i)mismatched|missing|expects"):
            function()


# -- a store that fails


def truncated(path):
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[: len(data) // 2])


def emptied(path):
    path.chmod(0o644)
    path.write_bytes(b"")


def changed(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("part", "damage"),
    [("entry", truncated), ("entry", Path.unlink), ("blob", emptied), ("blob", changed), ("blob", Path.unlink)],
)
def test_damage_is_compiled_again_and_repaired(rig, part, damage):
    damage(getattr(rig, part)())
    assert rig.counted() == MISS
    assert rig.counted() == HIT


def test_an_entry_that_is_not_what_the_dsl_compiles_is_replaced(rig, capsys):
    store = Store(rig.root)
    entry, blob = store.load(rig.entry().stem)
    artifact = blobs.unpacked(blob, entry)
    wrong = dataclasses.replace(artifact, host=artifact.host + b"\0")
    rig.entry().unlink()
    store.publish(*blobs.packed(entry.key, dict(entry.fields), wrong, {}, 1.0))
    assert rig.counted() == HIT
    assert rig.counted(verify=1.0) == HIT
    assert "is not what the DSL compiles; it is replaced" in capsys.readouterr().err
    assert store.load(entry.key)[1] == blob
    assert rig.counted(verify=1.0) == HIT
    assert capsys.readouterr().err == ""


def full(root, monkeypatch):
    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
    monkeypatch.setattr(Disk, "write", MagicMock(side_effect=refused))


def a_file(root, monkeypatch):
    root.write_text("")


def below_a_file(root, monkeypatch):
    a_file(root.parent, monkeypatch)


def of_another(root, monkeypatch):
    root.mkdir()
    (root / "notes.txt").write_text("not a store")


def read_only(root, monkeypatch):
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))
    for change in ("make_directory", "write"):
        monkeypatch.setattr(Disk, change, MagicMock(side_effect=refused))


def failing(root, monkeypatch):
    monkeypatch.setattr(cache.Cache, "_fields", MagicMock(side_effect=ZeroDivisionError("of ours")))


@pytest.mark.parametrize("trouble", [full, a_file, below_a_file, of_another, read_only, failing])
def test_trouble_compiles_and_does_not_hide_a_miss(tmp_path, monkeypatch, trouble):
    rig = Rig(tmp_path / "folder" / "store", tmp_path / "report")
    if trouble is not below_a_file:
        rig.root.parent.mkdir()
    with monkeypatch.context() as patch:
        trouble(rig.root, patch)
        assert rig.counted() == MISS
        with pytest.raises(NotBuiltError, match="FUSEKIT_MISS is error"):
            rig.counted(miss="error")


def test_a_lock_that_is_never_released_delays_and_no_more(rig, monkeypatch):
    key = rig.entry().stem
    rig.entry().unlink()
    shutil.rmtree(rig.root / "used")
    monkeypatch.setattr(cache, "_PATIENCE", 0.2)
    with Store(rig.root).lock(key) as held:
        assert held
        assert rig.counted() == MISS
    assert rig.counted() == HIT


def test_an_entry_that_cannot_be_loaded_is_compiled(rig, monkeypatch, capsys):
    monkeypatch.setattr(dsl.Call, "load", MagicMock(side_effect=RuntimeError("no such symbol")))
    assert rig.counted(miss="warn") == MISS
    assert "RuntimeError: no such symbol" in capsys.readouterr().err


def test_an_error_of_the_dsl_is_the_programs(empty):
    def work():
        return cute.compile(kernels.Kernel(), kernels.fake(), options="--ptxas-options=--no-such-option")

    with pytest.raises(Exception) as bare:
        work()
    with pytest.raises(type(bare.value)) as cached:
        empty.run(work)
    assert str(cached.value) == str(bare.value)
    assert not list(empty.root.glob("entries/*/*"))


# -- misses on request, and trust


def test_a_miss_is_an_error_on_request(rig, monkeypatch, tmp_path):
    assert rig.counted(miss="error") == HIT
    monkeypatch.setattr(kernels, "SCALE", 5)
    with pytest.raises(NotBuiltError, match=r"__call__ would be compiled \(it is not in the store\)"):
        rig.run(miss="error")
    assert len(list(rig.root.glob("entries/*/*.json"))) == 1
    with pytest.raises(NotBuiltError, match="the DSL's setting keep_ir is on"), monkeypatch.context() as patch:
        patch.setattr(CuTeDSL._get_dsl().envar, "dump_dir", str(tmp_path))
        patch.setattr(CuTeDSL._get_dsl().envar, "keep_ir", True)
        rig.run(miss="error")


OTHER = 54321


def test_only_entries_of_trusted_users_are_loaded(rig, monkeypatch, capsys):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(rig.entry(), OTHER, OTHER)
    assert rig.counted(trusted_users=frozenset({OTHER})) == HIT
    lower = CuteConfig(Config(store=rig.root.parent / "own", read_only_roots=(rig.root,))).config
    assert rig.counted(miss="warn", config=lower) == MISS
    assert f"set FUSEKIT_TRUSTED_USERS={OTHER}" in capsys.readouterr().err
    assert rig.counted() == MISS  # and replaced
    assert rig.entry().stat().st_uid == 0
    assert rig.counted() == HIT


@pytest.mark.parametrize("mode", [0o464, 0o446])
def test_an_entry_that_others_may_write_is_not_loaded(rig, mode):
    rig.entry().chmod(mode)
    assert rig.counted() == MISS
    assert rig.counted() == HIT


def test_trusted_keys_decide_alone(rig, tmp_path):
    generate(tmp_path / "key")
    signing = Config(store=tmp_path / "signed", trusted_keys=(tmp_path / "key.pub",), signing_key=tmp_path / "key")
    reading = dataclasses.replace(signing, signing_key=None)
    assert rig.counted(config=signing) == MISS
    (entry,) = signing.store.glob("entries/*/*.json")
    entry.chmod(0o446)
    assert rig.counted(config=reading) == HIT
    assert rig.counted(config=dataclasses.replace(reading, store=rig.root)) == MISS  # it has no signature


@pytest.mark.parametrize(
    ("name", "value"),
    [("FUSEKIT_MISS", "fail"), ("FUSEKIT_VERIFY", "2"), ("FUSEKIT_VERIFY", "some"), ("FUSEKIT_TRUSTED_USERS", "bob")],
)
def test_a_variable_with_another_value_is_an_error(name, value):
    with pytest.raises(UsageError, match=f"{name}.*{value}"):
        CuteConfig.from_environment(environ={name: value, "FUSEKIT_STORE": "/nowhere"})


def test_a_store_with_host_objects_is_a_store(rig):
    from fusekit.runtime.wellformed import WELLFORMED

    store = Store(rig.root)
    report = store.verify(full=True, inspect=WELLFORMED)
    assert (report.bad, report.orphans, report.entries, report.strays) == ((), 0, 1, ())
    with store.lease():
        assert rig.counted() == HIT
        assert store.collect(max_bytes=0).removed == 0
    for part in ("entry", "blob"):
        os.utime(getattr(rig, part)(), (1, 1))
    for mark in rig.root.glob("used/*/*"):
        os.utime(mark, (1, 1))
    assert store.collect(max_bytes=0).removed == 1
    assert not list(rig.root.glob("blobs/sha256/*/*"))
    assert rig.counted() == MISS


# -- a line in a program


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """The DSL as it is; what a test patches is undone."""
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(CutlassBaseDSL, "compile_and_cache", ORIGINAL)


def test_a_line_in_a_program_does_it_once(bare, tmp_path):
    install()
    patched = CutlassBaseDSL.compile_and_cache
    install()
    assert patched is CutlassBaseDSL.compile_and_cache is not ORIGINAL
    kernels.compile_kernel()
    assert len(list(tmp_path.glob("store/entries/*/*.json"))) == 1


def test_settings_that_cannot_be_read_leave_the_dsl_as_it_is(bare, monkeypatch, capsys):
    monkeypatch.setenv("FUSEKIT_VERIFY", "7")
    install()
    assert CutlassBaseDSL.compile_and_cache is ORIGINAL
    assert "fusekit: the cache is off: UsageError: FUSEKIT_VERIFY = '7'" in capsys.readouterr().err
    monkeypatch.setenv("FUSEKIT_MISS", "error")
    with pytest.raises(UsageError, match="FUSEKIT_VERIFY = '7'"):
        install()
