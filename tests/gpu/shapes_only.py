"""Times a spec with nothing but shapes against the packaged one: what `load` takes of both, each alone on the device.

    fusekit --store STORE build tests/gpu/shapes-only.toml 'gpt-oss-*' deepseek-v3 qwen3-30b-a3b mixtral-8x7b
    FUSEKIT_STORE=STORE python tests/gpu/shapes_only.py

prints for each kernel the ratio of the two and the milliseconds of every variant. It takes about three minutes; nothing
else may use the device. It is no test: a ratio depends on the device's clock.
"""
# ruff: noqa: T201

from pathlib import Path

import fusekit
from fusekit.bench.arrays import Tensors, sizes_of
from fusekit.bench.timing import Stopwatch, median, own_stream
from fusekit.choice.tuning import features
from fusekit.spec import parse_file

SHAPES_ONLY = Path(__file__).with_name("shapes-only.toml")
MODELS = {"a": "gpt-oss-20b", "b": "deepseek-v3", "c": "qwen3-30b-a3b", "d": "mixtral-8x7b", "g": "gpt-oss-120b"}
STEADY_MS = 600.0


def twin(kernel):
    """The packaged kernel of the same computation and problem."""
    letter, _, role = kernel.partition("-")
    return f"{MODELS[letter]}/{role}"


def compare(library, kernel):
    """Milliseconds by record of every variant and of the packaged choice; the two that `load` takes come first."""
    ours, device = f"{SHAPES_ONLY.stem}/{kernel}", library.devices.get(0)
    reference, chosen = (library.find(name, "sm_90a", 0) for name in (twin(kernel), ours))
    assert features(chosen.spec) == features(reference.spec)
    problem = chosen.spec["problem"]
    assert problem == reference.spec["problem"]
    every = [reference, chosen, *library.store.variants(ours, "sm_90a")]
    records = list({record.key: record for record in every}.values())
    with library.devices.active(device), own_stream(library.devices, device) as stream:
        kernels = [library.load(record.name, "sm_90a", 0) for record in records]
        tensors = Tensors(library.devices, kernels[0], problem, sizes_of("uneven", problem["M"], problem["E"]))
        try:
            runs = [item.bind(**tensors.arguments) for item in kernels]
            with Stopwatch(library.devices, device, stream) as watch:
                times = dict(zip((record.key for record in records), map(median, watch.steady(runs, STEADY_MS)),
                                 strict=True))  # fmt: skip
        finally:
            tensors.free()
            for entry in kernels:
                entry.unload()
    return reference, chosen, {record.name: times[record.key] for record in records}, times


def main():
    library, worst = fusekit.open_library(), 0.0
    for kernel in sorted({spec.kernel for spec in parse_file(SHAPES_ONLY)}):
        reference, chosen, named, times = compare(library, kernel)
        base = times[reference.key]
        ratio = times[chosen.key] / base
        worst = max(worst, ratio)
        every = ", ".join(f"{name.partition('@')[2]} {ms:.4f} ({ms / base:.3f})" for name, ms in named.items())
        print(f"{ratio:.3f}  {kernel}: {chosen.name.partition('@')[2]}; {every}",
              flush=True)  # fmt: skip
    print(f"worst {worst:.3f}")


if __name__ == "__main__":
    main()
