"""The project file: where it is found, what wins over it, and what it can never do."""

import json
import os

import pytest

import fusekit
from fusekit.choice.tuning import features
from fusekit.compiler.targets import check_toolchain, look_up
from fusekit.config import Config
from fusekit.errors import ArgumentError, SpecError, ToolchainError, UsageError
from fusekit.project import Project, find_project, read_project
from fusekit.spec.schemas import layer_of
from fusekit.store import Store
from fusekit.store.signature import Trust, generate
from tests.spec.configs import CONFIGS

WHOLE = """
requires = ">=0.2,<9"
[targets]
specs = ["specs/*.toml", "quickstart/linear", "../moe.toml/fc1"]
models = ["config.json"]
arch = ["sm_90a"]
tokens = 64
toolchains = ["cutlass-dsl-4.8.1-cu12"]
[stores]
store = "kernels"
read_only = ["/nfs/a", "~/b"]
[remotes]
cluster = "s3://bucket/kernels"
near = "mirror"
[trust]
keys = ["team.pub"]
[defaults]
dtype = "bf16"
"""
SPEC = """schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
tile = [128, 128]
cluster = [2, 1]
problem = { E = 8, M = 1024, N = 512, K = 256 }
"""


def write(folder, text):
    (folder / "fusekit.toml").write_text(text)
    return read_project(folder)


def test_every_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    project = write(folder, WHOLE)
    assert project == Project(
        path=folder / "fusekit.toml",
        specs=(f"{folder}/specs/*.toml", "quickstart/linear", f"{tmp_path}/moe.toml/fc1"),
        models=(folder / "config.json",), arch=("sm_90a",), tokens=(64,), toolchains=("cutlass-dsl-4.8.1-cu12",),
        store=folder / "kernels", read_only_roots=(tmp_path.__class__("/nfs/a"), tmp_path / "home/b"),
        remotes={"cluster": "s3://bucket/kernels", "near": f"{folder}/mirror"}, keys=(folder / "team.pub",),
        defaults={"dtype": "bf16"},
    )  # fmt: skip
    assert write(folder, "") == Project(folder / "fusekit.toml")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[target]", "target: there is no such key; it has requires, targets"),
        ("[targets]\nspec = []", r"targets\.spec: there is no such key; \[targets\] has specs"),
        ("targets = 1", "it is a table"),
        ('[targets]\nspecs = "a"', "it is a list of texts"),
        ("[targets]\nspecs = [1]", "it is a list of texts"),
        ("[targets]\ntokens = 0", "number of tokens"),
        ("[targets]\ntokens = true", "number of tokens"),
        ("[targets]\ntokens = [1, 'a']", "or a list of numbers"),
        ('[stores]\nstore = ""', "it is a path"),
        ("[remotes]\nA = 's3://x'", 'a remote is NAME = "URL"'),
        ("[remotes]\na = ''", 'a remote is NAME = "URL"'),
        ("[trust]\nkeys = 'a'", "it is a list of texts"),
        ("allow_extern = true", "never allows foreign code; use --allow-extern"),
        ("[targets]\nallow-extern = true", "never allows foreign code"),
        ("requires = '0.2'", "it bounds the version"),
        ("requires = 2", "it bounds the version"),
        ("requires = '>=0.2,<0.2'", "requires fusekit >=0.2,<0.2, and this is"),
        ("requires = '>99'", "install one that fits"),
        ("x = [", "not TOML"),
    ],
)
def test_what_is_refused(tmp_path, text, match):
    with pytest.raises(UsageError, match=match):
        write(tmp_path, text)


@pytest.mark.parametrize("text", [">=0.2", ">=0.2.0", "==0.2", "!=0.3", ">0.1", "<=0.2.0", " >= 0.1 , < 0.3 ", ""])
def test_a_version_that_fits(tmp_path, text, monkeypatch):
    monkeypatch.setattr(fusekit, "__version__", "0.2.0")
    write(tmp_path, f"requires = '{text}'")


def test_the_nearest_file_upwards(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_project(deep) is None
    write(tmp_path, "")
    assert find_project(deep).folder == tmp_path
    write(tmp_path / "a", "")
    assert find_project(deep).folder == tmp_path / "a"
    (deep / "fusekit.toml").mkdir()  # no file
    assert find_project(deep).folder == tmp_path / "a"


def test_a_file_of_somebody_else_in_a_folder_of_everybody(tmp_path, monkeypatch):
    write(tmp_path, "")
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    if (tmp_path / "fusekit.toml").stat().st_uid == 0:
        os.chown(tmp_path / "fusekit.toml", 1234, -1)
    read_project(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="belongs to another user"):
        read_project(tmp_path)


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path):
    project = write(tmp_path, "[stores]\nstore = 'kernels'\nread_only = ['below', 'kernels']")
    assert Config.from_environment(environ={}, project=project).roots == (tmp_path / "kernels", tmp_path / "below")
    environ = {"FUSEKIT_STORE": "/a", "FUSEKIT_STORES": ""}
    assert [str(path) for path in Config.from_environment(environ=environ, project=project).roots] == ["/a"]
    assert str(Config.from_environment("/b", environ, project=project).store) == "/b"


def test_trust_only_narrows(tmp_path):
    for name in ("ours", "theirs", "third"):
        generate(tmp_path / name)
    pub = {name: tmp_path / f"{name}.pub" for name in ("ours", "theirs", "third")}

    def keys(environ, allowed):
        project = write(tmp_path, "" if allowed is None else f"[trust]\nkeys = {[str(pub[name]) for name in allowed]}")
        text = ":".join(str(pub[name]) for name in environ or ())
        variables = {} if environ is None else {"FUSEKIT_TRUSTED_KEYS": text}
        config = Config.from_environment(environ=variables, project=project)
        trust = Trust.of(config)
        assert (Store.open(config).trust is None) == (trust is None)
        names = {path.read_text().split()[1]: name for name, path in pub.items()}
        return None if trust is None else [names[key.line().split()[1]] for key in trust.keys]

    assert keys(None, None) is None
    assert keys(None, ["ours"]) == ["ours"]
    assert keys(["ours", "theirs"], None) == ["ours", "theirs"]
    assert keys(["ours", "theirs"], ["theirs", "third"]) == ["theirs"]
    for environ, allowed in ((["ours"], ["third"]), (["ours"], []), ([], ["ours"]), (None, [])):
        with pytest.raises(UsageError, match="FUSEKIT_TRUSTED_KEYS"):
            keys(environ, allowed)


def test_targets_and_defaults(tmp_path):
    (tmp_path / "moe.toml").write_text(SPEC)
    targets = "[targets]\nspecs = ['moe.toml', 'quickstart/linear']\narch = ['sm_90a']\n"
    project = write(tmp_path, f"{targets}[defaults]\nout_dtype = 'f32'\nwarps = 4")
    specs = [spec for found in look_up(project=project) for spec in found.specs]
    assert [(spec.full_name.partition("@")[0], spec.out_dtype) for spec in specs] == [
        ("moe/fc1", "f32"), ("quickstart/linear", "bf16")  # packaged ones keep theirs
    ]  # fmt: skip
    path = str(tmp_path / "moe.toml")
    assert [spec.out_dtype for spec in look_up([path], project=project)[0].specs] == ["f32"]
    (tmp_path / "moe.toml").write_text(SPEC.replace('op = "', 'out_dtype = "bf16"\nop = "'))
    assert [spec.out_dtype for spec in look_up([path], project=project)[0].specs] == ["bf16"]
    (tmp_path / "moe.toml").write_text(SPEC)
    with pytest.raises(SpecError, match="out_dtype"):
        look_up([path], project=write(tmp_path, "[defaults]\nout_dtype = 'f7'"))


def test_a_model_for_several_token_counts(tmp_path):
    """The variants of each count, with the keys that they have alone, in one layer; of one name, the first count's."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    text = "[targets]\nmodels = ['m']\ntokens = {}"

    def named(tokens):
        found = look_up(project=write(tmp_path, text.format(tokens)))
        return {spec.full_name: spec for of_file in found for spec in of_file.specs}

    few, many, both = named(64), named([8192]), named([64, 8192])
    assert few.keys() < both.keys() <= few.keys() | many.keys()
    apart = (few | many).keys() - both.keys()
    assert {name.partition("@")[0] for name in apart} <= {"m/moe.router-wgrad"}  # which is split for many tokens
    for kernel in {spec.name for spec in both.values()}:
        alike = [features(spec.canonical()) for spec in both.values() if spec.name == kernel]
        assert alike == alike[:1] * len(alike)
    assert all(both[name].device_spec() == spec.device_spec() for name, spec in (many | few).items() if name in both)
    assert {layer_of(spec).tokens for spec in both.values()} == {64}
    assert len({spec.problem.T for spec in both.values() if hasattr(spec.problem, "T")}) <= 1


def test_only_listed_toolchains_build(tmp_path):
    installed = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu12": "4.8.1"}
    check_toolchain(write(tmp_path, "[targets]\ntoolchains = ['cutlass-dsl-4.8.1-cu12']"), installed)
    check_toolchain(write(tmp_path, ""), installed)
    with pytest.raises(ToolchainError, match="cu12 is installed here; install one of those"):
        check_toolchain(write(tmp_path, "[targets]\ntoolchains = ['cutlass-dsl-4.9.0-cu13']"), installed)


def test_open_library_reads_it_only_if_given(tmp_path, monkeypatch):
    write(tmp_path, "[stores]\nstore = 'kernels'")
    monkeypatch.delenv("FUSEKIT_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert fusekit.open_library().store.root != tmp_path / "kernels"
    assert fusekit.open_library(project=tmp_path).store.root == tmp_path / "kernels"
    with pytest.raises(ArgumentError, match="give one of them"):
        fusekit.open_library(Config(tmp_path), project=tmp_path)
