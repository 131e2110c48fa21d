"""What does not fit is refused before the driver sees it, by the argument's name; good launches go on afterwards."""

from dataclasses import replace

import numpy as np
import pytest

from fusekit import ArchMismatchError, ArgumentError, NotBuiltError

from .cases import Case
from .device import View
from .harness import faults, prepare

NAME = "whole-epilogue@128x128-c1x1"
CASE = Case("plain", (70, 0, 33), 272, 72)
GOOD = {"x", "w", "offsets", "alpha", "bias", "row_scale", "y", "preactivation"}


@pytest.fixture
def placed(gpu, specs):
    return gpu.arguments(prepare(specs[NAME], CASE))


def shaped(view, *shape, strides=None):
    return replace(view, shape=shape, strides=strides)


# name -> (the argument that the error names, a change of the placed arguments); where two disagree it may be either
WRONG = {
    "x-of-fp16": ("x", lambda a: {"x": replace(a["x"], dtype="fp16")}),
    "x-of-float32": ("x", lambda a: {"x": shaped(replace(a["x"], dtype="f32"), 103, 36)}),
    "y-of-fp16": ("y", lambda a: {"y": replace(a["y"], dtype="fp16")}),
    "offsets-of-float32": ("offsets", lambda a: {"offsets": replace(a["offsets"], dtype="f32")}),
    "x-of-rank-3": ("x", lambda a: {"x": shaped(a["x"], 1, 103, 72)}),
    "w-of-rank-2": ("w", lambda a: {"w": shaped(a["w"], 272, 72)}),
    "w-of-another-k": ("w", lambda a: {"w": shaped(a["w"], 3, 272, 64)}),
    "y-of-fewer-rows": ("y", lambda a: {"y": shaped(a["y"], 102, 136)}),
    "y-not-halved": ("y", lambda a: {"y": shaped(a["preactivation"], 103, 272)}),
    "preactivation-halved": ("preactivation", lambda a: {"preactivation": shaped(a["preactivation"], 103, 136)}),
    "bias-of-another-n": ("bias", lambda a: {"bias": shaped(a["bias"], 3, 256)}),
    "offsets-too-few": ("offsets", lambda a: {"offsets": shaped(a["offsets"], 2)}),
    "row-scale-too-short": ("row_scale", lambda a: {"row_scale": shaped(a["row_scale"], 102)}),
    "x-column-major": ("x", lambda a: {"x": replace(a["x"], strides=(1, 103))}),
    "x-rows-off-16-bytes": ("x", lambda a: {"x": replace(a["x"], strides=(76, 1))}),
    "bias-not-compact": ("bias", lambda a: {"bias": replace(a["bias"], strides=(280, 1))}),
    "x-misaligned": ("x", lambda a: {"x": replace(a["x"], offset=a["x"].offset + 2)}),
    "y-misaligned": ("y", lambda a: {"y": replace(a["y"], offset=a["y"].offset + 8)}),
    "y-over-x": ("y", lambda a: {"y": View(a["x"].memory, a["x"].offset, "bf16", (103, 136), (136, 1))}),
    "y-over-preactivation": ("y preactivation", lambda a: {"y": replace(a["preactivation"], shape=(103, 136))}),
    "x-on-the-host": ("x", lambda a: {"x": np.zeros((103, 72), np.float16)}),
    "x-a-list": ("x", lambda a: {"x": [[0.0] * 72] * 103}),
    "stray-argument": ("beta", lambda a: {"beta": 1.0}),
    "act-alpha-a-string": ("act_alpha", lambda a: {"act_alpha": "1.0"}),
    "negative-margin": ("cluster_margin", lambda a: {"cluster_margin": -1}),
    "stream-a-string": ("stream", lambda a: {"stream": "default"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_argument(gpu, specs, placed, wrong):
    argument, change = WRONG[wrong]
    with pytest.raises(ArgumentError) as caught:
        gpu.kernel(specs[NAME])(**(placed | change(placed)))
    assert caught.value.argument in argument.split(), str(caught.value)
    assert caught.value.argument in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_missing_argument(gpu, specs, placed, missing):
    del placed[missing]
    with pytest.raises(ArgumentError) as caught:
        gpu.kernel(specs[NAME])(**placed)
    assert caught.value.argument == missing


def test_k_off_16_bytes(gpu, specs, placed):
    change = {"x": shaped(placed["x"], 103, 68, strides=(72, 1)), "w": shaped(placed["w"], 3, 272, 68)}
    with pytest.raises(ArgumentError, match="K"):
        gpu.kernel(specs[NAME])(**(placed | change))


def test_a_scalar_without_default_must_be_given(gpu, specs):
    spec = specs["srelu@128x192-c1x1"]
    arguments = gpu.arguments(prepare(spec, CASE))
    del arguments["alpha"]
    with pytest.raises(ArgumentError) as caught:
        gpu.kernel(spec)(**arguments)
    assert caught.value.argument == "alpha"


def test_nothing_was_launched_by_the_wrong_ones(gpu, specs):
    spec = specs[NAME]
    launch = prepare(spec, CASE)
    placed = gpu.arguments(launch)
    for _, change in WRONG.values():
        with pytest.raises(ArgumentError):
            gpu.kernel(spec)(**(placed | change(placed)))
    gpu.finish("nothing")
    untouched = launch.fresh()
    gpu.download(untouched, placed)
    assert all((untouched.arguments[name].image == 0xFF).all() for name in launch.outputs)
    gpu.kernel(spec)(**placed)
    gpu.finish(NAME)
    gpu.download(launch, placed)
    assert not faults(launch)


def test_bind_refuses_the_same(gpu, specs, placed):
    with pytest.raises(ArgumentError) as caught:
        gpu.kernel(specs[NAME]).bind(**(placed | {"preactivation": placed["x"]}))
    assert caught.value.argument == "preactivation"


def test_names_that_are_not_there(gpu):
    with pytest.raises(NotBuiltError, match="fusekit build"):
        gpu.library.load("matrix/no-such-kernel")
    with pytest.raises((NotBuiltError, ArchMismatchError)):
        gpu.library.load(f"matrix/{NAME}", arch="sm_100a")
