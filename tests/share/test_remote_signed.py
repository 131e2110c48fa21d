"""Remotes with signatures: they travel along, and only what is trusted is pulled."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.keys import sha256
from fusekit.store.signature import Trust, read_signing_key
from tests.share.remotes import NAMES, damage, fill, paths_of, remote
from tests.soak import sample
from tests.store.samples import build_entry, build_record, files


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


def trusting(keys, root="seeded", signing_key=None):
    return Store(keys / root, trust=Trust([keys / "ours.pub"]), signing_key=signing_key)


def test_signatures_travel_along(store, url, keys):
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    assert pull(trusting(keys), Remote(url)).failed == []
    assert not trusting(keys).verify(full=True).bad
    plain = Store(keys / "plain")
    pull(plain, Remote(url))
    assert files(keys / "plain") == files(keys / "seeded")
    assert push(signing, select(signing), Remote(url)).bytes == 0


def test_only_what_is_trusted_is_pulled(store, url, keys, monkeypatch):
    push(store, select(store), Remote(url))
    strangers = Store(keys / "store", signing_key=keys / "stranger")
    push(strangers, select(strangers), Remote(url))

    def parse(*_):
        raise AssertionError("parsed")

    monkeypatch.setattr("fusekit.store.names.unseal", parse)
    monkeypatch.setattr("fusekit.store.entries.unseal", parse)
    report = pull(trusting(keys), Remote(url))
    assert len(report.failed) == 3
    assert all("not signed" in error or "signed only by" in error for _, error in report.failed)
    assert not (keys / "seeded").exists()


def test_signing_what_was_pushed_unsigned(store, url, keys):
    push(store, select(store), Remote(url))
    signing = Store(keys / "store", signing_key=keys / "ours")
    again = remote(url)
    push(signing, select(signing), again)
    assert again._fs.count("pipe_file", "blobs") == again._fs.count("pipe_file", "entries") == 0
    assert pull(trusting(keys), Remote(url)).failed == []


def test_a_signed_entry_replaces_another_that_is_not(store, url, keys):
    entry, cubin = build_entry(0)
    other = Store(keys / "other")
    other.publish(dataclasses.replace(entry, seconds=2.5), cubin)
    other.publish_name(build_record(entry, NAMES[0]))
    push(other, select(other), Remote(url))
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    assert pull(trusting(keys), Remote(url)).failed == []
    assert trusting(keys).find_entry(entry.key) == entry


def test_a_forged_remote(store, url, keys):
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    entry, _ = build_entry(0)
    forged = dataclasses.replace(entry, launch={**entry.launch, "dynamic_shared": 0})
    damage(url, paths_of(0, NAMES[0])["entry"], lambda data: forged.to_bytes())
    report = pull(trusting(keys), Remote(url))
    assert [name for name, _ in report.failed] == [NAMES[0]]
    assert "is not signed" in report.failed[0][1]
    key_id = read_signing_key(keys / "ours").public.id
    damage_signature = next(path for path in Remote(url).sizes("signatures") if path.endswith(key_id))
    damage(url, damage_signature, lambda data: bytes(64))
    assert len(pull(Store(keys / "plain"), Remote(url)).failed) == 0  # nobody asks for signatures there
    assert len(pull(trusting(keys, "again"), Remote(url)).failed) >= 1


@pytest.mark.parametrize("where", sample(["here", "elsewhere"], most=1))
def test_a_push_that_is_killed_at_each_step(keys, where):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.share.killed_pusher", keys, where]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 1])


ATTACKS = {
    "stripped": lambda data: None,
    "of zeros": lambda data: bytes(64),
    "one bit off": flip,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("what", ["entry", "name"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_signature_that_is_not_the_one(url, keys, what, attack):
    signing = fill(Store(keys / "store", signing_key=keys / "ours"))
    push(signing, select(signing), Remote(url))
    digest = sha256(Remote(url).read(paths_of(0, NAMES[0])[what], limit=1 << 20))
    damage(url, f"signatures/{digest[:2]}/{digest}.{read_signing_key(keys / 'ours').public.id}", ATTACKS[attack])
    report = pull(trusting(keys), Remote(url))
    assert [name for name, _ in report.failed] == [NAMES[0]]
    assert sorted(listed.record.name for listed in trusting(keys).names()) == sorted(NAMES[1:])


def test_a_signature_of_another_document_or_kind(url, keys):
    signing = fill(Store(keys / "store", signing_key=keys / "ours"))
    push(signing, select(signing), Remote(url))
    key = read_signing_key(keys / "ours")
    remote, paths = Remote(url), paths_of(0, NAMES[0])
    name, entry = (remote.read(paths[what], limit=1 << 20) for what in ("name", "entry"))
    place = f"signatures/{sha256(name)[:2]}/{sha256(name)}.{key.public.id}"
    for other in (key.sign("name", entry), key.sign("entry", name), key.sign("bundle", name)):
        damage(url, place, lambda data, other=other: other[key.public.id])
        assert [name for name, _ in pull(trusting(keys), Remote(url)).failed] == [NAMES[0]]


def test_a_cubin_that_was_changed_with_its_digests(url, keys):
    """Another cubin, entry and name that fit together, with the signatures of the old ones."""
    signing = fill(Store(keys / "store", signing_key=keys / "ours"))
    push(signing, select(signing), Remote(url))
    entry, cubin = build_entry(0, b"\x7fELF of somebody else" * 9)
    forged = Store(keys / "forged")
    forged.publish(entry, cubin)
    forged.publish_name(build_record(entry, NAMES[0]))
    for path, data in files(keys / "forged").items():
        Remote(url).write(path.as_posix(), data)
    report = pull(trusting(keys), Remote(url))
    assert [name for name, _ in report.failed] == [NAMES[0]]
    assert "is not signed" in report.failed[0][1]
