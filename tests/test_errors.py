"""The exception tree: exit codes, and survival of a trip between processes."""

import pickle

import pytest

import fusekit
from fusekit import errors

EXIT_CODES = {
    "FusekitError": 1,
    "UsageError": 2,
    "SpecError": 2,
    "NotBuiltError": 3,
    "StoreError": 1,
    "IntegrityError": 1,
    "SignatureError": 1,
    "BuildError": 1,
    "ProofError": 1,
    "ToolchainError": 1,
    "ArgumentError": 2,
    "DriverError": 4,
    "ArchMismatchError": 4,
    "CheckFailedError": 1,
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
def test_the_package_offers_it(name):
    assert getattr(fusekit, name) is every_error()[name]
    assert name in fusekit.__all__


def test_not_built_has_the_line_that_builds():
    error = errors.NotBuiltError.of("model/fc1", arch="sm_90a")
    assert error.name == "model/fc1"
    assert error.command == "fusekit build model/fc1 --arch sm_90a"
    assert str(error) == (
        "'model/fc1' for sm_90a is not in any store layer; build it with: fusekit build model/fc1 --arch sm_90a"
    )
    assert errors.NotBuiltError.of("model/*").command == "fusekit build 'model/*'"
    assert "(nothing is)" in str(errors.NotBuiltError.of("a/b", detail="nothing is"))
