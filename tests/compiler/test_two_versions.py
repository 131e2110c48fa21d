"""A store that two versions of fusekit share: the other's records are misses, and no damage."""

import pytest

from fusekit.compiler.build import execute, plan_build
from fusekit.compiler.explain import explain
from fusekit.compiler.identity import Identity
from fusekit.errors import OtherSchemaError
from fusekit.spec import find
from fusekit.store import Store
from fusekit.store.documents import seal, unseal

LINEAR = find(["quickstart/linear"])[0]


@pytest.fixture
def store(tmp_path, tilecopy):
    """One kernel, whose name record and entry are made those of another version by `newer`."""
    store = Store(tmp_path / "store")
    assert execute(plan_build([LINEAR], store), store, planner=tilecopy.plan).ok
    return store


def newer(path):
    document = unseal(path.read_bytes(), path)
    path.chmod(0o600)
    path.write_bytes(seal(document | {"schema": 99, "something": "new"}, "a test"))


def test_a_name_of_another_version(store, tilecopy):
    (path,) = (path for path in (store.root / "names").rglob("*") if path.is_file())
    newer(path)
    with pytest.raises(OtherSchemaError, match="of another version of fusekit: it has schema 99, and this one reads 2"):
        store.find_name(LINEAR.full_name, "sm_90a")
    assert store.listing().problems == ()
    assert store.verify(full=True).bad == ()
    assert explain(store, LINEAR, Identity().key_fields(LINEAR)).status == "hit"  # the entry is this version's
    assert execute(plan_build([LINEAR], store), store, planner=tilecopy.plan).ok
    assert store.find_name(LINEAR.full_name, "sm_90a") is not None


def test_an_entry_of_another_version(store, tilecopy):
    (path,) = (path for path in (store.root / "entries").rglob("*") if path.is_file())
    newer(path)
    result = explain(store, LINEAR, Identity().key_fields(LINEAR))
    assert (result.status, "of another version of fusekit" in result.reason) == ("miss", True)
    assert store.verify(full=True).bad == ()
    assert execute(plan_build([LINEAR], store), store, planner=tilecopy.plan).ok
    assert explain(store, LINEAR, Identity().key_fields(LINEAR)).status == "hit"
