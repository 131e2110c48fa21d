"""A program that compiles as Triton, DeepGEMM or inductor does: what its cache lacks, each time to other bytes.

python -m tests.cute.cached PACKAGE NAME...: prints for each NAME whether it was compiled.
"""

import json
import os
import sys
import uuid
from pathlib import Path

VARIABLES = {"triton": "TRITON_CACHE_DIR", "deepgemm": "DG_JIT_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
ELF = b"\x7fELF" + bytes(36) + (64).to_bytes(8, "little") + bytes(10) + (8).to_bytes(2, "little") + b"\1\0" + bytes(2)


def triton(cache, name, size=1000):
    """Whether a kernel was compiled into the folder `cache`."""
    folder = cache / name
    group = folder / "__grp__kernel.json"
    if group.exists() and all(Path(path).exists() for path in json.loads(group.read_text())["child_paths"].values()):
        return False
    write(folder / "kernel.ttir", os.urandom(size))
    write(folder / "kernel.cubin", ELF + os.urandom(size))
    paths = {each: str(folder / each) for each in ("kernel.ttir", "kernel.cubin")}
    write(group, json.dumps({"child_paths": paths}).encode())
    return True


def deepgemm(cache, name, size=1000):
    folder = cache / "cache" / f"kernel.{name}.0123"
    if folder.exists():
        assert (folder / "kernel.cu").exists() and (folder / "kernel.cubin").exists(), "Corrupted JIT cache directory"
        return False
    temporary = cache / "tmp" / str(uuid.uuid4())
    write(temporary / "kernel.cu", b"//")
    write(temporary / "kernel.cubin", ELF + os.urandom(size))
    folder.parent.mkdir(exist_ok=True)
    temporary.rename(folder)
    return True


def inductor(cache, name, size=1000):
    folder, library = cache / "fxgraph" / name[:2] / name, cache / name[:2] / f"c{name}.main.so"
    write(cache / "locks" / f"c{name}.lock", b"")
    compiled = triton(cache / "triton" / "0", name.upper(), size)
    if folder.exists() and library.exists():
        (graph,) = folder.iterdir()
        named = Path(os.fsdecode(graph.read_bytes().partition(b"\0")[0]))
        write(named / name[:2] / f"{name}.best_config", b"{}")
        return compiled
    write(folder / uuid.uuid4().hex, os.fsencode(cache) + b"\0" + os.urandom(size))
    write(library, ELF + os.urandom(size))
    return True


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


if __name__ == "__main__":
    package, *names = sys.argv[1:]
    where = Path(os.environ[VARIABLES[package]])
    sys.stdout.write(f"{[globals()[package](where, name) for name in names]}\n")
