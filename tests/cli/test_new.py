"""`fusekit new`: where the file goes, what it is called, and that a build takes it."""

import json
import os
import re
import subprocess
import sys

import pytest

from fusekit.spec.hf_config import read_model
from fusekit.spec.model_kernels import Request
from tests.spec.configs import CONFIGS
from tests.spec.kernel_lists import kernel_list


@pytest.fixture
def model(tmp_path):
    """A folder with a model's config, as a download has it."""
    folder = tmp_path / "models" / "Mixtral-8x7B v0.1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    return folder


def test_to_stdout_to_a_file_and_to_a_folder(fusekit, model, tmp_path):
    text = fusekit("new", str(model)).out
    assert text == fusekit("new", str(model / "config.json")).out
    assert "by `fusekit new` from config.json" in text
    assert "mixtral-8x7b-v0.1" in text
    result = fusekit("new", str(model), "-o", str(tmp_path / "mine.toml"))
    assert result.out == f"{tmp_path / 'mine.toml'}\n"
    assert 'summary = "mine: ' in (tmp_path / "mine.toml").read_text()
    assert fusekit("new", str(model), "-o", str(tmp_path)).out == f"{tmp_path / 'mixtral-8x7b-v0.1.toml'}\n"
    document = fusekit("new", str(model), "--name", "other", "--json").json
    assert (document["name"], document["model_type"], document["file"]) == ("other", "mixtral", None)
    assert 'summary = "other: ' in document["spec"]


@pytest.mark.parametrize(
    ("config", "changes", "lines"),
    [
        ("mixtral-8x7b", {}, ["layer moe: One layer, forward and backward: router and experts"]),
        ("phi-3.5-moe", {}, ["layer moe: ", "note: the router is not covered: sparsemixer masks"]),
        ("qwen2-57b-a14b", {}, ["layer moe: One layer, forward and backward: router and experts, and the shared"]),
        ("mixtral-8x7b", {"torch_dtype": "float16"},
         ['warning: no layer moe: dtype = "fp16": the kernels that move rows', "single kernels: router-topk, ",
          "warning: left out, the file says why: permute, unpermute"]),
        ("mixtral-8x7b", {"intermediate_size": 1150},
         ["warning: no layer moe: intermediate = 1150: a row must be a multiple of 16 bytes", "single kernels: "]),
    ],
)  # fmt: skip
def test_what_is_in_the_file_and_what_is_not_is_on_stderr(fusekit, tmp_path, config, changes, lines):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config] | changes))
    err = fusekit("new", str(tmp_path), "--name", "x", "--json").err.splitlines()
    assert all(any(line.startswith(start) for line in err) for start in lines), err
    assert any(line.startswith("warning: ") for line in err) == bool(changes)
    assert err[-1] == "next: fusekit build x.toml"
    out = tmp_path / "y.toml"
    assert fusekit("new", str(tmp_path), "-o", str(out)).err.splitlines()[-1] == f"next: fusekit build {out}"
    assert fusekit("new", str(tmp_path), "-q").err == ""


def test_from_stdin(fusekit):
    run = subprocess.run(
        [sys.executable, "-m", "fusekit", "new", "-"], input=json.dumps(CONFIGS["llama-3-8b"]), text=True,
        env=fusekit.environment, cwd=fusekit.root.parent, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert 'summary = "llama: ' in run.stdout


def test_the_name_in_a_cache_of_downloads(fusekit, tmp_path):
    folder = tmp_path / "hub" / "models--openai--gpt-oss-20b" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["gpt-oss-20b"]))
    assert fusekit("new", str(folder), "--json").json["name"] == "gpt-oss-20b"


def test_a_model_of_the_hub(fusekit, tmp_path):
    config = tmp_path / "cached.json"
    config.write_text(json.dumps(CONFIGS["qwen3-8b"]))
    module = tmp_path / "fake" / "huggingface_hub.py"
    module.parent.mkdir()
    module.write_text(
        "def hf_hub_download(model, file):\n"
        "    if model != 'Qwen/Qwen3-8B': raise OSError('404 Client Error\\nmore')\n"
        f"    assert file == 'config.json'\n    return {str(config)!r}\n"
    )
    path = {"PYTHONPATH": str(module.parent)}
    document = fusekit("new", "Qwen/Qwen3-8B", "--json", **path).json
    assert (document["name"], document["model_type"]) == ("qwen3-8b", "qwen3")
    refused = fusekit("new", "Qwen/Nothing", code=2, **path).err
    assert (
        "Qwen/Nothing: there is no such folder here, and the Hub does not give its config.json: 404 Client" in refused
    )
    module.write_text("raise ImportError")
    missing = fusekit("new", "Qwen/Qwen3-8B", code=2, **path).err
    command = "pip install huggingface_hub && hf download Qwen/Qwen3-8B config.json --local-dir Qwen3-8B"
    assert f"`{command}`, then `fusekit new Qwen3-8B`" in missing
    assert "huggingface_hub" not in fusekit("new", "Qwen/config.json", code=2, **path).err


def test_a_file_is_not_overwritten_unasked(fusekit, model, tmp_path):
    out = tmp_path / "mine.toml"
    out.write_text("mine")
    err = fusekit("new", str(model), "-o", str(out), code=2).err
    assert "exists; give --force" in err
    assert out.read_text() == "mine"
    fusekit("new", str(model), "-o", str(out), "--force")
    assert out.read_text().startswith("#:schema")
    assert [path.name for path in tmp_path.glob("*mine*")] == ["mine.toml"]


def test_a_full_disk_leaves_no_half_of_a_file(fusekit, model, tmp_path):
    line = [sys.executable, "-m", "fusekit", "new", str(model), "-o", str(tmp_path / "mine.toml")]
    before = {path.name for path in tmp_path.iterdir()}
    # Python would leave half of the byte code of a module that nobody has imported before, for whoever does next.
    environment = fusekit.environment | {"PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *line],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "File too large" in run.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_force_replaces_a_link_and_not_what_it_leads_to(fusekit, model, tmp_path):
    target, out = tmp_path / "target.toml", tmp_path / "mine.toml"
    target.write_text("theirs")
    out.symlink_to(target)
    fusekit("new", str(model), "-o", str(out), code=2)
    fusekit("new", str(model), "-o", str(out), "--force")
    assert target.read_text() == "theirs"
    assert not out.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}/none"], "there is no config.json"),
        (["{model}", "-o", "x.json"], "give x.toml, or a folder"),
        (["{model}", "-o", "x.toml", "--name", "y"], "give y.toml, or a folder"),
        (["{model}", "-o", "none/x.toml"], ": No such file or directory; make its folder first"),
        (["{model}", "--name", "A B"], "64 at most; give --name a-b"),
        (["{model}", "-o", "Mixtral-8x7B.toml"], "64 at most; give mixtral-8x7b.toml"),
        (["{model}", "--arch", "sm_80"], "--arch sm_80: there are no kernels for it"),
        (["{model}", "--expert-parallel", "3"], "1, 2, 4, 8 do"),
        (["{model}", "--family", "mixtrall"], "the nearest are mixtral, mistral"),
        (["{model}", "--tokens", "0"], "--tokens"),
    ],
)
def test_errors_are_one_message(fusekit, model, arguments, words):
    result = fusekit("new", *(each.format(model=model) for each in arguments), code=None)
    assert result.code == (1 if "none/x.toml" in arguments else 2)
    assert words in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_what_is_too_long_or_no_text_is_refused(fusekit, tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2**40)  # sparse
    assert "longer than" in fusekit("new", str(path), code=2).err
    path.write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in fusekit("new", str(path), code=2).err


def test_a_build_takes_every_file(fusekit, tmp_path, soak):
    """Several models at once, with --soak every one: what would be built, from the files alone."""
    configs = {name: CONFIGS[name] for name in list(CONFIGS)[:: 1 if soak else 6]}
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        fusekit("new", str(tmp_path / f"{name}.json"), "-o", str(tmp_path / f"{name}.toml"))
    plan = fusekit("build", *(str(tmp_path / f"{name}.toml") for name in configs), "--dry-run", "--json").json
    named = {re.sub(r"/.*", "", row["name"]) for row in plan["would_build"]}
    assert named == set(configs)


SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 8}
CHOICES = {"num_experts_per_tok": 2, "experts_per_token": 2}
ONE_VARIANT = '[defaults]\ntile = [128, 128]\ncluster = [2, 1]\nschedule = "static"\n'


@pytest.mark.soak("kernels as the packaged ones; a dry run reads the same files")
@pytest.mark.parametrize(("name", "training", "kernels"), [("gpt-oss-20b", False, 6), ("starcoder2-3b", True, 7)])
def test_the_kernels_of_a_small_model_build(fusekit, tmp_path, name, training, kernels):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    config = CONFIGS[name] | SMALL | CHOICES
    text = kernel_list(read_model(json.dumps(config), "config.json"), Request("small", tokens=64, training=training))
    (tmp_path / "small.toml").write_text(text.replace("[defaults]\n", ONE_VARIANT))
    report = fusekit("build", str(tmp_path / "small.toml"), "--json", "--jobs", "2").json
    assert (len(report["built"]), report["failed"]) == (kernels, [])
    assert all(row["proved_launches"] for row in report["built"])


def test_new_loads_no_compiler(model, tmp_path):
    code = (
        "import sys; from fusekit_cli.main import main; main(['new', sys.argv[1], '-o', sys.argv[2]]); "
        "print(*({'cutlass', 'numpy', 'cuda', 'rich', 'llvmlite', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path / "m.toml")], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(tmp_path / "m.toml")]


@pytest.mark.parametrize("inside", [False, True])
def test_a_fifo_is_refused_and_not_waited_for(fusekit, tmp_path, inside):
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)
    err = fusekit("new", str(tmp_path if inside else fifo), code=2).err
    assert f"{fifo} is no plain file; a config.json is; give a config.json, a folder that holds one, or -" in err


def test_for_a_trainer_or_server(fusekit, tmp_path):
    path = tmp_path / "config.json"
    sizes = '"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4'
    path.write_text(f'{{"model_type": "qwen3_moe", {sizes}, "num_experts": 8, "num_experts_per_tok": 2}}')
    assert 'keep = "none"' in fusekit("new", str(path), "--for", "vllm").out
    assert "accumulate = true" in fusekit("new", str(path), "--for", "megatron").out
    refused = fusekit("new", str(path), "--for", "deepspeed", code=2)
    assert "there is no such door; it is one of transformers, megatron," in refused.err
