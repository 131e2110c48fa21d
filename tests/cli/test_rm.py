"""fusekit rm: names go, with what only they kept; everything else stays."""

import errno
import json
import time

import pytest

from fusekit.store import NameRecord, Store
from fusekit_cli.main import main
from tests.cli.conftest import NAMES, SPEC
from tests.cli.test_explain import fill
from tests.store.collecting import unreadable_files
from tests.store.samples import build_entry

LINEAR, SMALL, LARGE = NAMES
TICK = 0.06  # what is younger counts as in use


@pytest.fixture
def rm(store, fusekit, capsys, monkeypatch):
    """`fusekit rm` in this process, after the store's clock has ticked; its document and its notes."""
    monkeypatch.delenv("FUSEKIT_STORES", raising=False)

    def run(*arguments, code=0):
        time.sleep(TICK)
        assert main(["rm", "--store", str(fusekit.root), "--json", *arguments]) == code
        captured = capsys.readouterr()
        return json.loads(captured.out) if captured.out else None, captured.err

    return run


def files(root):
    kept = ("entries", "blobs", "names", "signatures")
    return {
        path.relative_to(root): path.read_bytes() for top in kept for path in (root / top).rglob("*") if path.is_file()
    }


def names(store):
    return [listed.record.name for listed in store.names()]


def test_a_name_and_its_kernel(store, rm):
    before = files(store.root)
    dry, _ = rm(LINEAR, "--dry-run")
    assert files(store.root) == before
    done, err = rm(LINEAR)
    assert done | {"dry_run": True} == dry
    assert (done["removed"], done["kernels"], err) == ([{"name": LINEAR, "arch": "sm_90a"}], 1, "")
    gone = before.keys() - files(store.root).keys()
    assert sum(len(before[path]) for path in gone) == done["freed_bytes"]
    assert sorted(path.parts[0] for path in gone) == ["blobs", "entries", "names"]
    assert names(store) == [SMALL, LARGE]
    assert not store.verify(full=True).bad


def test_globs_files_and_kernels(store, rm):
    assert [row["name"] for row in rm("*/moe-*@128x192*")[0]["removed"]] == [LARGE]
    assert [row["name"] for row in rm("quickstart/moe-fc1")[0]["removed"]] == [SMALL]
    document, err = rm("quickstart", "nothing", code=3)
    assert (document, "'nothing' is not in the store" in err) == (None, True)
    assert [row["name"] for row in rm("quickstart", "--arch", "sm_90a")[0]["removed"]] == [LINEAR]
    assert rm("quickstart", code=3)[0] is None
    assert not [path for path in files(store.root) if path.parts[0] in ("blobs", "entries", "names")]


def test_a_kernel_that_another_name_needs_stays(store, rm):
    entry, _ = build_entry(0)
    store.publish_name(NameRecord("other/linear@w1", "sm_90a", entry.key, SPEC, {}))
    done, err = rm(LINEAR)
    assert done["kept"] == [{"key": entry.key, "needed_by": [{"name": "other/linear@w1", "arch": "sm_90a"}]}]
    assert (done["kernels"], "stays: other/linear@w1 needs it" in err) == (0, True)
    assert names(store) == ["other/linear@w1", SMALL, LARGE]
    assert store.load(entry.key) is not None
    assert rm("other/linear", "*/linear*")[0]["kernels"] == 1


def test_both_names_of_a_kernel_at_once(store, rm):
    entry, _ = build_entry(0)
    store.publish_name(NameRecord("other/linear@w1", "sm_90a", entry.key, SPEC, {}))
    assert (rm("*/linear")[0]["kernels"], store.load(entry.key)) == (1, None)


def test_read_only_roots_are_left_alone(fusekit, store, tmp_path, rm):
    roots = {"FUSEKIT_STORES": str(store.root)}
    upper = tmp_path / "upper"
    lower = fusekit("rm", LINEAR, "--store", str(upper), code=3, **roots)
    assert f"is in the read-only root {store.root} only" in lower.err
    fusekit("copy", LINEAR, "--store", str(upper), **roots)
    time.sleep(TICK)
    before = files(store.root)
    done = fusekit("rm", LINEAR, "--store", str(upper), "--json", **roots)
    assert done.json["in_roots"] == [{"name": LINEAR, "arch": "sm_90a", "root": str(store.root)}]
    assert "is taken from the read-only root" in done.err
    assert files(store.root) == before
    assert not Store(upper).names()


def test_damaged_and_strange_files(store, rm, tmp_path):
    """A record that cannot be read goes by its name; a link stays, and so does what it leads to."""
    path = store.roots[0].name_path(LINEAR, "sm_90a")
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    store.roots[0].name_path("quickstart/link@x", "sm_90a").symlink_to(outside)
    done, err = rm("quickstart/li*")
    assert [row["name"] for row in done["removed"]] == [LINEAR]
    assert [row["name"] for row in done["not_removed"]] == ["quickstart/link@x"]
    assert "quickstart/link@x (sm_90a) stays: it changed meanwhile, or is no plain file" in err
    assert outside.read_text() == "{}"
    assert not path.exists()


def test_what_a_running_build_relies_on_stays(store, rm):
    entry, _ = build_entry(0)
    with store.lease():
        store.present(entry.key)
        done, err = rm(LINEAR)
    assert (done["kernels"], done["in_use"]) == (0, [entry.key])
    assert "a build or a launch uses it now" in err
    assert names(store) == [SMALL, LARGE]
    assert store.load(entry.key) is not None


def test_a_name_that_cannot_be_read(store, rm, monkeypatch):
    entry, _ = build_entry(0)
    store.publish_name(NameRecord("other/linear@w1", "sm_90a", entry.key, SPEC, {}))
    other = store.roots[0].name_path("other/linear@w1", "sm_90a")
    unreadable_files(monkeypatch, errno.EACCES)(other)
    done, err = rm(LINEAR, code=1)
    assert (done["kernels"], done["unread"]) == (0, [str(other)])
    assert done["may_be_needed"] == {"kernels": [entry.key], "cubins": 0}
    assert f"{other} cannot be read, so what it needs is not known: kernel {entry.key[:12]} may be needed" in err
    done, err = rm("other/linear", code=1)
    assert done["without_kernel"] == done["removed"] == [{"name": "other/linear@w1", "arch": "sm_90a"}]
    assert store.load(entry.key) is not None


def test_an_entry_that_cannot_be_read(store, rm, monkeypatch):
    unreadable_files(monkeypatch, errno.EIO)(store.roots[0].entry_path(build_entry(1)[0].key))
    done, err = rm(LINEAR, code=1)
    assert (done["kernels"], done["may_be_needed"]) == (1, {"kernels": [], "cubins": 1})
    assert "1 cubin may be needed, and stays" in err


def test_gc_with_a_name_that_cannot_be_read(store, fusekit, capsys, monkeypatch):
    time.sleep(TICK)
    name = store.roots[0].name_path(LINEAR, "sm_90a")
    unreadable_files(monkeypatch, errno.ESTALE)(name)
    assert main(["gc", "--store", str(fusekit.root), "--max-size", "0"]) == 1
    captured = capsys.readouterr()
    assert "0 kernels removed" in captured.out
    assert f"{name} cannot be read" in captured.err


def test_prune_with_a_name_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    fill(tmp_path)
    store = Store(tmp_path)
    entry = store.publish(*build_entry(1))
    for name in ("quickstart/linear@old", "other/linear@w1"):
        store.publish_name(NameRecord(name, "sm_90a", entry.key, SPEC, {}))
    time.sleep(TICK)
    unreadable_files(monkeypatch, errno.EIO)(store.roots[0].name_path("other/linear@w1", "sm_90a"))
    assert main(["build", "quickstart/linear", "--prune", "--store", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "removed, as the spec no longer has them: quickstart/linear@old" in err
    assert f"kernel {entry.key[:12]} may be needed, and stays" in err
    assert store.load(entry.key) is not None
