"""Bundles from anybody: damaged in any byte, cut anywhere, made up with the right digests. Under the sanitizers."""

from __future__ import annotations

import copy
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import LaunchRecord, RecordError
from fusekit.cabi import Exported, generate_loader
from fusekit.config import Config
from fusekit.store import bundle as form
from fusekit.store.keys import canonical_json, sha256
from tests.abi.test_schema_2 import SECOND
from tests.runtime.samples import record

from .bundles import entry_of, name_of
from .launcher import BAD_BUNDLE, CUBIN, INVALID_ARGUMENT, LANGUAGES, OK, complete
from .samples import samples

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MUTATIONS = 1500
SOURCE = Path(__file__).parent / "hostile.c"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The program; without the sanitizers where the compiler has none."""
    folder = tmp_path_factory.mktemp("hostile")
    compiler, *standard = LANGUAGES["c11"]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    for name, text in generate_loader("demo").items():
        (folder / name).write_text(text)
    command = [compiler, *standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}", SOURCE, "-ldl", "-o"]
    for options in (SANITIZERS, ()):
        done = subprocess.run([*command, folder / "hostile", *options], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return folder / "hostile"
    raise AssertionError(done.stderr)


def run(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def packed(kernel: Exported, launch: Mapping[str, Any] | None = None, cubin: bytes | None = None, **rows: Any) -> bytes:
    """A bundle of one kernel, its digests all right whatever it holds. rows: other rows of the index."""
    cubin = kernel.cubin if cubin is None else cubin
    entry = entry_of(kernel, launch, cubin)
    documents = {"entries": entry.to_bytes(), "names": name_of(kernel, entry).to_bytes()}
    digests = {label: sha256(data) for label, data in documents.items()}
    index = {
        "schema": 1,
        "blobs": [[sha256(cubin), len(cubin)]],
        "signatures": [],
        "entries": [[entry.key, len(documents["entries"]), digests["entries"]]],
        "names": [[kernel.name, kernel.record.arch, len(documents["names"]), digests["names"]]],
    } | rows
    members = [
        form.blob_of(sha256(cubin), len(cubin)),
        form.entry_of(entry.key, len(documents["entries"]), digests["entries"]),
        form.name_of(kernel.name, kernel.record.arch, len(documents["names"]), digests["names"]),
    ]
    content = [cubin, *documents.values()]
    return tar(
        (canonical_json(index) + "\n").encode(), [(m.path, data) for m, data in zip(members, content, strict=True)]
    )


def tar(index: bytes, members: list[tuple[str, bytes]]) -> bytes:
    whole = b"".join(
        form.header(path, len(data)) + data + bytes(form.padding(len(data)))
        for path, data in [(form.INDEX, index), *members]
    )
    return whole + form.END


def attempts(hostile: Path, folder: Path, bundles: list[bytes]) -> list[tuple[int, int, int]]:
    """Status of opening and checking, status of loading, launches made, of each bundle."""
    (folder / "bundles").write_bytes(b"".join(struct.pack("<Q", len(data)) + data for data in bundles))
    lines = run(hostile, "try", folder / "bundles").splitlines()
    assert len(lines) == len(bundles)
    return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]


def test_every_byte_and_every_cut(hostile, tmp_path):
    long_name = replace(samples()[-1], name=f"{'f' * 60}/{'k' * 60}@v")  # with extension headers
    (tmp_path / "kernels.tar").write_bytes(packed(long_name))
    assert "bytes" in run(hostile, "sweep", tmp_path / "kernels.tar")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield (*path, key)
            yield from places(item, (*path, key))


def nested(depth: int) -> Any:
    value: Any = "M"
    for _ in range(depth):
        value = ["add", value, ["mul", 2, value]] if depth < 8 else ["add", 1, value]
    return value


STRANGE = [
    0, -1, 1, 3, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 1.5, 1e300, "", "x", "M", "x.address", "w.stride1",
    "y.stride7",
    "sm_count", "a\0b", "é\n\"𝄞", "sm_9", "sm_1234a", [], {}, [1, 2, 3], None, True, ["add", "M"], ["mod", "M", "K"],
    ["floordiv", "M", ["sub", "M", "M"]], ["mul", "M", 2**62], ["mul", "x.address", 3], ["max", "x.address", 3],
    nested(5), nested(31), nested(33), "f32", "u8", "workspace", ["sub", 0, "M"], [0] * 6, ["pow", 2, 3],
    2, "tiles", "safe", "active_clusters", ["if", "M", 1, ["floordiv", 8, "M"]], ["if", "M", 1],
    ["bit_length", ["sub", "M", 9]], ["exp2", "K"], ["lt", "x.address", 3], ["fmul", "act_alpha", 2],
    ["fdiv", 1e39, 0], ["fadd", "M", 1], "inf", "act_alpha", "e4m3", "tf32", "i16", "raw", "struct",
    {"kind": "pointer"}, 32764,
]  # fmt: skip


def mutated(launch: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A launch record with one thing wrong, or strange."""
    made = copy.deepcopy(launch)
    path = source.choice(list(places(made)))
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    act, key = source.randrange(8), path[-1]
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif act == 1:
        holder[f"{key}2"] = holder[key]
    elif act == 2 and isinstance(holder[key], list):
        holder[key] = holder[key] * 40
    elif act == 3 and isinstance(holder[key], list):
        source.shuffle(holder[key])
    else:
        holder[key] = source.choice(STRANGE)
    return made


def accepted(launch: dict[str, Any]) -> bool:
    try:
        return bool(LaunchRecord.from_json(copy.deepcopy(launch)))
    except RecordError:
        return False


def test_launch_records_that_are_made_up(hostile, tmp_path):
    """What fusekit refuses the loader refuses; what it takes the loader takes, and launches without harm, or refuses
    for being beyond its limits.
    """
    source = random.Random(5)
    names = ("every-field", "schema-2", "fc1-fwd")
    kernels = [kernel for kernel in samples() if any(name in kernel.name for name in names)]
    launches = []
    for number in range(MUTATIONS):
        kernel = kernels[number % len(kernels)]
        launch = mutated(kernel.record.to_json(), source)
        if launch.get("arch") == kernel.record.arch:  # else the entry is none
            launches.append((kernel, launch))
    found = attempts(hostile, tmp_path, [packed(kernel, launch) for kernel, launch in launches])
    taken = launched = 0
    for (_, launch), (checked, loaded, count) in zip(launches, found, strict=True):
        if not accepted(launch):
            assert (checked, loaded) == (BAD_BUNDLE, BAD_BUNDLE), launch
            continue
        assert checked in (OK, BAD_BUNDLE)
        taken += loaded == OK
        launched += count
    assert taken > 50
    assert launched > 100


def test_what_only_schema_2_can_say(hostile, tmp_path):
    made = [replace(samples()[-1], record=complete(replace(record(), **changes))) for changes in SECOND.values()]
    good = [packed(kernel) for kernel in made]
    bad = [packed(kernel, kernel.record.to_json() | {"schema": schema}) for kernel in made for schema in (1, 3)]
    assert [found[:2] for found in attempts(hostile, tmp_path, good)] == [(OK, OK)] * len(good)
    assert [found[:2] for found in attempts(hostile, tmp_path, bad)] == [(BAD_BUNDLE, BAD_BUNDLE)] * len(bad)


def test_a_float_argument_is_a_scalar(hostile, tmp_path):
    bad = []
    for wrong in ("inf", "-inf", "nan", "shift", "x", "", 1.5, ["fadd", "act_limit", 1]):
        launch = KERNEL.record.to_json()
        next(item for item in launch["parameters"] if item["kind"] == "float")["argument"] = wrong
        bad.append(packed(KERNEL, launch))
    assert {found[:2] for found in attempts(hostile, tmp_path, bad)} == {(BAD_BUNDLE, BAD_BUNDLE)}


def test_what_fusekit_takes_the_loader_takes(hostile, tmp_path):
    found = attempts(hostile, tmp_path, [packed(kernel) for kernel in samples()])
    assert all(statuses[:2] == (OK, OK) and statuses[2] > 0 for statuses in found), found


def test_kernels_as_they_are_built(hostile, tmp_path):
    """Real cubins, and entries with all that a build says of them."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.build import build
    from fusekit.store import Store
    from fusekit.store.selection import select

    built = build(["quickstart/moe-fc2"], jobs=1, config=Config(store=tmp_path / "store"))
    assert not built.failed
    store = Store(tmp_path / "store")
    form.export_bundle(store, select(store), tmp_path / "kernels.tar")
    ((checked, loaded, launches),) = attempts(hostile, tmp_path, [(tmp_path / "kernels.tar").read_bytes()])
    assert (checked, loaded) == (OK, OK)
    assert launches > 0


KERNEL = samples()[-1]
DIGEST = sha256(CUBIN)


@pytest.mark.parametrize(
    "rows",
    [
        {"blobs": [[DIGEST, len(CUBIN)], [DIGEST, len(CUBIN)]]},
        {"blobs": [[DIGEST.upper(), len(CUBIN)]]},
        {"blobs": [[DIGEST, 1 << 40]]},
        {"blobs": [[DIGEST, 2**70]]},
        {"blobs": [[DIGEST, 0]]},
        {"blobs": [[DIGEST, -1]]},
        {"blobs": [[DIGEST]]},
        {"blobs": [DIGEST]},
        {"blobs": {}},
        {"blobs": [[DIGEST, len(CUBIN) + 1]]},
        {"names": [["../../etc/passwd", "sm_90a", 10, DIGEST]]},
        {"names": [["a/../b@c", "sm_90a", 10, DIGEST]]},
        {"names": [["/a/b@c", "sm_90a", 10, DIGEST]]},
        {"names": [["a/b@c", "../x", 10, DIGEST]]},
        {"names": [["a/b@" + "c" * 101, "sm_90a", 10, DIGEST]]},
        {"names": [["a/b@c\n", "sm_90a", 10, DIGEST]]},
        {"names": [["a/b@c", "sm_90a", 10**20, DIGEST]]},
        {"entries": []},
        {"names": []},
        {"schema": 2},
        {"schema": "1"},
        {"more": []},
    ],
)
def test_an_index_that_lies(hostile, tmp_path, rows):
    ((checked, _, launches),) = attempts(hostile, tmp_path, [packed(KERNEL, **rows)])
    assert (checked, launches) == (BAD_BUNDLE, 0)


def test_digests_of_every_length(hostile, tmp_path):
    """SHA-256 pads by the length."""
    found = attempts(hostile, tmp_path, [packed(KERNEL, cubin=CUBIN + bytes(count)) for count in range(130)])
    assert all(statuses[:2] == (OK, OK) for statuses in found)


def elf(**fields: int) -> bytes:
    """The tests' ELF file with numbers of its header changed: name, offset and width are those of the ELF format."""
    places = {"phoff": (32, "<Q"), "shoff": (40, "<Q"), "phentsize": (54, "<H"), "phnum": (56, "<H"),
              "shentsize": (58, "<H"), "shnum": (60, "<H")}  # fmt: skip
    made = bytearray(CUBIN)
    for name, value in fields.items():
        struct.pack_into(places[name][1], made, places[name][0], value)
    return bytes(made)


@pytest.mark.parametrize(
    "cubin",
    [
        b"x", b"\x7fELF", b"// PTX", CUBIN[:63],
        elf(shnum=1, shentsize=64, shoff=2**63), elf(shnum=1, shentsize=64, shoff=2**64 - 64),
        elf(shnum=65535, shentsize=64, shoff=64), elf(shnum=1, shentsize=0, shoff=64),
        elf(shnum=1, shentsize=63, shoff=64), elf(shnum=3, shentsize=64, shoff=64),
        elf(phnum=1, phentsize=56, phoff=len(CUBIN)), elf(phnum=65535, phentsize=65535, phoff=64),
    ],
)  # fmt: skip
def test_a_cubin_that_would_lead_the_driver_astray(hostile, tmp_path, cubin):
    ((checked, loaded, _),) = attempts(hostile, tmp_path, [packed(KERNEL, cubin=cubin)])
    assert (checked, loaded) == (BAD_BUNDLE, BAD_BUNDLE)


def documents() -> list[bytes]:
    """Texts that are no canonical JSON, or none at all, where an index stands."""
    good = packed(KERNEL)
    text = good[form.BLOCK :].split(b"\n", 1)[0]
    deep = b"[" * 100_000
    return [
        b"", b"\n", b"{", b"[]", b"null", deep, b'{"a":' * 5000, text + b" ", b" " + text, text.replace(b":", b": ", 1),
        text.replace(b'"schema":1', b'"schema":01'), text.replace(b'"schema":1', b'"schema":-0'),
        text.replace(b'"schema":1', b'"schema":1,"schema":1'), text.replace(b'"schema":1', b'"\\u0073chema":1'),
        text.replace(b'"schema":1', b'"schema":1e0'), text[:-1], text + b"}", text.replace(b"@", b"\0"),
        text.replace(b"@", b"\xff"), text.replace(b"@", b"\\u0040"), text.replace(b"@", b"\\ud800"),
        text.replace(b"@", b"\\"),
    ]  # fmt: skip


def test_an_index_that_is_no_canonical_json(hostile, tmp_path):
    found = attempts(hostile, tmp_path, [tar(text + b"\n", []) for text in documents()])
    assert {status for status, _, _ in found} == {BAD_BUNDLE}


@pytest.mark.parametrize("name", ["bundle.json.sig", "../x", "", "a" * 100, "bundle.json.0123456789abcdeg.sig"])
def test_what_stands_before_the_index(hostile, tmp_path, name):
    header = form.header(name, 64) if name else bytes(512)
    ((checked, _, _),) = attempts(hostile, tmp_path, [header + bytes(512) + packed(KERNEL)])
    assert checked == BAD_BUNDLE


def test_statuses_are_those_of_the_header():
    assert (OK, INVALID_ARGUMENT, BAD_BUNDLE) == (0, 1, 8)
