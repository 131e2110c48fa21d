"""What is chosen where a spec leaves tile, cluster or schedule out; what a sweep leaves out."""

import itertools
import json
import math
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.choice import cost, tuning
from fusekit.choice.variants import choose
from fusekit.errors import SpecError, SpecWarning
from fusekit.spec import KernelSpec, find, packaged_files, parse_file, parse_text
from fusekit.spec.rules import broken_rules
from fusekit.spec.sweep import ALONE, CLUSTERS, COMMON, FEW, TILES
from fusekit.store import NameRecord

HEAD = 'schema = 1\n[[kernel]]\nname = "k"\narch = "sm_90a"\n'
GEMM = HEAD + 'op = "grouped-gemm"\n'
PROBLEM = "problem = { E = 32, M = 98304, N = 5760, K = 2880 }\n"
SHAPES_ONLY = Path(__file__).parents[1] / "gpu" / "shapes-only.toml"
WITHIN = 1.03


def variants(text: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        return [spec.variant for spec in parse_text(text, "s")]


def refused(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_text(text, "s")
    return str(caught.value)


def stripped(path: Path) -> tuple[KernelSpec, ...]:
    """The file's kernels with nothing but shapes."""
    specs = parse_text(re.sub(r"(?m)^(tile|cluster|schedule) = .*$", "", path.read_text()), path.stem)
    return tuple(spec for spec in specs if spec.layer is None)


def canonical(spec: KernelSpec) -> dict:
    return json.loads(json.dumps(spec.canonical()))


def measured(spec: KernelSpec) -> dict[str, float]:
    """Microseconds by variant, of the packaged table."""
    data = canonical(spec)
    for row in tuning.packaged("sm_90a").rows:
        if (row.features, dict(row.problem)) == (tuning.features(data), data["problem"]):
            return {variant: us for variant, us in row.variants if us is not None}
    return {}


def loaded(specs: list[KernelSpec]) -> str:
    """The variant that `load` takes of those that are built."""
    records = [NameRecord(spec.full_name, spec.arch, "0" * 64, canonical(spec), {}) for spec in specs]
    return choose(records, tuning=tuning.packaged("sm_90a")).name.partition("@")[2]


MODELS = [path for path in packaged_files() if "fc1-wgrad" in path.read_text()]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_shapes_alone_are_as_good_as_the_packaged_choice(path):
    """By what was measured, where that is known of a variant in the sweep, else by the model."""
    for name, group in itertools.groupby(stripped(path), key=lambda spec: spec.name):
        specs = list(group)
        problem = canonical(specs[0])["problem"]
        times = measured(specs[0])
        packaged = loaded(find([name]))
        assert packaged == min(times, key=times.get)
        reference = cost(canonical(next(spec for spec in find([name]) if spec.variant == packaged)), problem)
        by_model = {spec.variant: cost(canonical(spec), problem) / reference for spec in specs}
        by_clock = {variant: times[variant] / times[packaged] for variant in by_model if variant in times}
        lines = [f"{key} {each:.3f} {by_clock.get(key, math.nan):.3f}" for key, each in by_model.items()]
        print(f"{name}: packaged {packaged}; chosen, by the model, as measured: {', '.join(lines)}")  # noqa: T201
        assert len(specs) in (2, 3)
        assert min((by_clock or by_model).values()) <= WITHIN
        taken = loaded(specs)
        assert by_clock.get(taken, by_model[taken]) <= WITHIN
        assert {spec.schedule for spec in specs} == {"dynamic"}


def test_a_tile_alone_has_a_fit_cluster():
    """Two clusters were measured with each packaged tile; the chosen one is hardly slower."""
    slower = []
    for path in MODELS:
        for spec in (spec for spec in find([path.stem]) if spec.layer is None):
            times = measured(spec)
            head = 'schema = 1\n[defaults]\narch = "sm_90a"\n'
            table = canonical(spec)
            keys = ("op", "b_major", "bias", "glu_layout", "save_preactivation", "recompute", "dbias", "tile")
            lines = [f"{key} = {json.dumps(table[key])}" for key in keys]
            lines.append(f'activation = {{ kind = "{spec.activation.kind}" }}')
            lines.append("problem = {{ E = {E}, M = {M}, N = {N}, K = {K} }}".format(**table["problem"]))
            (chosen,) = parse_text(head + '[[kernel]]\nname = "k"\n' + "\n".join(lines), "s")
            assert tuning.features(canonical(chosen)) == tuning.features(table)
            both = [us for variant, us in times.items() if variant.startswith(chosen.variant.partition("-")[0])]
            slower.append(times[chosen.variant] / min(both))
    assert len(slower) >= 120
    assert max(slower) < 1.04
    assert sum(each < 1.01 for each in slower) > 0.6 * len(slower)


def test_the_file_for_the_gpu_has_nothing_but_shapes():
    """tests/gpu/shapes_only.py times it against the packaged files: the same kernels under names of its own."""
    assert not re.search(r"(?m)^ *(tile|cluster|schedule|mainloop)", SHAPES_ONLY.read_text())
    packaged = {(str(tuning.features(canonical(spec))), spec.problem) for path in MODELS for spec in find([path.stem])}
    got = {spec.name: (str(tuning.features(canonical(spec))), spec.problem) for spec in parse_file(SHAPES_ONLY)}
    assert set(got.values()) <= packaged
    assert len(got) == 30


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ["128x192-c2x1-dynamic", "128x192-c1x2-dynamic", "256x192-c1x2-dynamic"]),
        ("tile = [128, 160]", ["128x160-c2x1-dynamic"]),
        ("tile = [[128, 160], [256, 128]]", ["128x160-c2x1-dynamic", "256x128-c1x2-dynamic"]),
        ("tile = [128, 160]\ncluster = [1, 1]", ["128x160-c1x1-dynamic"]),
        ('tile = [128, 160]\nschedule = "static"', ["128x160-c2x1"]),
        ("cluster = [2, 1]", ["128x192-c2x1-dynamic", "256x192-c2x1-dynamic"]),
        ("cluster = [[1, 1], [1, 2]]", ["256x192-c1x1-dynamic", "128x192-c1x1-dynamic", "256x192-c1x2-dynamic",
                                        "128x192-c1x2-dynamic"]),
        ('schedule = "static"', ["128x192-c2x1", "128x192-c1x2", "256x192-c1x2"]),
        ('mainloop = "cooperative"', ["256x192-c1x2-dynamic", "256x192-c2x1-dynamic", "128x192-c2x1-coop-dynamic"]),
        ("exclude = [{ tile = [128, 192] }]", ["256x192-c1x2-dynamic", "256x192-c2x1-dynamic",
                                               "128x160-c2x1-dynamic"]),
        ('exclude = [{ mainloop = "cooperative" }, { cluster = [2, 1] }]',
         ["128x192-c1x2-dynamic", "128x160-c1x2-dynamic"]),
    ],
)  # fmt: skip
def test_what_is_left_out_is_chosen(lines, expected):
    assert variants(GEMM + PROBLEM + lines + "\n") == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('op = "grouped-gemm"', ["256x192-c1x2-dynamic", "256x192-c2x1-dynamic", "128x192-c2x1-dynamic"]),
        ('op = "dense-gemm"', ["256x192-c1x2-dynamic", "256x192-c2x1-dynamic", "128x192-c2x1-dynamic"]),
        ('op = "grouped-wgrad"', ["128x192-c2x1-dynamic", "128x192-c1x2-dynamic", "256x192-c1x2-dynamic"]),
        ('op = "grouped-gemm"\nactivation = { kind = "dswiglu" }\nrecompute = true',
         ["128x192-c2x1-dynamic", "128x192-c1x2-dynamic", "128x160-c2x1-dynamic"]),
        ('op = "grouped-gemm"\nactivation = { kind = "swiglu" }\nb_major = "n"',
         ["128x256-c2x1-dynamic", "128x256-c1x2-dynamic", "256x128-c1x2-dynamic"]),
    ],
)  # fmt: skip
def test_without_a_problem(lines, expected):
    assert variants(HEAD + lines + "\n") == expected


sizes = st.tuples(st.integers(1, 300), st.integers(0, 300_000), st.integers(1, 500), st.integers(1, 500))


@given(
    sizes, st.sampled_from(["dense-gemm", "grouped-gemm", "grouped-wgrad"]), st.sampled_from(["k", "n"]),
    st.sampled_from(["identity", "swiglu", "dswiglu", "gelu"]), st.sampled_from(["concat", "interleaved-32"]),
)  # fmt: skip
def test_any_problem_has_two_or_three_that_can_be_built(shape, op, b_major, kind, layout):
    groups, rows, n, k = shape
    problem = f"problem = {{ E = {1 if op == 'dense-gemm' else groups}, M = {rows}, N = {64 * n}, K = {8 * k} }}\n"
    text = f'{HEAD}op = "{op}"\n{problem}'
    if op != "grouped-wgrad":
        text += f'b_major = "{b_major}"\nactivation = {{ kind = "{kind}" }}\n'
        text += f'glu_layout = "{layout}"\n' if kind.endswith("glu") else ""
    specs = parse_text(text, "s")
    assert len(specs) in (2, 3)
    assert len({spec.full_name for spec in specs}) == len(specs)
    assert {spec.tile for spec in specs} <= set(TILES)
    assert all(spec.cluster in ((ALONE,) if spec.tile in FEW else CLUSTERS) for spec in specs)
    assert not [rule for spec in specs for rule in broken_rules(spec)]
    assert {spec.problem for spec in specs} == {specs[0].problem}
    # Spelled out, it is the same kernel with the same key.
    for spec in specs:
        (again,) = parse_text(
            f'{text}tile = {list(spec.tile)}\ncluster = {list(spec.cluster)}\nschedule = "{spec.schedule}"\n', "s"
        )
        assert again == spec
        assert again.device_spec() == spec.device_spec()


def test_common_tiles_are_candidates():
    assert set(COMMON) <= set(TILES)


def test_a_problem_decides():
    few = GEMM + "problem = { E = 1, M = 128, N = 4096, K = 4096 }\n"
    assert variants(few) != variants(GEMM + PROBLEM)


def test_products_of_few_columns_have_low_tiles():
    """Such as a router's: tiles of 128 rows are too few for all multiprocessors."""
    dense = HEAD + 'op = "dense-gemm"\nout_dtype = "f32"\n'
    narrow = variants(dense + "problem = { E = 1, M = 8192, N = 128, K = 2048 }\n")
    assert narrow[0].startswith("64x128") and any(each.startswith("128x128") for each in narrow)
    for more in (dense + "problem = { E = 1, M = 8192, N = 256, K = 2048 }\n", GEMM + PROBLEM.replace("5760", "128")):
        assert not any(each.startswith("64x") for each in variants(more))


def test_a_sweep_excludes_pairs():
    sweep = GEMM + 'tile = [[128, 128], [256, 192]]\ncluster = [[2, 1], [1, 2]]\nschedule = ["static", "dynamic"]\n'
    all_of_them = variants(sweep)
    assert len(all_of_them) == 8
    less = variants(sweep + "exclude = [{ tile = [256, 192], cluster = [2, 1] }]\n")
    assert less == [each for each in all_of_them if not each.startswith("256x192-c2x1")]
    least = variants(sweep + 'exclude = [{ tile = [256, 192] }, { cluster = [2, 1] }, { schedule = "static" }]\n')
    assert least == ["128x128-c1x2-dynamic"]
    shared = "schema = 1\n[defaults]\nexclude = [{ tile = [256, 192] }, { tile = [64, 64] }]\n"
    assert variants(sweep.replace("schema = 1\n", shared)) == [each for each in all_of_them if each[0] == "1"]
    own_exclusion = sweep.replace("schema = 1\n", shared) + "exclude = [{ tile = [128, 128] }]\n"
    assert variants(own_exclusion) == [each for each in all_of_them if each[0] == "2"], "a kernel's own value wins"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exclude = [{ tile = [128, 128] }]", "leaves nothing of the sweep; exclude less"),
        ("exclude = { tile = [128, 128] }", "must be a list of tables [{ tile = .., cluster = .. }]"),
        ("exclude = [{}]", "must be a list of tables"),
        ("exclude = [[128, 128]]", "must be a list of tables"),
        ("exclude = 1", "must be a list of tables"),
        (
            "exclude = [{ tiles = [128, 128] }]",
            'exclude.tiles = [128, 128]: there is no such field; did you mean "tile"?',
        ),
        ("exclude = [{ tile = [[128, 128]] }]", "exclude.tile = [[128, 128]]: must be a pair of integers"),
        ("exclude = [{ cluster = [4, 1] }]", "exclude.cluster = [4, 1]: must be [1, 1], [2, 1] or [1, 2]"),
        ("exclude = [{ schedule = 3 }]", "exclude.schedule = 3: must be a string"),
    ],
)
def test_what_exclude_may_not_say(line, said):
    assert said in refused(GEMM + "tile = [128, 128]\n" + line + "\n")


def test_everything_excluded_of_what_is_chosen():
    tables = ", ".join(f"{{ cluster = {list(cluster)} }}" for cluster in CLUSTERS)
    assert "leaves nothing of the sweep" in refused(f"{GEMM}exclude = [{tables}]\n")


def test_an_exclusion_that_means_nothing_is_said():
    text = GEMM + "tile = [128, 128]\nexclude = [{ tile = [128, 192] }]\n"
    with pytest.warns(
        SpecWarning, match=r"own\.toml: .*exclude: no combination of the sweep has { tile = \[128, 192\] }"
    ):
        parse_text(text, "own")


def test_an_impossible_pair_is_dropped_and_said_once():
    text = GEMM + 'b_major = "n"\ntile = [[128, 160], [128, 192]]\ncluster = [[2, 1], [1, 2]]\n'
    with pytest.warns(SpecWarning) as caught:
        specs = parse_text(text, "own")
    assert [spec.variant for spec in specs] == ["128x192-c2x1-dynamic", "128x192-c1x2-dynamic"]
    (only,) = caught
    message = str(only.message)
    assert message.startswith(
        "own.toml: [[kernel]] 1 (k): left out of the sweep: { tile = [128, 160], cluster = [2, 1] }, "
        "{ tile = [128, 160], cluster = [1, 2] }: tile N = 160 must be a multiple of 64"
    )
    assert message.count("must be a multiple of 64") == 1
    assert variants(text + "exclude = [{ tile = [128, 160] }]\n") == [spec.variant for spec in specs]
    # With a cluster that is chosen, a tile has one line.
    with pytest.warns(SpecWarning, match=r"left out of the sweep: { tile = \[128, 160\] }: tile N"):
        parse_text(text.replace("cluster = [[2, 1], [1, 2]]\n", ""), "own")


def test_many_dropped_are_said_in_short():
    tiles = ", ".join(f"[128, {n}]" for n in range(1, 200))
    with pytest.warns(SpecWarning) as caught:
        specs = parse_text(GEMM + f"tile = [{tiles}]\n", "own")
    assert [spec.tile[1] for spec in specs] == list(range(16, 193, 16))
    assert len(caught) == 8
    assert str(caught[-1].message) == "own.toml: [[kernel]] 1 (k): left out of the sweep: 180 combinations more"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("tile = [128, 100]", "tile N = 100 must be a multiple of 16"),
        ("tile = [[128, 100], [128, 104]]", "tile N = 104 must be a multiple of 16"),
        ('tile = [256, 128]\nmainloop = "pingpong"', "tile M = 256 does not fit the pingpong main loop"),
        ("tile = [128, 100]\ncluster = [2, 1]", "tile N = 100 must be a multiple of 16"),
    ],
)
def test_nothing_left_is_an_error(lines, said):
    assert said in refused(GEMM + lines + "\n")


def test_a_mistake_that_is_not_in_the_sweep_is_never_dropped():
    text = GEMM + "recompute = true\ntile = [[128, 160], [128, 192]]\n"
    assert 'only a backward activation such as "dswiglu" has it' in refused(text)
    alone = refused(GEMM + "recompute = true\n")
    assert alone.count("\n") == 0
    assert "recompute = true: only a backward activation" in alone
