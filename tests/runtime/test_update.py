"""A bound launch whose arguments change: only what depends on them is written anew, and a wrong one changes nothing."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from fusekit.errors import ArgumentError
from tests.runtime.samples import Torchlike, load, record, tensors

Y, OTHER = Torchlike((96, 160), address=0x6000_0000), Torchlike((96, 160), address=0x6100_0000)


def parameters(fake: Any) -> list[bytes]:
    return list(fake.launches[-1].parameters)


def test_a_new_output_is_one_pointer() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    launch(9)
    before = parameters(fake)
    fake.calls.clear()
    assert launch.update(y=Y) is launch
    assert fake.calls == []
    launch(9)
    assert fake.calls == ["cuLaunchKernelEx"]
    after = parameters(fake)
    assert struct.unpack("<Q", after[3]) == (0x6000_0000,)
    assert [index for index in range(len(after)) if before[index] != after[index]] == [3]


def test_a_tensor_map_is_given_its_address_in_place() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    kernel(**tensors(), stream=9)
    fake.cuCtxPushCurrent(1000)
    fake.calls.clear()
    launch.update(x=Torchlike((96, 128), address=0x7000_0000))(9)
    assert fake.calls == ["cuTensorMapReplaceAddress", "cuStreamGetGreenCtx", "cuLaunchKernelEx"]
    assert struct.unpack_from("<Q", parameters(fake)[0]) == (0x7000_0000,)


def test_a_thread_without_a_context_is_given_one_for_the_map() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    fake.calls.clear()
    launch.update(x=Torchlike((96, 128), address=0x7000_0000))(9)
    assert fake.calls[2:5] == ["cuCtxPushCurrent", "cuTensorMapReplaceAddress", "cuCtxPopCurrent"]


def test_an_address_expression_is_evaluated_again() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    launch.update(w=Torchlike((4, 320, 128), address=0x2200_0000))(9)
    assert struct.unpack_from("<Q", parameters(fake)[1]) == (0x2200_0000 + 2 * 128,)


def test_several_at_once_are_checked_together() -> None:
    """Swapping input and output passes no state in which the two are one."""
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    launch.update(x=Torchlike((96, 128), address=0x4000_0000), y=Torchlike((96, 160), address=0x1000_0000))(9)
    got = parameters(fake)
    assert struct.unpack_from("<Q", got[0]) == (0x4000_0000,)
    assert struct.unpack("<Q", got[3]) == (0x1000_0000,)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"y": Torchlike((96, 160), address=0x6000_0008)}, "must begin at a multiple of 16"),
        ({"y": Torchlike((96, 160), address=0)}, "null address"),
        ({"y": Torchlike((96, 160), address=0x1000_0000)}, "y overlaps x"),
        ({"x": Torchlike((96, 128), address=0x4000_0000)}, "y overlaps x"),
        # w, 320 KiB, has y, 30 KiB, inside it; whichever of the two moves
        ({"y": Torchlike((96, 160), address=0x2000_0000 + 1024)}, "y overlaps w"),
        ({"w": Torchlike((4, 320, 128), address=0x4000_0000 - 1024)}, "y overlaps w"),
        ({"y": Torchlike((96, 160), address=0x2000_0000 + 4 * 320 * 128 * 2 - 16)}, "y overlaps w"),
        ({"w": Torchlike((4, 320, 128), address=0x4000_0000 + 96 * 160 * 2 - 16)}, "y overlaps w"),
        ({"y": Torchlike((97, 160), address=0x6000_0000)}, "it must have M = 96"),
        ({"y": Torchlike((96, 160), "torch.float32", address=0x6000_0000)}, "must be bf16"),
        ({"z": Y}, "z is no argument"),
        ({"act_alpha": "much"}, "f32 number"),
    ],
)
def test_what_is_refused_changes_nothing(changed: dict[str, Any], text: str) -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    launch(9)
    before = parameters(fake)
    with pytest.raises(ArgumentError, match=text):
        launch.update(**changed)
    launch(9)
    assert parameters(fake) == before
    launch.update(y=Y)(9)
    assert struct.unpack("<Q", parameters(fake)[3]) == (0x6000_0000,)


@pytest.mark.parametrize(
    "changed",
    [
        {"y": Torchlike((96, 160), address=0x2000_0000 + 4 * 320 * 128 * 2)},
        {"y": Torchlike((96, 160), address=0x2000_0000 - 96 * 160 * 2)},
        {"w": Torchlike((4, 320, 128), address=0x4000_0000 + 96 * 160 * 2)},
        {"w": Torchlike((4, 320, 128), address=0x4000_0000 - 4 * 320 * 128 * 2)},
    ],
)
def test_an_output_may_touch_an_input(changed: dict[str, Any]) -> None:
    kernel, fake = load()
    kernel.bind(**tensors()).update(**changed)(9)
    assert len(fake.launches) == 1


def test_a_map_that_the_driver_refuses_changes_nothing() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    fake.cuCtxPushCurrent(1000)
    replaced: list[int] = []
    original = type(fake).cuTensorMapReplaceAddress

    def refuse(self: Any, tensor_map: Any, address: int) -> Any:
        replaced.append(address)
        if address == 0x7000_0000:
            return (1,)
        return original(self, tensor_map, address)

    type(fake).cuTensorMapReplaceAddress = refuse  # type: ignore[method-assign]
    try:
        with pytest.raises(ArgumentError, match="CUDA_ERROR_INVALID_VALUE"):
            launch.update(w=Torchlike((4, 320, 128), address=0x2200_0000), x=Torchlike((96, 128), address=0x7000_0000))
    finally:
        type(fake).cuTensorMapReplaceAddress = original  # type: ignore[method-assign]
    launch(9)
    assert struct.unpack_from("<Q", parameters(fake)[0]) == (0x1000_0000,)
    assert struct.unpack_from("<Q", parameters(fake)[1]) == (0x2000_0000 + 2 * 128,)


def test_other_shapes_scalars_and_rows_are_bound_afresh() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors(), cluster_margin=60)
    launch.update(act_alpha=2.5)(9)
    assert struct.unpack("<f", parameters(fake)[7]) == (2.5,)
    more = {"x": Torchlike((200, 128), address=0x1000_0000), "y": Torchlike((200, 160), address=0x4000_0000)}
    launch.update(**more)(9)
    assert struct.unpack("<i", parameters(fake)[5]) == (200,)
    assert struct.unpack("<f", parameters(fake)[7]) == (2.5,)
    assert fake.launches[-1].grid == (12, 1, 1)  # the margin stays
    empty = {"x": Torchlike((0, 128), address=0), "y": Torchlike((0, 160), address=0)}
    count = len(fake.launches)
    launch.update(**empty)(9)
    assert len(fake.launches) == count
    launch.update(**more)(9)
    assert len(fake.launches) == count + 1


def empty(address: int) -> dict[str, Any]:
    """No rows, as frameworks make such tensors: at no address, or with one."""
    return {"x": Torchlike((0, 128), address=address), "y": Torchlike((0, 160), address=address and address + 4096)}


@pytest.mark.parametrize("address", [0, 0x7000_0000])
def test_a_launch_of_nothing_stays_one(address: int) -> None:
    kernel, fake = load()
    launch = kernel.bind(**(tensors() | empty(0)))
    more = {**empty(address), "w": Torchlike((4, 320, 128), address=0x2200_0000), "act_alpha": 2.5}
    for changed in (more, *({name: value} for name, value in more.items())):
        launch.update(**changed)(9)
    assert (fake.launches, fake.encoded) == ([], [])
    with pytest.raises(ArgumentError, match="y has 0 at dim 0"):
        launch.update(x=Torchlike((96, 128), address=0x1000_0000))
    launch.update(x=Torchlike((96, 128), address=0x1000_0000), y=Y)(9)
    assert struct.unpack_from("<Q", parameters(fake)[1]) == (0x2200_0000 + 2 * 128,)


def test_a_kernel_that_runs_without_rows_has_maps_at_no_address() -> None:
    """As those that write sums over rows; its maps claim a row, which is never read."""
    base = record()
    x_map = replace(base.parameters[0], dims=("K", ("max", 1, "M")))
    kernel, fake = load(record(parameters=(x_map, *base.parameters[1:]), skip_if_zero=()))
    launch, got = kernel.bind(**(tensors() | empty(0))), []
    steps: list[dict[str, Any]] = [
        {},
        {"x": empty(0)["x"]},
        empty(0),
        {"w": Torchlike((4, 320, 128), address=0x2200_0000)},
        empty(0x7000_0000),
        empty(0),
        {"x": Torchlike((96, 128), address=0x1000_0000), "y": Y},
        empty(0),
    ]
    for changed in steps:
        launch.update(**changed)(9)
        got.append(struct.unpack_from("<Q", parameters(fake)[0])[0])
    assert got == [0, 0, 0, 0, 0x7000_0000, 0, 0x1000_0000, 0]
    for w in (0x2000_0000, 0x2200_0000):  # a call takes the block of the one before
        kernel(**(tensors() | empty(0) | {"w": Torchlike((4, 320, 128), address=w)}), stream=9)


def test_two_outputs_in_turn() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    for index in range(6):
        launch.update(y=(Y, OTHER)[index % 2])(9)
    outputs = [struct.unpack("<Q", launched.parameters[3])[0] for launched in fake.launches]
    assert outputs == [0x6000_0000, 0x6100_0000] * 3


def test_a_call_that_gives_scalars_and_one_that_does_not_share_a_block() -> None:
    kernel, fake = load(act_alpha=1.0)
    given = tensors()
    del given["act_alpha"]
    for alpha in (None, 4.0, None, 5.0):
        kernel(**given, **({} if alpha is None else {"act_alpha": alpha}), stream=9)
    assert [struct.unpack("<f", launched.parameters[7])[0] for launched in fake.launches] == [1.0, 4.0, 1.0, 5.0]


def test_a_priority_of_the_launchs_own() -> None:
    kernel, fake = load()
    kernel(**tensors(), stream=9, priority=-2)
    kernel.bind(**tensors(), priority=3)(9)
    kernel(**tensors(), stream=9)
    got = [launched.attributes.get("CU_LAUNCH_ATTRIBUTE_PRIORITY") for launched in fake.launches]
    assert got == [-2, 3, None]
    for wrong in (1.5, True, 2**31, "high"):
        with pytest.raises(ArgumentError, match="priority is"):
            kernel(**tensors(), priority=wrong)
