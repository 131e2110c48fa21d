"""Memory of the CPU instead of a device's."""

import pytest

from fusekit.layers import memory
from tests.layers.host import ALIGNMENT


@pytest.fixture(autouse=True)
def of_the_cpu(monkeypatch):
    monkeypatch.setattr(memory, "ALIGNMENT", ALIGNMENT)
