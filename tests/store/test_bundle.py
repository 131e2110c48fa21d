"""Bundles: the same bytes from the same kernels, and nothing at all from a file that is wrong anywhere."""

import dataclasses
import gzip
import json
import os
import random
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from fusekit.errors import IntegrityError, NotBuiltError, SignatureError, StoreError, UsageError
from fusekit.store import Store
from fusekit.store.bundle import BLOCK, END, INDEX, export_bundle, header, padding
from fusekit.store.bundle_import import import_bundle, read_index
from fusekit.store.keys import canonical_json, sha256
from fusekit.store.selection import select
from fusekit.store.signature import Trust, generate, read_signing_key
from tests.store.samples import build_entry, build_record

NAMES = ("quickstart/fc1@128x160-c2x1", "quickstart/fc1@128x192-c2x1", "other/fc2@a")


def fill(store):
    for seed, name in enumerate(NAMES):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, name))
    # A second name of the first kernel, and a kernel with the first one's cubin.
    entry, cubin = build_entry(0)
    store.publish_name(build_record(entry, f"quickstart/twin@{'long' * 24}"))
    twin = build_entry(9, cubin)[0]
    store.publish(twin, cubin)
    store.publish_name(build_record(twin, "other/fc1@b"))
    return store


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


@pytest.fixture
def bundle(store, tmp_path):
    path = tmp_path / "kernels.tar"
    export_bundle(store, select(store), path)
    return path


def files(root):
    return {
        path.relative_to(root): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "used")
    }


def refused(path, into, match, error=IntegrityError, trust=None):
    """It is refused, for that reason, and the store that it was to go into is untouched."""
    before = files(into)
    with pytest.raises(error, match=match):
        import_bundle(Store(into, trust=trust), path)
    assert files(into) == before


# -- what a bundle is for ---------------------------------------------------------------------------------------------


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
        "from fusekit.store.bundle import export_bundle; from fusekit.store.bundle_import import import_bundle\n"
        "from fusekit.store.selection import select\n"
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
        tar.extractall(tmp_path / "unpacked", filter="data")
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


def test_every_layer_is_exported_and_the_writable_one_is_filled(store, bundle, tmp_path):
    layered = Store(tmp_path / "top", [tmp_path / "store"])
    path = tmp_path / "layered.tar"
    export_bundle(layered, select(layered), path)
    assert path.read_bytes() == bundle.read_bytes()
    import_bundle(layered, path)  # what a layer below has is what this disk is to have too
    assert files(tmp_path / "top") == files(tmp_path / "store")


def test_a_damaged_store_is_not_exported(store, tmp_path):
    path = tmp_path / "kernels.tar"
    path.write_bytes(b"what was there")
    blob = store.layers[0].blob_path(build_entry(1)[0].cubin_sha256)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match="digest"):
        export_bundle(store, select(store), path)
    store.layers[0].name_path(NAMES[0], "sm_90a").unlink()
    store.layers[0].name_path(NAMES[0], "sm_90a").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="has no digest"):
        select(store)
    assert path.read_bytes() == b"what was there"
    assert {each.name for each in tmp_path.iterdir()} == {"store", "kernels.tar"}


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


def test_an_import_mends_what_is_damaged(bundle, tmp_path):
    target = Store(tmp_path / "seeded")
    import_bundle(target, bundle)
    for path in (
        target.layers[0].blob_path(build_entry(1)[0].cubin_sha256),
        target.layers[0].entry_path(build_entry(2)[0].key),
        target.layers[0].name_path(NAMES[0], "sm_90a"),
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


# -- what is refused --------------------------------------------------------------------------------------------------


def parts(path):
    """A bundle taken apart: (header, name, content) of each member."""
    with tarfile.open(path, "r:") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def put(members, path, end=END):
    """Members, as (name, content) or ready bytes, put together again."""
    data = b""
    for member in members:
        if isinstance(member, bytes):
            data += member
        else:
            name, content = member
            data += header(name, len(content)) + content + bytes(padding(len(content)))
    path.write_bytes(data + end)
    return path


def with_index(path, change):
    """The bundle with its index changed by `change(document)`, everything else as it was."""
    (name, index), *rest = parts(path)
    document = json.loads(index)
    change(document)
    return put([(name, (canonical_json(document) + "\n").encode()), *rest], path)


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
        (special("sparse", tarfile.GNUTYPE_SPARSE, size=512), "header of its own making for 'sparse'"),
        (special("x" * 300, tarfile.REGTYPE), "no plain file|header of its own making"),
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
    refused(bundle, tmp_path / "seeded", "has .* bytes, where its index makes")  # before anything else is looked at
    # The same size as before: the member takes the place of another one.
    original = [each for each in members if each is not member]
    index = 1 if place is None else place
    content = member if isinstance(member, bytes) else put([member], tmp_path / "one", b"").read_bytes()
    name, data = original[index]
    room = len(header(name, len(data))) + len(data) + padding(len(data))
    put([*original[:index], content.ljust(room, b"\0")[:room], *original[index + 1 :]], bundle)
    refused(bundle, tmp_path / "seeded", match if len(content) <= room else None)


def test_a_member_twice(bundle, tmp_path):
    first, *rest = parts(bundle)
    blobs = [each for each in rest if each[0].startswith("blobs")]
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
    refused(put([first, *rest], bundle), tmp_path / "seeded", "header of its own making|where .* must stand")


@pytest.mark.parametrize("offset", [-1, 1, 512, 1 << 40])
@pytest.mark.parametrize(("label", "column"), [("blobs", 1), ("entries", 1), ("names", 2)])
def test_a_lie_about_a_size_in_the_index(bundle, tmp_path, label, column, offset):
    def lie(document):
        document[label][0][column] += offset

    with_index(bundle, lie)
    refused(bundle, tmp_path / "seeded", "where its index makes|must stand|cannot be one")


@pytest.mark.parametrize("offset", [-1, 1, 512, 1 << 40])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_lie_about_a_size_in_a_header(bundle, tmp_path, which, offset):
    members = parts(bundle)
    name, content = members[which]
    info = tarfile.TarInfo(name)
    info.size, info.mode = max(0, len(content) + offset), 0o644
    lie = info.tobuf(tarfile.GNU_FORMAT)
    members[which] = lie + content + bytes(padding(len(content)))
    refused(put(members, bundle), tmp_path / "seeded", "states|ends within|begins with|bytes between|header|no JSON")


@pytest.mark.parametrize(("label", "column"), [("blobs", 0), ("entries", 2), ("names", 3)])
def test_a_lie_about_a_digest(bundle, tmp_path, label, column):
    def lie(document):
        document[label][0][column] = "0" * 64

    with_index(bundle, lie)
    refused(bundle, tmp_path / "seeded", "where its index says 0000|must stand")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(schema=2), "schema 2"),
        (lambda d: d.update(more=[]), "not in its one form"),
        (lambda d: d.pop("names"), "not in its one form"),
        (lambda d: d.update(names={}), "names are no list"),
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
        (lambda d: d["blobs"].pop(), "where its index makes"),
        (lambda d: d["names"].pop(), "where its index makes"),
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
        (lambda c: c.update({only(c, "entries")[0]: b"{" * 5000}), "no JSON"),
        (lambda c: c.update({only(c, "names")[0]: b"[" * 900 + b"]" * 900}), "no digest"),
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
    refused(bundle, tmp_path / "seeded", "it is cut, or a size is a lie")
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
    refused(bundle, tmp_path / "seeded", "ends too early|ends within|is cut|no tar file")


@pytest.mark.parametrize("more", [b"\0", b"x", bytes(512), bytes(10240), b"x" * 5000])
def test_a_bundle_with_more_behind_it(bundle, tmp_path, more):
    bundle.write_bytes(bundle.read_bytes() + more)
    refused(bundle, tmp_path / "seeded", "where its index makes")


def test_any_changed_byte(bundle, tmp_path):
    data = bundle.read_bytes()
    random.seed(4)
    for _ in range(300):
        place = random.randrange(len(data))
        bundle.write_bytes(data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :])
        refused(bundle, tmp_path / "seeded", None)


def test_a_file_that_changes_meanwhile(bundle, tmp_path, monkeypatch):
    """Between the reading that checks and the one that publishes."""
    from fusekit.store import bundle_import

    real = bundle_import._Reader.check

    def check_then_change(self, index):
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
    refused(tmp_path / "text", tmp_path / "seeded", "is no tar file")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "text", "text")
    refused(tmp_path / "other.tar", tmp_path / "seeded", "which no bundle has there")


# -- signed ones ------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path):
    for name in ("ours", "stranger"):
        generate(tmp_path / name, name)
    return tmp_path


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
    from fusekit.store import bundle_import

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
