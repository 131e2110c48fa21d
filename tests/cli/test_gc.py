"""gc and copy over a store of test entries."""

import os
import time

import pytest

from fusekit.store import Store
from fusekit.store.marks import mark_path
from fusekit_cli.main import main
from tests.cli.conftest import NAMES
from tests.store.samples import build_entry


@pytest.fixture
def aged(store):
    """The three kernels, used one, two and three days ago, the first one last."""
    for seed in range(3):
        entry, _ = build_entry(seed)
        stamp = time.time() - (seed + 1) * 86400
        for path in (mark_path(store.root, entry.key), store.roots[0].entry_path(entry.key)):
            os.utime(path, (stamp, stamp))
    return store


def test_gc_by_age(aged, fusekit):
    document = fusekit("gc", "--max-age", "36h", "--json").json
    assert (document["removed"], document["kept"], document["dry_run"]) == (2, 1, False)
    assert document["freed_bytes"] == sum(row["bytes"] for row in document["evicted"])
    assert [row["reason"] for row in document["evicted"]] == ["age", "age"]
    assert document["evicted"][0]["names"] == [f"{NAMES[2]}.sm_90a.json"]
    assert [row["name"] for row in fusekit("ls", "--json").json] == [NAMES[0]]
    assert fusekit("verify", "--full", "--json").json["bad"] == []


def test_gc_by_size(aged, fusekit):
    total = fusekit("gc", "--json").json["kept_bytes"]
    document = fusekit("gc", "--max-size", str(total - 1), "--json").json
    assert (document["removed"], document["kept"]) == (1, 2)
    assert document["kept_bytes"] <= total - 1
    assert fusekit("gc", "--max-size", "0", "--json").json["kept"] == 0


def test_gc_for_people(aged, fusekit):
    said = fusekit("gc", "--max-age", "2.5d", "--dry-run").out
    assert NAMES[2] in said
    assert "1 kernel would be removed" in said
    assert len(fusekit("ls", "--json").json) == 3
    assert "1 kernel removed" in fusekit("gc", "--max-age", "2.5d").out
    assert "2 kernels" in fusekit("gc").out


def test_gc_leaves_what_a_build_uses(aged, fusekit):
    with aged.lease():
        aged.present(build_entry(2)[0].key)
        result = fusekit("gc", "--max-size", "0", "--json")
    assert (result.json["removed"], result.json["kept"], result.json["in_use"]) == (2, 1, 1)
    assert "are in use by a build or launch" in result.err


def test_gc_names_what_is_not_its_own(aged, fusekit):
    (fusekit.root / "locks").mkdir(exist_ok=True)
    (fusekit.root / "locks" / "terraform.tfstate").write_text("precious")
    result = fusekit("gc", "--max-size", "0", "--json")
    assert result.json["strays"] == [str(fusekit.root / "locks" / "terraform.tfstate")]
    assert len(result.json["files"]) >= 9
    assert "not fusekit's, and not touched: " in result.err


def test_gc_of_no_store(fusekit):
    result = fusekit("gc", "--max-size", "1G", "--json")
    assert result.json["removed"] == 0
    assert "there is no store" in result.err
    assert not fusekit.root.exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("12", 12), ("12B", 12), ("1K", 1024), ("1k", 1024), ("1KiB", 1024), ("1KB", 1000), ("1.5M", 1572864),
        ("2g", 2 << 30), ("2GB", 2 * 10**9), ("1T", 1 << 40),
        ("1" + "0" * 400, 10**400),
    ],
)  # fmt: skip
def test_sizes(text, size):
    from fusekit_cli.gc import _size

    assert _size(None, None, text) == size


@pytest.mark.parametrize(
    "option",
    [("--max-size", "lots"), ("--max-size", "-1"), ("--max-age", "1y"), ("--max-age", ""), ("--max-age", "90")],
)
def test_what_is_no_size_or_age(fusekit, option):
    result = fusekit("gc", *option, code=2)
    assert result.out == ""
    assert "is not a size" in result.err or "is not an age" in result.err


def test_copy(store, fusekit, tmp_path):
    layered = {"FUSEKIT_STORE": str(tmp_path / "own"), "FUSEKIT_STORES": str(fusekit.root)}
    document = fusekit("copy", "quickstart/moe-fc1", "--json", **layered).json
    assert [row["name"] for row in document["copied"]] == list(NAMES[1:])
    assert document["bytes"] == sum(len(build_entry(seed)[1]) for seed in (1, 2))
    again = fusekit("copy", "--json", **layered).json
    assert [row["name"] for row in again["copied"]] == [NAMES[0]]
    assert [row["name"] for row in again["present"]] == list(NAMES[1:])
    own = Store(tmp_path / "own")
    assert len(own.names()) == 3
    assert not own.verify(full=True).bad
    fusekit("copy", "nothing", code=3, **layered)
    assert main(["copy", "quickstart/linear", "--store", str(fusekit.root)]) == 0
