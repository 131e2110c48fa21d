"""The GPU tests' fixtures. Without a GPU, a driver or the built kernels, every test is skipped and says why.

    fusekit --store STORE build tests/gpu/*.toml             on any machine
    FUSEKIT_STORE=STORE python -m pytest tests/gpu           on the machine with the GPU; nothing is compiled there

With pytest-xdist, ``-n 4`` also keeps the run going when a kernel hangs or crashes: only its worker is lost.
"""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from fusekit import DriverError, FusekitError
from fusekit.spec import parse_file

HERE = Path(__file__).parent
MATRIX, BACKWARD, FP8 = HERE / "matrix.toml", HERE / "matrix_backward.toml", HERE / "matrix_fp8.toml"
CODED = HERE / "matrix_fp8_output.toml"


class NoDriver(pytest.Module):
    """A file of tests on a machine without a driver: one skip instead of thousands, which are not even imported."""

    def collect(self):
        reason = "no GPU: there is no driver, libcuda.so.1, on this machine"
        raise pytest.skip.Exception(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NoDriver.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def opened():
    """The library of the store, whatever it holds, on a machine with a Hopper GPU."""
    from fusekit import open_library

    try:
        library = open_library()
        device = library.devices.get(0)
    except ImportError as error:
        pytest.skip(f"launching needs a package that is missing: {error}")
    except DriverError as error:
        pytest.skip(f"no GPU: {str(error).partition(';')[0]}")
    except FusekitError as error:
        pytest.skip(f"no store: {error}")
    if device.arch != "sm_90a":
        pytest.skip(f"the kernels are for sm_90a; this is {device}")
    return library


@pytest.fixture(scope="session")
def library(opened):
    """The library, if its store holds the kernels of the GEMM tests."""
    if not any(opened.store.names(f"{path.stem}/*") for path in (MATRIX, BACKWARD, FP8, CODED)):
        pytest.skip(f"no kernels of {MATRIX.name} in {opened}; build it there and name the store: FUSEKIT_STORE")
    return opened


@pytest.fixture(scope="session")
def gpu(library, request):
    from .device import Gpu

    capture = request.config.pluginmanager.getplugin("capturemanager")

    def give_up(message):
        """The context is lost with every later test; an xdist worker is replaced, a lone process has to end."""
        if hasattr(request.config, "workerinput"):
            capture.suspend_global_capture(in_=True)
            print(f"\n{message}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)
        pytest.exit(f"{message}; the tests after it could only fail", returncode=1)

    with library.devices.active(library.devices.get(0)):
        yield Gpu(library, give_up)


@pytest.fixture(scope="session")
def specs():
    """The kernels of the matrices by ``kernel@variant``."""
    return {
        spec.full_name.partition("/")[2]: spec for path in (MATRIX, BACKWARD, FP8, CODED) for spec in parse_file(path)
    }


@pytest.fixture(scope="session")
def alone(request):
    """Whether no other worker uses the device's memory meanwhile."""
    return not hasattr(request.config, "workerinput")


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch
