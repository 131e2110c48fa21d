"""Programs that make the windows of a layer in PyTorch's symmetric memory, on memory of the CPU."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusekit.plan.exchange import NEXT, STATUS

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["examples/symmetric_ranks.py", "docs/tvm-ffi.md"])
def test_windows_of_a_rank_are_joined_in_a_ring(file):
    code = re.search(r"words, windows = .*?\nranks = torch\.tensor\(words\)", (ROOT / file).read_text(), re.DOTALL)[0]
    windows = []

    def empty(size, *, dtype, device):
        windows.append(torch.full((size,), 7, dtype=dtype))
        return windows[-1]

    symmetric = SimpleNamespace(
        empty=empty, rendezvous=lambda window, group: SimpleNamespace(buffer_ptrs=[window.data_ptr(), 4096])
    )
    scope = {
        "torch": torch, "symmetric": symmetric, "distributed": SimpleNamespace(group=SimpleNamespace(WORLD=None)),
        "group": None, "moe": defaultdict(lambda: lambda capacity: 1024), "rank": 0, "device": 0, "capacity": 16,
        "checked": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    exec(code, scope)
    begins = [window.data_ptr() for window in windows]
    following = [window[NEXT : NEXT + 8].view(torch.int64).item() - STATUS for window in windows]
    assert following == begins[1:] + begins[:1] and len(begins) == 4
    assert all(window.count_nonzero() <= 8 for window in windows)
    assert scope["ranks"].tolist()[8::3] == [1024] * 4 and scope["ranks"].tolist()[9::3] == begins
