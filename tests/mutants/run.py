"""Plants each fault of `faults.toml` in a copy of this checkout and runs the tests that should notice it.

    python tests/mutants/run.py [-j N] [TEXT ...]

TEXT: only faults whose file or name contains one of them. Prints who survives; exits with 1 when more than five do, or
when tests fail without any fault. Needs what the tests need: `pip install '.[test]'`. Faults whose tests want PyTorch
are planted only where it is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
MOST = 5  # that may survive
NONE_RAN = 5  # pytest's exit code
TIMEOUT = 900  # seconds; a fault that makes tests hang is noticed too
OURS = "FUSEKIT_", "PYTEST_", "PYTHON"  # variables that could lead tests away from the copy
PATHS = "import fusekit, fusekit_cli; print(fusekit.__file__, fusekit_cli.__file__)"


@dataclass(frozen=True)
class Fault:
    """In `file`, the one place with the text `before` has `after`. tests: arguments of pytest."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def faults() -> list[Fault]:
    tables = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]
    return [Fault(**{**table, "tests": tuple(table["tests"].split())}) for table in tables]


class Copy:
    """A copy of the checkout's tracked files, with a Python that imports them: faults are planted one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._stamp = int(time.time())
        self._process: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in map(os.fsdecode, listed.split(b"\0")):
            if name and (source := ROOT / name).exists():
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self._python = self._own_python(folder / "python")

    def _own_python(self, folder: Path) -> str:
        """A Python to which this copy comes before what is installed, also where a test clears the environment."""
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        installed = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "copy.pth").write_text("\n".join([str(self.folder), f"{self.folder}/.editable", *installed]) + "\n")
        python = str(folder / "bin" / "python")
        result = subprocess.run(
            [python, "-c", PATHS], cwd=folder, env=self._environment, capture_output=True, check=True, text=True
        )
        if not all(path.startswith(f"{self.folder}{os.sep}") for path in result.stdout.split()):
            raise RuntimeError(f"tests would import {result.stdout.strip()}, not the copy in {self.folder}")
        return python

    def passes(self, tests: Iterable[str]) -> bool | None:
        """Whether the tests pass; None: all are skipped here. Raises RuntimeError where pytest itself fails."""
        command = [self._python, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = self._process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                self.end()
                return False
            log.seek(0)
            if code == NONE_RAN:
                return None
            if code > 1:
                raise RuntimeError(f"no test ran: {' '.join(command)}\n{log.read().decode(errors='replace')}")
        return code == 0

    def end(self) -> None:
        """Ends the tests that run."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def notices(self, fault: Fault) -> bool:
        """Whether the tests of `fault` fail when it is planted."""
        path = self.folder / fault.file
        text = path.read_text()
        if text.count(fault.before) != 1:
            raise RuntimeError(f"{fault.name}: {text.count(fault.before)} places in {fault.file} have {fault.before!r}")
        self._write(path, text.replace(fault.before, fault.after))
        try:
            return self.passes(fault.tests) is False
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Byte code belongs to a source of one size and second: no two texts have the same.
        self._stamp += 1
        os.utime(path, (self._stamp, self._stamp))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", nargs="*")
    parser.add_argument("-j", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    planted = [
        fault for fault in faults() if not options.text or any(text in fault.file + fault.name for text in options.text)
    ]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.j) as pool:
        Path(scratch).chmod(0o755)  # some tests become another user
        copies = [Copy(Path(scratch) / str(number)) for number in range(options.j)]
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def in_a_copy(work):  # type: ignore[no-untyped-def]
            copy = free.get()
            try:
                return work(copy)
            finally:
                free.put(copy)

        try:
            wanted = sorted({test for fault in planted for test in fault.tests})
            sound = pool.map(lambda test: in_a_copy(lambda copy: copy.passes([test])), wanted)
            passed = dict(zip(wanted, sound, strict=True))
            failing = {test for test in wanted if passed[test] is False}
            for test in failing:
                print(f"fails without a fault: {test}", flush=True)
            usable = [fault for fault in planted if all(passed[test] for test in fault.tests)]
            for test in (test for test in wanted if passed[test] is None):
                print(f"not planted, as its tests are skipped here: {test}", flush=True)
            survivors = []
            noticed = pool.map(lambda fault: in_a_copy(lambda copy: copy.notices(fault)), usable)
            for fault, killed in zip(usable, noticed, strict=True):
                if not killed:
                    survivors.append(fault)
                    print(f"survives: {fault.file}: {fault.name}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.end()
            raise
    print(f"{len(usable) - len(survivors)} of {len(usable)} faults noticed in {time.monotonic() - start:.0f} s")
    return 1 if failing or len(survivors) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
