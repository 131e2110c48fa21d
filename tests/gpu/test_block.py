"""Router, row order, permutation, both GEMMs and back on the GPU, without the host: launched, and in one graph.

fusekit --store STORE build tests/gpu/block.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_block.py
"""

import pytest

from fusekit.bench.replay import Replay
from fusekit.bench.timing import own_stream

from .block import SPECS, Block, random_inputs, wrong

SHAPES = ((1, 256, 128), (77, 2880, 128), (1500, 512, 768))


@pytest.fixture(scope="module")
def stored(opened):
    if not opened.store.names("block/*"):
        pytest.skip(f"no kernels of a block in {opened}; build tests/gpu/block.toml there and name the store")
    with opened.devices.active(opened.devices.get(0)):
        yield opened


@pytest.mark.parametrize(("tokens", "hidden", "inter"), SHAPES)
def test_a_block(stored, tokens, hidden, inter):
    assert set(SPECS) == {"topk", "index", "permute", "fc1", "fc2", "unpermute"}
    driver = stored.devices.driver

    def finish(stream):
        driver.check(driver.api.cuStreamSynchronize(stream), "the block")

    first, second = (random_inputs(tokens, hidden, inter, seed) for seed in (1, 2))
    block = Block(stored, first)
    try:
        with own_stream(stored.devices, stored.devices.get(0)) as stream:
            block.poison()
            driver.check(driver.api.cuCtxSynchronize(), "poison")
            block(stream)
            finish(stream)
            assert wrong(block, first) == []
            graph = Replay(stored.devices, [block], 1, stream)
            # Other choices, so other counts: the graph is replayed as it is.
            block.arrays["logits"].upload(second["logits"])
            block.poison()
            driver.check(driver.api.cuCtxSynchronize(), "poison")
            graph(stream)
            finish(stream)
            assert wrong(block, first | {"logits": second["logits"]}) == []
            graph.close()
    finally:
        block.close()
