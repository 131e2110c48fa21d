"""Names, globs and listings."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.errors import IntegrityError, UsageError
from fusekit.store import Store, matches
from fusekit.store.names import of_path, record_path, split

FULL = "gpt-oss-120b/fc1-fwd@128x160-c2x1"


@pytest.mark.parametrize(
    "pattern",
    [
        *("gpt-oss-120b", "gpt-oss-120b/fc1-fwd", FULL),
        *("*", "gpt*", "*/fc1-fwd", "*/fc1-fwd@*", "gpt-oss-?20b", "*@128x*", "gpt-oss-[12]*", "gpt-oss-120b/*-fwd"),
    ],
)
def test_what_means_a_kernel(pattern):
    assert matches(pattern, FULL)


@pytest.mark.parametrize(
    "pattern", ["", "gpt", "gpt-oss-120b/fc1", "fc1-fwd", FULL + "x", "GPT*", "*/fc1", "gpt-oss-120b/"]
)
def test_what_does_not(pattern):
    assert not matches(pattern, FULL)


part = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(part, part, part, st.sampled_from(["sm_90a", "sm_100a"]))
def test_a_path_gives_its_name_back(file, kernel, variant, arch):
    name = f"{file}/{kernel}@{variant}"
    path = Path(record_path(name, arch))
    assert split(name) == (file, kernel, variant)
    assert of_path(path.parts[1], path.name) == (name, arch)
    assert ".." not in path.parts


@given(st.text(max_size=30))
def test_no_text_leaves_the_folder(name):
    try:
        path = record_path(name, "sm_90a")
    except UsageError:
        return
    assert len(path.parts) == 3
    assert ".." not in path.parts


@pytest.mark.parametrize(
    "filename", ["x", "x.json", "k@v.json", "k@v.SM.json", "k.sm_90a.json", ".k@v.sm_90a.json", ".json"]
)
def test_no_other_file_is_a_record(filename):
    with pytest.raises(IntegrityError, match="not a name record"):
        of_path("file", filename)


@pytest.fixture
def store(tmp_path, make_entry, make_record):
    store = Store(tmp_path)
    entry, cubin = make_entry()
    store.publish(entry, cubin)
    for name in ("a/fc1@64x64", "a/fc1@128x64", "a/fc2@64x64", "ab/fc1@64x64", "ab/fc1.x@64x64"):
        store.publish_name(make_record(entry, name))
    return store


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a/fc1@128x64", "a/fc1@64x64", "a/fc2@64x64"]),
        ("a/fc1", ["a/fc1@128x64", "a/fc1@64x64"]),
        ("a/fc1@64x64", ["a/fc1@64x64"]),
        ("*/fc1", ["a/fc1@128x64", "a/fc1@64x64", "ab/fc1@64x64"]),
        ("a?", ["ab/fc1.x@64x64", "ab/fc1@64x64"]),
        *((pattern, []) for pattern in ("b", "a/fc3", "", "/", "..", "../a", "a/../a", "x\0y")),
    ],
)
def test_listing(store, pattern, names):
    assert [listed.record.name for listed in store.names(pattern)] == names


def test_listing_by_architecture(store):
    assert len(store.names("*", "sm_90a")) == 5
    assert store.names("*", "sm_100a") == []


def test_variants(store):
    assert [record.name for record in store.variants("a/fc1", "sm_90a")] == ["a/fc1@128x64", "a/fc1@64x64"]
    assert store.variants("a/fc1", "sm_100a") == store.variants("c/fc1", "sm_90a") == []


def test_variants_that_are_all_damaged_are_not_missing(store):
    path = store.roots[0].name_path("a/fc2@64x64", "sm_90a")
    path.chmod(0o644)
    path.write_bytes(b"")
    with pytest.raises(IntegrityError):
        store.variants("a/fc2", "sm_90a")
    assert len(store.listing("*").problems) == 1
