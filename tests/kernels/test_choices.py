"""The order of few choices that a launch makes for itself, on plain numbers: a thread of Python for each of a CTA's."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.operands import choices
from fusekit.reference.permutation import index
from tests.kernels.plain import plain
from tests.plans import gemm_plan
from tests.threads import at_once

THREADS, WORD = 70, 2**32  # more than choices, fewer than groups


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 8, 128), (8, 8, 100), (5, 3, 2), (0, 4, 7), (64, 1, 70)])
def test_the_order_of_rows_is_that_of_moe_index(tokens, topk, experts):
    rng, count = np.random.default_rng(tokens), tokens * topk
    indices = rng.integers(-1, experts + 1, (tokens, topk)).astype(np.int32)
    indices[indices == experts] = rng.choice([experts, 2**31 - 1])
    rows = count + 5
    memory = {name: np.full(size, -7) for name, size in
              {"offsets": experts, "token": rows, "inverse": count, "shared": choices.MOST + 4}.items()}  # fmt: skip
    memory["indices"] = indices.reshape(-1)
    here, barrier = threading.local(), threading.Barrier(THREADS)

    def place(address):
        name, offset = address
        assert offset % 4 == 0
        return memory[name], offset // 4

    def store(address, words, nbytes, valid=True):
        if valid:
            array, element = place(address)
            assert array[element] in (-7, signed(words[0]))
            array[element] = signed(words[0])

    def load(address, nbytes, valid, fill):
        array, element = place(address)
        return [int(array[element]) % WORD if valid else fill]

    def shared_store(address, value, valid=True):
        if valid:
            memory["shared"][address // 4] = value

    module = plain(
        choices, Uint32=lambda value: int(value) % WORD, Int64=int,
        lanes=SimpleNamespace(
            load=load, store=store, shared_store_u32=shared_store, shared_store_u32_if=shared_store,
            shared_load_u32=lambda address: memory["shared"][address // 4],
        ),
        ptx=SimpleNamespace(
            divide=lambda a, b: a // b, load_shared_v4=lambda address: memory["shared"][address // 4 :][:4]
        ),
        cute=SimpleNamespace(
            arch=SimpleNamespace(thread_idx=lambda: (here.number, 0, 0), sync_threads=barrier.wait)
        ),
    )  # fmt: skip
    own = SimpleNamespace(plan=SimpleNamespace(threads=THREADS, spec=gemm_plan(choices=topk, gather="x").spec))
    given = SimpleNamespace(
        tokens=tokens, **{name: Pointer(name) for name in ("indices", "inverse", "offsets", "token")}
    )

    def run(number):
        here.number = number
        module.Choices.order(own, given, 0, experts, rows)

    at_once(THREADS, run)
    wanted = index(indices, experts, rows)
    assert memory["offsets"].tolist() == wanted["offsets"].tolist()
    assert memory["inverse"].tolist() == wanted["inverse"].reshape(-1).tolist()
    assert memory["token"].tolist() == wanted["token"].tolist()


def signed(word):
    """A 32-bit word as int32."""
    return (int(word) + 2**31) % WORD - 2**31


class Pointer:
    """A tensor's begin."""

    def __init__(self, name, offset=0):
        self.name, self.offset = name, offset

    def toint(self):
        return self

    def __add__(self, offset):
        return Pointer(self.name, self.offset + offset)

    def __iter__(self):
        return iter((self.name, self.offset))
