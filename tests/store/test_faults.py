"""Commands of which one system call fails, reads too: faults.c is preloaded, faults.py says what is wrong.

A command that ends well has done all of its work; one that does not names a path. The store is whole after either, and
the next try completes it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusekit.share.bundle import export_bundle
from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import NameRecord, Store
from fusekit.store.keys import sha256
from fusekit.store.signature import generate
from tests.cli.conftest import NAMES, SPEC
from tests.conftest import PARTS
from tests.cubins import cubin_of
from tests.store.faults import COMMANDS
from tests.store.samples import build_entry

pytest.importorskip("cryptography")
pytest.importorskip("fsspec")
HERE = Path(__file__).parent
EACH = 1  # failures of each command in the short round


def prepare(folder):
    store = Store(folder / "s")
    for seed, name in enumerate(NAMES):
        entry, cubin = build_entry(seed, cubin=cubin_of("kernel", seed=f"{seed} " * 4000))
        store.publish(entry, cubin)
        store.publish_name(NameRecord(name, "sm_90a", entry.key, SPEC, {}))
        time.sleep(0.02)  # so which one was used last is known
    export_bundle(store, select(store), folder / "bundle.tar")
    push(store, select(store), Remote(str(folder / "remote")))
    (folder / "keys").mkdir()
    generate(folder / "keys" / "k")
    shutil.copytree(folder / "s", folder / "orphans")
    orphan = Store(folder / "orphans").roots[0].blob_path(sha256(b"orphan"))
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"orphan")


def test_one_system_call_fails(tmp_path, soak, soak_part):
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler, cc")
    library = tmp_path / "faults.so"
    flags = ["-O1", "-Wall", "-Werror", "-fno-builtin", "-shared", "-fPIC", "faults.c", "-ldl", "-o"]
    subprocess.run(["cc", *flags, str(library)], cwd=HERE, check=True)
    prepare(tmp_path)
    time.sleep(0.06)  # what is younger counts as in use
    run = subprocess.run(
        [sys.executable, "-m", "tests.store.faults", tmp_path, *map(str, (0 if soak else EACH, soak_part, PARTS))],
        cwd=HERE.parents[1], env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=False,
        timeout=7200 if soak else 300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    failures = [json.loads(line) for line in run.stdout.splitlines()]
    # A part of a long round may have no call of a short command.
    assert soak or {command for command, *_ in failures} == set(COMMANDS)
    assert len(failures) >= EACH * len(COMMANDS) // (2 if soak else 1)
    # Two runs of a command may differ by a few calls: the last number of a long round may come too late.
    reached = sum(bool(call) for _, call, *_ in failures)
    assert reached == len(failures) or (soak and reached > 0.9 * len(failures))
    assert [failure for failure in failures if failure[-1]] == []
