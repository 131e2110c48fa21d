"""Bundles from anybody: damaged in any byte, cut anywhere, forged with the right digests. Under the sanitizers."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fusekit.cabi import Exported, flat, generate_loader
from fusekit.cabi.layout import LAYER_TABLES, LOADER_TABLES, MAGIC, TABLES, VERSION, WORD, Field
from fusekit.config import Config
from fusekit.share import bundle as form
from fusekit.share.loader import export_bundle
from fusekit.share.selection import select
from fusekit.store import Store
from tests.abi.test_schema_2 import SECOND
from tests.cubins import cubin_of
from tests.records import FOLDERS
from tests.runtime.samples import record

from .bundles import bundle_of
from .launcher import BAD_BUNDLE, CUBIN, INVALID_ARGUMENT, LANGUAGES, MISMATCH, OK, WRONG_ARCH, complete
from .samples import hand_written, samples

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MUTATIONS = 1000  # with --soak; without, a third
SOURCE = Path(__file__).parent / "hostile.c"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """The program, compiled once a test run; without the sanitizers where the compiler has none."""
    folder = (FOLDERS[0] if FOLDERS else tmp_path_factory.getbasetemp()) / "hostile"
    if shutil.which(LANGUAGES["c11"][0]) is None:
        pytest.skip(f"{LANGUAGES['c11'][0]} is not installed")
    with FileLock(f"{folder}.lock"):
        return folder / "hostile" if (folder / "hostile").exists() else compiled(folder)


def compiled(folder: Path) -> Path:
    compiler, *standard = LANGUAGES["c11"]
    folder.mkdir(exist_ok=True)
    for name, text in generate_loader("demo").items():
        (folder / name).write_text(text)
    command = [compiler, *standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}", SOURCE, "-ldl", "-o"]
    for options in (SANITIZERS, ()):
        done = subprocess.run([*command, folder / "hostile", *options], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return folder / "hostile"
    raise AssertionError(done.stderr)


def run(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def row_of(kernel: Exported) -> dict[str, Any]:
    return flat.record_row(kernel.name, kernel.record, kernel.defaults)


def digest_of(data: bytes) -> tuple[int, ...]:
    return struct.unpack("<4q", hashlib.sha256(data).digest())


def packed(
    kernel: Exported, record: bytes | None = None, cubin: bytes | None = None, listed: Mapping[str, Any] | None = None,
    footer: Mapping[str, Any] | None = None, more: bytes = b"",
) -> bytes:  # fmt: skip
    """What the loader reads of a bundle of one kernel, its digests all right whatever it holds. listed, footer: changes
    of their rows; more: what stands after the directory's own rows.
    """
    cubin = kernel.cubin if cubin is None else cubin
    record = flat.record(kernel.name, kernel.record, kernel.defaults) if record is None else record
    row = {
        **flat.of_arch(kernel.record.arch), "name": kernel.name, "record_before": len(record), "record_bytes":
        len(record), "record_digest": digest_of(record), "cubin_before": len(record) + len(cubin), "cubin_bytes":
        len(cubin), "cubin_digest": digest_of(cubin),
    } | dict(listed or {})  # fmt: skip
    directory = flat.encode("", "directory", [{"kernels": [row]}]) + more
    own = {"magic": MAGIC, "version": VERSION, "before": len(directory) + 64, "bytes": len(directory),
           "digest": digest_of(directory)} | dict(footer or {})  # fmt: skip
    return cubin + record + directory + flat.encode("", "footer", [own]) + form.END


@pytest.fixture
def unchecked(monkeypatch):
    """The writer writes what it is told to."""
    monkeypatch.setattr(flat, "_check", lambda *_: None)


Found = list[tuple[int, int, int, str]]


def attempts(hostile: Path, folder: Path, bundles: Sequence[bytes]) -> Found:
    """Status of opening and checking, status of loading, launches made, and what was said, of each bundle."""
    (folder / "bundles").write_bytes(b"".join(struct.pack("<Q", len(data)) + data for data in bundles))
    lines = run(hostile, "try", folder / "bundles").split("\n")[:-1]
    assert len(lines) == len(bundles)
    result = [line.split(" ", 3) for line in lines]
    return [(int(opened), int(loaded), int(count), text) for opened, loaded, count, text in result]


def test_every_byte_and_every_cut(hostile, tmp_path, soak):
    """Every byte with --soak, else one in 127; the digests cover all alike."""
    step = 1 if soak else 127
    long_name = replace(hand_written()[-1], name=f"{'f' * 60}/{'k' * 60}@v")  # with extension headers
    message = run(hostile, "sweep", bundle_of(tmp_path, [long_name]), str(step))
    assert int(re.findall(r"(\d+) of them read", message)[0]) > 4000 // step


def of_every_form() -> list[Exported]:
    names = ("every-field", "schema-2", "following", "fc1-fwd")
    return [kernel for kernel in samples() if any(name in kernel.name for name in names)]


def test_every_word_of_a_launch_record(hostile, tmp_path, soak):
    """Whatever number is there, the record is refused, or taken and launched without harm. Every word with --soak, else
    one in 499.
    """
    step = 1 if soak else 499
    message = run(hostile, "words", bundle_of(tmp_path, of_every_form()), str(step))
    tried, taken, launched = map(int, re.findall(r"\d+", message))
    assert tried > 20_000 // step
    assert 1000 // step < taken < tried * 0.8
    assert launched > 1000 // step


STRANGE = [0, -1, 1, 2, 3, 5, 8, 40, 128, 511, 513, 32764, 2**31, 2**32, 2**56, WORD, -WORD - 1, WORD // 8, WORD - 7]


def mutated(words: list[int], source: random.Random) -> list[int]:
    """A flat record with words left out, twice, exchanged, or of other values."""
    changed = list(words)
    for _ in range(source.choice([1, 1, 2, 8])):
        if not changed:
            break
        at, other = source.randrange(len(changed)), source.randrange(len(changed))
        length = source.choice([1, 1, 2, 3, 7, 28])
        match source.randrange(6):
            case 0:
                del changed[at : at + length]
            case 1:
                changed[at:at] = changed[other : other + length]
            case 2:
                changed[at], changed[other] = changed[other], changed[at]
            case 3:
                changed = changed[:at]
            case 4:
                changed[at : at + length] = changed[other : other + length]
            case _:
                changed[at] = source.choice(STRANGE)
    return changed


def test_launch_records_that_are_forged(hostile, tmp_path, soak):
    source, rounds = random.Random(5), MUTATIONS if soak else MUTATIONS // 3
    kernels = of_every_form()
    records = {kernel.name: flat.record(kernel.name, kernel.record, kernel.defaults) for kernel in kernels}
    forged = []
    for number in range(rounds):
        kernel = kernels[number % len(kernels)]
        words = list(struct.unpack(f"<{len(records[kernel.name]) // 8}q", records[kernel.name]))
        forged.append(packed(kernel, struct.pack(f"<{len(changed)}q", *changed))
                    if (changed := mutated(words, source)) else packed(kernel, b"odd"))  # fmt: skip
    result = attempts(hostile, tmp_path, forged)
    assert {opened for opened, _, _, _ in result} == {OK, BAD_BUNDLE}
    assert all(loaded == BAD_BUNDLE for opened, loaded, _, _ in result if opened == BAD_BUNDLE)
    assert sum(loaded == OK for _, loaded, _, _ in result) > rounds // 20
    assert sum(count for _, _, count, _ in result) > rounds // 10


def holders(table: str, row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A row and every row below it, each with the name of its table."""
    result = [(table, row)]
    for field in TABLES[table]:
        if field.kind == "rows":
            for item in row.get(field.name, ()):
                result += holders(field.of, item)
    return result


def wrong(field: Field) -> list[int]:
    high = () if field.limit == "none" and field.high == WORD else (field.high + 1 if field.limit == "none" else 600,)
    return [*((field.low - 1,) if field.low > -WORD - 1 else ()), *high]


def test_every_rule_says_the_field_and_the_value(hostile, tmp_path, unchecked):
    """Each number of each table, below and above what it may be."""
    bad, expected = [], []
    for table, fields in TABLES.items():
        for field in fields if table not in (*LOADER_TABLES, *LAYER_TABLES) else ():
            for value in wrong(field) if field.kind == "whole" else ():
                of, row = SECOND_OF_ALL, row_of(SECOND_OF_ALL)
                last = [{"nodes": flat.more_rows(FOLLOWING.record)}] if table in MORE_TABLES else []
                if last:
                    of, row = FOLLOWING, row_of(FOLLOWING)
                held = holders("more", last[0]) if last else holders("record", row)
                holder = next(item for name, item in held if name == table)
                holder[field.name] = value if field.count == 1 else (value,) * field.count
                bad.append(packed(of, flat.encode("", "record", [row]) + flat.encode("", "more", last)))
                expected.append(f"{field.name} is {value}; it must be {field.low} to ")
    actual = attempts(hostile, tmp_path, bad)
    assert len(actual) > 80
    for (opened, loaded, count, text), words in zip(actual, expected, strict=True):
        assert (opened, loaded, count) == (BAD_BUNDLE, BAD_BUNDLE, 0)
        assert words in text
        assert text.endswith("write loader and bundle with one version of fusekit")


def first(rows: Rows, **values: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row.get(name) == value for name, value in values.items()))


def change_node(**values: Any) -> Any:
    return lambda row: row["nodes"][0].update(values)


def change_part(of: int, /, **values: Any) -> Any:
    return lambda row: first(row["nodes"][0]["parts"], kind=of).update(values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda row: row["dims"].pop(), "variable_count is not that of its dims"),
        (lambda row: row["values"].pop(), "variable_count is not that of its dims"),
        (lambda row: row["arguments"].append(row["arguments"][-1]), "variable_count is not that of its dims"),
        (lambda row: row["tensors"][1].update(rank=1), "tensors[2].first_stride is"),
        (lambda row: row["tensors"][1].update(written=65), "tensors[1].written is over no such tensor"),
        (lambda row: row["tensors"][0].update(shape=[[(1, 3 + 64)]]), "tensors[0].shape reads variable 67"),
        (lambda row: row["constraints"].append({"expression": [(1, row["first_value"])]}), "reads variable"),
        (lambda row: row["values"][1].update(expression=[(1, row["first_value"] + 1)]), "values[1].expression reads"),
        (lambda row: row["skips"].append({"dim": 99}), "dim is 99; it must be 3 to"),
        (lambda row: row["nodes"].clear(), "nodes has 0 rows; there may be 1 to 16"),
        (lambda row: row["nodes"].extend(row["nodes"] * 16), "nodes has 51 rows; there may be 1 to 16"),
        (lambda row: row.update(scratch=[(22, 0), (0, 1)]), "scratch has a step that is not known"),
        (lambda row: row.update(scratch=[(-1, 0), (0, 1)]), "scratch has a step that is not known"),
        (lambda row: row.update(scratch=[(8, 0)]), "scratch has a step that is not known, or no expression alone"),
        (lambda row: row.update(scratch=[(2, 1), (0, 1)]), ""),
        (lambda row: row.update(scratch=[(2, 2), (0, 1)]), "scratch leaves out 2 steps, of which there are fewer"),
        (lambda row: row.update(scratch=[(3, -1), (0, 1)]), "scratch leaves out -1 steps"),
        (lambda row: row.update(scratch=[(0, 1)] * 65537), "scratch has 65537 steps"),
        (lambda row: row.update(arch="sm\0"), "arch holds a 0 byte"),
        (lambda row: row.update(arch="x" * 65537), "arch has 65537 bytes; there may be 65536"),
        (lambda row: row["nodes"][0]["parameters"].reverse(), "nodes[0].parameters[1].offset is"),
        (change_part(0, size=64), "nodes[0].parts[0].size is 64, which is not its kind's"),
        (change_part(1, offset=32764), "size is 8, which is not its kind's, or reaches beyond"),
        (change_part(4, size=3), "size is 3, which is not its kind's"),
        (change_part(0, map=[]), "map is there or not against its kind"),
        (change_part(0, kind=1, size=8), "map is there or not against its kind"),
        (change_part(1, argument=-1), "argument is no tensor"),
        (change_node(parts=[], parameters=[{"name": "a", "offset": 32760, "size": 8}]), "offset is 32760; it must be"),
    ],
)
def test_what_does_not_belong_together(hostile, tmp_path, unchecked, change, text):
    row = row_of(SECOND_OF_ALL)
    change(row)
    ((opened, _, _, message),) = attempts(hostile, tmp_path, [packed(SECOND_OF_ALL, flat.encode("", "record", [row]))])
    assert opened == (BAD_BUNDLE if text else OK)
    assert text in message


def test_a_record_with_more_or_less_than_it_says(hostile, tmp_path):
    good = flat.encode("", "record", [row_of(KERNEL)])
    records = good[:-8], good + bytes(8), b"x"
    cut, longer, odd = attempts(hostile, tmp_path, [packed(KERNEL, data) for data in records])
    assert [result[:2] for result in (cut, longer, odd)] == [(BAD_BUNDLE, BAD_BUNDLE)] * 3
    assert "is cut" in cut[3]
    assert "is cut" in longer[3]


def test_more_than_the_record_says_is_held_against_it(hostile, tmp_path):
    base, rows = flat.encode("", "record", [row_of(FOLLOWING)]), flat.more_rows(FOLLOWING.record)
    more = [flat.encode("", "more", [{"nodes": nodes}]) for nodes in (rows, rows[:1], rows)]
    good, fewer, longer = attempts(
        hostile, tmp_path, [packed(FOLLOWING, base + data) for data in (*more[:2], more[2] + bytes(8))]
    )
    assert good[:2] == (OK, OK)
    assert (fewer[:2], longer[:2]) == ((BAD_BUNDLE, BAD_BUNDLE),) * 2
    assert "nodes are not so many twice" in fewer[3]
    assert "has 1 words too many" in longer[3]


def test_what_only_schema_2_can_say(hostile, tmp_path):
    exported = [
        replace(hand_written()[-1], record=complete(replace(record(), **changes))) for changes in SECOND.values()
    ]
    result = attempts(hostile, tmp_path, [packed(kernel) for kernel in exported])
    assert [statuses[:2] for statuses in result] == [(OK, OK)] * len(exported)


def test_what_fusekit_takes_the_loader_takes(hostile, tmp_path):
    result = attempts(hostile, tmp_path, [packed(kernel) for kernel in samples()])
    assert all(statuses[:2] == (OK, OK) and statuses[2] > 0 for statuses in result), result


def test_kernels_as_they_are_built(hostile, tmp_path):
    """Real cubins, and entries with all that a build says of them."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.build import build

    built = build(["quickstart/moe-fc2"], jobs=1, config=Config(store=tmp_path / "store"))
    assert not built.failed
    store = Store(tmp_path / "store")
    export_bundle(store, select(store), tmp_path / "kernels.tar")
    ((checked, loaded, launches, _),) = attempts(hostile, tmp_path, [(tmp_path / "kernels.tar").read_bytes()])
    assert (checked, loaded) == (OK, OK)
    assert launches > 0


KERNEL, FOLLOWING = hand_written()[-1], hand_written()[0]
MORE_TABLES = ("more", "more_node")
SECOND_OF_ALL = next(kernel for kernel in hand_written() if "schema-2" in kernel.name)
RECORD = flat.encode("", "record", [row_of(KERNEL)])


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        ({"record_before": -1}, "record_before is -1; it must be 0 to"),
        ({"record_before": WORD}, "has the launch record of"),
        ({"record_before": len(RECORD) - 8}, "has the launch record of"),
        ({"record_bytes": 0}, "has the launch record of"),
        ({"record_bytes": len(RECORD) - 8}, "has the launch record of"),
        ({"record_bytes": WORD}, "record_bytes is 9223372036854775807; it must be 0 to 16777216"),
        ({"record_digest": (0, 0, 0, 0)}, "has the launch record of"),
        ({"cubin_before": len(RECORD) + len(CUBIN) + 1}, "has the cubin of"),
        ({"cubin_before": len(RECORD) + len(CUBIN) - 1}, "has the cubin of"),
        ({"cubin_before": 1 << 62}, "has the cubin of"),
        ({"cubin_bytes": len(CUBIN) + len(RECORD) + 1}, "has the cubin of"),
        ({"cubin_bytes": 1 << 31}, "cubin_bytes is 2147483648; it must be 0 to 1073741824"),
        ({"cubin_digest": (1, 2, 3, 4)}, "has the cubin of"),
        ({"major": 100}, "major is 100; it must be 0 to 99"),
        ({"suffix": 3}, "suffix is 3; it must be 0 to 2"),
        ({"problem": "it has 99 tensors"}, "is for Python alone: it has 99 tensors"),
        ({"name": "a\0b"}, "name holds a 0 byte"),
    ],
)
def test_a_directory_that_lies(hostile, tmp_path, unchecked, listed, text):
    ((checked, loaded, launches, message),) = attempts(hostile, tmp_path, [packed(KERNEL, listed=listed)])
    assert (checked, loaded, launches) == (OK if "problem" in listed else BAD_BUNDLE, BAD_BUNDLE, 0)
    assert text in message


def test_a_directory_that_sends_to_another_device(hostile, tmp_path):
    ((checked, loaded, _, message),) = attempts(hostile, tmp_path, [packed(KERNEL, listed={"major": 10})])
    assert (checked, loaded) == (OK, WRONG_ARCH)
    assert "for sm_90a; device 0 is of capability 9.0" in message


@pytest.mark.parametrize(
    ("footer", "text"),
    [
        ({"magic": 0}, "was not exported for this loader"),
        ({"version": VERSION + 1}, f"is of version {VERSION + 1}; this loader reads {VERSION}"),
        ({"before": -1}, "before is -1"),
        ({"before": 0}, "has the directory of"),
        ({"before": WORD}, "has the directory of"),
        ({"bytes": 0}, "bytes is 0; it must be 1 to"),
        ({"bytes": WORD}, "bytes is 9223372036854775807"),
        ({"bytes": 1 << 28}, "has the directory of"),
        ({"bytes": 8}, "has the directory of"),
        ({"digest": (0, 0, 0, 0)}, "has the directory of"),
    ],
)
def test_a_footer_that_lies(hostile, tmp_path, unchecked, footer, text):
    ((checked, _, launches, message),) = attempts(hostile, tmp_path, [packed(KERNEL, footer=footer)])
    assert (checked, launches) == (BAD_BUNDLE, 0)
    assert text in message


def test_files_that_are_no_bundle(hostile, tmp_path):
    good = packed(KERNEL)
    bad = [b"", b"x", bytes(1087), bytes(1088), bytes(5000), form.END + good[:-1024], packed(KERNEL, more=bytes(8))]
    assert {status for status, _, _, _ in attempts(hostile, tmp_path, bad)} == {BAD_BUNDLE}


def test_digests_of_every_length(hostile, tmp_path):
    """SHA-256 pads by the length."""
    result = attempts(hostile, tmp_path, [packed(KERNEL, cubin=CUBIN + bytes(count)) for count in range(130)])
    assert all(statuses[:2] == (OK, OK) for statuses in result)


def elf(**fields: int) -> bytes:
    """The tests' ELF file with numbers of its header changed: name, offset and width are those of the ELF format."""
    places = {"phoff": (32, "<Q"), "shoff": (40, "<Q"), "phentsize": (54, "<H"), "phnum": (56, "<H"),
              "shentsize": (58, "<H"), "shnum": (60, "<H")}  # fmt: skip
    content = bytearray(CUBIN)
    for name, value in fields.items():
        struct.pack_into(places[name][1], content, places[name][0], value)
    return bytes(content)


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
    ((checked, loaded, _, message),) = attempts(hostile, tmp_path, [packed(KERNEL, cubin=cubin)])
    assert (checked, loaded) == (BAD_BUNDLE, BAD_BUNDLE)
    assert "is no whole ELF file" in message


def test_a_cubin_that_lacks_what_its_record_launches(hostile, tmp_path):
    others = cubin_of("another", "kernel_"), cubin_of(), CUBIN.replace(b"kernel\0", b"kerneL\0")
    for checked, loaded, _, message in attempts(hostile, tmp_path, [packed(KERNEL, cubin=cubin) for cubin in others]):
        assert (checked, loaded) == (BAD_BUNDLE, BAD_BUNDLE)
        assert "without its kernel kernel; export it again" in message


def test_a_record_that_is_listed_under_another_name(hostile, tmp_path):
    """As in a bundle whose variants somebody exchanged."""
    data = packed(KERNEL, flat.encode("", "record", [row_of(KERNEL) | {"name": "sample/other@1"}]))
    ((checked, loaded, _, message),) = attempts(hostile, tmp_path, [data])
    assert (checked, loaded) == (BAD_BUNDLE, BAD_BUNDLE)
    assert f"lists {KERNEL.name} with the launch record of another kernel" in message


def test_statuses_are_those_of_the_header():
    assert (OK, INVALID_ARGUMENT, BAD_BUNDLE) == (0, 1, 8)


def test_lists_of_parameters_that_are_forged(hostile, tmp_path, soak):
    """Whatever is in the tables and the list of a cubin, it is read without harm."""
    source, cubins, rounds = random.Random(3), [], 1500 if soak else 500
    symbols = [step.symbol for step in KERNEL.record.launches]
    right = cubin_of(*symbols, parameters={KERNEL.record.symbol: len(KERNEL.record.parameters)})
    for _ in range(rounds):
        cubin = bytearray(right)
        for _ in range(source.choice([1, 1, 2])):
            at = source.choice([source.randrange(len(cubin)), source.randrange(len(cubin) - 256, len(cubin))])
            cubin[at] = source.choice([0, 1, 4, 8, 0x17, 0x7F, 0xFF])
        cubins.append(bytes(cubin))
    result = attempts(hostile, tmp_path, [packed(KERNEL, cubin=cubin) for cubin in (right, *cubins)])
    assert result[0][:2] == (OK, OK)
    loaded = [status for _, status, _, _ in result]
    assert rounds // 15 < loaded.count(OK) < rounds * 14 // 15
    assert MISMATCH in loaded
