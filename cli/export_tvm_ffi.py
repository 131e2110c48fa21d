"""`fusekit export --lang tvm-ffi`: stored kernels and layers as one shared library of TVM-FFI functions."""

from __future__ import annotations

import shutil
import subprocess
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from fusekit.errors import StoreError, ToolchainError
from fusekit_cli import output
from fusekit_cli.export_c import chosen_exports
from fusekit_cli.options import Session

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


def run(session: Session, out: Path, names: tuple[str, ...], arch: str | None) -> None:
    """Write the library, and print its functions."""
    from fusekit.cabi import generate_tvm_ffi
    from fusekit.store.publishing import replace_file

    kernels, layers, named = chosen_exports(session, names, arch)
    text, functions = generate_tvm_ffi(list(kernels.values()), list(layers.values()), named)
    data = compiled(text)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, methodcaller("write", data))
    except OSError as error:
        raise StoreError(f"{out}: {error.strerror}; choose a path that can be written to") from error
    document = {
        "file": str(out), "kernels": sorted(kernels), "layers": sorted(layers),
        "functions": [{"name": each.name, "arguments": list(each.arguments)} for each in functions],
    }  # fmt: skip
    output.answer(session, document, lambda: click.echo("\n".join([f"{out}:", *(f"  {each}" for each in functions)])))


def compiled(text: str) -> bytes:
    """The shared library of a C source."""
    try:
        from tvm_ffi import libinfo
    except ImportError as error:
        raise ToolchainError(
            "export --lang tvm-ffi needs TVM-FFI's headers; install them with: pip install apache-tvm-ffi"
        ) from error
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ToolchainError("export --lang tvm-ffi needs a C compiler, and there is no cc, gcc or clang; install gcc")
    runtime = Path(libinfo.find_libtvm_ffi()).parent
    with TemporaryDirectory(prefix="fusekit-export-") as folder:
        source, library = Path(folder) / "library.c", Path(folder) / "library.so"
        source.write_text(text, encoding="utf-8")
        headers = (f"-isystem{path}" for path in libinfo.include_paths())
        libraries = (f"-L{runtime}", "-ltvm_ffi", "-ldl", "-lpthread")
        command = [compiler, *FLAGS, *headers, str(source), "-o", str(library), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ToolchainError(f"{compiler} failed; put a compiler for C11 first in PATH:\n{done.stderr.strip()}")
        return library.read_bytes()
