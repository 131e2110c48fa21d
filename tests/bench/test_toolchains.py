"""The comparison of two toolchains: which names, which cubins, what differs."""

import dataclasses

import pytest

from fusekit.store import Store
from tests.benchmarks import toolchains
from tests.share.remotes import fill
from tests.store.samples import build_entry, build_record


@pytest.fixture
def stores(tmp_path):
    """Three names that both have; of the last, another cubin with other registers in the second."""
    first, second = fill(Store(tmp_path / "first")), fill(Store(tmp_path / "second"))
    entry, cubin = build_entry(9)
    changed = dataclasses.replace(entry, resources=entry.resources | {"registers": 200})
    second.publish(changed, cubin)
    second.publish_name(build_record(changed, "other/fc1@b"))
    return first, second


def test_only_cubins_that_differ_are_listed(stores, monkeypatch, capsys):
    monkeypatch.setattr(toolchains, "instructions", lambda cubin, symbol: (symbol,) * len(cubin))
    paths = [str(store.root) for store in stores]
    assert toolchains.main(paths) == 0
    _, _, row, _, total = capsys.readouterr().out.splitlines()
    before = stores[0].load(stores[0].find_name("other/fc1@b", "sm_90a").key)[0]
    assert row.startswith(f"| other/fc1@b | sm_90a | {before.resources['registers']} to 200 | ")
    assert total == "3 kernels in both stores; 2 have the same cubin."


def test_a_name_of_one_store_fails_the_comparison(stores, capsys):
    entry, cubin = build_entry(11)
    stores[1].publish(entry, cubin)
    stores[1].publish_name(build_record(entry, "quickstart/more@a"))
    assert toolchains.main([*(str(store.root) for store in stores), "quickstart/*"]) == 1
    assert capsys.readouterr().out.endswith("only in one store: quickstart/more@a for sm_90a\n")
