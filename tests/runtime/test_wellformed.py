"""Documents with the right digests and the wrong contents: one validator, wherever they come in."""

import dataclasses
import json
import re

import pytest

from fusekit.abi import RecordError, evaluate, validate
from fusekit.abi.expr import MAX_NODES
from fusekit.choice.tuning import Tuning
from fusekit.choice.variants import check_alike, check_name, choose
from fusekit.errors import FusekitError, IntegrityError, UsageError
from fusekit.runtime.wellformed import WELLFORMED, check_entry
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import NameRecord, Store
from fusekit.store.documents import DEPTH, seal
from fusekit.store.entries import Entry
from fusekit.store.lockfile import read_lock
from tests.cubins import cubin_of
from tests.store.samples import build_entry, build_launch, build_record, files

NAME = "quickstart/fc1@a"
SPEC = {"op": "dense-gemm", "tile": [128, 128], "cluster": [2, 1], "problem": {"E": 1, "M": 8, "N": 8, "K": 8}}


def nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


SPECS = [
    {"tile": "128x128"}, {"tile": [128]}, {"tile": [128, 0]}, {"tile": [True, 1]}, {"cluster": {}}, {"op": None},
    {"op": 5}, {"problem": [1]}, {"problem": {"M": "8"}}, {"problem": {"M": 1.5}}, {"activation": "gelu"},
    {"activation": {"kind": 3}}, {"warps": "8"}, {"experts": None}, {"schedule": ["static"]}, {"arch": {}},
]  # fmt: skip
LAUNCHES = [
    {}, {"schema": 99}, {"grid": "1"}, {"grid": [1, 1]}, {"arguments": {}}, {"symbol": 5}, {"more": 1},
    {"block": [2**40, 1, 1]}, {"grid": [nested(40), 1, 1]}, {"grid": [["mul", *[2**62] * 100_000], 1, 1]},
    {"dims": [{}] * 2000}, {"symbol": ""}, {"symbol": "a\0b"}, {"symbol": "x" * 70_000}, {"symbol": "other"},
    {"arch": "sm_100a"},
]  # fmt: skip


WHOLE = cubin_of("kernel")
CUBINS = [
    b"<html>",
    WHOLE[:63],
    WHOLE[:-1],
    b"\x7fELF\x02\x01" + bytes(58) + b"no table",
    cubin_of(),
    WHOLE[:0x28] + (2**40).to_bytes(8, "little") + WHOLE[0x30:],  # sections, far outside
    WHOLE[:0x20] + (2**40).to_bytes(8, "little") + WHOLE[0x28:0x38] + b"\1" + WHOLE[0x39:],  # a segment
]


def write(store, entry, cubin, record):
    """What whoever can write there can put there: sealed, and published like any other."""
    store.publish(entry, cubin)
    store.publish_name(record)


def bad_name(spec):
    entry, cubin = build_entry(0)
    return entry, cubin, dataclasses.replace(build_record(entry, NAME), spec=SPEC | spec)


def bad_cubin(cubin):
    entry, cubin = build_entry(0, cubin)
    return entry, cubin, build_record(entry, NAME)


def bad_launch(launch):
    entry, cubin = build_entry(0)
    whole = build_launch(1024) if launch else {"arch": "sm_90a"}
    if "arch" in launch:  # a store sees this itself
        entry = dataclasses.replace(entry, launch=whole)
        return entry, cubin, build_record(entry, NAME)
    entry = dataclasses.replace(entry, launch=whole | launch)
    return entry, cubin, build_record(entry, NAME)


@pytest.mark.parametrize(
    "record_and_cubin",
    [
        *(pytest.param(lambda spec=spec: bad_name(spec), id=f"spec-{index}") for index, spec in enumerate(SPECS)),
        *(pytest.param(lambda each=each: bad_launch(each), id=f"launch-{i}") for i, each in enumerate(LAUNCHES[:-1])),
        *(pytest.param(lambda each=each: bad_cubin(each), id=f"cubin-{i}") for i, each in enumerate(CUBINS)),
    ],
)
def test_what_cannot_be_used_is_refused_at_every_door(record_and_cubin, tmp_path):
    pytest.importorskip("fsspec")
    store = Store(tmp_path / "store")
    write(store, *record_and_cubin())
    assert len(store.verify(full=True, inspect=WELLFORMED).bad) == 1
    export_bundle(store, select(store), tmp_path / "k.tar")
    with pytest.raises(IntegrityError, match=r"which cannot be used: .*; a bundle is imported whole") as refused:
        import_bundle(Store(tmp_path / "imported"), tmp_path / "k.tar", inspect=WELLFORMED)
    assert len(re.findall("build it again|build the kernel again|rebuild the kernel", str(refused.value))) == 1
    push(store, select(store), Remote(str(tmp_path / "remote")))
    report = pull(Store(tmp_path / "pulled"), Remote(str(tmp_path / "remote")), inspect=WELLFORMED)
    assert [name for name, _ in report.failed] == [NAME]
    assert not (tmp_path / "imported").exists()
    assert files(tmp_path / "pulled") == {}
    record = store.find_name(NAME, "sm_90a")
    with pytest.raises(IntegrityError):
        check_entry(*store.load(record.key))
        check_name(record)


@pytest.mark.parametrize("margin", [-1, 1.5, float("inf")])
def test_a_margin_is_a_count(margin):
    entry, _ = build_entry(0)
    record = dataclasses.replace(build_record(entry, NAME), spec=SPEC, defaults={"cluster_margin": margin})
    with pytest.raises(IntegrityError, match="its cluster_margin is"):
        check_name(record)


def test_variants_are_chosen_among_what_can_be_used():
    entry, _ = build_entry(0)
    good = dataclasses.replace(build_record(entry, NAME), spec=SPEC)
    for spec in (*SPECS, {"op": "x"}):
        other = SPEC | spec if spec != {"op": "x"} else {"op": "x"}
        variants = [good, dataclasses.replace(build_record(entry, "quickstart/fc1@b"), spec=other)]
        for look in (choose, check_alike):
            with pytest.raises(UsageError if spec == {"op": "x"} else IntegrityError):
                look(variants)


def test_members_of_a_sweep_are_not_compared():
    """They are kernels of their own, also next to others of their name."""
    entry, _ = build_entry(0)
    specs = [{"op": "extern", "params": {"n": n}} for n in (1, 2)]
    sweep = [dataclasses.replace(build_record(entry, f"own/k@n-{s['params']['n']}"), spec=s) for s in specs]
    check_alike(sweep)
    with pytest.raises(UsageError, match="differ in op, params"):
        check_alike([dataclasses.replace(build_record(entry, "own/k@a"), spec=SPEC), *sweep])


def resealed(change):
    entry, _ = build_entry(0)
    document = json.loads(build_record(entry, NAME).to_bytes())
    del document["digest"]
    change(document)
    return seal(document, "test")


SUMMARY = {
    "bytes": 1, "cubin_sha256": "0" * 64, "entry_bytes": 1, "launches": 1, "registers": 1, "seconds": 1.0,
    "spill_bytes": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        *(
            pytest.param(
                lambda d, label=label, value=value: d.update(summary=SUMMARY | {label: value}), id=f"{label}-{i}"
            )
            for label in SUMMARY
            for i, value in enumerate(["x", [], {}, -1, True, 1.5 if label != "seconds" else "1"])
        ),
        pytest.param(lambda d: d.update(summary={"bytes": None}), id="bytes-null"),
        pytest.param(lambda d: d["spec"].update(x=nested(DEPTH - 1)), id="nested"),
        pytest.param(lambda d: d["defaults"].update(act_alpha=[1]), id="default"),
        pytest.param(lambda d: d["defaults"].update(act_alpha="nan"), id="default-nan"),
        pytest.param(lambda d: d.update(spec=[]), id="spec"),
    ],
)
def test_a_name_record_of_wrong_types_is_no_name_record(change, tmp_path):
    """A listing, a build and a verification say so and go on with the others."""
    store = Store(tmp_path)
    for seed, name in enumerate((NAME, "quickstart/fc2@a")):
        entry, cubin = build_entry(seed)
        write(store, entry, cubin, build_record(entry, name))
    path = store.roots[0].name_path(NAME, "sm_90a")
    path.chmod(0o644)
    path.write_bytes(resealed(change))
    listed = [row.name for row in store.overview().rows]  # which does not take specs apart
    assert listed == (["quickstart/fc2@a"] if b'"x":[[' not in path.read_bytes() else [NAME, "quickstart/fc2@a"])
    assert [got.record.name for got in store.names()] == ["quickstart/fc2@a"]
    assert len(store.verify().bad) == len(store.verify(full=True).bad) == 1
    entry, _ = build_entry(0)
    assert store.settled(build_record(entry, NAME)) is None
    store.publish_name(build_record(entry, NAME))
    assert not store.verify(full=True).bad


@pytest.mark.parametrize(
    "member", [{"resources": {"registers": "168"}}, {"resources": {"spill_bytes": -1}}, {"proof": {"launches": 1.5}},
               {"seconds": -1.0}]
)  # fmt: skip
def test_an_entry_of_wrong_types_is_no_entry(member):
    entry, _ = build_entry(0)
    with pytest.raises(IntegrityError):
        dataclasses.replace(entry, **member).to_bytes()


@pytest.mark.parametrize(
    "text", ["1e999", "NaN", "-Infinity", "9223372036854775808", str(10**400), "[" * 64 + "]" * 64]
)
def test_numbers_and_nesting_are_bounded(text, tmp_path):
    body = f'{{"more":{text},"schema":2}}'
    for read in (
        lambda data: NameRecord.from_bytes(data, "x", NAME, "sm_90a"),
        lambda data: Entry.from_bytes(data, "x", "0" * 64),
        lambda data: Tuning.from_bytes(data, "x", "sm_90a"),
    ):
        with pytest.raises(IntegrityError, match=r"finite|too large|JSON does not|64 bits|nested deeper|valid JSON"):
            read(body.encode())
    (tmp_path / "m.json").write_text(body)
    with pytest.raises(IntegrityError, match="is no lock"):
        read_lock(tmp_path / "m.json", folder=True)


@pytest.mark.parametrize(
    "row",
    [
        {"problem": {"T": 10**18, "H": -1}},
        {"problem": {"T": True}},
        {"variants": [["a", True]]},
        {"variants": [["a", [1]]]},
        {"variants": [["a", 0]]},
        {"features": []},
        {"device": 1},
    ],
)
def test_a_tuning_table_of_wrong_types(row, tmp_path):
    good = {"device": "x", "features": {}, "problem": {"T": 1}, "variants": [["a", 1.0]]}
    data = json.dumps({"schema": 1, "arch": "sm_90a", "rows": [good | row]}).encode()
    entry, cubin = build_entry(0)
    store = Store(tmp_path)
    write(store, entry, cubin, build_record(entry, NAME))
    store.publish_tuning("sm_90a", data)
    (bad,) = store.verify(full=True, inspect=WELLFORMED).bad
    assert "is no tuning table" in bad.problem


@pytest.mark.parametrize("expr", [["mul", *[2**62] * 100_000], ["add", *[["add", 1, 1]] * 3000]])
def test_an_expression_has_a_cost(expr):
    with pytest.raises(RecordError, match=f"more than {MAX_NODES} operators and operands"):
        validate(expr)


def test_a_product_has_a_size():
    validate(["mul", *[2**62] * 4000])
    with pytest.raises(RecordError, match=r"the product of .* does not fit into 64 bits"):
        evaluate(["mul", *[2**62] * 4000], {})


def test_what_could_not_be_read_again_is_not_published(tmp_path):
    entry, cubin = build_entry(0)
    with pytest.raises(FusekitError, match="cannot be stored, since it has an integer that does not fit into 64 bits"):
        Store(tmp_path).publish(dataclasses.replace(entry, proof={"n": 2**63}), cubin)
    Store(tmp_path).publish(entry, cubin)
    record = dataclasses.replace(build_record(entry, NAME), spec={"x": nested(DEPTH)})
    with pytest.raises(FusekitError, match="cannot be stored, since it is nested deeper"):
        Store(tmp_path).publish_name(record)
