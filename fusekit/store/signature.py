"""Ed25519 signatures: they authenticate a document; a digest only detects changed bytes.

What is signed is one short message, `MESSAGE` below: a fixed first line, what kind of document it is (an `entry`, a
`name`, a `bundle`, a `manifest`, a `lock`, a `tuning` table) and the SHA-256 of its exact bytes. The kind is in it so
that a signature of one kind is not valid for another. An entry holds its cubin's digest, so its signature covers the
cubin.

Keys are files in OpenSSH's own formats: `ssh-keygen -t ed25519` makes such a pair too. A file of trusted keys has one
public key a line, `ssh-ed25519 <base64> <comment>`; blank lines and lines that begin with # are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusekit.errors import FusekitError, SignatureError, StoreError, UsageError, install
from fusekit.store.files import AnyPath, file_error
from fusekit.store.given import given_file
from fusekit.store.keys import sha256

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fusekit.config import Config

MESSAGE = "fusekit signature 1\n{kind}\n{digest}\n"
KINDS = frozenset({"entry", "name", "bundle", "manifest", "lock", "tuning"})
SIGNATURE_BYTES = 64
# The command that signs a document outside a store.
_SIGNING = {"bundle": "export --sign KEY", "manifest": "lock --write --sign KEY", "lock": "lock --sign KEY"}
ID_DIGITS = 16
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_KEY_TYPE = "ssh-ed25519"
_KEY_FILE_LIMIT = 1 << 20
_FOLDER_MODE = 0o700
_PRIVATE_MODE = 0o600
_PUBLIC_MODE = 0o644


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key. raw: its 32 bytes. comment: its owner, for people."""

    raw: bytes
    comment: str = ""

    @property
    def id(self) -> str:
        """The first 16 digits of the SHA-256 of the 32 bytes: part of the names of signature files, not a check."""
        return sha256(self.raw)[:ID_DIGITS]

    def line(self) -> str:
        """Its line in a file of trusted keys, without the newline."""
        serialization = _cryptography().serialization
        public = _cryptography().ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
        encoded = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return f"{encoded.decode()} {self.comment}".rstrip()

    def verifies(self, kind: str, digest: str, signature: bytes) -> bool:
        """Whether `signature` (64 bytes) is this key's over the document of `kind` with SHA-256 `digest`."""
        library = _cryptography()
        try:
            library.ed25519.Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, _message(kind, digest))
        except library.InvalidSignature:
            return False
        return True


class SigningKey:
    """A private key. `repr` does not show it, and it cannot be pickled."""

    def __init__(self, private: Ed25519PrivateKey, comment: str = "") -> None:
        self._private = private
        self.public = PublicKey(private.public_key().public_bytes_raw(), comment)

    def sign(self, kind: str, data: bytes) -> dict[str, bytes]:
        """Key id -> signature over the document `data` of `kind`. Deterministic."""
        return {self.public.id: self._private.sign(_message(kind, sha256(data)))}

    def __repr__(self) -> str:
        return f"SigningKey({self.public.id})"

    def __reduce__(self) -> Any:
        raise TypeError("a signing key is not pickled: it stays in the process that read it")


class Trust:
    """The keys whose signatures are accepted, from files that are read at the first check.

    A file that is missing or has no key is a `UsageError`: a trust that cannot be read refuses everything.
    """

    def __init__(self, paths: Sequence[Path] = (), only: Sequence[Path] | None = None) -> None:
        """only: files of the keys that alone count among those in `paths`."""
        self._paths = tuple(paths)
        self._only = only

    @classmethod
    def of(cls, config: Config) -> Trust | None:
        """The trust of a configuration; None: only digests are checked."""
        if config.trusted_keys is None:
            return None if config.only_keys is None else cls(config.only_keys)
        return cls(config.trusted_keys, config.only_keys)

    @functools.cached_property
    def keys(self) -> tuple[PublicKey, ...]:
        """Every trusted key, once."""
        keys = [key for path in self._paths for key in read_public_keys(path)]
        if self._only is not None and keys:
            allowed = {key.raw for path in self._only for key in read_public_keys(path)}
            keys = [key for key in keys if key.raw in allowed]
            if not keys:
                raise UsageError(
                    "no key of FUSEKIT_TRUSTED_KEYS is one of the project's [trust], which narrows them; add it there, "
                    "or to the variable"
                )
        if not keys:
            raise UsageError(
                "FUSEKIT_TRUSTED_KEYS is set and names no file; without a trusted key nothing is loaded; name a file "
                "of public keys, or unset the variable"
            )
        return tuple({key.raw: key for key in keys}.values())

    def check(self, kind: str, data: bytes, signatures: Mapping[str, bytes], what: object) -> PublicKey:
        """The trusted key that signed the document `data` of `kind`. what: name of the document in errors.

        signatures: key id -> signature. Raises `SignatureError` if no trusted key signed it, or if a signature of a
        trusted key is wrong, even if that of another one is good.
        """
        digest = sha256(data)
        signed = [key for key in self.keys if key.id in signatures]
        for key in signed:
            if not key.verifies(kind, digest, signatures[key.id]):
                raise SignatureError(
                    f"{what}: the signature of key {key.id} ({key.comment or 'no comment'}) is not one of these bytes; "
                    "they were changed after they were signed, or were never signed; get them again from whoever signs"
                )
        if not signed:
            others = ", ".join(sorted(signatures))
            by = f"is signed only by {others}, which is not trusted" if others else "is not signed"
            trusted = ", ".join(key.id for key in self.keys)
            raise SignatureError(
                f"{what} {by}; only what is signed by a trusted key ({trusted}) is loaded; get it from there, sign it "
                f"with `fusekit {_SIGNING.get(kind, 'key sign')}`, or add its key to FUSEKIT_TRUSTED_KEYS"
            )
        return signed[0]


def is_key_id(text: object) -> bool:
    """True for 16 lower-case hexadecimal digits."""
    return isinstance(text, str) and _KEY_ID.fullmatch(text) is not None


def read_signatures(paths: Iterable[tuple[str, AnyPath]], read: Callable[..., bytes | None]) -> dict[str, bytes]:
    """Key id -> signature, for those files of `paths` (key id, path) that `read` gives; unchecked."""
    contents = {key_id: read(path, limit=SIGNATURE_BYTES, exactly=SIGNATURE_BYTES) for key_id, path in paths}
    return {key_id: data for key_id, data in contents.items() if data is not None}


def generate(path: Path, comment: str = "") -> PublicKey:
    """Create a key pair: `path` (the private key, mode 0600) and `path`.pub. Raises UsageError if either exists."""
    library = _cryptography()
    serialization = library.serialization
    public_path = path.with_name(path.name + ".pub")
    if any(character in comment for character in "\r\n\0") or not comment.isprintable():
        raise UsageError(f"comment {comment!r}; it is one line of printable text; leave out what is not")
    for taken in (path, public_path):
        if os.path.lexists(taken):
            raise UsageError(f"{taken} exists; a key is never overwritten; choose another path or move it away")
    private = library.ed25519.Ed25519PrivateKey.generate()
    key = SigningKey(private, comment)
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        _make_folder(path.parent)
        with (
            _written(path, text, _PRIVATE_MODE),
            _written(public_path, f"{key.public.line()}\n".encode(), _PUBLIC_MODE),
        ):
            _sync_folder(path.parent)
    except OSError as error:
        raise file_error(path, "write the key", error) from error
    return key.public


def read_signing_key(path: Path) -> SigningKey:
    """The private key in the file `path`; UsageError if users other than its owner may read it."""
    library = _cryptography()
    data, mode = _read_key_file(path)
    if mode & 0o077:
        raise UsageError(
            f"{path} has mode {stat.S_IMODE(mode):04o}; a private key may be read by its owner alone; "
            f"chmod 600 '{path}', and make a new one if others could have read it"
        )
    try:
        private = library.serialization.load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, library.UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path} is no private key that can be read ({error}); a signing key is Ed25519 in OpenSSH's format "
            "without a passphrase; make one with `fusekit key new`"
        ) from None
    if not isinstance(private, library.ed25519.Ed25519PrivateKey):
        raise UsageError(f"{path} is a {type(private).__name__}; a signing key is Ed25519; make one: `fusekit key new`")
    comment = ""
    with contextlib.suppress(FusekitError):
        comment = read_public_keys(path.with_name(path.name + ".pub"))[0].comment
    return SigningKey(private, comment)


def read_public_keys(path: Path) -> tuple[PublicKey, ...]:
    """The keys of a file of public keys, at least one. Raises UsageError for a line that is not a key."""
    data, _ = _read_key_file(path)
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text; a file of trusted keys has one public key a line; check it") from None
    keys = [
        _parse(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise UsageError(f"{path} holds no key; a file of trusted keys has one public key a line; add one")
    return tuple(keys)


def read_any_keys(path: Path) -> tuple[PublicKey, ...]:
    """The keys of a file of public keys, or the public key of the private key in `path`; errors as for those two."""
    data, _ = _read_key_file(path)
    return (read_signing_key(path).public,) if b"PRIVATE KEY" in data[:100] else read_public_keys(path)


def _parse(line: str, where: str) -> PublicKey:
    library = _cryptography()
    kind, _, rest = line.strip().partition(" ")
    encoded, _, comment = rest.strip().partition(" ")
    wanted = f"a line is '{_KEY_TYPE} <base64> <comment>', as `fusekit key show` prints it"
    if "PRIVATE KEY" in line:
        raise UsageError(f"{where} is of a private key; trusted keys are public ones; {wanted}")
    if kind != _KEY_TYPE:
        raise UsageError(f"{where} begins with '{kind[:40]}'; only Ed25519 keys sign here; {wanted}")
    try:
        public = library.serialization.load_ssh_public_key(f"{kind} {encoded}".encode())
    except (ValueError, library.UnsupportedAlgorithm) as error:
        raise UsageError(f"{where} is no public key ({error}); {wanted}") from None
    return PublicKey(public.public_bytes_raw(), comment.strip())


def _message(kind: str, digest: str) -> bytes:
    if kind not in KINDS:
        raise FusekitError(f"kind {kind!r}; signatures are over {', '.join(sorted(KINDS))}; name one of them")
    return MESSAGE.format(kind=kind, digest=digest).encode()


def _read_key_file(path: Path) -> tuple[bytes, int]:
    """Bytes and mode of a key file."""
    with given_file(path, "key file") as (file, status):
        if status.st_size > _KEY_FILE_LIMIT:
            raise UsageError(f"{path} has {status.st_size} bytes; a key file has at most {_KEY_FILE_LIMIT}; check it")
        return file.read(_KEY_FILE_LIMIT), status.st_mode


@contextlib.contextmanager
def _written(path: Path, data: bytes, mode: int) -> Iterator[None]:
    """Create and sync the file `path`; remove it if writing it, or the body, fails."""
    # The mode is set at creation: there is no moment at which others could read the file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
    for path in missing:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    from fusekit.store.publishing import Disk

    Disk().sync(folder)


@functools.cache
def _cryptography() -> Any:
    """The parts of `cryptography` that are used here."""
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise StoreError(
            f"signatures cannot be checked or made ({error}); they need the package cryptography, and nothing is "
            f"loaded unchecked; {install('sign')}"
        ) from None
    from types import SimpleNamespace

    return SimpleNamespace(
        ed25519=ed25519,
        serialization=serialization,
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
    )
