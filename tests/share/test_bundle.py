"""Bundles: the same bytes from the same kernels."""

import dataclasses
import os
import subprocess
import sys
import tarfile

import pytest

from fusekit.errors import IntegrityError, NotBuiltError, StoreError, UsageError
from fusekit.share.bundle import BLOCK, INDEX, export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.loader import member
from fusekit.share.selection import select
from fusekit.store import Store
from tests.share.bundles import NAMES, fill, read_index, refused
from tests.store.samples import build_entry, files


def test_from_one_store_to_another(store, bundle, tmp_path):
    done = import_bundle(Store(tmp_path / "seeded"), bundle)
    cubins = {build_entry(seed)[0].cubin_sha256: build_entry(seed)[0].cubin_bytes for seed in range(3)}
    assert (done.entries, done.names, done.skipped) == (4, 5, 0)
    assert done.bytes == sum(cubins.values()) + build_entry(0)[0].cubin_bytes
    assert files(tmp_path / "seeded") == files(tmp_path / "store")
    assert not Store(tmp_path / "seeded").verify(full=True).bad
    again = import_bundle(Store(tmp_path / "seeded"), bundle)
    assert (again.entries, again.skipped, again.bytes) == (4, 4, 0)


def test_the_same_kernels_give_the_same_bytes(bundle, tmp_path):
    """Another store, filled in another order, in another process with another hash seed, umask and time."""
    code = (
        "import os, sys; os.umask(0o077); from pathlib import Path; from fusekit.store import Store\n"
        "from fusekit.share.bundle import export_bundle; from fusekit.share.bundle_import import import_bundle\n"
        "from fusekit.share.selection import select\n"
        "store = Store(Path(sys.argv[2])); import_bundle(store, Path(sys.argv[1]))\n"
        "export_bundle(store, select(store, ['other', 'quickstart', '*fc1*']), Path(sys.argv[3]))"
    )
    for seed in ("0", "1"):
        arguments = [bundle, tmp_path / f"store-{seed}", tmp_path / f"again-{seed}"]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "LC_ALL": "C"}
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment)
        assert (tmp_path / f"again-{seed}").read_bytes() == bundle.read_bytes()


def test_it_is_a_plain_tar_file_of_a_store(bundle, tmp_path):
    with tarfile.open(bundle, "r:") as tar:
        assert tar.getnames()[0] == INDEX
        assert {member.mtime for member in tar} == {0}
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.0 to 3.11.3 has none
        tar.extractall(tmp_path / "unpacked", **safely)
    (tmp_path / "unpacked" / INDEX).unlink()
    assert files(tmp_path / "unpacked") == files(tmp_path / "store")
    assert bundle.stat().st_size % BLOCK == 0


def test_a_selection(store, tmp_path):
    path = tmp_path / "some.tar"
    done = export_bundle(store, select(store, ["other"]), path)
    assert (done.entries, done.names, done.bytes) == (2, 2, path.stat().st_size)
    assert [member.subject[0] for member in read_index(path).of("name")] == ["other/fc1@b", "other/fc2@a"]
    with pytest.raises(NotBuiltError, match="nothing"):
        select(store, ["other", "nothing"])
    nothing = export_bundle(Store(tmp_path / "none"), select(Store(tmp_path / "none")), path)
    assert (nothing.entries, import_bundle(Store(tmp_path / "seeded"), path).entries) == (0, 0)


def test_every_root_is_exported_and_the_writable_one_is_filled(store, bundle, tmp_path):
    layered = Store(tmp_path / "top", [tmp_path / "store"])
    path = tmp_path / "layered.tar"
    export_bundle(layered, select(layered), path)
    assert path.read_bytes() == bundle.read_bytes()
    import_bundle(layered, path)  # what a root below has is what this disk is to have too
    assert files(tmp_path / "top") == files(tmp_path / "store")


def test_a_damaged_store_is_not_exported(store, tmp_path):
    path = tmp_path / "kernels.tar"
    path.write_bytes(b"what was there")
    blob = store.roots[0].blob_path(build_entry(1)[0].cubin_sha256)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match="digest"):
        export_bundle(store, select(store), path)
    store.roots[0].name_path(NAMES[0], "sm_90a").unlink()
    store.roots[0].name_path(NAMES[0], "sm_90a").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="has no digest"):
        select(store)
    assert path.read_bytes() == b"what was there"
    assert {path.name for path in tmp_path.iterdir()} == {"store", "kernels.tar"}


def test_a_file_that_cannot_be_written(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        export_bundle(store, select(store), tmp_path / "file" / "kernels.tar")
    with pytest.raises(UsageError, match="there is no folder"):
        export_bundle(store, select(store), tmp_path / "absent" / "kernels.tar")


def test_what_is_no_plain_file_is_not_replaced(store, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name in ("fifo", "null", "folder"):
        with pytest.raises(UsageError, match="is no plain file"):
            export_bundle(store, select(store), tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert not (tmp_path / "fifo").is_file()
    assert (tmp_path / "null").is_symlink()


def test_a_link_to_an_open_stream_is_not_replaced(store, tmp_path):
    """/dev/stdout is such a link, also where it leads to a plain file at the moment."""
    with (tmp_path / "open").open("wb") as file:
        (tmp_path / "first").symlink_to(f"/proc/self/fd/{file.fileno()}")
        (tmp_path / "second").symlink_to("first")
        for name in ("first", "second"):
            with pytest.raises(UsageError, match="is a link to an open stream"):
                export_bundle(store, select(store), tmp_path / name)
            assert (tmp_path / name).is_symlink()
    assert (tmp_path / "open").read_bytes() == b""


def test_an_import_that_is_killed_is_finished_by_the_next(bundle, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    target = Store(tmp_path / "seeded")
    publish, calls = Store.publish, []

    def second_is_the_last(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Killed
        return publish(self, *arguments)

    monkeypatch.setattr(Store, "publish", second_is_the_last)
    with pytest.raises(Killed):
        import_bundle(target, bundle)
    assert target.names() == []  # no name leads to what is not there
    assert not target.verify(full=True).bad
    monkeypatch.undo()
    assert import_bundle(target, bundle).skipped == 2
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_an_import_repairs_what_is_damaged(bundle, tmp_path):
    target = Store(tmp_path / "seeded")
    import_bundle(target, bundle)
    for path in (
        target.roots[0].blob_path(build_entry(1)[0].cubin_sha256),
        target.roots[0].entry_path(build_entry(2)[0].key),
        target.roots[0].name_path(NAMES[0], "sm_90a"),
    ):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-2])
    assert len(target.verify(full=True).bad) >= 3
    import_bundle(target, bundle)
    assert not target.verify(full=True).bad


def test_what_is_there_under_a_key_stands(store, bundle, tmp_path):
    """Two builds of one key: the entry that was published first stays, with its own cubin."""
    target = Store(tmp_path / "seeded")
    entry, _ = build_entry(0)
    other = dataclasses.replace(build_entry(0, b"another cubin")[0], seconds=9.0)
    target.publish(other, b"another cubin")
    import_bundle(target, bundle)
    assert target.find_entry(entry.key) == other
    assert not target.verify(full=True).bad


def test_what_the_loader_reads_comes_last_and_stays_in_the_file(tmp_path):
    """Every import checks it, and takes nothing of it."""
    store = fill(Store(tmp_path / "store"))
    offsets, content = {}, []

    def loader(before):
        offsets.update(before)
        content.append(member(select(store), before)[0])
        return content[0], "digest"

    done = export_bundle(store, select(store), tmp_path / "kernels.tar", loader)
    assert done.digest == "digest"
    data = (tmp_path / "kernels.tar").read_bytes()
    place = data.index(content[0])
    for cubin, before in offsets.items():
        entry = next(entry for entry, _ in select(store).entries if entry.cubin_sha256 == cubin)
        assert data[place - before :].startswith(store.read_cubin(entry))
    export_bundle(store, select(store), tmp_path / "plain.tar")
    for name in ("kernels", "plain"):
        import_bundle(Store(tmp_path / name), tmp_path / f"{name}.tar")
    assert files(tmp_path / "kernels") == files(tmp_path / "plain")
    (tmp_path / "kernels.tar").write_bytes(data[: place + 7] + b"!" + data[place + 8 :])
    refused(tmp_path / "kernels.tar", tmp_path / "other", "'loader.bin' with the digest")
