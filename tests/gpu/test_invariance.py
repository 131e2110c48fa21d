"""Batch invariance of whole layers: a token's bits do not depend on its batch, its place, or on variants and margins.

fusekit --store STORE build tests/gpu/layers.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_invariance.py
"""

from pathlib import Path

import pytest

from fusekit import NotBuiltError
from fusekit.spec import parse_file

from .batches import Batches

LAYERS = {spec.layer.name: spec.layer for spec in parse_file(Path(__file__).with_name("layers.toml"))}
NAMES = [
    name
    for name, o in LAYERS.items()
    if (o.trained or o.weights != "none") and not o.accumulate and not name.startswith("hf-")
]
TRIALS = 12


@pytest.mark.parametrize("name", NAMES)
def test_random_batches(opened, name):
    with opened.devices.active(opened.devices.get(0)):
        try:
            batches = Batches(opened, f"layers/{name}")
        except NotBuiltError as error:
            pytest.skip(str(error))
        assert batches.problems(TRIALS) == []
        variants = [len(names) for names in batches.loose.taken.values()]
        assert max(variants) > 1, batches.loose.taken
