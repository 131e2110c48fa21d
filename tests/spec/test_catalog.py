"""The packaged specs, and finding kernels in them."""

import codecs
import io
import sys
from types import SimpleNamespace

import pytest

from fusekit.errors import SpecError, UsageError
from fusekit.spec import KernelSpec, find, packaged_files, parse_file
from fusekit.spec.catalog import packaged_folder, targets
from fusekit.spec.document import MAX_BYTES

MODELS = ("deepseek-v3", "gpt-oss-120b", "gpt-oss-20b", "mixtral-8x7b", "qwen3-30b-a3b")
SHAPES = {  # E, H, I, M
    "gpt-oss-20b": (32, 2880, 2880, 98304),
    "gpt-oss-120b": (128, 2880, 2880, 98304),
    "deepseek-v3": (8, 7168, 2048, 65536),
    "qwen3-30b-a3b": (128, 2048, 768, 196608),
    "mixtral-8x7b": (8, 4096, 14336, 16384),
}


def names(*patterns):
    return [spec.full_name for spec in find(patterns)]


def test_packaged_files():
    assert {path.stem for path in packaged_files()} >= {*MODELS, "quickstart"}


def test_no_pattern_is_every_kernel():
    everything = find()
    assert [spec for path in packaged_files() for spec in parse_file(path)] == list(everything)
    assert find([]) == find(["*"]) == everything


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_shapes(model):
    experts, hidden, intermediate, rows = SHAPES[model]
    # A weight gradient has the shape of the weight that the forward pass multiplies by.
    fc1, fc2 = (2 * intermediate, hidden), (hidden, intermediate)
    shapes = {"fc1-dgrad": (hidden, 2 * intermediate), "fc2-dgrad": (intermediate, hidden)}
    single = [spec for spec in find([model]) if spec.layer is None]
    for spec in single:
        problem = spec.problem
        n, k = shapes.get(spec.kernel, fc2 if spec.kernel.startswith("fc2") else fc1)
        assert (experts, rows, n, k) == (problem.E, problem.M, problem.N, problem.K)
        gpt = model.startswith("gpt-oss")
        forward = spec.kernel.endswith(("-fwd", "-infer"))
        columns, tile_n = k if spec.op == "grouped-wgrad" else n, spec.tile[1]
        assert -(-columns // tile_n) * tile_n <= 1.04 * columns, "packaged tiles have few columns beyond the last"
        assert spec.op == ("grouped-wgrad" if spec.kernel.endswith("-wgrad") else "grouped-gemm")
        assert spec.operands["bias"] is (gpt and forward)
        assert spec.operands["dbias"] is (
            gpt and spec.op == "grouped-wgrad"
        )  # in a pass that reads the gradient anyway
        assert spec.b_major == ("n" if spec.kernel.endswith("-dgrad") else "k")
        assert spec.schedule == "dynamic"
        assert spec.activation.backward is (spec.kernel == "fc2-dgrad")
        assert spec.operands["recompute"] is spec.activation.backward
        if spec.activation.gated:
            scalars = (spec.activation.alpha, spec.activation.limit, spec.activation.up_offset)
            assert scalars == ((1.702, 7.0, 1.0) if gpt else (1.0, None, 0.0))
            assert spec.glu_layout == ("interleaved" if gpt else "concat")
    six = {f"{layer}-{part}" for layer in ("fc1", "fc2") for part in ("fwd", "dgrad", "wgrad")}
    assert {spec.kernel for spec in single} == six | {"fc1-infer"}
    assert len(single) <= 28
    layers = {spec.layer.name: spec.layer for spec in find([model]) if spec.layer is not None}
    coded = {"deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b"}
    assert set(layers) == ({"moe", "moe-fp8"} if model in coded else {"moe"})
    if model in coded:  # they differ in the recipe alone; DeepSeek-V3's is that of its training
        plain, narrow = (layers[name].canonical() for name in ("moe", "moe-fp8"))
        squares = set() if model == "deepseek-v3" else {"x_blocks"}
        assert {key for key in plain if plain[key] != narrow[key]} == {"name", "recipe"} | squares
        assert narrow["recipe"] == "fp8-block"


def test_every_packaged_kernel_fits_and_has_a_shape():
    for spec in find():
        if spec.op == "extern":
            continue
        assert not isinstance(spec, KernelSpec) or spec.plan.stages >= 3
        assert spec.problem is not None
        assert spec.summary


def test_models_share_cubins():
    specs = [spec for spec in find() if spec.op != "extern"]
    assert len({str(spec.device_spec()) for spec in specs}) < len(specs)


def test_quickstart_is_small_and_shows_both_operations():
    specs = find(["quickstart"])
    assert len(specs) <= 4
    assert {spec.op for spec in specs} == {"dense-gemm", "grouped-gemm"}
    assert any(spec.activation.kind == "swiglu" for spec in specs)


def test_patterns():
    assert names("quickstart/moe-fc1") == ["quickstart/moe-fc1@128x128-c2x1", "quickstart/moe-fc1@128x192-c2x1"]
    assert names("quickstart/moe-fc1@128x192-c2x1") == ["quickstart/moe-fc1@128x192-c2x1"]
    assert names("quick*") == names("quickstart")
    assert names("quickstart/*fc1*") == names("quickstart/moe-fc1")
    assert names("quickstart/*@128x192*") == ["quickstart/moe-fc1@128x192-c2x1"]
    assert {name.partition("/")[0] for name in names("*/fc1-fwd")} == set(MODELS)
    assert {spec.file for spec in find(["gpt-oss-*"])} == {"gpt-oss-20b", "gpt-oss-120b"}


def test_each_kernel_once_in_the_order_of_the_patterns():
    assert names("quickstart/moe-fc2", "quickstart") == [
        "quickstart/moe-fc2@128x128-c2x1",
        "quickstart/linear@128x128-c2x1",
        "quickstart/moe-fc1@128x128-c2x1",
        "quickstart/moe-fc1@128x192-c2x1",
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("quickstrt", r"'quickstrt' names no packaged kernel; did you mean \"quickstart\"\?"),
        ("quickstart/moe-fc3", r"did you mean \"quickstart/moe-fc2\"\?"),
        ("quickstart/moe-fc1@128x12-c2x1", r"did you mean \"quickstart/moe-fc1@128x192-c2x1\"\?"),
        ("zz*", r"there are checks, cudnn, deepseek-v3, exchange.* and \d+ more;"),
        ("", "names no packaged kernel"),
        ("zz/fc1", "there are checks, cudnn, deepseek-v3"),
    ],
)
def test_unknown_name(pattern, message):
    with pytest.raises(UsageError, match=message):
        find([pattern])


def test_paths(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((packaged_folder() / "quickstart.toml").read_text())
    assert [spec.file for spec in find([str(path), "quickstart"])] == ["mine"] * 4 + ["quickstart"] * 4
    assert find(["quickstart.toml"]) == find(["quickstart"])
    with pytest.raises(SpecError, match="there is no such file"):
        find([str(tmp_path / "none.toml")])


def test_one_name_with_two_meanings_is_refused(tmp_path):
    path = tmp_path / "quickstart.toml"
    text = (packaged_folder() / "quickstart.toml").read_text()
    path.write_text(text)
    assert find([str(path), "quickstart"]) == find(["quickstart"])
    path.write_text(text.replace("bias = true", "bias = false"))
    with pytest.raises(UsageError, match="another meaning than an earlier target"):
        find([str(path), "quickstart"])


def test_a_broken_file_does_not_hide_the_others(tmp_path, monkeypatch):
    (tmp_path / "good.toml").write_text((packaged_folder() / "quickstart.toml").read_text())
    (tmp_path / "broken.toml").write_text("schema = ")
    monkeypatch.setattr("fusekit.spec.catalog.packaged_folder", lambda: tmp_path)
    assert len(find(["good"])) == 4
    with pytest.raises(SpecError, match=r"broken\.toml"):
        find()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `specs` with two copies of quickstart, in the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for stem in ("one", "two"):
        (tmp_path / "specs" / f"{stem}.toml").write_text((packaged_folder() / "quickstart.toml").read_text())
    return tmp_path


def kernels(*patterns):
    return list(dict.fromkeys(spec.name for spec in find(patterns)))


def test_kernels_of_files_and_folders(folder):
    every = [f"{stem}/{kernel}" for stem in ("one", "two") for kernel in ("linear", "moe-fc1", "moe-fc2")]
    assert kernels("specs") == kernels("./specs/") == kernels("specs/*.toml") == kernels(str(folder / "specs")) == every
    assert kernels("specs/one.toml/linear") == ["one/linear"]
    assert kernels("specs/*.toml/moe-*") == [name for name in every if "moe" in name]
    assert names("specs/two.toml/moe-fc1@128x192*") == ["two/moe-fc1@128x192-c2x1"]
    assert kernels("specs/one.toml/") == every[:3]
    assert kernels("quickstart.toml/linear") == ["quickstart/linear"]


def test_a_packaged_name_wins_over_a_folder(folder):
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "mine.toml").write_text((folder / "specs" / "one.toml").read_text())
    assert kernels("quickstart") == ["quickstart/linear", "quickstart/moe-fc1", "quickstart/moe-fc2"]
    assert kernels("./quickstart") == kernels("quickstart/") == ["mine/linear", "mine/moe-fc1", "mine/moe-fc2"]


def test_a_target_means_what_a_file_had_before(folder):
    """Each file: all of it, what was asked for, and whether a name that is no longer in it was asked for."""
    (whole,), (part,) = targets(["specs/one.toml"], "team"), targets(["specs/one.toml/moe-*"])
    assert (whole.file, part.file) == ("team.one", "one")
    assert len(whole.every) == len(part.every) == 4
    assert (len(whole.specs), len(part.specs)) == (4, 3)
    assert whole.means("team.one/gone@x")
    assert (part.means("one/moe-gone@x"), part.means("one/gone@x")) == (True, False)
    (packaged,) = targets(["quickstart/moe-fc1@128x128-c2x1"])
    assert not packaged.means("quickstart/moe-fc1@64x64-c1x1")


@pytest.mark.parametrize("where", ["file", "argument", "both"])
def test_a_namespace_begins_every_name(folder, where):
    path = folder / "specs" / "one.toml"
    if where != "argument":
        namespace = "team-a" if where == "file" else "another"
        path.write_text(f'namespace = "{namespace}"\n{path.read_text()}')
    got = find(["specs/one.toml/linear"], None if where == "file" else "team-a")
    assert [spec.name for spec in got] == ["team-a.one/linear"]
    assert find(["quickstart/linear"], "team-a")[0].name == "team-a.quickstart/linear"


@pytest.mark.parametrize("namespace", ["", "Team", "a/b", "..", "a" * 62, 3])
def test_a_namespace_that_cannot_begin_a_name(folder, namespace):
    with pytest.raises(SpecError, match=r"top level: namespace = .*begins every kernel's name, as namespace\.one"):
        find(["specs/one.toml"], namespace)


def test_a_spec_on_stdin(folder, monkeypatch):
    def stdin(data):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    stdin((folder / "specs" / "one.toml").read_bytes())
    assert kernels("-") == ["stdin/linear", "stdin/moe-fc1", "stdin/moe-fc2"]
    stdin(codecs.BOM_UTF8 + (folder / "specs" / "one.toml").read_bytes())
    assert kernels("-") == ["stdin/linear", "stdin/moe-fc1", "stdin/moe-fc2"]
    for data, message in ((b"\xff", "not UTF-8"), (b"", "is empty"), (b"#" * (MAX_BYTES + 1), "more than")):
        stdin(data)
        with pytest.raises(SpecError, match=f"stdin: .*{message}"):
            find(["-"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "specs/one.toml/lineer",
            r"'specs/one.toml/lineer' names no kernel of specs/one.toml; did you mean \"linear\"",
        ),
        ("specs/t*.toml/none", "there are linear, moe-fc1, moe-fc2"),
        ("specs/x*.toml", "matches no file"),
        ("specs/x.toml/linear", "there is no such file"),
        (".", "is a folder without a .toml file"),
        ("one/linear", "names no packaged kernel"),
    ],
)
def test_targets_that_name_nothing(folder, target, message):
    with pytest.raises((UsageError, SpecError), match=message):
        find([target])
