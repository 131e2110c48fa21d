"""Signatures: what is trusted is loaded, and not one byte of anything else."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from fusekit import Config
from fusekit.errors import IntegrityError, SignatureError, StoreError, UsageError
from fusekit.share.selection import select, sign_selection
from fusekit.store import NameRecord, Store, documents
from fusekit.store.keys import sha256
from fusekit.store.signature import Trust, read_signing_key
from tests.store.samples import build_entry, build_record


def signed_store(keys, name="ours", trust=None, root="store"):
    return Store(keys / root, trust=trust, signing_key=keys / name)


def trusting(keys, *names, root="store", read_only=(), signing_key=None):
    trust = Trust([keys / f"{name}.pub" for name in names or ("ours",)])
    return Store(keys / root, read_only, trust=trust, signing_key=signing_key)


def fill(store, seed=0, signatures=None):
    entry, cubin = build_entry(seed)
    store.publish(entry, cubin, signatures)
    record = build_record(entry)
    store.publish_name(record, signatures)
    return entry, record


# -- signatures -------------------------------------------------------------------------------------------------------


def test_a_signature_is_of_one_kind_of_document_and_of_its_bytes(keys):
    signer, trust = read_signing_key(keys / "ours"), Trust([keys / "ours.pub"])
    signatures = signer.sign("entry", b"data")
    with pytest.raises(SignatureError, match="changed after they were signed"):
        trust.check("name", b"data", signatures, "it")
    with pytest.raises(SignatureError, match="changed after they were signed"):
        trust.check("entry", b"Data", signatures, "it")
    broken = {signer.public.id: bytes(64)}
    with pytest.raises(SignatureError, match="changed after they were signed"):
        trust.check("entry", b"data", broken, "it")
    with pytest.raises(SignatureError, match="is not signed"):
        trust.check("entry", b"data", {}, "it")


def test_another_key_under_our_id_is_no_good(keys):
    ours, stranger = read_signing_key(keys / "ours"), read_signing_key(keys / "stranger")
    forged = {ours.public.id: stranger.sign("entry", b"data")[stranger.public.id]}
    with pytest.raises(SignatureError, match="changed after they were signed"):
        Trust([keys / "ours.pub"]).check("entry", b"data", forged, "it")


def test_a_false_signature_is_refused_beside_a_good_one(keys):
    ours, stranger = read_signing_key(keys / "ours"), read_signing_key(keys / "stranger")
    trust = Trust([keys / "ours.pub", keys / "stranger.pub"])
    both = ours.sign("entry", b"data") | stranger.sign("entry", b"data")
    assert trust.check("entry", b"data", both, "it") == ours.public
    with pytest.raises(SignatureError):
        trust.check("entry", b"data", both | {stranger.public.id: bytes(64)}, "it")


# -- stores -----------------------------------------------------------------------------------------------------------


def test_a_signed_store_is_read_by_those_who_trust_it_and_by_those_who_ask_for_no_signature(keys):
    entry, record = fill(signed_store(keys))
    for store in (trusting(keys), trusting(keys, "stranger", "ours"), Store(keys / "store")):
        assert store.load(entry.key)[0] == entry
        assert store.find_name(record.name, record.arch) == record
        assert not store.verify(full=True).bad


def test_what_is_unsigned_is_refused_before_it_is_parsed(keys, monkeypatch):
    entry, record = fill(Store(keys / "store"))

    def parse(*_):
        raise AssertionError("parsed")

    monkeypatch.setattr(documents, "unseal", parse)
    monkeypatch.setattr("fusekit.store.entries.unseal", parse)
    monkeypatch.setattr("fusekit.store.names.unseal", parse)
    store = trusting(keys)
    for read in (
        lambda: store.load(entry.key),
        lambda: store.find_entry(entry.key),
        lambda: store.find_name(record.name, record.arch),
        lambda: store.variants(record.name.partition("@")[0], record.arch),
    ):
        with pytest.raises(IntegrityError, match="is not signed; only what is signed by a trusted key"):
            read()
    assert store.names() == []
    assert len(store.verify().bad) == 2


def test_what_a_stranger_signed_is_refused(keys):
    entry, record = fill(signed_store(keys, "stranger"))
    stranger = read_signing_key(keys / "stranger").public.id
    with pytest.raises(SignatureError, match=rf"signed only by {stranger}|is not signed"):
        trusting(keys).load(entry.key)
    with pytest.raises(SignatureError):
        trusting(keys).find_name(record.name, record.arch)


def test_tampering_with_a_signed_store(keys):
    """Whoever can write a store can write digests too; only a signature stops this."""
    entry, record = fill(signed_store(keys))
    other, cubin = build_entry(1)
    fill(Store(keys / "elsewhere"), seed=1)
    store, plain = trusting(keys), Store(keys / "store")
    root = plain.roots[0]

    def replace(path, data):
        path.chmod(0o644)
        path.write_bytes(data)

    # The name is led to another kernel, whose entry and cubin are planted, all with right digests.
    plain.publish(other, cubin, {})
    replace(root.name_path(record.name, record.arch), build_record(other).to_bytes())
    assert plain.find_name(record.name, record.arch).key == other.key
    with pytest.raises(SignatureError):
        store.find_name(record.name, record.arch)
    with pytest.raises(SignatureError):
        store.load(other.key)

    # The entry is changed, with a right digest.
    forged = dataclasses.replace(entry, launch={**entry.launch, "dynamic_shared": 0})
    replace(root.entry_path(entry.key), forged.to_bytes())
    assert plain.find_entry(entry.key) == forged
    with pytest.raises(SignatureError):
        store.load(entry.key)

    # The genuine signature is put beside the forged entry.
    genuine = root.signature_path(documents.sha256(entry.to_bytes()), read_signing_key(keys / "ours").public.id)
    target = root.signature_path(documents.sha256(forged.to_bytes()), genuine.name.rpartition(".")[2])
    target.parent.mkdir(exist_ok=True)
    shutil.copy(genuine, target)
    with pytest.raises(SignatureError, match="changed after they were signed"):
        store.load(entry.key)

    # A signature that is a link, a folder, or too long, is none.
    for make in (
        lambda: target.symlink_to(genuine),
        lambda: target.mkdir(),
        lambda: target.write_bytes(genuine.read_bytes() + b"\0"),
    ):
        target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink()
        make()
        with pytest.raises(IntegrityError):
            store.load(entry.key)


@pytest.mark.parametrize("what", ["unsigned", "a stranger's"])
def test_a_signed_name_does_not_vouch_for_the_listing_of_its_entry(keys, what):
    store = signed_store(keys)
    entry, _ = fill(store)
    ours = read_signing_key(keys / "ours").public.id
    path = store.roots[0].signature_path(sha256(entry.to_bytes()), ours)
    path.unlink()
    if what != "unsigned":
        path.write_bytes(read_signing_key(keys / "stranger").sign("entry", entry.to_bytes()).popitem()[1])
    overview = trusting(keys).overview()
    assert overview.rows == ()
    (problem,) = overview.problems
    assert str(store.roots[0].entry_path(entry.key)) in problem
    assert len(Store(keys / "store").overview().rows) == 1


def test_a_changed_cubin_of_a_signed_entry_is_refused(keys):
    entry, _ = fill(signed_store(keys))
    store = trusting(keys)
    blob = store.roots[0].blob_path(entry.cubin_sha256)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match="digest"):
        store.load(entry.key)


def test_an_unsigned_root_does_not_hide_a_signed_one_below(keys):
    fill(Store(keys / "store"))
    entry, record = fill(signed_store(keys, root="below"))
    store = trusting(keys, read_only=[keys / "below"])
    assert store.load(entry.key)[0] == entry
    assert store.find_name(record.name, record.arch) == record


def test_a_trusting_store_takes_only_what_it_could_read(keys):
    entry, cubin = build_entry()
    with pytest.raises(SignatureError, match="would be signed by nobody"):
        trusting(keys).publish(entry, cubin)
    with pytest.raises(SignatureError, match=r"would be signed by [0-9a-f]{16}"):
        trusting(keys, signing_key=keys / "stranger").publish(entry, cubin)
    foreign = read_signing_key(keys / "stranger").sign("entry", entry.to_bytes())
    with pytest.raises(SignatureError, match="signed only by"):
        trusting(keys).publish(entry, cubin, foreign)
    assert not (keys / "store").exists()
    store = trusting(keys, signing_key=keys / "ours")
    store.publish(entry, cubin)
    store.publish_name(build_record(entry))
    assert trusting(keys).load(entry.key)[1] == cubin


def test_an_untrusted_entry_gives_way_to_a_trusted_one(keys):
    entry, record = fill(Store(keys / "store"))
    store = trusting(keys, signing_key=keys / "ours")
    fill(store)
    assert trusting(keys).load(entry.key)[0] == entry
    assert trusting(keys).find_name(record.name, record.arch) == record


def test_a_planted_signature_file_is_replaced(keys):
    store = signed_store(keys)
    entry, cubin = build_entry()
    ((key_id, signature),) = store.sign("entry", entry.to_bytes()).items()
    path = store.roots[0].signature_path(documents.sha256(entry.to_bytes()), key_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(64))
    store.publish(entry, cubin)
    assert path.read_bytes() == signature


def test_signing_what_is_there_checks_it_first(keys):
    entry, _ = fill(Store(keys / "store"))
    store = signed_store(keys)
    selection = select(store)
    blob = store.roots[0].blob_path(entry.cubin_sha256)
    whole = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(whole[:-1] + b"!")
    with pytest.raises(IntegrityError):
        sign_selection(store, selection)
    assert not (keys / "store" / "signatures").exists()
    blob.write_bytes(whole)
    sign_selection(store, selection)
    assert trusting(keys).load(entry.key)[0] == entry


def test_a_trust_that_cannot_be_read_refuses_everything(keys):
    entry, record = fill(signed_store(keys))
    for store in (Store(keys / "store", trust=Trust([keys / "absent"])), Store(keys / "store", trust=Trust())):
        with pytest.raises(UsageError):
            store.load(entry.key)
        with pytest.raises(UsageError):
            store.find_name(record.name, record.arch)


def test_without_the_library_nothing_is_loaded_unchecked(keys):
    entry, _ = fill(signed_store(keys))
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from pathlib import Path; from fusekit.store import Store; from fusekit.store.signature import Trust\n"
        "Store(Path(sys.argv[1]), trust=Trust([Path(sys.argv[2])])).load(sys.argv[3])"
    )
    command = [sys.executable, "-c", code, keys / "store", keys / "ours.pub", entry.key]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"{StoreError.__name__}: signatures cannot be checked or made" in done.stderr
    assert "pip install 'cryptography>=42'" in done.stderr


def test_the_configuration_says_whom_to_trust(keys):
    environ = {"FUSEKIT_STORE": str(keys / "store"), "FUSEKIT_SIGNING_KEY": str(keys / "ours")}
    fill(Store.open(Config.from_environment(environ=environ)))
    environ["FUSEKIT_TRUSTED_KEYS"] = f"{keys / 'stranger.pub'}:{keys / 'ours.pub'}"
    assert len(Store.open(Config.from_environment(environ=environ)).names()) == 1
    environ["FUSEKIT_TRUSTED_KEYS"] = f"{keys / 'stranger.pub'}"
    assert Store.open(Config.from_environment(environ=environ)).names() == []
    over = Config.from_environment(environ=environ, signing_key=keys / "stranger")
    assert over.signing_key == keys / "stranger"


def test_names_of_many_variants(keys):
    store = signed_store(keys)
    entry, cubin = build_entry()
    store.publish(entry, cubin)
    for variant in ("a", "b"):
        store.publish_name(NameRecord(f"quickstart/fc1@{variant}", "sm_90a", entry.key, {}, {}))
    assert [record.name for record in trusting(keys).variants("quickstart/fc1", "sm_90a")] == [
        "quickstart/fc1@a",
        "quickstart/fc1@b",
    ]


# -- collection -------------------------------------------------------------------------------------------------------


def age(root, seconds=7200):
    for path in root.rglob("*"):
        status = path.lstat()
        os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds), follow_symlinks=False)


def test_collection_takes_the_signatures_of_what_is_gone(keys):
    store = signed_store(keys)
    entry, first = fill(store)
    store.publish_name(dataclasses.replace(first, defaults={"cluster_margin": 1}))
    kept, record = fill(store, seed=1)  # the same name, for another kernel: what it replaces is a candidate
    assert store.collect().removed == 0
    signatures = keys / "store" / "signatures"
    assert len(list(signatures.glob("*/*"))) == 5  # they are young: a publisher may be about to need them
    age(keys / "store")
    assert store.collect(dry_run=True).freed_bytes == 64
    assert len(list(signatures.glob("*/*"))) == 5
    assert store.collect().freed_bytes == 64  # of the record that was replaced
    assert trusting(keys).load(entry.key)[0] == entry
    age(keys / "store")
    assert trusting(keys).find_name(record.name, record.arch).key == kept.key
    store.collect(max_age=1)
    assert list(signatures.glob("*/*")) == []


def test_a_signature_that_is_relied_on_again_is_young(keys):
    store = signed_store(keys)
    entry, cubin = build_entry()
    store.publish_signatures(entry.to_bytes(), store.sign("entry", entry.to_bytes()))
    age(keys / "store")
    store.publish_signatures(entry.to_bytes(), store.sign("entry", entry.to_bytes()))
    assert store.collect().freed_bytes == 0
    store.publish(entry, cubin)
    assert trusting(keys).load(entry.key)[0] == entry


def test_copying_up_takes_the_signatures_along(keys):
    entry, record = fill(signed_store(keys, root="below"))
    store = trusting(keys, read_only=[keys / "below"])
    assert store.adopt(store.find_name(record.name, record.arch))
    assert trusting(keys).load(entry.key)[0] == entry
    assert trusting(keys).find_name(record.name, record.arch) == record
