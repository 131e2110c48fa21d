"""The cache behind `cute.compile`, in this process: what a hit returns, stores that fail, misses on request, trust."""

import dataclasses
import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from cutlass import cute
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fusekit.config import Config, CuteConfig
from fusekit.cute import blobs, cache, dsl, install
from fusekit.cute.report import troubles
from fusekit.errors import NotBuiltError, UsageError
from fusekit.store import Store
from fusekit.store.publishing import Disk
from fusekit.store.signature import generate
from tests.cute import kernels
from tests.cute.rig import HIT, MISS, ORIGINAL, Rig

pytestmark = pytest.mark.usefixtures("device")


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
        assert all(why.startswith("1 could not be ") for why in troubles(rig.report))
        assert troubles(rig.report)
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
