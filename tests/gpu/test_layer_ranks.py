"""Layers whose experts are on two ranks, or four, against the definition of one GPU: on as many devices, or on fewer.

fusekit --store STORE build tests/gpu/layer-ranks.toml examples/{ranks,data-parallel}.toml     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_layer_ranks.py

The tests with processes need two devices, and PyTorch or mpirun with mpi4py.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fusekit import ArgumentError, CapacityError, PeerTimeoutError
from fusekit.plan.layer.program import BACKWARD, FORWARD, QUANTISE
from fusekit.runtime import DeviceArray
from tests.exchange.layers import ANY, ONE, OTHERS, LayerRanks

ROOT = Path(__file__).parents[2]
OVERLAP = ("gpt-oss-overlap", "choices-overlap")
OF_FOUR = ("gpt-oss-4", "deepseek-4", "choices-4-overlap")
NAMES = ("gpt-oss", "deepseek", "llama4", "choices", *OVERLAP, *OF_FOUR)
CODED = ("fp8", "fp8-gpt-oss", "fp8-deepseek", "fp8-llama4", "fp8-choices", "fp8-4")


@pytest.fixture(scope="module")
def over(opened):
    """over(name, tokens) -> a context of the layer over its ranks."""
    if not opened.store.names("layer-ranks/*"):
        pytest.skip(f"no layers over ranks in {opened}; build tests/gpu/layer-ranks.toml there and name the store")

    @contextmanager
    def over_ranks(name, tokens=512, **said):
        options = opened.layers()[f"layer-ranks/{name}"]
        devices = [rank % opened.devices.count for rank in range(options.ranks)]
        ranks = LayerRanks(opened, f"layer-ranks/{name}", devices, tokens, **said)
        try:
            if opened.devices.count < options.ranks:
                try:
                    for layer in ranks.layers:
                        layer.connect()
                except ArgumentError as error:
                    pytest.skip(f"few devices: {error}")
            yield ranks
        finally:
            ranks.close()

    return over_ranks


def shared(ranks, tokens):
    """Tokens of each rank: those of two, again and again, of the later ones a few less."""
    return [max(0, tokens[rank % 2] - 3 * (rank // 2)) for rank in range(len(ranks.devices))]


@pytest.mark.parametrize("name", [*NAMES, *CODED])
def test_outputs_and_gradients(over, name):
    with over(name) as ranks:
        few = [(120, 70), (0, 17)]  # the definition of a layer with FP8 values takes seconds
        for seed, tokens in enumerate(few if name in CODED else [(300, 300), (512, 0), (1, 400), (0, 17), (0, 0)]):
            ranks.fill(shared(ranks, tokens), seed)
            ranks.launch()
            assert ranks.problems() == [], tokens


@pytest.mark.parametrize("name", ["choices", "choices-overlap", "fp8-choices", "choices-4-overlap"])
def test_routings(over, soak, name):
    source = np.random.default_rng(3)
    with over(name, tokens=256) as ranks:
        for turn in range(200 if soak else 20):
            tokens = [int(source.integers(0, 257)) if source.random() > 0.1 else 0 for _ in ranks.devices]
            kind = (ANY, ONE, OTHERS)[turn % 3]
            ranks.fill(tokens, turn, kind)
            ranks.launch()
            assert ranks.problems() == [], (turn, tokens, kind)


@pytest.mark.parametrize(("tokens", "kind"), [((3000, 2500), ANY), ((4000, 0), ANY), ((900, 4096), OTHERS)])
def test_the_same_bits_as_without_overlap(over, tokens, kind):
    """Many tiles of either rank's rows, in another order."""
    result = []
    for name in ("choices", "choices-overlap"):
        with over(name, tokens=4096) as ranks:
            for seed in (1, 2):
                ranks.fill(list(tokens), seed, kind)
                ranks.launch()
            result.append(ranks.bits())
    assert result[0] == result[1]


@pytest.mark.parametrize("name", ["gpt-oss", "choices", "gpt-oss-overlap", "fp8", "fp8-gpt-oss", *OF_FOUR])
def test_the_same_bits_again(over, name):
    with over(name) as ranks:
        result = []
        for _ in range(2):
            ranks.fill(shared(ranks, (400, 77)), 5)
            ranks.launch()
            result.append(ranks.bits())
        assert result[0] == result[1]


@pytest.mark.parametrize("tokens", [[300, 0], [300, 210]])
@pytest.mark.parametrize("name", ["choices", "fp8-choices"])
def test_tokens_of_one_rank_have_the_bits_of_one_gpu(over, opened, name, tokens):
    """All choices are on one rank, so no sum is rounded in between; the rows of an expert are in the same order."""
    with over(name) as ranks:
        ranks.fill(tokens, 4, ONE)
        ranks.launch()
        layer = opened.layer(f"layer-ranks/{name}-alone", device=ranks.devices[0])
        sizes, count = layer.sizes(sum(tokens)), sum(tokens)
        local_weights = {item: ranks.array(0, ranks.random_parameters[item].whole(), "bf16") for item in ("w1", "w2")}
        for value, buffer in (layer.inputs(FORWARD) | layer.inputs(BACKWARD)).items():
            if value in ranks.inputs[0]:
                rows = np.concatenate([rank_inputs[value] for rank_inputs in ranks.inputs])
                local_weights[value] = ranks.array(0, rows, buffer.dtype)
        for which in (QUANTISE, FORWARD, BACKWARD):
            for element, buffer in layer.outputs(which).items():
                extents = buffer.extents(layer.dims(count))
                local_weights[element] = DeviceArray(opened.devices, extents, buffer.dtype, ranks.devices[0])
        memory = {item: DeviceArray(opened.devices, (size,), "u8", ranks.devices[0])
                  for item, size in (("kept", sizes.kept), ("scratch", sizes.scratch))}  # fmt: skip
        given = {which: {item: local_weights[item] for item in (*layer.inputs(which), *layer.outputs(which))}
                 for which in (QUANTISE, FORWARD, BACKWARD)}  # fmt: skip
        if given[QUANTISE]:
            layer.quantise(**given[QUANTISE], stream=ranks.streams[0])
        layer.forward(**given[FORWARD], **memory, stream=ranks.streams[0])
        layer.backward(**given[BACKWARD], **memory, stream=ranks.streams[0])
        ranks.wait()
        for entry in ("y", "dx", "dweights", "dw1", "dw2"):
            of_ranks = [bytes(ranks.tensors[rank][entry].download()) for rank in range(2)]
            assert bytes(local_weights[entry].download()) == b"".join(of_ranks), entry


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-overlap", "fp8", "gpt-oss-4"])
def test_one_graph_per_rank_is_replayed_with_other_tokens(over, name):
    with over(name) as ranks:
        ranks.fill(shared(ranks, (200, 310)), 0)
        ranks.launch()
        graphs, fresh = ranks.graphs(), ranks.tensors
        for seed in (1, 2, 3):
            ranks.fill(shared(ranks, (200, 310)), seed)
            for rank in range(len(ranks.devices)):
                for name in ("x", "dy"):
                    fresh[rank][name].upload(np.frombuffer(ranks.tensors[rank][name].download(), np.uint16).reshape(
                        ranks.tensors[rank][name].shape))  # fmt: skip
            ranks.tensors = fresh
            ranks.replay(graphs)
            ranks.wait()
            assert ranks.problems() == [], seed


@pytest.mark.parametrize("name", ["choices", "choices-overlap"])
@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
def test_a_rank_that_never_comes(over, which, name):
    """The other ends within the time that it was given, and says who is missing."""
    with over(name, timeout=1000) as ranks:
        ranks.fill([100, 100], 1)
        if which == BACKWARD:
            ranks.launch((FORWARD,))
        alone = ranks.bind(0, which)
        begin = time.monotonic()
        alone(ranks.streams[0])
        ranks.wait()
        assert 0.95 < time.monotonic() - begin < 1.5  # once, however many launches of the pass would wait
        begin = time.monotonic()
        alone(ranks.streams[0])
        ranks.wait()
        assert time.monotonic() - begin < 0.5
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited in launch .* for rank 1"):
            ranks.layers[0].check()
        output = ranks.found(0, "y" if which == FORWARD else "dx")
        assert np.isnan(output).all()


def test_too_few_rows(over):
    with over("choices", rows=1000) as ranks:
        ranks.fill([200, 50], 1, ONE)  # 1000 rows of rank 1
        ranks.launch()
        assert ranks.problems() == []
        ranks.fill([201, 50], 1, ONE)
        ranks.launch(check=False)
        for layer in ranks.layers:
            with pytest.raises(CapacityError, match="rank 1 were chosen for 1004 rows and have room for 1000"):
                layer.check()
            assert layer.check() is None
        ranks.fill([200, 50], 2, ONE)
        ranks.launch()
        assert ranks.problems() == []


@pytest.mark.parametrize("name", ["choices", "choices-overlap", "fp8-choices", "gpt-oss-4"])
def test_an_overflow_is_of_one_layer_and_one_pass(over, opened, name):
    """Two layers in turns, of which one overflows in every third pass."""
    with over(name, rows=1000) as ranks:
        layers = ranks.layers
        other = [opened.layer(f"layer-ranks/{name}", ranks=rank, tokens=512, rows=1000) for rank in ranks.ranks]
        for seed in range(12):
            beyond = seed % 3 == 1
            for item, tokens in ((layers, 512 if beyond else 31), (other, 7)):
                ranks.layers = item
                ranks.fill([tokens] * len(ranks.devices), seed, ONE)
                ranks.launch(check=False)
                if tokens < 512:
                    assert ranks.problems() == [], seed
            result = ranks.overflows(layers)
            assert len(set(result)) == 1 and (result[0][1] > 1000) == beyond, (seed, result)
            assert set(ranks.overflows(layers) + ranks.overflows(other)) == {("", 0)}, seed


# -- processes --------------------------------------------------------------------------------------------------------


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


def processes(opened, command, *arguments, needs="ranks"):
    """Runs an example with two ranks, each a process with a device of its own. needs: the file of its layer."""
    if opened.devices.count < 2:
        pytest.skip("needs two devices")
    if not opened.store.names(f"{needs}/*"):
        pytest.skip(f"no layer of the examples in {opened}; build examples/{needs}.toml there and name the store")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mpirun(opened):
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpirun with mpi4py")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    assert processes(opened, command, ROOT / "examples" / "layer_ranks.py").count("right") == 2


def test_one_process_with_both_ranks(opened):
    assert processes(opened, [sys.executable], ROOT / "examples" / "layer_ranks.py").count("right") == 2


@pytest.mark.parametrize("more", [[], ["--leave"]])
def test_torchrun(opened, more):
    """Values and gradients of MoE(group=...); a process that leaves, after which the other raises in time."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    out = processes(opened, TORCHRUN, ROOT / "examples" / "moe_ranks.py", *more)
    assert out.count("right") == 2, out
    assert not more or "rank 0 waited in launch" in out, out


def test_gradients_are_summed_while_others_are_computed(opened):
    """Their bits and sums, for several margins."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    example = ROOT / "examples" / "data_parallel.py"
    out = processes(opened, TORCHRUN, example, "0", "8", needs="data-parallel")
    assert out.count("right") == 2 and out.count('"with"') == 2, out
