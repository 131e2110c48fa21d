"""fusekit.build over a real store, with the tests' small kernel instead of a GEMM."""

import dataclasses

import numpy as np
import pytest

from fusekit.abi import LaunchRecord, elf
from fusekit.compiler import build as building
from fusekit.compiler.build import Progress, execute, plan_build
from fusekit.compiler.explain import explain
from fusekit.compiler.hostfunction import Lifted
from fusekit.compiler.identity import Identity
from fusekit.compiler.targets import select
from fusekit.config import Config
from fusekit.errors import ArgumentError, StoreError, ToolchainError, UsageError
from fusekit.spec import find
from fusekit.store import Store
from fusekit.store.layout import MARKER
from fusekit.store.marker import DATA

LINEAR = find(["quickstart/linear"])[0]


def named(kernel, **changes):
    return dataclasses.replace(LINEAR, kernel=kernel, **changes)


@pytest.fixture
def build(tilecopy, store):
    def run(*specs, **options):
        return execute(plan_build(specs, store), store, planner=tilecopy.plan, **options)

    return run


def test_line_information_has_a_key_of_its_own_and_the_same_code(tilecopy, store):
    def built(**options):
        identity = Identity(**options)
        report = execute(plan_build([LINEAR], store, identity), store, planner=tilecopy.plan)
        assert not report.failed
        entry = store.find_entry(store.find_name(LINEAR.full_name, "sm_90a").key)
        assert entry.fields == identity.key_fields(LINEAR)
        cubin = elf.parse(store.read_cubin(entry), "cubin")
        code = [section.data for section in cubin.sections if section.name.startswith(".text.")]
        return entry, code, cubin.section(".debug_line") is not None, len(report.built)

    plain, lined, again = built(), built(lineinfo=True), built()
    assert [lines for _, _, lines, _ in (plain, lined, again)] == [False, True, False]
    assert {label for label, value in plain[0].fields.items() if lined[0].fields[label] != value} == {"options"}
    assert plain[1] == lined[1]
    assert plain[0].launch == lined[0].launch
    assert (again[0], again[3]) == (plain[0], 0)


def test_an_option_is_one_of_all_traces_of_a_plan(tilecopy):
    plan = tilecopy.plan()
    lifted = Lifted("sm_count", (1, 2), plan)
    several = dataclasses.replace(plan, lifted=lifted, again=lambda: plan, options="--opt-level=2").with_option("--x")
    assert [each.options for each in (several, several.lifted.plan, several.again())] == [
        "--opt-level=2 --x",
        " --x",
        " --x",
    ]


def test_a_miss_is_built_and_then_it_is_a_hit(build, store, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    steps: list[Progress] = []
    report = build(LINEAR, jobs=1, progress=steps.append)
    assert report.ok
    (built,) = report.built
    assert (built.name, built.arch) == (LINEAR.full_name, "sm_90a")
    assert built.proved_launches >= 8
    assert built.registers > 0
    assert steps == [Progress(0, 1), Progress(1, 1, LINEAR.full_name)]
    assert list((tmp_path / "folder").iterdir()) == []

    entry = store.find_entry(built.key)
    assert (entry.cubin_sha256, entry.cubin_bytes) == (built.cubin_sha256, built.bytes)
    assert len(store.read_cubin(entry)) == built.bytes
    assert LaunchRecord.from_json(entry.launch).symbol
    assert entry.proof["launches"] == built.proved_launches
    assert entry.resources["registers"] == built.registers
    assert entry.toolchain["distributions"]["nvidia-cutlass-dsl"]
    record = store.find_name(LINEAR.full_name, "sm_90a")
    assert (record.key, record.spec, record.defaults) == (built.key, LINEAR.canonical(), LINEAR.defaults())
    assert not store.verify(full=True).bad

    again = build(LINEAR, progress=steps.append)
    assert (again.built, again.cached, again.failed) == ([], [LINEAR.full_name], [])
    assert len(steps) == 2  # nothing was compiled, so nothing was told


def test_what_another_builder_compiles_is_left_to_it(build, store):
    specs = [named("one"), named("two", tile=(128, 192)), named("three", cluster=(1, 1))]
    others = {task.name: task.key for task in plan_build(specs, store).misses}
    assert len(others) == 3
    held = store.lock(others[specs[0].full_name])
    assert held.__enter__()
    steps = []

    def progress(step):
        steps.append(step.name)
        if step.done == 2:  # all that is left is another's: who waits for it sees it come, or its builder go
            held.__exit__(None, None, None)

    report = build(*specs, jobs=1, progress=progress)
    assert steps[1:] == [specs[1].full_name, specs[2].full_name, specs[0].full_name]
    assert len(report.built) == 3


def test_a_builder_that_never_lets_go_is_not_waited_for_for_ever(build, store, monkeypatch):
    monkeypatch.setattr(building, "PATIENCE", 0.0)
    (task,) = plan_build([LINEAR], store).misses
    with store.lock(task.key) as held:
        assert held
        assert build(LINEAR, jobs=1).ok


@pytest.mark.parametrize("kind", ["entry", "name", "name of what is there"])
def test_what_cannot_be_replaced_fails_its_own_kernel_alone(build, store, kind):
    one, two = named("one"), named("two", tile=(128, 192))
    (key, _) = (task.key for task in plan_build([one, two], store).misses)
    if kind == "name of what is there":
        assert build(one).ok
    own = store.roots[0]
    path = own.entry_path(key) if kind == "entry" else own.name_path(one.full_name, one.arch)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    (own.path / MARKER).write_bytes(DATA)
    report = build(one, two)
    assert [built.name for built in report.built] == [two.full_name]
    (failed,) = report.failed
    assert failed.name == one.full_name
    assert f"{path} is a directory" in failed.error
    assert "remove it" in failed.error
    path.rmdir()
    assert build(one, two).ok
    assert not store.verify(full=True).bad


def test_names_that_share_a_kernel_share_the_work(build, store):
    report = build(named("one"), named("two", cluster_margin=3), jobs=2)
    assert [built.name for built in report.built] == ["quickstart/one@128x128-c2x1", "quickstart/two@128x128-c2x1"]
    assert len({built.key for built in report.built}) == 1
    assert [result.record.defaults["cluster_margin"] for result in store.names()] == [0, 3]
    # Another name of it later: nothing to compile, only to name.
    report = build(named("three"))
    assert report.cached == ["quickstart/three@128x128-c2x1"]
    assert len(store.names()) == 3


def test_a_failure_does_not_stop_the_others(build, store):
    report = build(named("broken"), named("fine", dtype="fp16", out_dtype="fp16"), jobs=1)
    assert not report.ok
    assert [failed.name for failed in report.failed] == ["quickstart/broken@128x128-c2x1"]
    assert "this kernel cannot be traced" in report.failed[0].error
    assert [built.name for built in report.built] == ["quickstart/fine@128x128-c2x1"]
    assert [result.record.name for result in store.names()] == ["quickstart/fine@128x128-c2x1"]


def test_a_process_that_dies_is_named_and_the_rest_goes_on(tilecopy, store):
    import misbehaving

    specs = [named("dies"), named("fine", dtype="fp16", out_dtype="fp16"), named("good", tile=(128, 192))]
    report = execute(plan_build(specs, store), store, jobs=1, planner=misbehaving.some_die)
    (failed,) = report.failed
    assert failed.name == "quickstart/dies@128x128-c2x1"
    assert "the compile process died of quickstart/dies@128x128-c2x1 (SIGKILL)" in failed.error
    assert len(report.built) == 2
    assert not store.verify(full=True).bad


def test_kernels_are_published_as_they_come(build, store):
    seen = []
    specs = [named("one"), named("two", tile=(128, 192)), named("three", dtype="fp16", out_dtype="fp16")]
    build(*specs, jobs=1, progress=lambda step: seen.append((step.done, len(store.names()))))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_damaged_cubin_is_built_again(build, store):
    first = build(LINEAR).built[0]
    blob = store.roots[0].blob_path(first.cubin_sha256)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    assert store.verify(full=True).bad
    second = build(LINEAR).built[0]
    assert second.cubin_sha256 == first.cubin_sha256
    assert not store.verify(full=True).bad


@pytest.mark.parametrize("launch", [{}, {"grid": [1, 1]}])
def test_an_entry_without_a_usable_record_is_built_again(build, store, launch):
    """Its digests are right: anybody can write such a one."""
    (built,) = build(LINEAR).built
    entry = store.find_entry(built.key)
    store.roots[0].entry_path(built.key).unlink()
    broken = dataclasses.replace(entry, launch={**entry.launch, **launch} if launch else {})
    store.publish(broken, store.read_cubin(broken))
    assert store.find_entry(built.key).launch != entry.launch
    assert explain(store, LINEAR, entry.fields).status == "damaged"
    report = build(LINEAR)
    assert [row.name for row in report.built] == [LINEAR.full_name]
    assert store.find_entry(built.key).launch == entry.launch
    assert build(LINEAR).cached == [LINEAR.full_name]


def test_what_changes_meanwhile_fails_the_kernel(build, store, monkeypatch):
    real = Identity.key_fields
    stale = {"source.kernels/ptx.py": "0" * 64, "source.kernels/gone.py": "0" * 64, "toolchain.nvidia-cutlass-dsl": "1"}
    monkeypatch.setattr(Identity, "key_fields", lambda self, spec: real(self, spec) | stale)
    (failed,) = build(LINEAR).failed
    listed = "source.kernels/ptx.py, source.kernels/gone.py, toolchain.nvidia-cutlass-dsl"
    assert f"{listed} changed while quickstart/linear@128x128-c2x1 was compiled; run the build again" in failed.error
    assert not store.names()


def test_a_store_that_cannot_be_written_ends_the_build(tilecopy, tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store")
    with pytest.raises(StoreError):
        execute(plan_build([LINEAR], store), store, planner=tilecopy.plan)


def test_without_the_dsl_a_build_says_what_to_install(store, monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    with pytest.raises(ToolchainError, match=r"pip install 'llvmlite"):
        plan_build([LINEAR], store)


def test_select():
    assert select("quickstart/linear") == (LINEAR,)
    assert select(["quickstart/linear"], "sm_90a") == (LINEAR,)
    assert len(select("quickstart", ["sm_90a"])) == 4
    with pytest.raises(UsageError, match="arch 'sm_100a': none of the kernels named is for it; they are for sm_90a"):
        select("quickstart", "sm_100a")


def test_the_number_of_processes_may_be_of_numpy(build):
    assert not build(LINEAR, jobs=np.int64(2)).failed


@pytest.mark.parametrize("jobs", [0, -1, "a", True, 1.5])
def test_no_processes_are_refused(build, jobs):
    with pytest.raises(ArgumentError, match=f"jobs = {jobs!r}; it must be a whole number, 1 or more; leave it out"):
        build(LINEAR, jobs=jobs)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"targets": 3}, "targets = 3; it must be a name, or a list"),
        ({"targets": ["quickstart", b"x"]}, "targets = b'x'"),
        ({"targets": b"x"}, "targets = b'x'; it must be a name, or a list"),
        ({"targets": "quickstart", "progress": 5}, "progress = 5; it must be a function"),
        ({"targets": "quickstart", "executor": 5}, "executor = 5; it must be a concurrent.futures.Executor"),
        ({"targets": "quickstart", "prune": "no"}, "prune = 'no'; it must be True or False"),
        ({"targets": "quickstart", "allow_extern": "0"}, "allow_extern = '0'; it must be True or False"),
        ({"targets": "quickstart", "namespace": 5}, "namespace = 5; it must be text"),
        ({"targets": "quickstart", "arch": 3}, "arch = 3; it must be a name, or a list"),
        ({"targets": "quickstart", "config": "/some/store"}, r"config = '/some/store'; it must be a fusekit\.Config; "),
    ],
)
def test_arguments_of_another_type_are_refused(said, text):
    import fusekit

    with pytest.raises(ArgumentError, match=text):
        fusekit.build(**said)


def test_the_public_function(tilecopy, tmp_path, monkeypatch):
    import fusekit

    assert fusekit.build is building.build
    config = fusekit.Config(tmp_path / "store")
    report = fusekit.build("quickstart/moe-fc2", arch="sm_90a", jobs=1, config=config)
    assert [built.name for built in report.built] == ["quickstart/moe-fc2@128x128-c2x1"]
    assert report.seconds > 0
    assert fusekit.build("quickstart/moe-fc2", config=config).cached == ["quickstart/moe-fc2@128x128-c2x1"]


def test_an_empty_list_builds_nothing(store):
    report = building.build([], config=Config(store=store.root))
    assert (report.built, report.hits, report.failed) == ([], [], [])
    assert not store.names("*")
