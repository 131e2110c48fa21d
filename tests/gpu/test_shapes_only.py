"""A spec with nothing but shapes is as fast as the packaged one: what `load` takes of both, each alone on the device.

    fusekit --store STORE build tests/gpu/shapes-only.toml 'gpt-oss-*' deepseek-v3 qwen3-30b-a3b mixtral-8x7b
    FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_shapes_only.py -s

prints each kernel's milliseconds, both, and their ratio. It takes about three minutes; nothing else may use the device.
"""

from pathlib import Path

import pytest

from fusekit.runtime.tuning import features
from fusekit.spec import find, parse_file

SHAPES_ONLY = Path(__file__).with_name("shapes-only.toml")
MODELS = {"a": "gpt-oss-20b", "b": "deepseek-v3", "c": "qwen3-30b-a3b", "d": "mixtral-8x7b", "g": "gpt-oss-120b"}
KERNELS = sorted({spec.kernel for spec in parse_file(SHAPES_ONLY)})
STEADY_MS = 600.0
WITHIN = 1.03


def twin(kernel):
    """The packaged kernel of the same computation and problem."""
    letter, _, role = kernel.partition("-")
    return f"{MODELS[letter]}/{role}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_as_fast_as_the_packaged_choice(kernel, opened, alone):
    from fusekit.bench.arrays import Tensors, sizes_of
    from fusekit.bench.timing import Stopwatch, median, own_stream

    if not alone:
        pytest.skip("times mean nothing while other workers use the device; run this file without xdist")
    ours, packaged = f"{SHAPES_ONLY.stem}/{kernel}", twin(kernel)
    for name in (ours, packaged):
        if not opened.store.names(f"{name}@*"):
            pytest.skip(f"no {name} in {opened}; build it there and name the store: FUSEKIT_STORE")
    device = opened.devices.get(0)
    chosen, reference = (opened.find(name, "sm_90a", 0) for name in (ours, packaged))
    assert features(chosen.spec) == features(reference.spec)
    problem = chosen.spec["problem"]
    assert problem == reference.spec["problem"]
    sweep = [record for record in opened.store.variants(ours, "sm_90a") if record.key != chosen.key]
    records = {record.key: record for record in (reference, chosen, *sweep)}
    with opened.devices.active(device), own_stream(opened.devices, device) as stream:
        kernels = [opened.load(record.name, "sm_90a", 0) for record in records.values()]
        tensors = Tensors(opened.devices, kernels[0], problem, sizes_of("uneven", problem["M"], problem["E"]))
        try:
            runs = [each.bind(**tensors.arguments) for each in kernels]
            with Stopwatch(opened.devices, device, stream) as watch:
                times = dict(zip(records, map(median, watch.steady(runs, STEADY_MS)), strict=True))
        finally:
            tensors.free()
            for each in kernels:
                each.unload()
    base = times[reference.key]
    lines = [f"{record.name.partition('@')[2]} {times[key]:.4f} ms ({times[key] / base:.3f})"
             for key, record in records.items()]  # fmt: skip
    ratio = times[chosen.key] / base
    print(f"\n{ratio:.3f}  {chosen.name} over {reference.name}; {', '.join(lines)}")  # noqa: T201
    assert ratio <= WITHIN
    assert {spec.full_name for spec in find([packaged])} >= {reference.name}
