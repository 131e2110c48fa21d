"""The planted faults still fit the code: each has one place, and tests that are there; every room has some."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = ROOT / "tests" / "mutants" / "run.py"


def faults():
    spec = importlib.util.spec_from_file_location("mutants_run", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module.faults()


def test_each_fault_has_its_place():
    planted = faults()
    assert len(planted) >= 100
    assert len({fault.name for fault in planted}) == len(planted)
    for fault in planted:
        source = (ROOT / fault.file).read_text()
        assert source.count(fault.before) == 1, f"{fault.name}: {fault.before!r} in {fault.file}"
        assert fault.before != fault.after, fault.name
        if fault.file.endswith(".py"):
            compile(source.replace(fault.before, fault.after), fault.file, "exec")
        files = [argument.partition("::")[0] for argument in fault.tests]
        assert files and all((ROOT / file).exists() for file in files), fault.name


def test_they_are_in_every_room():
    rooms = {path.name for path in (ROOT / "fusekit").iterdir() if (path / "__init__.py").is_file()}
    planted = {Path(fault.file).parts for fault in faults()}
    missing = rooms - {parts[1] for parts in planted if parts[0] == "fusekit"}
    assert missing <= {"providers"}  # whose own packages are needed to see a fault
    assert any(parts[0] == "cli" for parts in planted)
