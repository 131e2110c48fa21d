"""A launcher in JavaScript, written from the pages of the records, against this package's launches."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from fusekit.abi.tensormap import decode
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE
from tests.layers.test_compiled_passes import SMALL, call, launched, layers  # noqa: F401  (a fixture)
from tests.plan.test_layer_program import FEW

LAUNCHER = Path(__file__).with_name("launcher.mjs")
NODE = shutil.which("node")


def by_node(layer, calls):
    """The launches of each call."""
    store = layer._library.store
    entries = {key: dict(store.find_entry(key).launch) for key in layer.record.kernels}
    document = {"layer": json.loads(layer.record.to_bytes()), "records": entries, "calls": calls}
    command = [NODE, str(LAUNCHER)]
    out = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=True).stdout
    return json.loads(out)


def shown(record, launch):
    """A launch of the fake driver as the launcher writes it. The memory of the stream is 0."""
    symbol, grid, stream, attributes, parameters = launch
    step = next(each for each in record.launches if each.symbol == symbol[0])
    of_stream = {each.offset for each in step.parameters if getattr(each, "argument", "") in ("workspace", "scratch")}
    values = []
    for each, value in zip(sorted(step.parameters, key=lambda each: each.offset), parameters, strict=True):
        if isinstance(value, tuple):
            fields = decode(value[0])
            dims, strides = list(fields.dims), list(fields.strides)
            values.append({"address": str(fields.address), "dims": dims, "strides": strides})
        else:
            values.append({"bytes": (bytes(8) if each.offset in of_stream else value).hex()})
    cluster = list(attributes["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"])
    return {"symbol": symbol[0], "grid": list(grid), "cluster": cluster, "stream": stream, "parameters": values}


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "fp8-choices", "served"])
def test_a_launcher_from_the_pages_launches_the_same(layers, name):  # noqa: F811
    (layer, fake), rng, calls, want = layers(name), random.Random(name), [], []
    for which in (FORWARD, INFERENCE, BACKWARD if layer.outputs(BACKWARD) else INFERENCE) * 8:
        tokens = rng.choice([1, FEW, FEW + 1, SMALL, SMALL + 1, int(2 ** rng.uniform(0, 13))])
        outputs = [each for each in layer.outputs(which) if rng.random() < 0.7] or [*layer.outputs(which)]
        wide = {each for each in outputs if rng.random() < 0.2}
        given = call(layer, which, rng, tokens, outputs, wide)
        in_place = which == BACKWARD and rng.random() < 0.5
        more = {"in_place": in_place} if which == BACKWARD else {}
        bind = layer.bind_backward if which == BACKWARD else layer.bind_forward
        want.append(launched(fake, lambda bind=bind, given=given, more=more: bind(**given, **more)(77)))
        assert isinstance(want[-1], list), want[-1]
        strides = {each: list(given[each].stride()) for each in given}
        calls.append({
            "pass": which, "tokens": tokens, "outputs": outputs, "in_place": in_place,
            "sm_count": 132, "stream": 77, "strides": strides,
            "addresses": {each: tensor.data_ptr() for each, tensor in given.items()},
        })  # fmt: skip
    kernels = {kernel: layer._kernels._load(kernel).record for kernel in layer.record.kernels}
    for number, (got, python) in enumerate(zip(by_node(layer, calls), want, strict=True)):
        assert len(got) == len(python), calls[number]
        for one, other in zip(got, python, strict=True):
            expected = shown(kernels[one.pop("key")], other)
            assert {key: one[key] for key in expected} == expected, calls[number]
