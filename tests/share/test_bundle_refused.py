"""A bundle that is wrong anywhere: nothing at all is taken from it."""

import gzip
import json
import os
import random
import tarfile
import tracemalloc

import pytest

from fusekit.errors import IntegrityError, UsageError
from fusekit.share.bundle import BLOCK, INDEX, header, padding
from fusekit.share.bundle_import import import_bundle
from fusekit.store import Store
from fusekit.store.keys import canonical_json, sha256
from tests.share.bundles import parts, put, refused, with_index
from tests.store.samples import build_entry


def special(name, kind, linkname="", size=0):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, linkname, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (special("blobs/x", tarfile.SYMTYPE, "/etc/passwd"), "a link, 'blobs/x' to '/etc/passwd'"),
        (special("blobs/x", tarfile.LNKTYPE, INDEX), "a link, 'blobs/x' to 'bundle.json'"),
        (special("blobs", tarfile.DIRTYPE), "'blobs', which is no plain file"),
        (special("pipe", tarfile.FIFOTYPE), "no plain file"),
        (special("device", tarfile.CHRTYPE), "no plain file"),
        (special("sparse", tarfile.GNUTYPE_SPARSE, size=512), "an unexpected header for 'sparse'"),
        (special("x" * 300, tarfile.REGTYPE), "no plain file|an unexpected header"),
        (("/etc/cron.d/evil", b"x"), "'/etc/cron.d/evil', which leads out of a store"),
        (("../../evil", b"x"), r"'../../evil', which leads out of a store"),
        (("blobs/../../evil", b"x"), "leads out of a store"),
        (("blobs/sha256/more", b"x"), "'blobs/sha256/more'"),
        ((INDEX, b"{}"), f"'{INDEX}'"),
        (bytes(BLOCK), "has no member"),
        (b"\xff" * BLOCK, "has no member"),
    ],
    ids=[
        "symlink",
        "hardlink",
        "folder",
        "fifo",
        "device",
        "sparse",
        "long-name",
        "absolute",
        "parent",
        "inner-parent",
        "stranger",
        "second-index",
        "zeros",
        "noise",
    ],
)
@pytest.mark.parametrize("place", [1, 3, None], ids=str)
def test_members_that_do_not_belong(bundle, tmp_path, member, match, place):
    members = parts(bundle)
    members.insert(len(members) if place is None else place, member)
    put(members, bundle)
    refused(bundle, tmp_path / "seeded", "has .* bytes, and by its index")  # before anything else is looked at
    # The same size as before: the member takes the place of another one.
    original = [other for other in members if other is not member]
    index = 1 if place is None else place
    content = member if isinstance(member, bytes) else put([member], tmp_path / "one", b"").read_bytes()
    name, data = original[index]
    room = len(header(name, len(data))) + len(data) + padding(len(data))
    put([*original[:index], content.ljust(room, b"\0")[:room], *original[index + 1 :]], bundle)
    refused(bundle, tmp_path / "seeded", match if len(content) <= room else None)


def test_a_member_twice(bundle, tmp_path):
    first, *rest = parts(bundle)
    blobs = [other for other in rest if other[0].startswith("blobs")]
    sizes = {len(data) for _, data in blobs}
    assert len(sizes) == 1  # so the file keeps its size
    rest[1] = rest[0]
    put([first, *rest], bundle)
    refused(bundle, tmp_path / "seeded", "twice, where")

    def twice(document):
        document["blobs"][1] = document["blobs"][0]

    with_index(bundle, twice)
    refused(bundle, tmp_path / "seeded", "twice or out of order among its blobs")


def test_members_in_another_order(bundle, tmp_path):
    first, *rest = parts(bundle)
    rest[0], rest[1] = rest[1], rest[0]
    refused(put([first, *rest], bundle), tmp_path / "seeded", "an unexpected header|where .* is expected")


@pytest.mark.parametrize("offset", [-1, 1, 512, 1 << 40])
@pytest.mark.parametrize(("label", "column"), [("blobs", 1), ("entries", 1), ("names", 2)])
def test_a_lie_about_a_size_in_the_index(bundle, tmp_path, label, column, offset):
    def lie(document):
        document[label][0][column] += offset

    with_index(bundle, lie)
    refused(bundle, tmp_path / "seeded", "and by its index|is expected|cannot be one")


@pytest.mark.parametrize("offset", [-1, 1, 512, 1 << 40])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_lie_about_a_size_in_a_header(bundle, tmp_path, which, offset):
    members = parts(bundle)
    name, content = members[which]
    info = tarfile.TarInfo(name)
    info.size, info.mode = max(0, len(content) + offset), 0o644
    lie = info.tobuf(tarfile.GNU_FORMAT)
    members[which] = lie + content + bytes(padding(len(content)))
    refused(put(members, bundle), tmp_path / "seeded", "gives|ends within|begins with|bytes between|header|valid JSON")


@pytest.mark.parametrize(("label", "column"), [("blobs", 0), ("entries", 2), ("names", 3)])
def test_a_lie_about_a_digest(bundle, tmp_path, label, column):
    def lie(document):
        document[label][0][column] = "0" * 64

    with_index(bundle, lie)
    refused(bundle, tmp_path / "seeded", "and its index gives 0000|is expected")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(schema=4), "schema 4, and this"),
        (lambda d: d.update(schema=3), "not in canonical form"),
        (lambda d: d.update(schema=True), "schema True"),
        (lambda d: d.update(schema=2), "not in canonical form"),
        (lambda d: d.update(loader=[]), "not in canonical form"),
        (lambda d: d.update(schema=2, loader=[["0" * 64, 1], ["0" * 64, 1]]), "twice or out of order among its loader"),
        (lambda d: d.update(schema=2, loader=[["0" * 64, 0]]), "cannot be one"),
        (lambda d: d.update(schema=2, loader=[["0" * 64, 512]]), "and by its index"),
        (lambda d: d.update(more=[]), "not in canonical form"),
        (lambda d: d.pop("names"), "not in canonical form"),
        (lambda d: d.update(names={}), "names are not a list"),
        (lambda d: d["names"].insert(0, []), r"among its names \[\]"),
        (lambda d: d["names"].insert(0, "x"), "among its names 'x'"),
        (lambda d: d["names"][0].__setitem__(0, "../../x/y@z"), "cannot be one"),
        (lambda d: d["names"][0].__setitem__(0, "/etc/x@z"), "cannot be one"),
        (lambda d: d["names"][0].__setitem__(1, "../sm"), "cannot be one"),
        (lambda d: d["names"][0].__setitem__(1, 90), "cannot be one"),
        (lambda d: d["entries"][0].__setitem__(0, "../" + "0" * 61), "cannot be one"),
        (lambda d: d["entries"][0].__setitem__(0, "A" * 64), "cannot be one"),
        (lambda d: d["blobs"][0].__setitem__(1, -1), "cannot be one"),
        (lambda d: d["blobs"][0].__setitem__(1, 0), "cannot be one"),
        (lambda d: d["blobs"][0].__setitem__(1, True), "cannot be one"),
        (lambda d: d["blobs"][0].__setitem__(1, 1.5), "cannot be one"),
        (lambda d: d["blobs"][0].__setitem__(1, 1 << 62), "cannot be one"),
        (lambda d: d["blobs"].reverse(), "out of order"),
        (lambda d: d["names"].reverse(), "out of order"),
        (lambda d: d["signatures"].append(["0" * 64, "../../../../x", "0" * 64]), "cannot be one"),
        (lambda d: d["blobs"].pop(), "and by its index"),
        (lambda d: d["names"].pop(), "and by its index"),
    ],
)
def test_an_index_that_cannot_be(bundle, tmp_path, change, match):
    refused(with_index(bundle, change), tmp_path / "seeded", match)


def test_an_index_in_another_form(bundle, tmp_path):
    (name, index), *rest = parts(bundle)
    for changed in (
        json.dumps(json.loads(index)).encode(),
        index.rstrip(b"\n"),
        index[:-1] + b" \n",
        b"[" * 100_000,
        b"9" * 10_000,
        b"\xff",
        b"",
        b"null\n",
        index.replace(b'"schema":1', b'"schema":1,"schema":1'),
    ):
        refused(put([(name, changed), *rest], tmp_path / "changed.tar"), tmp_path / "seeded", "index")


def rebuilt(path, change):
    """The bundle with what is in it changed by `change(contents)`, and an index that says so: all digests right."""
    contents = dict(parts(path)[1:])
    change(contents)
    document = {"schema": 1, "blobs": [], "signatures": [], "entries": [], "names": []}
    for name, data in contents.items():
        top, *folders, last = name.split("/")
        if top == "blobs":
            document["blobs"].append([sha256(data), len(data)])
        elif top == "entries":
            document["entries"].append([last.removesuffix(".json"), len(data), sha256(data)])
        elif top == "names":
            stem, _, arch = last.removesuffix(".json").rpartition(".")
            document["names"].append([f"{folders[0]}/{stem}", arch, len(data), sha256(data)])
    for rows in list(document.values())[1:]:
        rows.sort()
    return put([(INDEX, (canonical_json(document) + "\n").encode()), *contents.items()], path)


def only(contents, start):
    return [name for name in contents if name.startswith(start)]


def test_rebuilding_changes_nothing(bundle):
    before = bundle.read_bytes()
    assert rebuilt(bundle, lambda contents: None).read_bytes() == before


def without_names_and_one_entry(contents):
    for name in [*only(contents, "names"), f"entries/{(key := build_entry(1)[0].key)[:2]}/{key}.json"]:
        contents.pop(name)


def change_document(contents, name, old, new):
    contents[name] = contents[name].replace(old, new)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.pop(only(c, "entries")[0]), "but no such entry|of none of its entries"),
        (lambda c: c.pop(only(c, "blobs")[0]), "but not its cubin"),
(without_names_and_one_entry, "of none of its entries"),
        (lambda c: change_document(c, only(c, "entries")[0], b'"registers":168', b'"registers":169'), "digest"),
        (lambda c: change_document(c, only(c, "names")[0], b"other/fc1", b"other/fc9"), "digest"),
        (lambda c: c.update({only(c, "entries")[0]: c[only(c, "entries")[1]]}), "is the entry of key"),
        (lambda c: c.update({only(c, "names")[0]: c[only(c, "names")[1]]}), "is the record of"),
        (lambda c: c.update({only(c, "entries")[0]: b"{" * 5000}), "not valid JSON"),
        (lambda c: c.update({only(c, "names")[0]: b"[" * 900 + b"]" * 900}), "nested deeper than 63"),
    ],
)  # fmt: skip
def test_contents_that_do_not_belong_together(bundle, tmp_path, change, match):
    refused(rebuilt(bundle, change), tmp_path / "seeded", match)


def test_a_document_in_another_form_is_refused(bundle, tmp_path):
    """Sealed with the right digest, but not as a store writes it: the same entry could have two sets of bytes."""

    def respell(contents):
        name = only(contents, "entries")[0]
        document = json.loads(contents[name])
        document.pop("digest")
        body = json.dumps(document)
        contents[name] = f'{{"digest":"{sha256(body.encode())}",{body[1:]}\n'.encode()

    refused(rebuilt(bundle, respell), tmp_path / "seeded", "another form")


def test_a_bundle_that_would_grow(bundle, tmp_path):
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(bundle.read_bytes() + bytes(10 << 20)))
    refused(packed, tmp_path / "seeded", "compressed with gzip; .* decompress it first")
    for magic in (b"PK\x03\x04", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"BZh9"):
        packed.write_bytes(magic + bytes(5000))
        refused(packed, tmp_path / "seeded", "is compressed with")


def test_claims_of_enormous_sizes_take_no_memory(bundle, tmp_path):
    """Sizes are compared with the file's before anything of that size is read."""
    tracemalloc.start()

    def claim(document):
        document["blobs"][0][1] = 1 << 30
        document["entries"][0][1] = 16 << 20

    with_index(bundle, claim)
    refused(bundle, tmp_path / "seeded", "it is truncated, or a size is false")
    huge = tmp_path / "huge.tar"
    for size in (17 << 20, 1 << 32):
        with huge.open("wb") as file:
            file.write(header(INDEX, size))
            file.truncate(1 << 33)  # a sparse file: eight gigabytes of nothing
        refused(huge, tmp_path / "seeded", "index of .* bytes, where 1 to")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("keep", [0, 1, 511, 512, 513, 1024, -1, -512, -1024, -1025])
def test_a_cut_bundle(bundle, tmp_path, keep):
    data = bundle.read_bytes()
    bundle.write_bytes(data[:keep])
    refused(bundle, tmp_path / "seeded", "is not a bundle, or ends" if 0 <= keep < 512 else "ends|is truncated")


@pytest.mark.parametrize("more", [b"\0", b"x", bytes(512), bytes(10240), b"x" * 5000])
def test_a_bundle_with_more_behind_it(bundle, tmp_path, more):
    bundle.write_bytes(bundle.read_bytes() + more)
    refused(bundle, tmp_path / "seeded", "and by its index")


def test_any_changed_byte(bundle, tmp_path):
    data = bundle.read_bytes()
    random.seed(4)
    for _ in range(300):
        place = random.randrange(len(data))
        bundle.write_bytes(data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :])
        refused(bundle, tmp_path / "seeded", None)


def test_a_file_that_changes_meanwhile(bundle, tmp_path, monkeypatch):
    """Between the reading that checks and the one that publishes."""
    from fusekit.share import bundle_import

    real = bundle_import._Reader.check

    def check_then_change(self, index, *rest):
        real(self, index)
        data = bundle.read_bytes()
        place = data.index(b"\x7fELF")
        with bundle.open("r+b") as file:
            file.seek(place)
            file.write(b"evil")

    monkeypatch.setattr(bundle_import._Reader, "check", check_then_change)
    with pytest.raises(IntegrityError, match="changed while it was imported"):
        import_bundle(Store(tmp_path / "seeded"), bundle)
    assert not Store(tmp_path / "seeded").verify(full=True).bad
    assert Store(tmp_path / "seeded").names() == []


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", tmp_path / "pipe" / "x"):
        refused(path, tmp_path / "seeded", "there is no bundle|is no plain file", UsageError)
    (tmp_path / "text").write_text("hello\n" * 200)
    refused(tmp_path / "text", tmp_path / "seeded", "is not a tar file")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "text", "text")
    refused(tmp_path / "other.tar", tmp_path / "seeded", "which no bundle has there")
