"""The one frozen configuration."""

import dataclasses
import os
from pathlib import Path

import pytest

from fusekit import Config
from fusekit.errors import ArgumentError, UsageError


def test_default_is_the_user_cache_folder(tmp_path):
    config = Config.from_environment(environ={})
    assert config.store.name == "fusekit"
    assert config.store.is_absolute()
    assert config.read_only_roots == ()
    assert config.color


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in the list of users
    with pytest.raises(UsageError, match=r"no home folder for one; name it with --store or FUSEKIT_STORE"):
        Config.from_environment(environ={})


def test_argument_wins_over_variable_wins_over_default(tmp_path):
    environ = {"FUSEKIT_STORE": str(tmp_path / "variable")}
    assert Config.from_environment(environ=environ).store == tmp_path / "variable"
    assert Config.from_environment(tmp_path / "argument", environ).store == tmp_path / "argument"
    assert Config.from_environment(str(tmp_path / "argument"), environ).store == tmp_path / "argument"


def test_empty_variables_count_as_unset():
    empty = Config.from_environment(environ={"FUSEKIT_STORE": "", "FUSEKIT_STORES": "", "NO_COLOR": ""})
    assert empty == Config.from_environment(environ={})


def test_layers_in_order_each_once_without_the_store():
    environ = {"FUSEKIT_STORE": "/a", "FUSEKIT_STORES": "/b::/c:/b:/a:/c/../d"}
    config = Config.from_environment(environ=environ)
    assert config.read_only_roots == (Path("/b"), Path("/c"), Path("/d"))
    assert config.roots == (Path("/a"), *config.read_only_roots)


def test_home_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Config.from_environment("~/store", {}).store == tmp_path / "home" / "store"
    assert Config.from_environment("here", {}).store == tmp_path / "here"


@pytest.mark.parametrize("bad", ["", "~no-such-user-here/store"])
def test_a_path_that_names_no_folder(bad):
    with pytest.raises(UsageError, match="--store"):
        Config.from_environment(bad, {})
    if bad:
        with pytest.raises(UsageError, match="FUSEKIT_STORES"):
            Config.from_environment(environ={"FUSEKIT_STORES": f"/a:{bad}"})


def test_color():
    assert not Config.from_environment(environ={"NO_COLOR": "1"}).color


def test_it_reads_the_process_environment_and_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))
    assert Config.from_environment().store == tmp_path / "store"
    assert list(tmp_path.iterdir()) == []


def test_it_is_frozen():
    config = Config.from_environment(environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.store = Path("/")


def test_keys(tmp_path):
    environ = {"FUSEKIT_TRUSTED_KEYS": "/a/b.pub::/c.pub:/a/b.pub", "FUSEKIT_SIGNING_KEY": "/d"}
    config = Config.from_environment(environ=environ)
    assert config.trusted_keys == (Path("/a/b.pub"), Path("/c.pub"))
    assert config.signing_key == Path("/d")
    assert Config.from_environment(environ=environ, signing_key=tmp_path / "e").signing_key == tmp_path / "e"
    unset = Config.from_environment(environ={"FUSEKIT_SIGNING_KEY": ""})
    assert (unset.trusted_keys, unset.signing_key) == (None, None)


@pytest.mark.parametrize("value", ["", ":", " : ", "::", "\t"])
def test_a_trust_in_nobody_is_no_trust_in_everybody(value):
    assert Config.from_environment(environ={"FUSEKIT_TRUSTED_KEYS": value}).trusted_keys == ()


@pytest.mark.parametrize(
    "environ", [{"FUSEKIT_TRUSTED_KEYS": "~no-such-user-here/k"}, {"FUSEKIT_SIGNING_KEY": "~no-such-user-here/k"}]
)
def test_a_path_that_names_no_key(environ):
    with pytest.raises(UsageError, match=next(iter(environ))):
        Config.from_environment(environ=environ)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": "/store"}, {"store": Path("/s"), "read_only_roots": ("/l",)},
        {"store": Path("/s"), "read_only_roots": Path("/l")},
        {"store": Path("/s"), "trusted_keys": ("k",)}, {"store": Path("/s"), "signing_key": "k"},
    ],
)  # fmt: skip
def test_paths_are_paths(fields):
    with pytest.raises(ArgumentError, match=rf"{[*fields][-1]} = .*from_environment\(FOLDER\) takes text as well"):
        Config(**fields)


@pytest.mark.parametrize("given", [{"store": 5}, {"store": b"x"}, {"signing_key": 5}])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(ArgumentError, match="it must be a path"):
        Config.from_environment(environ={}, **given)
