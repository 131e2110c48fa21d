"""Sealed JSON: the form of every entry and name record on the disk.

A document is one line of canonical JSON with a member `digest`: the SHA-256 of the same line without that member. So
a changed byte anywhere, white space included, is seen, and two equal documents are equal files.
"""

from __future__ import annotations

import json
from typing import Any

from fusekit.errors import IntegrityError
from fusekit.store.files import AnyPath
from fusekit.store.keys import canonical_json, is_digest, sha256

LIMIT = 16 << 20
"""Largest document accepted, in bytes. A launch record has some thousands."""


def seal(document: dict[str, Any], what: str) -> bytes:
    """`document`, which must have members that sort after `digest`, as the bytes of a file. `what` names it in an
    error.
    """
    body = canonical_json(document, what)
    return (canonical_json(document | {"digest": sha256(body.encode())}, what) + "\n").encode()


def unseal(data: bytes, path: AnyPath) -> dict[str, Any]:
    """The document in `data`, read from `path`, without its digest. Raises `IntegrityError` for anything but sealed
    bytes.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is no JSON ({error})") from None
    digest = document.pop("digest", None) if isinstance(document, dict) else None
    if not is_digest(digest):
        raise damaged(path, "has no digest")
    # The digest is over bytes as they lie there, not over what a parser made of them.
    member = f'"digest":"{digest}",'.encode()
    body, _, _ = data.replace(member, b"", 1).rpartition(b"\n")
    if data[-1:] != b"\n" or sha256(body) != digest:
        raise damaged(path, f"does not have the digest {digest} that it states")
    assert isinstance(document, dict)
    return document


def members(document: dict[str, Any], types: dict[str, type], path: AnyPath) -> None:
    """Raises `IntegrityError` unless `document` has exactly the members of `types`, each of its type."""
    if set(document) != set(types):
        odd = ", ".join(sorted(set(document) ^ set(types)))
        raise damaged(path, f"lacks or has too many members: {odd}")
    for name, kind in types.items():
        if type(document[name]) is not kind:
            raise damaged(path, f"has {name} of type {type(document[name]).__name__}, where {kind.__name__} must stand")


def damaged(path: AnyPath, what: str) -> IntegrityError:
    return IntegrityError(f"{path} {what}; a store loads only what its digests vouch for; remove it and build it again")
