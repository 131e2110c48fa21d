"""Sealed JSON: the form of every entry and name record on the disk.

A document is one line of canonical JSON with a member `digest`: the SHA-256 of the same line without that member. So
a changed byte anywhere, white space included, is detected, and two equal documents are equal files.

A digest does not authenticate. So what is read is also bounded, in bytes, values, nesting and numbers: a document that
passes can be walked, compared and printed by plain recursive code.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from fusekit.errors import FusekitError, IntegrityError, OtherSchemaError
from fusekit.store.files import AnyPath
from fusekit.store.keys import canonical_json, is_digest, sha256

LIMIT = 16 << 20
"""Largest document accepted, in bytes. A launch record has some thousands."""
DEPTH = 63
"""Deepest nesting of objects and arrays. An entry has some ten; the C loader has the same limit."""
VALUES = 250_000
"""Most commas in a document, and so about the most values. An entry has some 700."""

_INT64 = range(-(2**63), 2**63)
_DIGITS = bytes(48) + b"0" * 10 + bytes(198)  # every digit as 0, all else as a zero byte
_LONG = b"0" * 19
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def seal(document: dict[str, Any], what: str) -> bytes:
    """The bytes of a file with `document`, which must have members that sort after `digest`. what: for errors."""
    body = canonical_json(document, what)
    return (canonical_json(document | {"digest": sha256(body.encode())}, what) + "\n").encode()


def check_readable(data: bytes, what: str) -> None:
    """Raises FusekitError, naming `what`, for a document that could be written but not read again."""
    try:
        parse(data)
    except ValueError as error:
        raise FusekitError(f"{what} cannot be stored, since {error}; leave that out") from None


def unseal(data: bytes, path: AnyPath) -> dict[str, Any]:
    """The document in `data`, read from `path`, without its digest. Raises `IntegrityError` for anything but sealed
    bytes.
    """
    try:
        document = parse(data)
    except ValueError as error:
        raise damaged(path, f"is not valid JSON of a store ({error})") from None
    digest = document.pop("digest", None) if isinstance(document, dict) else None
    if not is_digest(digest):
        raise damaged(path, "has no digest")
    # The digest is over the bytes of the file, not over the parsed values.
    member = f'"digest":"{digest}",'.encode()
    body, _, _ = data.replace(member, b"", 1).rpartition(b"\n")
    if data[-1:] != b"\n" or sha256(body) != digest:
        raise damaged(path, f"does not have the digest {digest} that it states")
    assert isinstance(document, dict)
    return document


def parse(data: bytes, values: int = VALUES) -> Any:
    """The JSON value in `data`. Raises ValueError for invalid JSON, a number that is not finite or does not fit into 64
    bits, half of a surrogate pair, and more than `values` values or `DEPTH` levels.
    """
    if data.count(b",") > values:
        raise ValueError(f"it has more than {values} values")
    try:
        document = _DECODER.decode(data.decode())
        if _SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has the text {error.object[error.start : error.end]!a}, half of a character") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    if _LONG not in data.translate(_DIGITS) and _is_shallow(data):
        return document
    level: list[Any] = [[document]]
    for _ in range(DEPTH + 1):
        inside = [child for node in level for child in (node.values() if type(node) is dict else node)]
        if any(type(child) is int and child not in _INT64 for child in inside):
            raise ValueError("it has an integer that does not fit into 64 bits")
        level = [child for child in inside if type(child) is dict or type(child) is list]
        if not level:
            return document
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def _is_shallow(data: bytes) -> bool:
    """Whether the brackets of the JSON text `data` are nested no deeper than `DEPTH`. Brackets in strings may make
    the answer False where it is True. Walking the values would take three times as long as parsing.
    """
    brackets = data.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(DEPTH):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text[:40]}, which is too large")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"it has the number {text}, which JSON does not have")


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def members(document: dict[str, Any], types: dict[str, type], path: AnyPath) -> None:
    """Raises `IntegrityError` unless `document` has exactly the members of `types`, each of its type."""
    if set(document) != set(types):
        odd = ", ".join(sorted(set(document) ^ set(types)))
        raise damaged(path, f"lacks or has too many members: {odd}")
    for name, kind in types.items():
        if type(document[name]) is not kind:
            raise damaged(path, f"has {name} of type {type(document[name]).__name__}, which must be {kind.__name__}")


def check_schema(document: dict[str, Any], schema: int, path: AnyPath) -> None:
    """Raises `OtherSchemaError` for a document of another version of fusekit."""
    written = document.get("schema")
    if type(written) is int and written != schema:
        raise OtherSchemaError(
            f"{path} is of another version of fusekit: it has schema {written}, and this one reads {schema}; build it"
            " again, or use that version"
        )


def damaged(path: AnyPath, what: str) -> IntegrityError:
    return IntegrityError(f"{path} {what}; a store loads only what its digests vouch for; remove it and build it again")
