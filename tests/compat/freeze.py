"""Writes what the fusekit on PATH writes to one file, for later versions to read. Run from the checkout of a version:

    python tests/compat/freeze.py tests/compat/VERSION.tar.gz

The file holds a signed store, a signed bundle of it, its manifest and lock, the public key, the C loader, and launch
records of every schema. The private key is not kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

SPEC = """\
schema = 1
summary = "One kernel of each kind of launch"

[defaults]
arch = "sm_90a"
dtype = "bf16"

[[kernel]]
name = "fc1"
op = "grouped-gemm"
activation = { kind = "swiglu" }
glu_layout = "concat"
bias = true
save_preactivation = true
tile = [[128, 128], [128, 192]]
cluster = [2, 1]
schedule = "dynamic"
problem = { E = 8, M = 1024, N = 512, K = 256 }

[[kernel]]
name = "wgrad"
op = "grouped-wgrad"
tile = [128, 128]
cluster = [1, 1]
schedule = "static"
problem = { E = 8, M = 256, N = 256, K = 1024 }

[[kernel]]
name = "mlp"
kind = "mlp"
hidden = 256
intermediate = 512
activation = { kind = "gelu", approximate = "tanh" }
keep = "none"
problem = { T = 1024 }
"""


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "compat"
        folder.mkdir()
        spec = folder / "frozen.toml"
        spec.write_text(SPEC, encoding="utf-8")
        key = Path(scratch) / "key"

        def fusekit(*arguments: object, cwd: Path | None = None) -> None:
            subprocess.run(["fusekit", "--store", folder / "store", *map(str, arguments)], check=True, cwd=cwd)

        fusekit("key", "new", key)
        fusekit("build", spec, "--sign", key)
        fusekit("export", folder / "kernels.tar", "--sign", key)
        (folder / "cache_manifests").mkdir()
        fusekit("lock", spec, "--write", "--sign", key, cwd=folder)
        (folder / "cache_manifests").rename(folder / "manifests")
        (folder / "fusekit.toml").write_text("[targets]\nspecs = ['frozen.toml']\n", encoding="utf-8")
        fusekit("lock", "--sign", key, cwd=folder)
        fusekit("export", folder / "loader", "--lang", "c", "--loader", "--prefix", "compat")
        shutil.copy(f"{key}.pub", folder / "key.pub")
        (folder / "records.json").write_text(json.dumps(records(), indent=1), encoding="utf-8")
        with tarfile.open(out, "w:gz") as archive:
            archive.add(folder, "compat")


def records() -> list[object]:
    """Launch records with whatever one may hold."""
    from tests.cabi.samples import hand_written

    return [kernel.record.to_json() for kernel in hand_written()]


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
