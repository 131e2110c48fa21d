"""Signed bundles: what nobody trusted has signed is not even parsed."""

import json

from fusekit.errors import IntegrityError, SignatureError
from fusekit.share.bundle import INDEX, export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.keys import canonical_json
from fusekit.store.signature import Trust, read_signing_key
from tests.share.bundles import parts, put, read_index, refused
from tests.store.samples import files


def trust(keys, *names):
    return Trust([keys / f"{name}.pub" for name in names or ("ours",)])


def signed_bundle(keys, name="ours"):
    store = Store(keys / "store", signing_key=keys / name)
    path = keys / f"{name}.tar"
    export_bundle(store, select(store), path)
    return path


def test_a_signed_bundle_fills_a_trusting_store(keys, store):
    path = signed_bundle(keys)
    assert path.read_bytes() == signed_bundle(keys).read_bytes()
    target = Store(keys / "seeded", trust=trust(keys))
    import_bundle(target, path)
    assert len(target.names()) == 5
    assert not target.verify(full=True).bad
    assert not (keys / "store" / "signatures").exists()  # exporting does not change what is exported
    # It is a bundle like any other where nobody is trusted, and its signatures come along.
    plain = Store(keys / "plain")
    import_bundle(plain, path)
    assert files(keys / "plain") == files(keys / "seeded")
    assert read_index(path, trust(keys)).signer == read_signing_key(keys / "ours").public.id
    # Sent on from there by somebody else: still signed by us.
    again = keys / "again.tar"
    export_bundle(plain, select(plain), again)
    assert read_index(again).signers == ()
    assert len(read_index(again).of("signature")) == 9


def test_unsigned_and_foreign_bundles_are_refused_before_they_are_parsed(keys, bundle, monkeypatch):
    from fusekit.share import bundle_import

    def parse(*_):
        raise AssertionError("parsed")

    monkeypatch.setattr(bundle_import._Reader, "_parse", parse)
    refused(bundle, keys / "seeded", "is not signed", SignatureError, trust(keys))
    refused(signed_bundle(keys, "stranger"), keys / "seeded", "signed only by", SignatureError, trust(keys))


def test_tampering_with_a_signed_bundle(keys, store):
    path = signed_bundle(keys)
    (signature, raw), (name, index), *rest = parts(path)
    assert signature == f"{INDEX}.{read_signing_key(keys / 'ours').public.id}.sig"
    stranger = read_signing_key(keys / "stranger")
    changed = index.replace(b'"schema":1', b'"schema":2')
    cases = {
        "changed after": [(signature, raw), (name, changed), *rest],
        "is not signed": [(name, index), *rest],
        "were changed": [(signature, bytes(64)), (name, index), *rest],
        "changed after they": [(signature, stranger.sign("bundle", index)[stranger.public.id]), (name, index), *rest],
        "signed only by": [
            (f"{INDEX}.{stranger.public.id}.sig", stranger.sign("bundle", index)[stranger.public.id]),
            (name, index),
            *rest,
        ],
    }
    for match, members in cases.items():
        refused(put(members, keys / "changed.tar"), keys / "seeded", match, SignatureError, trust(keys))
    for members in (
        [(signature, raw), (signature, raw), (name, index), *rest],
        [(signature, raw + b"\0"), (name, index), *rest],
        [(name, index), (signature, raw), *rest],
        [(f"{INDEX}.../../x.sig", raw), (name, index), *rest],
    ):
        refused(put(members, keys / "changed.tar"), keys / "seeded", None, IntegrityError, trust(keys))
        refused(put(members, keys / "changed.tar"), keys / "seeded", None, IntegrityError)


def test_a_signed_index_over_unsigned_documents_is_refused(keys, store, bundle):
    """What a trusting store could not read afterwards does not get in."""
    (name, index), *rest = parts(bundle)
    ((key_id, signature),) = read_signing_key(keys / "ours").sign("bundle", index).items()
    path = put([(f"{INDEX}.{key_id}.sig", signature), (name, index), *rest], keys / "half.tar")
    refused(path, keys / "seeded", r"half.tar:entries/.* is not signed", SignatureError, trust(keys))


def test_signatures_over_nothing_are_refused(keys, store):
    path = signed_bundle(keys)
    _, (name, index), *rest = parts(path)
    document = json.loads(index)
    of, key_id, digest = document["signatures"][0]
    document["signatures"] = sorted([*document["signatures"][1:], ["0" * 64, key_id, digest]])
    content = dict(rest)
    data = content.pop(f"signatures/{of[:2]}/{of}.{key_id}")
    content[f"signatures/00/{'0' * 64}.{key_id}"] = data
    order = {kind: place for place, kind in enumerate(("blobs", "signatures", "entries", "names"))}
    members = sorted(content.items(), key=lambda member: (order[member[0].partition("/")[0]], member[0]))
    put([(name, (canonical_json(document) + "\n").encode()), *members], path)
    refused(path, keys / "seeded", "signature over 0000.*, which is none of its documents")
