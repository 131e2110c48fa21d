"""fusekit export, import, push, pull, key: kernels on their way from one store to another, through the command line."""

import functools
import json
import shutil
import stat
import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest

from fusekit.share.lock_folder import write_lock
from fusekit.store import NameRecord, Store
from fusekit.store.lockfile import Build, Lock
from fusekit.store.signature import read_signing_key
from fusekit_cli.main import main
from tests.cli.conftest import NAMES
from tests.store.samples import build_entry

CUBINS = sum(len(build_entry(seed)[1]) for seed in range(3))  # bytes of the store's


@pytest.fixture
def other(fusekit, tmp_path):
    """The same command line over another store."""

    def run(*arguments, **options):
        return fusekit("--store", str(tmp_path / "other"), *arguments, **options)

    return run


def stated_digest(path):
    """The digest of the loader's directory: the end of the bundle, before 1024 zeros."""
    with tarfile.open(path) as file:
        return file.extractfile("loader.bin").read()[-32:].hex()


def test_export_and_import(fusekit, store, other, tmp_path):
    done = fusekit("export", "kernels.tar", "--json").json
    assert done == {
        "entries": 3,
        "names": 3,
        "bytes": (tmp_path / "kernels.tar").stat().st_size,
        "digest": stated_digest(tmp_path / "kernels.tar"),
        "signed_by": None,
    }
    first = (tmp_path / "kernels.tar").read_bytes()
    assert fusekit("export", "kernels.tar").out.startswith("kernels.tar: 3 names, 3 entries, ")
    assert (tmp_path / "kernels.tar").read_bytes() == first
    assert other("import", "kernels.tar", "--json").json == {"entries": 3, "names": 3, "bytes": CUBINS, "skipped": 0}
    assert other("import", "kernels.tar").out == "3 names, 3 entries, 3 of them there already; 0 B of cubins imported\n"
    assert [row["name"] for row in other("ls", "--json").json] == list(NAMES)
    assert other("verify", "--full", "--json").json["bad"] == []
    assert fusekit("export", "some.tar", "quickstart/linear", "--json").json["names"] == 1
    assert "is not in the store" in fusekit("export", "none.tar", "nothing", code=3).err
    assert not (tmp_path / "none.tar").exists()


def test_a_bad_bundle(fusekit, store, other, tmp_path):
    fusekit("export", "kernels.tar")
    data = (tmp_path / "kernels.tar").read_bytes()
    (tmp_path / "kernels.tar").write_bytes(data[:3000] + b"!" + data[3001:])
    failed = other("import", "kernels.tar", "--json", code=1)
    assert failed.out == ""
    assert "a bundle is imported whole or not at all; get it again" in failed.err
    assert not (tmp_path / "other").exists()
    assert "there is no bundle" in other("import", "absent.tar", code=2).err


def test_push_and_pull(fusekit, store, other, tmp_path):
    pytest.importorskip("fsspec")
    first = fusekit("push", "remote", "quickstart/moe-fc1", "--json").json
    assert (first["entries"], first["names"], first["skipped"]) == (2, 2, 0)
    second = fusekit("push", f"file://{tmp_path}/remote", "--json")
    assert second.json["entries"] == 1
    assert second.json["skipped"] == 2
    assert second.err == ""
    assert fusekit("push", "remote").out == "0 entries and 0 names pushed (0 B), 3 there already\n"

    pulled = other("pull", "remote", "quickstart/linear", "--json").json
    assert (pulled["entries"], pulled["names"], pulled["skipped"], pulled["failed"]) == (1, 1, 0, [])
    assert other("pull", "remote").out.startswith("2 entries and 2 names pulled (")
    assert other("verify", "--full", "--json").json["bad"] == []
    assert [row["name"] for row in other("ls", "--json").json] == list(NAMES)
    assert "does not list 'nothing'" in other("pull", "remote", "nothing", code=3).err
    assert "does not list any kernel" in other("pull", "elsewhere", code=3).err
    assert "Protocol not known" in other("pull", "nowhere://x", code=2).err


def test_pulling_what_is_damaged(fusekit, store, other, tmp_path):
    pytest.importorskip("fsspec")
    fusekit("push", "remote")
    blob = next(path for path in (tmp_path / "remote" / "blobs").rglob("*") if path.is_file())
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    failed = other("pull", "remote", "--json", code=1)
    assert failed.json["entries"] == 2
    ((name, error),) = [(row["name"], row["error"]) for row in failed.json["failed"]]
    assert name in NAMES
    assert "digest" in error
    assert f"fusekit: {name}: " in failed.err
    fusekit("push", "remote", "--full")
    assert other("pull", "remote", "--json").json["entries"] == 1


def test_keys(fusekit, tmp_path):
    pytest.importorskip("cryptography")
    key = fusekit("key", "new", "keys/ours", "--comment", "the build farm", "--json").json
    assert key["line"].startswith("ssh-ed25519 ")
    assert key["line"].endswith(" the build farm")
    assert stat.S_IMODE((tmp_path / "keys" / "ours").stat().st_mode) == 0o600
    assert (tmp_path / "keys" / "ours.pub").read_text() == key["line"] + "\n"
    for file in ("keys/ours", "keys/ours.pub"):
        assert fusekit("key", "show", file, "--json").json == [
            {"id": key["id"], "comment": "the build farm", "line": key["line"]}
        ]
    assert fusekit("key", "show", "keys/ours").out == f"{key['id']}  {key['line']}\n"
    assert "is never overwritten" in fusekit("key", "new", "keys/ours", code=2).err
    assert "PRIVATE" not in fusekit("key", "show", "keys/ours").out
    assert "there is no key file" in fusekit("key", "show", "absent", code=2).err
    assert "there is no signing key" in fusekit("key", "sign", code=2).err


def test_a_store_that_trusts_a_key(fusekit, store, other, tmp_path):
    pytest.importorskip("cryptography")
    for name in ("ours", "stranger"):
        fusekit("key", "new", name)
    trusted = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "ours.pub")}

    # Nothing is signed yet: nothing is loaded, exported or imported.
    listed = fusekit("ls", "--json", **trusted)
    assert listed.json == []
    assert "is not signed" in listed.err
    assert "is not signed" in fusekit("show", NAMES[0], code=1, **trusted).err
    assert "is not signed" in fusekit("export", "x.tar", code=1, **trusted).err
    fusekit("export", "unsigned.tar")
    assert "is not signed" in other("import", "unsigned.tar", code=1, **trusted).err
    fusekit("export", "foreign.tar", "--sign", "stranger")
    assert "which is not trusted" in other("import", "foreign.tar", code=1, **trusted).err
    assert not (tmp_path / "other").exists()

    # The owner signs: then all of it works.
    signed = fusekit("key", "sign", "--sign", "ours", "--json").json
    assert (signed["entries"], signed["names"]) == (3, 3)
    assert len(fusekit("ls", "--json", **trusted).json) == 3
    assert fusekit("verify", "--full", "--json", **trusted).json["bad"] == []
    done = fusekit("export", "signed.tar", FUSEKIT_SIGNING_KEY=str(tmp_path / "ours"))
    assert f"signed by {signed['id']}" in done.out
    for options in ((), ("--sign", "stranger")):
        refused = fusekit("export", "signed.tar", *options, code=2).err
        assert f"signed.tar is signed by {signed['id']}, and this export is " in refused
    fusekit("export", "foreign.tar", "--force")  # the stranger's
    fusekit("export", "signed.tar", "--sign", "ours")
    other("import", "signed.tar", **trusted)
    assert len(other("ls", "--json", **trusted).json) == 3
    fusekit("push", "remote")
    pulled = fusekit("--store", "third", "pull", "remote", "--json", **trusted).json
    assert (pulled["entries"], pulled["failed"]) == (3, [])
    assert Store(tmp_path / "third").verify(full=True).bad == ()


def test_a_push_of_everything_leaves_out_what_nobody_trusted_signed(fusekit, store, other, tmp_path):
    """As a wheel of kernels from elsewhere, in the roots of a team that signs its own."""
    pytest.importorskip("cryptography")
    pytest.importorskip("fsspec")
    fusekit("key", "new", "ours")
    ours = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "ours.pub"), "FUSEKIT_STORES": str(fusekit.root)}
    assert "is not signed" in other("push", "remote", "--sign", "ours", code=1, **ours).err
    fusekit("export", "signed.tar", NAMES[0], "--sign", "ours")
    other("import", "signed.tar", **ours)
    for command in (("push", "remote"), ("export", "x.tar"), ("export", "--wheel", "k-1")):
        done = other(*command, "--sign", "ours", "--json", **ours)
        assert (done.json["names"], done.err.count("left out: ")) == (1, 2)
        assert "is not signed" in other(*command, NAMES[1], "--sign", "ours", code=1, **ours).err


def test_a_store_without_signatures_has_no_line_for_every_kernel(fusekit, store, tmp_path, monkeypatch, capsys):
    pytest.importorskip("cryptography")
    fusekit("key", "new", "ours")
    monkeypatch.setenv("FUSEKIT_TRUSTED_KEYS", str(tmp_path / "ours.pub"))
    monkeypatch.setattr("fusekit_cli.output.SHOWN", 1)
    main(["ls", "--store", str(fusekit.root)])
    lines = capsys.readouterr().err.splitlines()
    assert sum("is not signed" in line for line in lines) == 1
    assert lines[-1] == "left out: 2 more; `fusekit verify` lists them"


def test_a_trusting_store_refuses_what_is_changed(fusekit, store, tmp_path):
    pytest.importorskip("cryptography")
    fusekit("key", "new", "ours")
    fusekit("key", "sign", "--sign", "ours")
    fusekit("export", "signed.tar", "--sign", "ours")
    trusted = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "ours.pub")}
    data = (tmp_path / "signed.tar").read_bytes()
    place = data.index(b'"schema":2')
    (tmp_path / "signed.tar").write_bytes(data[:place] + b'"schema":1' + data[place + 10 :])
    refused = fusekit("--store", "other", "import", "signed.tar", code=1, **trusted)
    assert "changed after they were signed" in refused.err
    for bad in ("absent.pub", "signed.tar"):
        assert bad in fusekit("ls", code=2, FUSEKIT_TRUSTED_KEYS=str(tmp_path / bad)).err


def test_an_empty_list_of_trusted_keys_trusts_nobody(fusekit, store, other, tmp_path):
    pytest.importorskip("cryptography")
    pytest.importorskip("fsspec")
    fusekit("key", "new", "ours")
    fusekit("key", "sign", "--sign", "ours")
    fusekit("export", "signed.tar", "--sign", "ours")
    fusekit("push", "remote")
    for value in ("", ":", " : "):
        for line in (("ls",), ("show", NAMES[0]), ("export", "x.tar"), ("push", "elsewhere")):
            assert "names no file" in fusekit(*line, code=2, FUSEKIT_TRUSTED_KEYS=value).err
        for line in (("import", "signed.tar"), ("pull", "remote")):
            assert "names no file" in other(*line, code=2, FUSEKIT_TRUSTED_KEYS=value).err
    assert not (tmp_path / "other").exists()


# -- elsewhere --------------------------------------------------------------------------------------------------------


def test_what_a_bundle_or_a_remote_holds(fusekit, store, tmp_path):
    pytest.importorskip("fsspec")
    fusekit("export", "kernels.tar")
    fusekit("push", "remote")
    listed = fusekit("ls", "--json").json
    bundle = (tmp_path / "kernels.tar").read_bytes()
    for where in ("kernels.tar", "remote", f"file://{tmp_path}/kernels.tar", f"file://{tmp_path}/remote"):
        rows = fusekit("ls", "--from", where, "--json", FUSEKIT_STORE=str(tmp_path / "none")).json
        assert [row | {"root": None} for row in rows] == [row | {"root": None} for row in listed]
        assert {row["root"] for row in rows} == {where}
        assert len(fusekit("ls", "quickstart/linear", "--from", where, "--json").json) == 1
        report = fusekit("verify", "--full", "--from", where, "--json").json
        assert (report["checked"], report["blobs"], report["bad"], report["full"]) == (6, 3, [], True)
        shown = fusekit("show", NAMES[0], "--from", where, "--json").json
        assert shown | {"root": None} == fusekit("show", NAMES[0], "--json").json | {"root": None}
        assert fusekit("show", "quickstart/moe-fc1", "--from", where, "--json").json["name"] in NAMES
        assert "nothing of that name" in fusekit("ls", "nope", "--from", where).err
        assert "nope" in fusekit("show", "nope", "--from", where, code=3).err
    (tmp_path / "kernels.tar").write_bytes(bundle[:-2000] + b"!" + bundle[-1999:])
    bad = fusekit("verify", "--from", "kernels.tar", "--json", code=1).json
    assert len(bad["bad"]) == 1
    assert "a bundle is imported whole or not at all" in fusekit("ls", "--from", "kernels.tar", code=1).err
    blob = next(path for path in (tmp_path / "remote" / "blobs").rglob("*") if path.is_file())
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    assert fusekit("verify", "--from", "remote", "--json").json["bad"] == []
    assert len(fusekit("verify", "--full", "--from", "remote", "--json", code=1).json["bad"]) == 1
    assert not (tmp_path / "none").exists()


def test_export_to_standard_output(fusekit, store, tmp_path):
    fusekit("export", "kernels.tar")
    line = [sys.executable, "-m", "fusekit", "export", "-"]
    run = {"env": fusekit.environment, "cwd": tmp_path, "capture_output": True, "check": False}
    done = subprocess.run(line, **run)
    assert (done.returncode, done.stdout) == (0, (tmp_path / "kernels.tar").read_bytes())
    assert b"3 names, 3 entries" in done.stderr
    assert not (tmp_path / "-").exists()
    refused = subprocess.run([*line, "--json"], **run)
    assert (refused.returncode, refused.stdout) == (2, b"")


def test_import_from_standard_input(fusekit, store, tmp_path):
    fusekit("export", "kernels.tar")
    for arguments, file in ((["import", "-", "--json"], "kernels.tar"), (["import", "-"], "cut.tar")):
        (tmp_path / "cut.tar").write_bytes((tmp_path / "kernels.tar").read_bytes()[:5000])
        with (tmp_path / file).open("rb") as stream:
            done = subprocess.run(
                [sys.executable, "-m", "fusekit", "--store", "other", *arguments],
                env=fusekit.environment, cwd=tmp_path, stdin=stream, capture_output=True, text=True, check=False,
            )  # fmt: skip
        if file == "kernels.tar":
            assert json.loads(done.stdout) == {"entries": 3, "names": 3, "bytes": CUBINS, "skipped": 0}
        else:
            assert (done.returncode, "standard input has 5000 bytes" in done.stderr) == (1, True)


def test_dry_runs(fusekit, store, other, tmp_path):
    pytest.importorskip("fsspec")
    fusekit("export", "kernels.tar")
    assert "3 entries and 3 names would be pushed (" in fusekit("push", "remote", "--dry-run").out
    assert not (tmp_path / "remote").exists()
    done = fusekit("push", "remote", "--json").json
    for arguments in (("pull", "remote"), ("import", "kernels.tar")):
        dry = other(*arguments, "--dry-run", "--json").json
        assert dry["dry_run"]
        assert [row["name"] for row in dry["would"]] == list(NAMES)
        assert (dry["entries"], dry["names"]) == (done["entries"], done["names"])
        assert "would be" in other(*arguments, "--dry-run").out
        assert not (tmp_path / "other").exists()


def test_a_lock_protects_against_what_is_older(fusekit, store, other, tmp_path):
    """Yesterday's names, entries and signatures are all good; only who knows today's can tell."""
    pytest.importorskip("cryptography")
    pytest.importorskip("fsspec")
    fusekit("key", "new", "ours")
    trusted = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "ours.pub")}
    fusekit("push", "remote", "--sign", "ours")
    fusekit("export", "yesterday.tar", "--sign", "ours")
    shutil.copytree(tmp_path / "remote", tmp_path / "yesterday")
    entry, cubin = build_entry(7)
    store.publish(entry, cubin)
    store.publish_name(NameRecord(NAMES[0], "sm_90a", entry.key, {}, {}))
    fusekit("push", "remote", "--sign", "ours")
    fusekit("export", "today.tar", "--sign", "ours")
    kernels = {
        (listed.record.name, listed.record.arch): (Build.of("dsl", store.find_entry(listed.record.key)),)
        for listed in store.names()
    }
    path = tmp_path / "fusekit.lock"
    lock = Lock("0" * 32, 1, None, {"dsl": {}}, {}, kernels)
    write_lock(lock, path, read_signing_key(tmp_path / "ours"))
    locked = {**trusted, "FUSEKIT_LOCK": str(path)}

    other("pull", "yesterday", **trusted)  # signed, and so taken: docs/remotes.md says so
    for run in (other, functools.partial(fusekit, "--store", "fresh")):
        refused = run("pull", "yesterday", "--json", code=1, **locked)
        assert [row["name"] for row in refused.json["failed"]] == [NAMES[0]]
        assert f"the build {entry.key[:12]} that the lock lists" in refused.err
        older = run("import", "yesterday.tar", code=1, **locked)
        assert "is not listed in" in older.err
        assert run("pull", "remote", "--json", **locked).json["failed"] == []
        assert run("import", "today.tar", "--json", **locked).json["names"] == 3
        assert run("verify", "--json", **locked).json["bad"] == []
    assert fusekit("--store", "one", "pull", "remote", NAMES[1], "--json", **locked).json["entries"] == 1
    assert "lists none of these names" in other("pull", "remote", "nothing", code=2, **locked).err
    (bad, *_) = fusekit("--store", "one", "verify", "--json", code=1, **locked).json["bad"]
    assert "is in the lock and not here" in bad["problem"]
    # What is withheld is missed, and a lock that is not today's own bytes is refused.
    for file in (tmp_path / "remote" / "entries").rglob(f"{entry.key}.json"):
        file.unlink()
    assert "does not have it" in fusekit("--store", "new", "pull", "remote", code=1, **locked).err
    path.write_text(path.read_text().replace(entry.key, build_entry(0)[0].key))
    assert "changed after they were signed" in other("pull", "remote", code=1, **locked).err
    next(tmp_path.glob("*.sig")).unlink()
    assert "is not signed" in other("pull", "remote", code=1, **locked).err


def test_verify_holds_a_store_against_a_lock(fusekit, store, tmp_path):
    """A name that is gone, one that leads to an older kernel, and a launch record that is another one are seen."""
    names = [listed.record for listed in store.names()]
    listed = {record.name: Build.of("cutlass-dsl-4.8.1", store.find_entry(record.key)) for record in names}

    def written(kernels):
        lock = Lock.of_folder("sm_90a", {"nvidia-cutlass-dsl": "4.8.1"}, kernels)
        return str(write_lock(lock, tmp_path / "x.json", folder=True))

    path = written(listed)
    fusekit("verify", "--check", path)
    fusekit("push", "remote")
    fusekit("verify", "--check", path, "--from", "remote")
    older, cubin = build_entry(7)
    store.publish(older, cubin)
    store.publish_name(NameRecord(NAMES[0], "sm_90a", older.key, {}, {}))
    store.roots[0].name_path(NAMES[1], "sm_90a").unlink()
    path = written({**listed, NAMES[2]: replace(listed[NAMES[2]], launch_sha256="0" * 64)})
    bad = [row["problem"] for row in fusekit("verify", "--check", path, "--json", code=1).json["bad"]]
    assert ["points to" in bad[0], "is not there" in bad[1], "has another launch record" in bad[2]] == [True] * 3
    assert len(bad) == 3
    assert fusekit("verify", "--json").json["bad"] == []
    (only,) = fusekit("verify", "--check", path, "--from", "remote", "--json", code=1).json["bad"]
    assert "has another launch record" in only["problem"]
