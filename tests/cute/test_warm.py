"""`fusekit warm`: what a program, or a model with the packages that run it, compiles, before there is a GPU."""

import json
import os
import re
import sys
from importlib.util import find_spec

import pytest

from fusekit.cute.plans import Model, Work, environment
from fusekit.errors import UsageError
from fusekit_cli.main import main
from tests.cute.test_exec import NO_DSL

WARM = (sys.executable, "-m", "fusekit", "warm")
GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "num_experts_per_tok": 4, "num_local_experts": 32, "hidden_size": 2880, "intermediate_size": 2880,
    "swiglu_limit": 7.0,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
    "sliding_window": None, "use_sliding_window": False, "num_experts_per_tok": 8, "num_experts": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None,
    "num_experts_per_tok": 2, "num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 14336,
}  # fmt: skip
PACKAGES = ("quack", "flash_attn", "flashinfer")


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (GPT_OSS, Model(2880, 64, 8, 64, 32, 4, 2880, 128, False, True, (1.702, 1.0, 7.0))),
        (QWEN3, Model(2048, 32, 4, 128, 128, 8, 768, 0, True, False, ())),
        ({"text_config": MIXTRAL}, Model(4096, 32, 8, 128, 8, 2, 14336, 0, False, False, ())),
        ({"hidden_size": 512, "num_attention_heads": 8}, Model(512, 8, 8, 64, 0, 0, 0, 0, False, False, ())),
    ],
)
def test_a_config_gives_what_decides_the_kernels(config, model):
    assert Model.of(config, "config.json") == model
    work = Work((model,), ("quack",), (1, 16), 2, 132, "all", 3)
    assert Work.from_text(work.to_text()) == work


def test_a_config_without_sizes_is_refused():
    with pytest.raises(UsageError, match=r"m\.json: hidden_size is missing"):
        Model.of({}, "m.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "warm takes a program or models; give one"),
        (("--model", "nowhere.json"), "nowhere.json: .*No such file"),
        (("--tokens", "0", "--model", "{model}"), "--tokens 0; it is a list of positive numbers"),
        (
            ("--with", "triton", "--", "python", "x y"),
            "it once on such a machine: fusekit exec --with triton -- python 'x y'",
        ),
    ],
)
def test_what_warm_cannot_do_is_an_error(arguments, message, tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(MIXTRAL))
    assert main(["warm", *(part.format(model=tmp_path / "model.json") for part in arguments)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_program_that_is_warmed_starts_with_hits(run):
    pytest.importorskip("cutlass", reason=NO_DSL)
    program = (sys.executable, "-m", "tests.cute.program", "work")
    warmed = run("--records", "--", *program, execute=WARM)
    assert (warmed.code, warmed.counts) == (0, (0, 1)), warmed.err
    assert re.fullmatch(r"fusekit: adopted as adopted/tests\.Kernel@[0-9a-f]{16}\n", warmed.err)
    assert run(*program, FUSEKIT_MISS="error").counts == (1, 0)


def test_the_stand_ins_of_a_device_name_its_architecture():
    assert environment("sm_90a", 132)["CUTE_DSL_ARCH"] == "sm_90a"
    assert environment("sm_100a", 148)["FLASH_ATTENTION_ARCH"] == "sm_100"


def test_three_models_take_a_hundred_kernels_and_find_them(run, soak, figure, tmp_path):
    if not soak:
        pytest.skip("only with --soak: it takes minutes")
    if missing := [package for package in ("cutlass", *PACKAGES) if find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    models = []
    for name, config in {"gpt-oss-20b": GPT_OSS, "qwen3-30b-a3b": QWEN3, "mixtral-8x7b": MIXTRAL}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        models += ["--model", str(tmp_path / f"{name}.json")]
    path = os.environ.get("PYTHONPATH", "")
    cold = run("--tokens", "16,1024", *models, execute=WARM, timeout=3000, PYTHONPATH=path)
    assert cold.code == 0, cold.err
    compiled = len(list((tmp_path / "store").glob("names/*/*.json")))
    assert compiled >= 100
    warm = run("--tokens", "16,1024", *models, execute=WARM, timeout=3000, PYTHONPATH=path, FUSEKIT_MISS="error")
    assert (warm.code, warm.counts) == (0, (sum(cold.counts), 0)), warm.err
    figure(f"fusekit warm, three models: {compiled} kernels of {', '.join(PACKAGES)}")
