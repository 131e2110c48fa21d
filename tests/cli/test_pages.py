"""Commands of the pages, in their order: none is refused. Here nothing is compiled or launched."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.spec.configs import CONFIGS

ROOT = Path(__file__).parents[2]
# Their commands run for real, in tests/compiler/test_own_kernel.py and tests/cli/test_cluster.py.
RUN = {"your-kernel.md", "cluster.md"}
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name not in RUN]
# What needs another machine or package, or all of the catalogue: tests/cli/test_exchange.py, test_lock.py, tests/cute.
ELSEWHERE = re.compile(
    r"\w+://|^fusekit (lock|exec|warm)|--check cache_manifests|pull|ls --from|import|^fusekit export kernels.tar$"
    r"|attention"
)
NOT_BUILT, NO_GPU = 3, 4
SPEC = """schema = 1
[[kernel]]
name = "moe"
kind = "moe"
arch = "sm_90a"
hidden = 512
intermediate = 256
experts = 8
topk = 2
"""


def lines(page):
    """Each command of fusekit in a block of the shell, as its words."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            for part in re.split(r"&&|\|", line):
                command = " ".join(shlex.split(part, comments=True))
                if command.startswith("fusekit ") and not ELSEWHERE.search(command):
                    yield shlex.split(part, comments=True)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if any(lines(page))], ids=lambda page: page.name)
def test_no_command_of_a_page_is_refused(fusekit, store, tmp_path, page):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    for name in ("path/to/model", "path/to"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"]))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("moe.toml", "my-model.toml"):
        (tmp_path / name).write_text(SPEC)
    (tmp_path / "keys").mkdir()
    for line in lines(page):
        words = [word.replace("~", str(tmp_path)) for word in line]
        if words[0] == "build":
            words += ["--dry-run"] * ("--dry-run" not in words)
        done = fusekit(*words, code=None, CUDA_VISIBLE_DEVICES="")
        assert done.code in (0, NOT_BUILT, NO_GPU), (words, done.err)
        if done.code == NOT_BUILT:
            assert re.search("fusekit (build|ls)", done.err), (words, done.err)
