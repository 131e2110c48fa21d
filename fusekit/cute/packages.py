"""The packages whose caches `fusekit exec --with` carries, and what their keys leave out."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusekit.cute.blobs import TOOLCHAIN
from fusekit.cute.processor import cpu, gpus, system
from fusekit.errors import StoreError
from fusekit.store.entries import CARRIED, KIND
from fusekit.store.keys import sha256

_SCHEMA = "2"
"""Version of the fields and of the sets, raised when their meaning changes."""
GROUP = "__grp__"
"""Begins the names of files in which Triton keeps absolute paths. One is written after all others of a kernel."""
_ASK_SECONDS = 60.0
_ELF, _ELF_TABLE, _ELF_COUNT = b"\x7fELF", struct.Struct("<Q"), struct.Struct("<HH")
_ELF_TABLE_AT, _ELF_COUNT_AT = 40, 58

_ASK = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json, sysconfig
from importlib.metadata import version
def of(name):
    try:
        return version(name)
    except Exception:
        return "-"
print()
print(json.dumps({"python": str(sysconfig.get_config_var("SOABI")), **{name: of(name) for name in sys.argv[1:]}}))
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A package with a cache of its own.

    variables: that name its folder; all of them are set. distributions: whose versions count. unit: the path of what
    is stored whole or not at all, in the path of a file of it. counted: the units that are compilations. needs: names
    of files without which a unit is not whole. on_host: it compiles for the processor. named: what it compiles has the
    path of the folder, and writes there later.
    """

    name: str
    variables: tuple[str, ...]
    distributions: tuple[str, ...]
    unit: re.Pattern[str]
    counted: re.Pattern[str]
    needs: frozenset[str] = frozenset()
    on_host: bool = False
    named: bool = False


_ALL = re.compile("")
PACKAGES = {
    package.name: package
    for package in (
        # A folder for each kernel: its stages, and a group file that comes last; another for each stub of C.
        Package("triton", ("TRITON_CACHE_DIR",), ("triton",), re.compile(r"([^/]+)/."), _ALL),
        # SGLang gives DeepGEMM the folder of a variable of its own. A folder with one file alone ends the process.
        Package(
            "deepgemm", ("DG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR"), ("deep_gemm", "sgl-deep-gemm", "torch"),
            re.compile(r"((?:[^/]+/)*cache/kernel\.[^/]+)/."), _ALL, frozenset({"kernel.cu", "kernel.cubin"}),
        ),
        # Files that are named by their content, or lie in folders of the key that they were stored under.
        Package(
            "inductor", ("TORCHINDUCTOR_CACHE_DIR",), ("torch", "triton"), re.compile(r"(triton/[^/]+/[^/]+(?=/)|.+)"),
            re.compile(r"(?:fxgraph|triton)/|.*\.so$"), on_host=True, named=True,
        ),
    )
}  # fmt: skip


def fields_of(package: Package, versions: Mapping[str, str]) -> dict[str, str]:
    """What a set is kept under: packages and Python, system, the models of the GPUs (what tuners chose is of a model).
    And the processor for inductor, which compiles with `-march=native`, and has its features in no key.
    """
    machine = gpus()
    fields = {KIND: CARRIED, "schema": _SCHEMA, "package": package.name, "arch": machine.arch, "system": system()}
    fields |= {"gpus": ", ".join(machine.models), "python": versions["python"]}
    if package.on_host:
        fields["processor"] = sha256(cpu().encode())
    return fields | {f"{TOOLCHAIN}{name}": versions[name] for name in package.distributions}


def versions_of(command: Sequence[str], environ: Mapping[str, str], packages: Sequence[Package]) -> dict[str, str]:
    """The versions of the distributions of `packages` in the Python that `command` starts; and its own, as "python"."""
    python = _python(command, environ)
    names = sorted({name for package in packages for name in package.distributions})
    if python is None:
        raise StoreError(f"no Python is found that {command[0]} could start; put it on PATH")
    try:
        done = subprocess.run(
            [python, "-c", _ASK, *names], env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=_ASK_SECONDS, check=True,
        )  # fmt: skip
        versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StoreError(f"{python} does not tell which packages it has: {type(error).__name__}: {error}") from error
    return versions


def _python(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The first word of `command` that is a Python, or a script of one; else the first Python on PATH."""
    path = environ.get("PATH")
    for word in command:
        found = shutil.which(word, path=path)
        if found is None:
            continue
        if re.fullmatch(r"python[0-9.]*", Path(found).name):
            return found
        try:
            with Path(found).open("rb") as file:
                head = file.read(1024)
        except OSError:
            continue
        # A script with a long path begins with a line for sh.
        script = re.match(rb"#![^\n]*?(\S*python[0-9.]*)|#!/bin/sh\n'''exec' \"?(\S*python[0-9.]*)", head)
        if script is not None:
            return shutil.which(os.fsdecode(script[1] or script[2]), path=path)
    return shutil.which("python3", path=path) or shutil.which("python", path=path)


def is_whole(package: Package, folder: Path, paths: Sequence[str]) -> bool:
    """Whether a unit was finished: a process may have been killed while it wrote."""
    names = {path.rpartition("/")[2] for path in paths}
    staged = any(name.endswith(".ttir") for name in names)
    if not names >= package.needs or (staged and not any(name.startswith(GROUP) for name in names)):
        return False
    return all(_is_linked(folder / path) for path in paths if path.endswith((".so", ".cubin")))


def _is_linked(path: Path) -> bool:
    """Whether a file of machine code is as long as its table of sections says, which is at its end."""
    try:
        with path.open("rb") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
        (table,), (each, count) = (
            _ELF_TABLE.unpack_from(head, _ELF_TABLE_AT),
            _ELF_COUNT.unpack_from(head, _ELF_COUNT_AT),
        )
    except (OSError, struct.error):
        return False
    return head.startswith(_ELF) and table > 0 and table + each * count <= size
