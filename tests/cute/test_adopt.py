"""`fusekit adopt`: entries of `fusekit exec` as kernels that are launched without the DSL."""

import dataclasses
import json
import re
import struct
import sys

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cutlass import cute

import fusekit
from examples.cute import fusion, gemm, rows, total
from fusekit.abi import LaunchRecord
from fusekit.compiler import dsl as compiler_dsl
from fusekit.compiler.build import build
from fusekit.config import Config
from fusekit.cute.adopt import adopt, adopt_all, name_of
from fusekit.errors import BuildError, UsageError
from fusekit.library import Library
from fusekit.runtime.driver import Driver
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.store import NameRecord, Store, key_of
from fusekit_cli.main import main
from tests.cute import kernels
from tests.cute.command import EXECUTE
from tests.cute.rig import Rig
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike
from tests.soak import sample


def compile_twice():
    return cute.compile(kernels.twice, *(kernels.fake(64, cutlass.Float32) for _ in range(2)))


def compile_for_tvm_ffi():
    tensors = (kernels.fake(cute.sym_int(), cutlass.Float32) for _ in range(2))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = cutlass.Float32(1.0), cutlass.Int64(1), 128
    return cute.compile(kernels.scale, *tensors, *numbers, stream, options="--enable-tvm-ffi")


@dataclasses.dataclass
class Wide:
    number: cutlass.Float64


@cute.jit
def wide(x: cute.Tensor, it: Wide):
    kernels.scaled(x, x, cutlass.Float32(it.number), cutlass.Int64(1)).launch(grid=(1, 1, 1), block=(32, 1, 1))


def compile_wide():
    return cute.compile(wide, kernels.fake(64, cutlass.Float32), Wide(cutlass.Float64(1.0)))


class Compiled:
    """A store with entries of four calls."""

    def __init__(self, folder):
        rig = Rig(folder / "store", folder / "report")
        with compiler_dsl.target("sm_90a", 1024):
            for work in (kernels.compile_scale, compile_twice, compile_for_tvm_ffi, compile_wide):
                assert rig.counted(work) == (0, 1)
        self.store = Store(rig.root)
        self.names = {each.record.name: each.record for each in self.store.names()}

    def entry(self, function, tvm_ffi=False):
        """The name record of a call's entry."""
        (found,) = (
            record
            for name, record in self.names.items()
            if name.startswith(f"tests/{function}@")
            and self.store.find_entry(record.key).launch["host-object"]["tvm_ffi"] == tvm_ffi
        )
        return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("source", sample([fusion, gemm, rows, total], most=1))
def test_an_entry_becomes_the_kernel_that_a_build_of_the_captured_call_gives(source, tmp_path):
    function, fakes = source.arguments(2) if source is rows else source.arguments()
    rig = Rig(tmp_path / "store", tmp_path / "report")
    with compiler_dsl.target("sm_90a", 1024), fusekit.capture() as found:
        assert rig.counted(lambda: cute.compile(function, *fakes)) == (0, 1)
    store = Store(rig.root)
    ((entry, _),) = store.recorded()
    report = build([found.write(tmp_path / "found.toml")], config=Config(store=store.root), allow_extern=True)
    assert report.ok, report.failed
    wanted = store.find_entry(report.built[0].key)
    adopted = adopt(store, store.find_name(entry, "sm_90a"), "mine/kernel@base").entry
    assert (adopted.launch, adopted.cubin_sha256) == (wanted.launch, wanted.cubin_sha256)
    assert (adopted.resources, adopted.proof["digest"]) == (wanted.resources, wanted.proof["digest"])


def test_an_entry_for_tvm_ffi_becomes_the_same_kernel(compiled):
    plain, ffi = (adopt(compiled.store, compiled.entry("scale", kind), "any/scale@base") for kind in (False, True))
    assert ffi.is_new
    assert ffi.key != plain.key
    assert (ffi.entry.launch, ffi.entry.cubin_sha256) == (plain.entry.launch, plain.entry.cubin_sha256)
    assert not adopt(compiled.store, compiled.entry("scale"), "other/scale@base").is_new
    assert not compiled.store.verify(inspect=WELLFORMED).bad


def test_it_is_launched_by_its_name(compiled):
    roles = {"x": "input", "y": "output"}
    adopted = adopt(compiled.store, compiled.entry("scale"), "launched/scale@base", roles)
    (launch,) = LaunchRecord.from_json(dict(adopted.entry.launch)).launches
    fake = FakeDriver([(each.offset, each.size) for each in launch.parameters], symbol=launch.symbol)
    kernel = Library(compiled.store, Driver(fake)).load("launched/scale", "sm_90a")
    x, y = (Torchlike((300,), "torch.float32", address) for address in (0x1000_0000, 0x2000_0000))
    kernel(x=x, y=y, a=0.5, n=7, stream=5)
    (done,) = fake.launches
    assert (done.grid, done.block, done.stream) == ((3, 1, 1), (128, 1, 1), 5)
    assert struct.unpack_from("<Qi", done.parameters[0]) == (x.address, 300)
    assert struct.unpack("<f", done.parameters[2]) == (0.5,)
    assert {each.name: each.role for each in kernel.record.tensors} == roles
    shown = compiled.store.find_name("launched/scale@base", "sm_90a").spec
    assert shown["source"] == "tests.cute.kernels:scale"


def test_names(compiled):
    of = "tests/scale@0123456789abcdef"
    assert name_of(of) == "adopted/tests.scale@0123456789abcdef"
    assert name_of(of, "mine/scale") == "mine/scale@base"
    assert name_of(of, "mine/scale", alone=False) == "mine/scale@0123456789abcdef"
    with pytest.raises(UsageError, match="several entries"):
        name_of(of, "mine/scale@base", alone=False)
    with pytest.raises(UsageError, match="--as scale: a name is FILE/KERNEL, such as --as mine/scale"):
        name_of(of, "scale")


@pytest.mark.parametrize(
    ("roles", "says"),
    [({"x": "result"}, "a role is one of input, output, inout"), ({"n": "input"}, "has the tensors x, y")],
)
def test_a_role_that_is_none_is_refused(compiled, roles, says):
    with pytest.raises(UsageError, match=says):
        adopt(compiled.store, compiled.entry("scale"), "a/b@base", roles)


def test_what_cannot_be_adopted_is_named_and_the_others_are(compiled):
    chosen = [compiled.entry("wide"), compiled.entry("twice")]
    done, failed = adopt_all(compiled.store, chosen)
    assert [each.of for each in done] == [chosen[1].name]
    assert "it_number is cutlass.base_dsl.typing.Float64" in str(failed[chosen[0].name])


def test_an_entry_of_another_toolchain_or_without_arguments_is_refused(compiled, tmp_path):
    entry, blob = compiled.store.load(compiled.entry("twice").key)
    store = Store(tmp_path / "store")

    def stored(fields, launch):
        changed = dataclasses.replace(entry, key=key_of(fields), fields=fields, launch=launch)
        store.publish(changed, blob)
        record = NameRecord("tests/twice@0", entry.arch, changed.key, compiled.entry("twice").spec, {})
        store.publish_name(record)
        return record

    other = stored({**entry.fields, "toolchain.nvidia-cutlass-dsl": "4.8.0"}, entry.launch)
    with pytest.raises(BuildError, match=r"nvidia-cutlass-dsl 4\.8\.0.* is installed here; adopt it with what"):
        adopt(store, other, "a/b@base")
    facts = {name: value for name, value in entry.launch["host-object"].items() if name != "arguments"}
    with pytest.raises(BuildError, match="older fusekit"):
        adopt(store, stored({**entry.fields, "x": "1"}, {"host-object": facts}), "a/b@base")
    kernel = adopt(compiled.store, compiled.entry("twice"), "a/b@base")
    with pytest.raises(UsageError, match="nothing that fusekit exec compiled"):
        adopt(compiled.store, compiled.store.find_name(kernel.name, kernel.arch), "a/c@base")


def test_a_record_that_is_not_the_machine_codes_is_refused(compiled, monkeypatch):
    """The proof runs the IR's own host code."""
    from fusekit.cute import adopt as module

    def doubled(*args):
        plan, record = read(*args)
        return plan, dataclasses.replace(record, grid=(("mul", 2, record.grid[0]), *record.grid[1:]))

    read = module.hostcode.read
    monkeypatch.setattr(module.hostcode, "read", doubled)
    with pytest.raises(BuildError, match="grid"):
        adopt(compiled.store, compiled.entry("scale"), "a/b@base", {"x": "inout", "y": "input"})


def test_the_commands(run, tmp_path, capsys):
    """`exec --records` adopts what the program used; `adopt` does it afterwards, under a name of one's own."""
    program = (sys.executable, "-m", "tests.cute.program", "work")
    first = run(*program, execute=(*EXECUTE[:-1], "--records", "--"))
    assert first.code == 0
    assert first.counts == (0, 1)
    assert re.fullmatch(r"fusekit: adopted as adopted/tests\.Kernel@[0-9a-f]{16}\n", first.err)
    store = ("--store", str(tmp_path / "store"))
    assert main(["adopt", "tests/*", "--as", "mine/kernel", "--role", "x=output", "--json", *store]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["adopted"]
    assert (kernel["name"], kernel["proved"]) == ("mine/kernel@base", True)
    assert main(["export", "--lang", "c", str(tmp_path / "c"), "mine/kernel", *store]) == 0
    assert "fusekit_mine_kernel_launch" in (tmp_path / "c" / "fusekit.h").read_text()
    assert main(["adopt", "mine/*", *store]) == 2
    assert main(["adopt", "tests/*", "--role", "x", *store]) == 2
    assert main(["adopt", "nothing", *store]) == 3
    assert "'nothing' is not in the store: run the program first, as fusekit exec" in capsys.readouterr().err
    assert main(["adopt", "tests/*", *store]) == 0
    assert "next: fusekit show adopted/tests.Kernel@" in capsys.readouterr().err
