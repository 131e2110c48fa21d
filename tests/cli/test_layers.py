"""A layer by its name, `file/layer`: every command that takes a name takes it, for all its kernels."""

import json
import re

import pytest

from fusekit.compiler.layers import Layer as Described
from fusekit.compiler.layers import publish_layer
from fusekit.errors import NotBuiltError, UsageError
from fusekit.library import Library
from fusekit.plan.layer import program
from fusekit.store import NameRecord, Store
from fusekit.store.names import layer_record
from tests.bench.layer_stand_in import publish
from tests.plan.test_layer_program import options
from tests.store.samples import build_entry

OPTIONS = options(file="model", tokens=1024, bias=True)
PARTS = [f"model/moe.{part}" for part in program(OPTIONS).parts]
NAMES = sorted(f"{part}@one" for part in PARTS)


def plain(store, name, seed):
    entry, cubin = build_entry(seed)
    store.publish(entry, cubin)
    store.publish_name(NameRecord(name, "sm_90a", entry.key, {"op": "dense-gemm"}, {}))


@pytest.fixture
def store(fusekit):
    """A layer, a kernel that is not part of it, and one whose name begins as the layer's."""
    publish(fusekit.root, OPTIONS)
    store = Store(fusekit.root)
    plain(store, "model/fc1@one", 90)
    plain(store, "model/moe-fc1@one", 91)
    return store


def listed(fusekit, *arguments):
    return [row["name"] for row in fusekit("ls", *arguments, "--json").json]


def test_a_layer_means_its_kernels(store):
    assert [listing.record.name for listing in store.names("model/moe")] == NAMES
    assert [name for name, _ in store.recorded("model/moe")] == sorted([*NAMES, layer_record("model/moe")])
    assert [listing.record.name for listing in store.names("mod*/moe")] == NAMES
    assert [listing.record.name for listing in store.names("model/moe.fc2")] == ["model/moe.fc2@one"]
    assert [listing.record.name for listing in store.names("model/moe-fc1")] == ["model/moe-fc1@one"]
    assert store.variants("model/moe", "sm_90a") == []
    assert store.names("model/mo") == []
    plain(store, "model/moe@one", 92)  # an equal name comes first
    assert [listing.record.name for listing in store.names("model/moe")] == ["model/moe@one"]


def test_ls_says_of_which_layer_a_kernel_is(fusekit, store):
    record = layer_record("model/moe")
    assert sorted(listed(fusekit, "model/moe")) == sorted([*NAMES, record])
    rows = {row["name"]: row for row in fusekit("ls", "--json").json}
    assert {name: row["part_of"] for name, row in rows.items()} == (
        dict.fromkeys([*NAMES, record], "model/moe") | {"model/fc1@one": None, "model/moe-fc1@one": None}
    )
    entry, document = store.load(rows[record]["key"])
    assert (rows[record]["bytes"], rows[record]["registers"]) == (len(document), None)
    assert rows[record]["cubin_sha256"] == entry.cubin_sha256
    text = fusekit("ls").out.splitlines()
    assert "PART OF" in text[0]
    assert text[-1].endswith("model/moe") or text[-1].startswith("model/moe-fc1@one")
    assert "PART OF" not in fusekit("ls", "model/fc1").out


def test_show_says_what_a_layer_is(fusekit, store):
    document = fusekit("show", "model/moe", "--json").json
    plan = program(OPTIONS)
    assert (document["name"], document["kind"], document["missing"]) == ("model/moe", "moe", [])
    assert (document["options"]["hidden"], document["options"]["weight_dtype"]) == (OPTIONS.hidden, OPTIONS.dtype)
    assert sorted(kernel["name"] for kernel in document["kernels"]) == NAMES
    for which in ("forward", "inference", "backward"):
        inputs, outputs = plan.arguments(which)
        steps = document["passes"][which]
        assert {tensor["name"]: tuple(tensor["shape"]) for tensor in steps["inputs"]} == {
            name: buffer.shape for name, buffer in inputs.items()
        }
        assert [tensor["name"] for tensor in steps["outputs"]] == list(outputs)
        assert [step["kernel"] for step in steps["steps"]] == [f"model/moe.{step.part}" for step in plan.steps[which]]
    sizes = Library(store).layer("model/moe").sizes(1024)
    assert document["memory"]["tokens"] == 1024
    assert document["memory"]["kept"] == sizes.kept
    assert document["memory"]["scratch"] == {
        "forward": sizes.forward, "inference": sizes.inference, "backward": sizes.backward,
    }  # fmt: skip
    text = fusekit("show", "model/moe").out
    assert text.startswith(f"model/moe: a layer (moe) of {len(PARTS)} kernels for sm_90a\n")
    for line in ("kept for the backward pass", "fc1-fwd", "[T, 24]", "memory for 1024 tokens"):
        assert line in text
    assert "ladders from the model" in text
    fusekit("rm", "model/moe.fc2")
    assert fusekit("show", "model/moe", "--json").json["missing"] == [], "the layer needs it"


def test_show_of_a_layer_for_inference(fusekit):
    publish(fusekit.root, options(file="model", tokens=1024, keep="none"))
    text = fusekit("show", "model/moe").out
    assert "\ninference\n" in text and "fc1-infer" in text and "scratch, inference" in text
    assert not any(word in text for word in ("backward", "\nforward\n", "scratch, forward"))
    assert fusekit("show", "model/moe", "--json").json["passes"]["backward"]["steps"] == []


def test_show_says_what_a_recipe_quantises(fusekit, store):
    publish(fusekit.root, options(file="coded", recipe="fp8-block", hidden=144, intermediate=192, tokens=1024))
    document = fusekit("show", "coded/moe", "--json").json
    assert (document["options"]["recipe"], document["missing"]) == ("fp8-block", [])
    steps = document["passes"]["quantise"]
    assert [tensor["name"] for tensor in steps["inputs"]] == ["w1", "w2"]
    assert {
        "name": "w2_ts",
        "dtype": "f32",
        "shape": [8, 2, 2],
        "added_to": False,
        "what": "scales for the transpose of w2",
    } in steps["outputs"]
    assert "w1" not in {tensor["name"] for tensor in document["passes"]["forward"]["inputs"]}
    assert document["memory"]["fp8_weights"] == Library(store).layer("coded/moe").sizes(1024).fp8_weights
    assert "quantise" not in document["memory"]["scratch"]
    text = fusekit("show", "coded/moe").out
    for line in ("FP8 weights", "quantise-x-turned", "w1_q"):
        assert line in text
    keyed = options(file="own", recipe="fp8-block", weight_dtype="f32", hidden=144, intermediate=192, tokens=1024)
    publish(fusekit.root, keyed)
    assert re.search(r"^  weight_dtype +f32$", fusekit("show", "own/moe").out, re.MULTILINE)
    assert "FP8 weights" not in fusekit("show", "model/moe").out


def test_show_of_a_layer_imports_little(fusekit, store, tmp_path):
    code = (
        "import sys; from fusekit_cli.main import main; main(['show', 'model/moe', '-q']); "
        "print(*({'cutlass', 'numpy', 'cuda', 'rich', 'torch', 'fusekit.library'} & set(sys.modules)))"
    )
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-c", code], env=fusekit.environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == ""


def test_a_layer_moves_between_stores(fusekit, store, tmp_path):
    other = {"FUSEKIT_STORE": str(tmp_path / "other")}
    remote = str(tmp_path / "remote")
    assert fusekit("push", remote, "model/moe", "--json").json["names"] == len(NAMES) + 1
    fusekit("push", remote, "model/fc1")
    assert sorted(listed(fusekit, "model/moe", "--from", remote)) == sorted([*NAMES, layer_record("model/moe")])
    assert fusekit("show", "model/moe", "--from", remote, "--json").json["missing"] == []
    assert fusekit("pull", remote, "model/moe", "--json", **other).json["names"] == len(NAMES) + 1
    assert json.loads(fusekit("ls", "--json", **other).out)[0]["name"] == NAMES[0]
    bundle = str(tmp_path / "moe.tar")
    assert fusekit("export", bundle, "model/moe", "--json").json["names"] == len(NAMES) + 1
    assert len(listed(fusekit, "model/moe", "--from", bundle)) == len(NAMES) + 1
    assert fusekit("show", "model/moe", "--from", bundle, "--json").json["name"] == "model/moe"
    third = {"FUSEKIT_STORE": str(tmp_path / "third")}
    fusekit("import", bundle, **third)
    fourth = {"FUSEKIT_STORE": str(tmp_path / "fourth"), "FUSEKIT_STORES": str(tmp_path / "third")}
    assert len(fusekit("copy", "model/moe", "--json", **fourth).json["copied"]) == len(NAMES) + 1
    assert len(fusekit("rm", "model/moe", "--json").json["removed"]) == len(NAMES) + 1
    assert listed(fusekit) == ["model/fc1@one", "model/moe-fc1@one"]
    assert fusekit("show", "model/moe", code=3).err
    assert fusekit("verify", "--full").out


def test_an_export_of_half_a_layer_says_what_is_missing(fusekit, store):
    assert "incomplete" not in fusekit("export", "k.tar", "model/moe").err
    fusekit("rm", "model/moe.fc2", "model/moe.layer")
    assert "model/moe is incomplete: the store has no record" in fusekit("export", "k.tar", "model/moe").err
    assert "incomplete" not in fusekit("export", "k.tar", "model/moe.fc2-dgrad", "model/fc1").err


@pytest.mark.parametrize("language", ["c", "tvm-ffi"])
def test_half_a_layer_has_no_functions(fusekit, store, language):
    fusekit("rm", "model/moe.fc2", "model/moe.layer")
    done = fusekit("export", "--lang", language, "out", "model/moe", code=3)
    assert (
        "'model/moe' is not in the store (kernels of it are, but no record of the layer: a build of it has" in done.err
    )
    assert "fusekit build" in done.err
    if language == "c":
        fusekit("export", "--lang", language, "out", "model/moe.fc2-dgrad", "model/fc1")


def test_a_layer_is_exported_with_its_passes_in_c(fusekit, store, tmp_path):
    done = fusekit("export", "--lang", "c", "out", "model/moe", "--json")
    assert sorted(done.json["kernels"]) == NAMES and done.json["layers"] == ["model/moe"]
    header = (tmp_path / "out" / "fusekit.h").read_text()
    for name in ("load", "sizes", "forward", "bind_forward", "inference", "backward", "unload"):
        assert f"fusekit_status fusekit_model_moe_{name}(" in header


def test_load_of_a_layer_says_how_it_is_launched(store):
    library = Library(store)
    with pytest.raises(UsageError, match=r"'model/moe' is a layer of \d+ kernels; library.layer\('model/moe'\)"):
        library.load("model/moe")
    with pytest.raises(NotBuiltError):
        library.load("model/moee")
    assert library.layer("model/moe").options.canonical() == OPTIONS.canonical()
    with pytest.raises(UsageError, match=r"'model/fc1' is a kernel, .* library.load\('model/fc1'\) .* model/fc1@one"):
        library.layer("model/fc1")
    with pytest.raises(NotBuiltError, match="'model/moee' is not in the store; no packaged spec has it"):
        library.layer("model/moee")


@pytest.mark.parametrize("name", ["*", "model/*", "", "../x", "model", "model/moe.*", "model/moe.fc2@one", "a/b/c"])
def test_what_names_no_layer(store, name):
    with pytest.raises(UsageError, match=r"names no layer; a layer is named file/layer, .*; the store has model/moe$"):
        Library(store).layer(name)
    with pytest.raises(UsageError, match=r"the store has none yet$"):
        Library(Store(store.root / "none")).layer(name)


def test_the_last_build_of_an_edited_table_counts(store, fusekit):
    edited = options(file="model", tokens=1024, bias=False)
    publish(fusekit.root, edited)
    assert Library(store).layer("model/moe").options.canonical() == edited.canonical()
    assert fusekit("show", "model/moe", "--json").json["options"]["bias"] is False


def test_a_store_of_before_has_no_record_and_says_so(store, fusekit):
    store.discard([(layer_record("model/moe"), "sm_90a")])
    text = "kernels of model/moe and no record of the layer: .* compiles only .* missing; .* build model.toml/moe"
    with pytest.raises(NotBuiltError, match=text):
        Library(store).layer("model/moe")
    assert "no record of the layer" in fusekit("show", "model/moe", code=3).err
    assert publish_layer(store, Described(OPTIONS, "sm_90a", ()))
    assert Library(store).layer("model/moe").options.canonical() == OPTIONS.canonical()


def test_a_layer_is_completed(fusekit, store):
    def offered(word):
        line = {"_FUSEKIT_COMPLETE": "bash_complete", "COMP_WORDS": f"fusekit show {word}", "COMP_CWORD": "2"}
        return [text.partition(",")[2] for text in fusekit(**line).out.splitlines()]

    assert offered("model/") == ["model/fc1", "model/moe", "model/moe-fc1"]
    assert offered("model/moe.fc2")[0] == "model/moe.fc2"
    assert set(offered("model/moe.")) == set(PARTS)


TABLES = """schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "fc"
op = "dense-gemm"
tile = [128, 128]
cluster = [2, 1]
[[kernel]]
name = "moe"
kind = "moe"
hidden = 256
intermediate = 128
experts = 8
topk = 2
"""


def test_a_build_says_what_a_layer_needs(fusekit, tmp_path):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    (tmp_path / "small.toml").write_text(TABLES)
    document = fusekit("build", "small.toml", "--dry-run", "--json").json
    (layer,) = document["layers"]
    assert (layer["name"], layer["arch"]) == ("small/moe", "sm_90a")
    names = {row["name"].partition("@")[0] for row in document["would_build"]}
    assert {"small/moe.fc1-fwd", "small/moe.fc2-wgrad"} <= names - {"small/fc"} <= set(layer["kernels"])
    lines = fusekit("build", "small.toml", "--dry-run").out.splitlines()
    assert lines[1].startswith("small/fc@")
    assert lines[2].split()[:2] == ["small/moe", "sm_90a"]
    assert f"needs {len(layer['kernels'])} kernels:" in lines[2]
    assert all(line.startswith("small/moe.") for line in lines[3:-1])
    only = fusekit("build", "small.toml/moe", "--dry-run", "--json").json["would_build"]
    assert {row["name"].partition("@")[0] for row in only} == names - {"small/fc"}
    assert fusekit("build", "small.toml/fc", "--dry-run", "--json").json["layers"] == []
    explained = fusekit("explain", "small.toml/moe.index", "--json").json
    assert (explained["name"].partition("@")[0], explained["status"]) == ("small/moe.index", "miss")


def test_show_says_what_the_windows_of_ranks_take(fusekit):
    o = options(file="ranked", tokens=1000, ranks=2)
    publish(fusekit.root, o)
    memory = fusekit("show", "ranked/moe", "--json").json["memory"]
    layer = Library(Store(fusekit.root)).layer("ranked/moe")
    sizes = layer.sizes(1000)
    assert (memory["kept"], memory["windows"]) == (sizes.kept, sizes.windows) and len(sizes.windows) == 4
    lines = fusekit("show", "ranked/moe").out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  window ")] == [*sizes.windows]
