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
from fusekit.config import Config, CuteConfig
from fusekit.cute import adopt as adopt_module
from fusekit.cute import blobs, explain
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


def explained(store, record):
    return explain.explained(CuteConfig(Config(store=store.root)), record)


def test_why_a_program_takes_an_entry(compiled, monkeypatch):
    record = compiled.entry("twice")
    found = explained(compiled.store, record)
    assert (found.name, found.key, found.status, found.differs) == (record.name, record.key, "hit", ())
    assert "`fusekit exec` compiled for tests.cute.kernels:twice; a program whose trace " in found.reason
    assert found.reason.endswith(f"fusekit adopt {record.name}")
    monkeypatch.setattr(blobs, "cpu", lambda: "another")
    found = explained(compiled.store, record)
    assert (found.status, [row.field for row in found.differs]) == ("miss", ["host"])
    assert "programs compile anew here; what differs: host" in found.reason


def test_why_an_adopted_kernel_would_be_made_again(compiled, tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    entry, blob = compiled.store.load(compiled.entry("scale").key)
    store.publish(entry, blob)
    store.publish_name(compiled.entry("scale"))
    of = compiled.entry("scale").name
    for name, given, rest in (
        (name_of(of), {}, ""),
        ("mine/scale@base", {"x": "input", "y": "output"}, " --as mine/scale@base --role x=input --role y=output"),
    ):
        kernel = adopt(store, store.find_name(of, "sm_90a"), name, given)
        record = store.find_name(name, "sm_90a")
        found = explained(store, record)
        assert (found.status, found.key, found.differs) == ("hit", kernel.key, ())
        assert found.reason == (
            f"`fusekit adopt` made it of {of}, which `fusekit exec` compiled for tests.cute.kernels:scale; this would"
            f" give the same kernel: fusekit adopt {of}{rest}"
        )
    with monkeypatch.context() as patch:
        patch.setattr(adopt_module, "compile_options", lambda arch: "--other")
        found = explained(store, record)
        assert (found.status, [row.field for row in found.differs]) == ("miss", ["options"])
        patch.setattr(adopt_module, "distributions", lambda: {"nvidia-cutlass-dsl": "4.9"})
        found = explained(store, record)
        assert found.status == "miss" and "nvidia-cutlass-dsl 4.9 is installed here" in found.reason
    store.discard([(of, "sm_90a")])
    found = explained(store, record)
    assert (found.status, found.differs) == ("unknown", ())
    assert "whose entry is gone: it is launched as it is; to make it again, run the program" in found.reason


@pytest.mark.parametrize(("kind", "label"), [("host-object", "text"), ("host-object", []), ("carried", 3)])
def test_a_name_record_of_another_form_is_damaged(compiled, kind, label):
    record = compiled.entry("twice")
    found = explained(compiled.store, dataclasses.replace(record, spec={kind: label}))
    assert (found.status, found.reason[-len(record.name) :]) == ("damaged", record.name)


def test_commands_about_what_is_no_kernel(compiled, tmp_path, capsys):
    """Each works, or says what it is and what to do."""
    store = Store(tmp_path / "store")
    for kind in (False, True):
        entry, blob = compiled.store.load(compiled.entry("scale", kind).key)
        store.publish(entry, blob)
        store.publish_name(compiled.entry("scale", kind))
    one = compiled.entry("scale").name

    def says(*command, code=0):
        assert main([*command, "--store", str(store.root)]) == code, command
        return " ".join(capsys.readouterr())

    for name in (one, "tests/scale", "tests", "*"):
        assert says("show", name).count("module    tests.cute.kernels") == 1 + (name != one)
    for command in (("explain",), ("adopt",), ("ls",)):
        assert one.replace("/", "." if command == ("adopt",) else "/") in says(*command, one)
    adopted = name_of(one)
    assert f"explain {adopted} says of what" in says("build", adopted, code=2)
    for command in (("build", "--dry-run"), ("lock",), ("specs",)):
        assert f"'{one}' has no spec, so no command builds, lists or locks it" in says(*command, one, code=2)
    assert "'tests/other' names no packaged kernel" in says("build", "tests/other", code=2)
    html, out = str(tmp_path / "page.html"), str(tmp_path / "c")
    other = compiled.entry("scale", True).name
    remedy = f"make a kernel of it: fusekit adopt {min(one, other)}"
    for command in (("bench", "tests"), ("export", "--lang", "c", out, "tests"), ("report", html, "tests")):
        assert remedy in says(*command, code=2)
    for command in (("show", "--sass", one), ("diff", one, adopted)):
        assert f"make a kernel of it: fusekit adopt {one}" in says(*command, code=2)
    assert f"to launch it by a name: fusekit adopt '*@{one[-16:]}'" in says("run", one, code=1)
    assert "is none of several variants: `fusekit exec` stored it" in says("run", "tests/scale", code=2)
    assert "1 kernel, " in says("report", html, "*")
    says("export", "--lang", "c", out, "*")
    says("rm", "tests")
    assert f"adopt it: fusekit adopt {one.replace('scale', 'wide')}; or run" in says(
        "run", adopted.replace("scale", "wide"), code=3
    )


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
