"""fusekit lock in a project, and what keeps to the lock."""

import json

import pytest

from fusekit.errors import IntegrityError, NotBuiltError, SignatureError
from fusekit.library import open_library
from fusekit.store import Store
from fusekit.store.lockfile import read_lock

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
SPEC = """schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "fc1"
op = "grouped-gemm"
tile = [128, 128]
cluster = [2, 1]
schedule = "static"
problem = { E = 8, M = 1024, N = 512, K = 256 }
"""
NAME = "moe/fc1@128x128-c2x1"


@pytest.fixture
def project(tmp_path, fusekit):
    (tmp_path / "moe.toml").write_text(SPEC)
    (tmp_path / "fusekit.toml").write_text("[targets]\nspecs = ['moe.toml']\n")
    return tmp_path


def test_a_lock_from_nothing_to_a_rollback(project, fusekit, monkeypatch):
    checked = fusekit("lock", "--check", "--json", code=1).json
    assert (checked["changed"][0]["before"], checked["same"]) == (None, 0)
    assert not (project / "fusekit.lock").exists()
    written = fusekit("lock", "--json").json
    assert (written["serial"], written["written"], written["missing"]) == (1, True, [])
    lock = read_lock(project / "fusekit.lock")
    ((name, arch),) = lock.kernels
    (build,) = lock.kernels[name, arch]
    assert (name.partition("@")[0], arch) == ("moe/fc1", "sm_90a")
    assert lock.to_bytes() == (project / "fusekit.lock").read_bytes()
    assert fusekit("lock", "--json").json["written"] is False  # nothing has changed
    assert fusekit("lock", "--check", "--json", "--store", "empty").json["same"] == 1  # by keys alone

    config = {"FUSEKIT_STORE": str(fusekit.root), "FUSEKIT_LOCK": str(project / "fusekit.lock")}
    for variable, value in config.items():
        monkeypatch.setenv(variable, value)
    assert open_library().store.find_name(name, arch).key == build.key

    (project / "moe.toml").write_text(SPEC.replace("K = 256 }", "K = 256 }\nbias = true"))
    (moved,) = fusekit("lock", "--check", "--json", code=1).json["changed"]
    assert (moved["before"], moved["now"] not in (None, build.key)) == (build.key, True)
    (project / "old.lock").write_bytes((project / "fusekit.lock").read_bytes())
    fusekit("build", FUSEKIT_LOCK="")
    # The name points to a newer build now; who keeps to the lock has the one that it lists.
    newer = Store(fusekit.root).find_name(name, arch).key
    assert newer != build.key
    assert open_library().store.find_name(name, arch).key == build.key
    assert open_library(project=project).store.find_name(name, arch).key == build.key

    assert fusekit("lock", "--json").json["serial"] == 2
    assert open_library().store.find_name(name, arch).key == newer
    monkeypatch.setenv("FUSEKIT_LOCK", str(project / "old.lock"))
    with pytest.raises(IntegrityError, match="has serial 1, and serial 2 of it was used here: it is older"):
        _ = open_library().store


def test_what_the_lock_does_not_list_is_not_loaded(project, fusekit, monkeypatch):
    fusekit("lock")
    fusekit("build", "quickstart/linear")
    path = project / "fusekit.lock"
    monkeypatch.setenv("FUSEKIT_STORE", str(fusekit.root))
    store = open_library(project=project).store
    assert store.names("quickstart") == []
    assert isinstance(store.not_built("quickstart/linear"), NotBuiltError)
    assert "does not list it" in str(store.not_built("quickstart/linear"))
    assert "does not list it" in fusekit("run", "quickstart/linear", code=None).err

    document = json.loads(path.read_text())
    ((name, builds),) = document["kernels"]["sm_90a"].items()
    (label,) = builds
    for member in ("cubin_sha256", "launch_sha256", "key"):
        changed = {**builds[label], member: "0" * 64}
        kernels = {"sm_90a": {name: {label: changed}}}
        path.write_text(json.dumps(document | {"kernels": kernels, "serial": document["serial"] + 1}))
        document["serial"] += 1
        store = open_library(project=project).store
        with pytest.raises(IntegrityError, match="fusekit sync"):
            store.load(store.find_name(name, "sm_90a").key)


def test_a_lock_expires(project, fusekit, monkeypatch):
    monkeypatch.setenv("FUSEKIT_STORE", str(fusekit.root))
    fusekit("lock", "--expires", "1")
    store = open_library(project=project).store
    key = store.names()[0].record.key
    assert store.load(key)
    document = json.loads((project / "fusekit.lock").read_text())
    document |= {"expires": "2026-01-01T00:00:00Z", "serial": 9}
    (project / "fusekit.lock").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="expired at 2026-01-01T00:00:00Z"):
        _ = open_library(project=project).store
    renewed = fusekit("lock", "--json")
    assert (renewed.json["serial"], renewed.json["expires"]) == (10, None)
    assert "this one does not: give --expires DAYS" in renewed.err
    assert open_library(project=project).store.load(key)


def test_a_signed_lock(project, fusekit, monkeypatch):
    pytest.importorskip("cryptography")
    fusekit("key", "new", "ours")
    trusted = {"FUSEKIT_TRUSTED_KEYS": str(project / "ours.pub")}
    fusekit("lock", "--sign", "ours", **trusted)
    monkeypatch.setenv("FUSEKIT_STORE", str(fusekit.root))
    monkeypatch.setenv("FUSEKIT_TRUSTED_KEYS", str(project / "ours.pub"))
    assert len(open_library(project=project).store.names()) == 1
    data = (project / "fusekit.lock").read_bytes()
    (project / "fusekit.lock").write_bytes(data.replace(b'"serial": 1', b'"serial": 2'))
    with pytest.raises(SignatureError, match="changed after they were signed"):
        _ = open_library(project=project).store
    for path in project.glob("fusekit.lock.*.sig"):
        path.unlink()
    with pytest.raises(SignatureError, match=r"not signed.*lock --sign KEY"):
        _ = open_library(project=project).store


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 2}, "this fusekit reads 1"),
        ({"serial": 0}, "its serial 0"),
        ({"id": "x"}, "its id is 'x'"),
        ({"more": 1}, "must have expires"),
        ({"expires": "tomorrow"}, "tomorrow"),
        ({"tuning": {"sm_90a": "x"}}, "no digest"),
        ({"kernels": {"sm_90a": {"a": {}}}}, "not a full kernel name"),
        ({"kernels": {"sm_90a": {NAME: {}}}}, "has no build"),
        ({"kernels": {"sm_90a": {NAME: {"other": {}}}}}, "missing"),
        ({"kernels": []}, "is no lock"),
        ({"toolchains": {"a b": {}}}, "neither a name nor a version"),
    ],
)
def test_a_lock_that_cannot_be(tmp_path, change, match):
    path = tmp_path / "fusekit.lock"
    document = {
        "schema": 1,
        "id": "0" * 32,
        "serial": 1,
        "expires": None,
        "toolchains": {},
        "tuning": {},
        "kernels": {},
    }
    path.write_text(json.dumps(document))
    read_lock(path)
    path.write_text(json.dumps(document | change))
    with pytest.raises(IntegrityError, match=match):
        read_lock(path)


def test_a_lock_is_of_all_targets(project, fusekit):
    for arguments in (("quickstart",), ("--write",), ("--namespace", "x")):
        assert "has all of its targets" in fusekit("lock", *arguments, code=2).err


def test_a_toolchain_that_the_project_names_and_nobody_built(project, fusekit):
    from fusekit.compiler.toolchain import distributions
    from fusekit.store.entries import toolchain_label

    label = toolchain_label(distributions())
    (project / "fusekit.toml").write_text(
        f"[targets]\nspecs = ['moe.toml']\ntoolchains = ['{label}', 'cutlass-dsl-9.9.9-cu13']\n"
    )
    result = fusekit("lock", "--json", code=1)
    assert [row["toolchain"] for row in result.json["missing"]] == ["cutlass-dsl-9.9.9-cu13"]
    assert "nothing was written" in result.err
    assert not (project / "fusekit.lock").exists()


def test_a_cluster_in_five_commands(project, fusekit):
    """init, lock, push; then sync on other machines: a frozen one, one that builds, one whose remote is older."""
    fusekit("init", "--force")  # lists moe.toml
    text = (project / "fusekit.toml").read_text().replace("[remotes]", "[remotes]\nteam = 'remote'\n#")
    (project / "fusekit.toml").write_text(text)
    fusekit("lock")
    fusekit("push", "team")
    assert fusekit("sync", "--json").json["from"] == {"here": 1}
    frozen = fusekit("sync", "--frozen", "--json", "--store", "node").json
    assert (frozen["from"], frozen["names"], frozen["missing"]) == ({"team": 1}, 1, [])
    assert fusekit("sync", "--frozen", "--store", "node").out.endswith("serial 1: 1 here; 0 missing\n")
    assert fusekit("verify", "--full", "--json", "--store", "node").json["bad"] == []

    # What the remote does not have is built, or missing where nothing may be built; no name moves.
    (project / "moe.toml").write_text(SPEC.replace("K = 256 }", "K = 256 }\nbias = true"))
    fusekit("lock")
    before = Store(project / "node").names()
    result = fusekit("sync", "--frozen", "--store", "node", code=1)
    assert "missing: moe/fc1@" in result.out
    assert "no name was changed" in result.err
    assert Store(project / "node").names() == before
    built = fusekit("sync", "--json", "--store", "node").json
    assert (built["from"], built["missing"]) == ({"built here": 1}, [])
    (old,), (new,) = before, Store(project / "node").names()
    assert new.record.key != old.record.key

    # While a build of another toolchain is missing, what is built here gets no name; it is not built again.
    document = json.loads((project / "fusekit.lock").read_text())
    ((builds,),) = (kernels.values() for kernels in document["kernels"].values())
    builds["other-1.0"] = {**next(iter(builds.values())), "key": "0" * 64}
    document |= {"serial": 1, "toolchains": document["toolchains"] | {"other-1.0": {}}}
    (project / "more.lock").write_text(json.dumps(document))
    arguments = ("sync", "--json", "--store", "partial")
    partial = fusekit(*arguments, code=1, FUSEKIT_LOCK=str(project / "more.lock")).json
    assert (partial["from"], len(partial["missing"])) == ({"built here": 1}, 1)
    assert Store(project / "partial").names() == []
    assert fusekit(*arguments).json["from"] == {"here": 1}
    assert [listed.record.key for listed in Store(project / "partial").names()] == [new.record.key]

    # An older lock is refused where a newer one was used, and taken where none was.
    (project / "moe.toml").write_text(SPEC)
    document = json.loads((project / "fusekit.lock").read_text())
    (project / "older.lock").write_text(json.dumps(document | {"serial": 1}))
    environment = {"FUSEKIT_LOCK": str(project / "older.lock")}
    assert "it is older" in fusekit("sync", "--store", "node", code=1, **environment).err


def test_sync_without_a_lock(fusekit, project):
    assert "`fusekit lock` writes that of a fusekit.toml" in fusekit("sync", code=2).err
