"""Key pairs: their files, their list, and what is refused as one."""

import errno
import os
import pickle
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from fusekit.errors import StoreError, UsageError
from fusekit.store.signature import Trust, generate, is_key_id, read_public_keys, read_signing_key


def test_a_key_pair(tmp_path):
    old = os.umask(0)
    try:
        public = generate(tmp_path / "folder" / "key", "a comment of two words")
    finally:
        os.umask(old)
    private, shown = tmp_path / "folder" / "key", tmp_path / "folder" / "key.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(shown.stat().st_mode) == 0o644
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    assert read_public_keys(shown) == (public,)
    assert public.comment == "a comment of two words"
    assert is_key_id(public.id)
    signer = read_signing_key(private)
    assert signer.public == public
    signatures = signer.sign("entry", b"data")
    assert signatures == read_signing_key(private).sign("entry", b"data")  # deterministic
    Trust([shown]).check("entry", b"data", signatures, "it")


def test_two_keys_are_two(keys):
    assert read_public_keys(keys / "ours.pub")[0].id != read_public_keys(keys / "stranger.pub")[0].id


def test_a_private_key_is_not_given_away(keys):
    signer = read_signing_key(keys / "ours")
    assert repr(signer) == f"SigningKey({signer.public.id})"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(signer)


@pytest.mark.parametrize("taken", ["key", "key.pub"])
def test_a_key_is_never_overwritten(tmp_path, taken):
    (tmp_path / taken).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists; a key is never overwritten"):
        generate(tmp_path / "key")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_a_key_that_could_not_be_written_leaves_nothing(tmp_path, name, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve().name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="free some space"):
            generate(tmp_path / "key")
    assert not list(tmp_path.iterdir())
    assert generate(tmp_path / "key")


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_a_key_whose_file_could_not_be_closed_leaves_nothing(tmp_path, name, monkeypatch):
    real = os.fdopen

    class Unclosed:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self.file

        def __exit__(self, *_):
            self.file.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fdopen(descriptor, mode):
        file = real(descriptor, mode)
        return Unclosed(file) if Path(f"/proc/self/fd/{descriptor}").resolve().name == name else file

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", fdopen)
        with pytest.raises(StoreError, match="cannot write the key"):
            generate(tmp_path / "key")
    assert not list(tmp_path.iterdir())
    assert generate(tmp_path / "key")


def test_the_folder_of_a_key_is_synced(tmp_path, monkeypatch):
    real, synced, path = os.fsync, [], tmp_path / "a" / "b" / "key"

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    generate(path)
    assert {tmp_path, path.parent.parent} <= set(synced)
    assert synced[-3:] == [path, path.with_name("key.pub"), path.parent]


@pytest.mark.parametrize("comment", ["two\nlines", "\x00", "\x1b[31m"])
def test_a_comment_is_one_line(tmp_path, comment):
    with pytest.raises(UsageError, match="one line of printable text"):
        generate(tmp_path / "key", comment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_private_key_that_others_may_read_is_refused(keys, mode):
    (keys / "ours").chmod(mode)
    with pytest.raises(UsageError, match=r"its owner alone; chmod 600"):
        read_signing_key(keys / "ours")


def test_what_is_no_private_key(keys):
    for content in (b"", b"text", (keys / "ours.pub").read_bytes(), os.urandom(200)):
        path = keys / "bad"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(UsageError, match="no private key that can be read"):
            read_signing_key(path)
    with pytest.raises(UsageError, match="there is no key file"):
        read_signing_key(keys / "absent")
    with pytest.raises(UsageError, match="no plain file"):
        read_signing_key(keys)


def test_only_ed25519_signs(keys):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1())
    path = keys / "other"
    path.write_bytes(
        other.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)
    with pytest.raises(UsageError, match="a signing key is Ed25519"):
        read_signing_key(path)
    path.write_bytes(
        other.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    with pytest.raises(UsageError, match="only Ed25519 keys sign here"):
        read_public_keys(path)


def test_a_list_of_trusted_keys(keys):
    lines = [(keys / f"{name}.pub").read_text() for name in ("ours", "stranger")]
    (keys / "list").write_text(f"# who builds for us\n\n{lines[0]}\n  {lines[1]}")
    assert [key.comment for key in read_public_keys(keys / "list")] == ["ours of the tests", "stranger of the tests"]
    assert len(Trust([keys / "list", keys / "ours.pub"]).keys) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (b"ssh-ed25519\n", "line 1 is no public key"),
        (b"# x\nssh-ed25519 AAAA me\n", "line 2 is no public key"),
        (b"ssh-rsa AAAA\n", "only Ed25519 keys sign here"),
        (b"\xff\xfe", "is no text"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "of a private key"),
    ],
)
def test_a_list_with_a_bad_line_is_refused_whole(keys, content, message):
    (keys / "list").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_public_keys(keys / "list")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_reads_our_keys_and_makes_some(keys):
    def keygen(*arguments):
        return subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, check=True).stdout

    assert keygen("-y", "-f", keys / "ours").split()[:2] == (keys / "ours.pub").read_text().split()[:2]
    keygen("-q", "-t", "ed25519", "-N", "", "-C", "made there", "-f", keys / "theirs")
    signer = read_signing_key(keys / "theirs")
    assert signer.public.comment == "made there"
    Trust([keys / "theirs.pub"]).check("name", b"x", signer.sign("name", b"x"), "it")
    keygen("-q", "-t", "ed25519", "-N", "secret", "-f", keys / "locked")
    with pytest.raises(UsageError, match="without a passphrase"):
        read_signing_key(keys / "locked")
