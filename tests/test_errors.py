"""The exception tree: exit codes, and survival of a trip between processes."""

import pickle
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fusekit
from fusekit import errors

EXIT_CODES = {
    "FusekitError": 1,
    "UsageError": 2,
    "SpecError": 2,
    "NotBuiltError": 3,
    "StoreError": 1,
    "NoStoreError": 2,
    "IntegrityError": 1,
    "OtherSchemaError": 1,
    "SignatureError": 1,
    "BuildError": 1,
    "ProofError": 1,
    "ToolchainError": 1,
    "ArgumentError": 2,
    "DriverError": 4,
    "ArchMismatchError": 4,
    "CheckFailedError": 1,
    "PeerTimeoutError": 1,
    "CapacityError": 1,
}


def every_error() -> dict[str, type[errors.FusekitError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.FusekitError)
    }


def test_exit_codes():
    assert {name: kind.exit_code for name, kind in every_error().items()} == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_pickling_keeps_everything(name):
    error = every_error()[name]("a value; a rule; a remedy")
    for attribute in vars(error):
        setattr(error, attribute, ("kept",))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "a value; a rule; a remedy"
    assert vars(again) == vars(error)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_no_value_in_a_message_writes_a_line_of_its_own(name):
    error = every_error()[name]("name 'a\nfusekit: all is well\x1b[2J\ud800' is wrong")
    if isinstance(error, (errors.SpecError, errors.BuildError)):  # they have several lines, of values that are escaped
        assert str(error).count("\n") == 1
    else:
        assert str(error) == r"name 'a\nfusekit: all is well\x1b[2J\ud800' is wrong"


@pytest.mark.parametrize("name", EXIT_CODES)
def test_the_package_offers_it(name):
    assert getattr(fusekit, name) is every_error()[name]
    assert name in fusekit.__all__


@pytest.mark.parametrize("value", [4, np.int64(4), np.uint8(4), np.array(4)])
def test_whole_numbers_of_any_type_are_integers(value):
    assert errors.ArgumentError.integer("tokens", value, "a whole number", 4) == 4
    assert type(errors.ArgumentError.integer("tokens", value, "a whole number", 4)) is int
    with pytest.raises(errors.ArgumentError, match="it must be 5 or more"):
        errors.ArgumentError.integer("tokens", value, "5 or more", 5)


@pytest.mark.parametrize("value", [True, np.True_, 4.0, np.float32(4), "4", None, int, np.array([4, 4])])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(errors.ArgumentError, match=r"tokens = .*; it must be a whole number"):
        errors.ArgumentError.integer("tokens", value, "a whole number")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("adopted/quack.RMSNorm@0123", "adopt it: fusekit adopt quack/RMSNorm@0123; or run the program that compiles"),
        ("adopted/quack.*", "puts it there: fusekit exec --records -- CMD"),
        ("carried/triton@0-1", "puts it there: fusekit exec --with triton -- CMD"),
        ("carried", "puts it there: fusekit exec --with PACKAGE -- CMD"),
        ("quack/RMSNorm@0123456789abcdef", "puts it there: fusekit exec -- CMD"),
    ],
)
def test_what_is_of_programs_is_not_built(name, remedy):
    error = errors.NotBuiltError.of(name)
    assert remedy in str(error)
    assert "fusekit build" not in str(error) and error.command == ""


def test_not_built_has_the_line_that_builds():
    error = errors.NotBuiltError.of("quickstart/moe-fc1", arch="sm_90a")
    assert error.name == "quickstart/moe-fc1"
    assert error.command == "fusekit build quickstart/moe-fc1 --arch sm_90a"
    assert str(error) == (
        "'quickstart/moe-fc1' for sm_90a is not in the store; build it with: "
        "fusekit build quickstart/moe-fc1 --arch sm_90a"
    )
    assert errors.NotBuiltError.of("quick*/*").command == "fusekit build 'quick*/*'"
    assert errors.NotBuiltError.of("*").command == "fusekit build '*'"
    assert "(nothing is)" in str(errors.NotBuiltError.of("a/b", detail="nothing is"))


def test_a_remedy_can_work():
    """A line is only given where it can make the kernel, as far as the packaged specs tell."""
    error = errors.NotBuiltError.of("mine/fc1@128x128-c1x1")
    assert error.command == "fusekit build mine.toml/fc1"
    assert str(error).endswith("no packaged spec has it; build it from its spec file: " + error.command)
    inside = errors.NotBuiltError.of("quickstart/mine")
    assert inside.command == ""
    assert "no packaged spec has it; quickstart has linear, " in str(inside)
    part = "gpt-oss-20b/moe.fc1-fwd"  # of a packaged layer
    assert errors.NotBuiltError.of(part).command == f"fusekit build {part}"
    variant = errors.NotBuiltError.of(f"{part}@128x192-c2x1")  # of which there may be none
    assert str(variant).endswith(f"; build its variants with: fusekit build {part}")
    assert errors.NotBuiltError.of("quickstart/*@128x*").command == "fusekit build 'quickstart/*@128x*'"
    assert errors.NotBuiltError.of("gpt-oss-20b/mine.fc1").command == ""
    assert errors.NotBuiltError.of("mine/*").command == "fusekit build 'mine.toml/*'"
    elsewhere = errors.NotBuiltError.of("quickstart/linear", "sm_100a", "only for sm_90a")
    assert elsewhere.command == ""
    assert str(elsewhere).endswith("its packaged spec is not for sm_100a, so it cannot be built for that")
    assert "if that names sm_100a: fusekit build mine.toml/k --arch sm_100a" in str(
        errors.NotBuiltError.of("mine/k", "sm_100a")
    )


@pytest.mark.parametrize(
    ("name", "remedy", "command"),
    [
        (
            "quickstart/moe_fc1",
            "did you mean 'quickstart/moe-fc1'? Build that with: ",
            "fusekit build quickstart/moe-fc1",
        ),
        ("gpt-oss-20/moe", "did you mean 'gpt-oss-20b/moe'? Build that with: ", "fusekit build gpt-oss-20b/moe"),
        ("Gpt-Oss-20b/moe", "did you mean 'gpt-oss-20b/moe'? Build that with: ", "fusekit build gpt-oss-20b/moe"),
        (
            "ours/fc1-fw",
            "did you mean 'ours/fc1-fwd'?; build it from its spec file: ",
            "fusekit build ours.toml/fc1-fw",
        ),
        ("our/fc1-fwd", "did you mean 'ours/fc1-fwd'?", ""),
    ],
)
def test_a_name_that_is_nearly_one(tmp_path, monkeypatch, name, remedy, command):
    monkeypatch.chdir(tmp_path)
    error = errors.NotBuiltError.of(name, stored=["ours/fc1-fwd@128x128-c2x1"])
    assert error.command == command
    assert str(error).endswith(f"no packaged spec has it; {remedy}{command}")
    (tmp_path / f"{name.partition('/')[0]}.toml").touch()  # then the file here may have it
    here = errors.NotBuiltError.of(name, stored=["ours/fc1-fwd@128x128-c2x1"]).command
    assert here == f"fusekit build {name.replace('/', '.toml/')}"


def test_what_an_extra_needs_is_installed_by_its_own_names():
    """PyPI's package fusekit is another project's."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra, packages in project["optional-dependencies"].items():
        command = errors.install(extra, "--force-reinstall")
        assert command.startswith("pip install --force-reinstall '")
        assert "fusekit" not in command
        for package in packages:
            name = re.match(r"[\w-]+", package)[0]
            assert name == "fusekit" or f"'{name.replace('_', '-')}" in command
    assert errors.install("build") == "pip install 'llvmlite>=0.44' 'nvidia-cutlass-dsl==4.8.*'"
    assert errors.install("quack").startswith(errors.install("build"))


def test_an_installation_without_metadata_names_the_checkout(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    assert errors.install("build") == "pip install '.[build]'"
