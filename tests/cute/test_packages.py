"""Packages that compile CuTe DSL kernels, unmodified: 24 calls of four packages. Every call is a hit the second time,
with its trace and without. The cubin that the process gets from each hit is that of a process without fusekit, byte for
byte. 22 of them become kernels with launch records.
"""

import dataclasses
import json
import os
import sys
from importlib.util import find_spec

import pytest

from fusekit.cute.blobs import packed, unpacked
from fusekit.store import Store
from fusekit.store.entries import HOST_OBJECT
from tests.cute.command import EXECUTE
from tests.cute.engines import places
from tests.cute.test_exec import NO_DSL

# Calls; those that are adopted (scales of cuDNN frontend have sizes that only specs say); cold to warm, CPU time of the
# calls, with the trace and without it. Some of it is the first call's, whatever it compiles. The trace is most of what
# cuDNN frontend takes.
PACKAGES = {
    "quack": (8, 8, 1.8, 4), "flash_attn": (4, 4, 1.8, 10), "flashinfer": (6, 6, 1.8, 10), "cudnn": (6, 4, 1.3, 10),
}  # fmt: skip


def level(number, *options):
    return (*EXECUTE[:-1], "--level", str(number), *options, "--")


class Outcome:
    """What a run printed: the calls, their CPU seconds, and the digest of each one's cubin."""

    def __init__(self, done):
        assert done.code == 0, done.err
        # The last line, after what the package prints.
        self.calls, self.seconds, self.cubins = json.loads(done.out.splitlines()[-1])
        self.counts, self.err = done.counts, done.err


def plant(store):
    """A wrong hit: change one byte of the cubin in one entry, whose digests are right again."""
    found = [each.record for each in store.names() if HOST_OBJECT in each.record.spec]
    entry, blob = store.load(found[0].key)
    artifact = unpacked(blob, entry)
    host = bytearray(artifact.host)
    (place,) = places(host)
    host[(place.start + place.stop) // 2] ^= 1
    wrong = dataclasses.replace(artifact, host=bytes(host))
    (path,) = store.root.glob(f"entries/*/{entry.key}.json")
    path.unlink()
    store.publish(*packed(entry.key, dict(entry.fields), wrong, {}, entry.seconds))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_compiles_once(package, run, soak, figure, tmp_path):
    if not soak:
        pytest.skip("only with --soak: it takes minutes")
    pytest.importorskip("cutlass", reason=NO_DSL)
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = (sys.executable, "-m", "tests.cute.packages", package)

    def outcome(how, store, **variables):
        variables = {"FUSEKIT_STORE": str(store), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **variables}
        return Outcome(run(*command, execute=how, timeout=600, **variables))

    count, adopted, with_trace, without_trace = PACKAGES[package]
    traced, untraced = tmp_path / "traced", tmp_path / "untraced"
    fresh = outcome((), traced)
    assert (fresh.calls, len(set(fresh.cubins))) == (count, count)

    cold, warm = outcome(level(2, "--records"), traced), outcome(level(2), traced)
    compared = outcome(level(2), traced, FUSEKIT_VERIFY="1")
    assert (cold.counts, warm.counts, compared.counts) == ((0, count), (count, 0), (count, 0)), cold.err
    assert cold.err.count("fusekit: adopted as adopted/") == adopted, cold.err
    assert "is not what the DSL compiles" not in compared.err
    assert warm.seconds * with_trace <= fresh.seconds

    first, second = outcome(level(1), untraced), outcome(level(1), untraced)
    checked = outcome(level(1), untraced, FUSEKIT_VERIFY="1")
    assert [each.counts for each in (first, second, checked)] == [(0, count), (count, 0), (count, 0)], first.err
    assert "its trace gives another one" not in checked.err
    assert second.seconds * without_trace <= fresh.seconds

    for each in (cold, warm, compared, first, second, checked):
        assert each.cubins == fresh.cubins
    # The comparison sees a byte.
    for how, store in ((level(2), traced), (level(1), untraced)):
        plant(Store(store))
        planted = outcome(how, store)
        assert planted.counts == (count, 0)
        assert sum(one != other for one, other in zip(planted.cubins, fresh.cubins, strict=True)) == 1
    took = ", ".join(f"{each.seconds:.2f}" for each in (fresh, cold, warm, first, second))
    figure(
        f"fusekit exec, {package}, {count} calls of cute.compile, CPU seconds without fusekit, cold and warm with the"
        f" trace, cold and warm without: {took}; hits compared: {count * 4}"
    )
