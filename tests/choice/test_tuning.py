"""Tuning tables: which row speaks for a problem, files, roots of a store, and the table that comes with fusekit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.choice import tuning
from fusekit.choice.tuning import Row, Tuning, features
from fusekit.choice.variants import choose
from fusekit.config import Config
from fusekit.errors import IntegrityError, SignatureError, UsageError
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share.selection import sign_tuning
from fusekit.spec import find
from fusekit.spec.model import ARCHES
from fusekit.store import NameRecord, Store
from fusekit.store.signature import Trust, generate
from tests.runtime.samples import SPEC, library, publish, record

PROBLEM = {"E": 32, "M": 32 * 1024, "N": 5760, "K": 2880}
WIDE, NARROW = "sample/fc1@128x256-c2x1", "sample/fc1@128x160-c2x1"
FEATURES = features(SPEC)


def row(*variants: str, device: str = "H200", problem: dict[str, int] = PROBLEM, **more: Any) -> Row:
    return Row(device, FEATURES | more, problem, tuple((variant, 10.0 + i) for i, variant in enumerate(variants)))


def canonical(pattern: str) -> dict[str, Any]:
    (spec,) = find([pattern])
    result: dict[str, Any] = json.loads(json.dumps(spec.canonical()))
    return result


def test_features_say_what_is_computed() -> None:
    large, small = (canonical(f"gpt-oss-{size}/fc1-fwd@128x192-c1x2-dynamic") for size in ("20b", "120b"))
    other_tile = canonical("gpt-oss-20b/fc1-fwd@128x160-c2x1-dynamic")
    other_scalars = large | {"activation": large["activation"] | {"alpha": 1.0, "limit": None}, "cluster_margin": 3}
    assert features(large) == features(small) == features(other_tile) == features(other_scalars)
    for changed in ("bias", "save_preactivation", "glu_layout", "dtype", "b_major", "op"):
        assert features(large | {changed: "another"}) != features(large)
    assert features(large | {"new_key": 1}) != features(large)
    assert features(large | {"new_key": "none", "another": False}) == features(large)  # which it does without
    assert json.loads(json.dumps(features(large))) == features(large)


@pytest.mark.parametrize(
    ("change", "distance"),
    [
        ({}, 0.0),
        ({"M": 64 * 1024}, 1.0),
        ({"M": 16 * 1024}, 1.0),
        ({"E": 64, "M": 64 * 1024}, 0.5),
        ({"E": 8, "M": 8 * 1024}, 1.0),
        ({"E": 64}, 1.5),
        ({"N": 5761}, float("inf")),
        ({"K": 2881}, float("inf")),
        ({"M": 0}, float("inf")),
        ({"T": 5}, float("inf")),
    ],
)
def test_distance(change: dict[str, int], distance: float) -> None:
    assert row("a").distance(PROBLEM | change) == pytest.approx(distance)


def test_distance_of_tokens() -> None:
    measured = row("w8", problem={"T": 8192, "H": 2880})
    assert measured.distance({"T": 4096, "H": 2880}) == 1.0
    assert measured.distance({"T": 8192, "H": 4096}) == float("inf")
    assert row("w8", problem={"T": 0}).distance({"T": 0}) == 0.0


def test_the_nearest_row_speaks() -> None:
    table = Tuning("sm_90a", (row("far", problem=PROBLEM | {"M": 60 * 1024}), row("near"), row("also near")))
    assert table.best(SPEC, PROBLEM) == ("near",)
    assert table.best(SPEC, PROBLEM | {"M": 50 * 1024}) == ("far",)
    assert table.best(SPEC, PROBLEM | {"M": 1024}) == ()
    assert table.best(SPEC | {"op": "dense-gemm"}, PROBLEM) == ()
    assert table.best(SPEC, {}) == ()
    assert Tuning("sm_90a").best(SPEC, PROBLEM) == ()


def test_the_devices_own_rows_come_first() -> None:
    table = Tuning("sm_90a", (row("of another"), row("own", device="H100", problem=PROBLEM | {"M": 50 * 1024})))
    assert table.best(SPEC, PROBLEM, "H100") == ("own",)
    assert table.best(SPEC, PROBLEM, "H200") == table.best(SPEC, PROBLEM) == table.best(SPEC, PROBLEM, "GH200")
    assert table.best(SPEC, PROBLEM) == ("of another",)


def test_what_is_measured_again_replaces_what_was() -> None:
    first, other = row("a", "b"), row("b", device="H100")
    table = Tuning("sm_90a").merged([first, other]).merged([replace(first, variants=(("c", 9.0), ("b", 12.5)))])
    assert [item.variants for item in table.rows] == [(("c", 9.0), ("a", 10.0), ("b", 12.5)), other.variants]
    placed = table.merged([replace(first, variants=(("b", None), ("d", None)))])
    assert placed.rows[0].variants == (("b", None), ("d", None), ("c", 9.0), ("a", 10.0))
    known = Tuning("sm_90a", (replace(first, variants=(("a", None),)),))
    assert known.merged([replace(first, variants=(("b", None),))]).rows[0].variants == (("b", None),)
    assert known.merged([replace(first, variants=(("b", 3.0), ("c", 4.0)))]).best(SPEC, PROBLEM) == ("b", "c")


numbers = st.integers(1, 10**6)
rows = st.builds(
    row,
    st.sampled_from(["128x128-c1x1", "128x192-c1x2-dynamic", "w8"]),
    device=st.sampled_from(["H100", "H200"]),
    problem=st.one_of(
        st.fixed_dictionaries({"E": numbers, "M": numbers, "N": numbers, "K": numbers}),
        st.fixed_dictionaries({"T": numbers, "H": numbers}),
    ),
    bias=st.sampled_from([True, "row"]),
)


@given(st.lists(rows, max_size=5), st.randoms(use_true_random=False))
def test_files(listed: list[Row], shuffler: Any) -> None:
    data = Tuning("sm_90a", tuple(listed)).to_bytes()
    result = Tuning.from_bytes(data, "x.json", "sm_90a")
    assert len(result.rows) == len(listed)
    assert all(item in listed for item in result.rows)
    shuffler.shuffle(listed)
    assert Tuning("sm_90a", tuple(listed)).to_bytes() == data


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2}, {"arch": "sm_80"}, {"rows": 3}, {"rows": [{}]}, {"rows": [[]]},
        {"rows": [row("a").to_json() | {"variants": []}]},
        {"rows": [row("a").to_json() | {"variants": [["a", -1]]}]},
        {"rows": [row("a").to_json() | {"variants": [["a"]]}]},
        {"rows": [row("a").to_json() | {"variants": [[7, 1]]}]},
        {"rows": [row("a").to_json() | {"problem": {}}]},
        {"rows": [row("a").to_json() | {"problem": {"E": 1.5, "M": 2}}]},
        {"rows": [row("a").to_json() | {"problem": {"N": 8}}]},
        {"rows": [row("a").to_json() | {"device": None}]},
        {"rows": [row("a").to_json() | {"features": []}]},
    ],
)  # fmt: skip
def test_what_is_no_table(change: dict[str, Any]) -> None:
    document = {"schema": 1, "arch": "sm_90a", "rows": [row("a").to_json()]} | change
    with pytest.raises(IntegrityError, match=r"t\.json is no tuning table of sm_90a: .*remove it, or measure anew"):
        Tuning.from_bytes(json.dumps(document).encode(), "t.json", "sm_90a")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff", b"{}"])
def test_bytes_that_are_no_table(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert tuning.read(path, "sm_90a") == Tuning("sm_90a")
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="no tuning table"):
        tuning.read(path, "sm_90a")


def test_a_table_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="is no plain file; a tuning table is"):
            tuning.read(path, "sm_90a")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(tuning.LIMIT + 1)
    with pytest.raises(IntegrityError, match="the most of a tuning table"):
        tuning.read(tmp_path / "long", "sm_90a")


def two_variants(root: Path) -> Store:
    publish(root, NARROW, record(dynamic_shared=1000))
    return publish(root, WIDE, record(dynamic_shared=2000), tile=[128, 256])


def test_a_name_without_variant_takes_the_measured_one(tmp_path: Path) -> None:
    store = two_variants(tmp_path)
    problem = SPEC["problem"]
    assert library(store)[0].load("sample/fc1").name == NARROW
    measured = Row("FAKE H200", FEATURES, problem, (("not-built", 1.0), ("128x256-c2x1", 2.0), ("128x160-c2x1", 3.0)))
    path = store.publish_tuning("sm_90a", Tuning("sm_90a", (measured,)).to_bytes())
    assert path == tmp_path / "tuning" / "sm_90a.json"
    assert library(store)[0].load("sample/fc1").name == WIDE
    assert library(store)[0].find("sample/fc1", problem=problem | {"M": 2048}).name == WIDE
    assert library(store)[0].find("sample/fc1", problem=problem | {"M": 4096}).name == NARROW
    assert library(store)[0].load(NARROW).name == NARROW
    # The device's own row is not the one that a reader without a device guesses; what is loaded is the own one.
    other = replace(measured, device="another", variants=(("128x160-c2x1", 1.0),))
    store.publish_tuning("sm_90a", Tuning("sm_90a", (other, measured)).to_bytes())
    assert library(store)[0].load("sample/fc1").name == WIDE


def test_tables_of_several_roots(tmp_path: Path) -> None:
    lower = two_variants(tmp_path / "lower")
    lower.publish_tuning("sm_90a", Tuning("sm_90a", (row("128x256-c2x1", problem=SPEC["problem"]),)).to_bytes())
    upper = Store.open(Config(store=tmp_path / "upper", read_only_roots=(tmp_path / "lower",)))
    assert library(upper)[0].find("sample/fc1").name == WIDE
    upper.publish_tuning("sm_90a", Tuning("sm_90a", (row("128x160-c2x1", problem=SPEC["problem"]),)).to_bytes())
    assert library(upper)[0].find("sample/fc1").name == NARROW
    (tmp_path / "upper" / "tuning" / "sm_90a.json").write_text("no table")
    assert library(upper)[0].find("sample/fc1").name == WIDE
    # A table is no kernel: verify and gc leave it alone, and clear away what a killed writer left next to it.
    (tmp_path / "upper" / "tuning" / ".sm_90a.json.gone-1-x.tmp").write_text("")
    assert not upper.verify(full=True).bad
    upper.collect()
    assert (tmp_path / "upper" / "tuning" / "sm_90a.json").exists()


def test_where_keys_are_trusted_a_table_counts_that_one_of_them_signed(tmp_path: Path) -> None:
    for name in ("ours", "stranger"):
        generate(tmp_path / name)
    trust, key = Trust([tmp_path / "ours.pub"]), tmp_path / "ours"
    data = Tuning("sm_90a", (row("128x256-c2x1", problem=SPEC["problem"]),)).to_bytes()
    trusting = Store(tmp_path / "store", trust=trust)
    for signer in (None, tmp_path / "stranger"):
        Store(tmp_path / "store", signing_key=signer).publish_tuning("sm_90a", data)
        assert len(Store(tmp_path / "store").tuning_tables("sm_90a")) == 1
        assert trusting.tuning_tables("sm_90a") == []
    with pytest.raises(SignatureError, match="name the private key with --sign or FUSEKIT_SIGNING_KEY"):
        trusting.publish_tuning("sm_90a", data)
    path = Store(tmp_path / "store", trust=trust, signing_key=key).publish_tuning("sm_90a", data)
    assert trusting.tuning_tables("sm_90a") == [(path, data)]
    # Its signature stays as long as it does: a collection knows what it is over.
    for signature in (tmp_path / "store" / "signatures").rglob("*.*"):
        os.utime(signature, (1, 1))
    trusting.collect()
    assert trusting.tuning_tables("sm_90a") == [(path, data)]
    path.chmod(0o644)
    path.write_bytes(data.replace(b"128x256", b"128x160"))
    assert trusting.tuning_tables("sm_90a") == []
    # A signature over a name or an entry does not stand for one over a table.
    publisher = Store(tmp_path / "store", signing_key=key)
    publisher.publish_signatures(path.read_bytes(), publisher.sign("name", path.read_bytes()))
    assert trusting.tuning_tables("sm_90a") == []
    assert sign_tuning(publisher, WELLFORMED.tuning) == ["sm_90a"]
    assert len(trusting.tuning_tables("sm_90a")) == 1


@pytest.mark.parametrize("arch", ARCHES)
def test_the_packaged_table_names_packaged_variants(arch: str) -> None:
    by_features: dict[str, set[str]] = {}
    problems = set()
    for spec in (item for item in find() if item.op != "extern"):
        data = json.loads(json.dumps(spec.canonical()))
        key = json.dumps(features(data), sort_keys=True)
        by_features.setdefault(key, set()).add(spec.variant)
        if spec.arch == arch and spec.problem:
            problems.add((key, json.dumps(data["problem"], sort_keys=True)))
    table = tuning.packaged(arch)
    assert table.rows
    for entry in table.rows:
        key = json.dumps(entry.features, sort_keys=True)
        assert {variant for variant, _ in entry.variants} <= by_features[key]
        assert (key, json.dumps(dict(entry.problem), sort_keys=True)) in problems
    path = Path(tuning.__file__).with_name(f"tuning-{arch}.json")
    assert path.read_bytes() == table.to_bytes(), "rows stand in the order in which they are written"


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [
        ("gpt-oss-20b/fc1-fwd", "128x160-c1x2-dynamic"),
        ("gpt-oss-120b/fc1-wgrad", "128x192-c2x1-dynamic"),
        ("mixtral-8x7b/fc1-dgrad", "256x192-c2x1-dynamic"),
        ("qwen3-30b-a3b/fc2-fwd", "128x160-c2x1-dynamic"),
    ],
)
def test_what_packaged_kernels_load(kernel: str, variant: str) -> None:
    records = [
        NameRecord(spec.full_name, spec.arch, "0" * 64, json.loads(json.dumps(spec.canonical())), {})
        for spec in find([kernel])
    ]
    result = choose(records, None, tuning.packaged("sm_90a"), "NVIDIA H200")
    assert result.name == f"{kernel}@{variant}"


def test_an_architecture_without_a_table() -> None:
    assert tuning.packaged("sm_12x") == Tuning("sm_12x")
