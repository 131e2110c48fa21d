"""Tiles of FP8 weights, on the CPU: the device code runs as it is written, a whole warpgroup at a time, over memory
that lies as TMA leaves it. Registers are arrays with an element for each thread; PTX is interpreted.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.operands import w_scale
from fusekit.kernels.gemm.operands.base import Tile
from fusekit.kernels.gemm.sm90 import dequantised
from fusekit.kernels.gemm.sm90.main_loop import Run
from fusekit.reference.fp8 import table
from tests.kernels.plain import plain
from tests.plans import gemm_plan

PTX = SimpleNamespace(divide=lambda a, b: a // b, modulo=lambda a, b: a % b, minimum_of=np.minimum)
THREADS = np.arange(128)
LANE, WARP = THREADS % 32, THREADS // 32
K, N, GROUPS = 320, 384, 2  # two blocks and a half


def bf16(words):
    """The two numbers of each register."""
    return (words << 16 & 0xFFFFFFFF).view(np.float32), (words & 0xFFFF0000).view(np.float32)


class Machine:
    """Shared memory, the wgmma in flight, and what was released when."""

    def __init__(self, plan, w, x):
        self.plan, self.w, self.x = plan, w, x
        self.flying, self.open, self.there, self.released = [], [], [], []
        self.memory = np.zeros(plan.stages * plan.tile[1] * plan.w_row_bytes, np.uint8)

    def load(self, stage, number):
        """A stage's 64 of K of w, in rows of 64 bytes whose units of 16 are exchanged by address bits 7 and 8."""
        part = np.zeros((self.plan.tile[1], 64), np.uint8)
        given = self.w[:, number * 64 : (number + 1) * 64]
        part[:, : given.shape[1]] = given
        address = np.arange(part.size)
        begin = stage * part.size
        self.memory[begin + (address ^ (address >> 7 & 3) << 4)] = part.reshape(-1)

    def await_stage(self, barrier, phase):
        stage, number = barrier, len(self.there)
        assert (stage, phase) == (number % self.plan.stages, number // self.plan.stages & 1)
        assert number - len(self.released) < self.plan.stages  # else it could not have come
        self.load(stage, number)
        self.there.append(stage)

    def release(self, plan, barrier, lane):
        number = len(self.released)
        assert barrier == number % plan.stages
        assert not any(read == number for group in (*self.flying, self.open) for *_, read in group)
        self.released.append(barrier)

    def gemm(self, mma, product, factors, where, same):
        assert product is same
        (words, step), (_, _, part, stage) = factors, where
        number = len(self.there) - 1
        assert stage == number % self.plan.stages
        a = np.full((64, 16), np.nan, np.float32)
        for r in range(2):
            for high in range(2):
                pair = bf16(words.words[step * 4 + high * 2 + r])
                for c in range(2):
                    a[WARP * 16 + LANE // 4 + r * 8, high * 8 + LANE % 4 * 2 + c] = pair[c]
        first = number * 64 + part * 16
        x = np.zeros((self.plan.tile[0], 16))
        given = self.x[:, first : first + 16]
        x[:, : given.shape[1]] = given
        flat = product.numbers
        if not mma.fields["accumulate"]:
            flat[:] = 0
        for index in range(len(flat)):
            chunk, (r, c) = index // 4, divmod(index % 4, 2)
            rows, columns = WARP * 16 + LANE // 4 + r * 8, chunk * 8 + LANE % 4 * 2 + c
            flat[index] += np.einsum("tk,tk->t", a[rows].astype(float), x[columns])
        self.open.append((words, product, number))

    def commit(self):
        self.flying.append(self.open)
        self.open = []

    def wait(self, most):
        del self.flying[: max(len(self.flying) - most, 0)]

    def free(self, thing):
        assert not any(thing in group[:2] for each in (*self.flying, self.open) for group in each)


class Registers:
    """Factors, or products, of which none may be touched that a wgmma in flight reads or writes."""

    def __init__(self, machine, count):
        self.machine, self.words, self.numbers = machine, np.zeros((count, 128), np.uint32), np.zeros((count, 128))

    def __getitem__(self, at):
        if isinstance(at, tuple):
            return self, at[-1]
        self.machine.free(self)
        return self.numbers[at]

    def __setitem__(self, at, value):
        self.machine.free(self)
        (self.numbers if np.asarray(value).dtype == float else self.words)[at] = value

    def __len__(self):
        return len(self.words)

    iterator = property(lambda self: self)


def interpreted(machine, scales):
    """What runs PTX of `dequantised`."""

    def run(result, text, *given):
        registers = {f"{{$r{number}}}": value for number, value in enumerate(given)}

        def value(word):
            return registers[word] if word in registers else np.uint32(int(word, 0))

        for line in text.strip("{} ").split(";"):
            op, _, rest = line.strip().partition(" ")
            if not op or op == ".reg":
                continue
            to, *words = re.split(r", ", rest)
            if op.startswith("ld."):
                place, _, offset = words[0].strip("[]").partition("}+")
                address = registers[place + "}" if offset else place] + int(offset or 0)
            if op == "ld.shared.u16":
                assert not (address & 1).any()
                registers[to] = (
                    machine.memory[address].astype(np.uint32) | machine.memory[address + 1].astype(np.uint32) << 8
                )
                continue
            if op == "ld.global.nc.f32":
                registers[to] = scales.reshape(-1)[address // 4].astype(float)
                continue
            a, *more = map(value, words)
            if op == "prmt.b32":
                both = np.stack([a >> 8 * n & 255 for n in range(4)] + [more[0] >> 8 * n & 255 for n in range(4)])
                registers[to] = sum(both[int(more[1]) >> 4 * n & 15] << 8 * n for n in range(4))
            elif op == "mul.rn.bf16x2":
                halves = [(n * bf16(np.uint32(more[0]))[0]).astype(np.float32).view(np.uint32) for n in bf16(a)]
                assert not any((half & 0xFFFF).any() for half in halves)  # exact
                registers[to] = halves[0] >> 16 | halves[1]
            elif op == "mad.wide.s32":
                registers[to] = a * int(more[0]) + more[1]
            else:
                known = {"mov": lambda a: a, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
                         "and": lambda a, b: a & b, "or": lambda a, b: a | b}  # fmt: skip
                registers[to] = np.asarray(known[op.partition(".")[0]](a, *more)).astype(np.uint32)
        outputs = [registers[f"{{$w{number}}}"] for number in range(len(result) if isinstance(result, list) else 1)]
        return outputs if isinstance(result, list) else outputs[0]

    return run


class Mma:
    def __init__(self):
        self.fields = {}

    def set(self, field, value):
        self.fields[field] = value


def module_on(machine, scales, consumer):
    """`dequantised` on this machine."""
    arch = SimpleNamespace(make_warp_uniform=lambda value: value, warp_idx=lambda: 4 * (1 + consumer) + WARP)
    return plain(
        dequantised,
        ptx=PTX,
        inline=interpreted(machine, scales),
        fma=lambda a, b, c: (np.float32(a).astype(float) * np.float32(b) + c).astype(np.float32).astype(float),
        release=machine.release,
        warpgroup=SimpleNamespace(
            Field=SimpleNamespace(ACCUMULATE="accumulate"), wait_group=machine.wait, fence=lambda: None,
            commit_group=machine.commit,
        ),
        column_of=lambda tile: tile,
        cute=SimpleNamespace(
            arch=arch, size=len, gemm=machine.gemm, recast_tensor=lambda tensor, kind: tensor,
            make_tensor=lambda tensor, layout: tensor, make_layout=lambda size: size,
        ),
    )  # fmt: skip


CASES = {
    "few": {"tile": (16, 128)},
    "few, low": {"tile": (32, 64), "glu_layout": "concat"},
    "many": {"tile": (128, 128), "mainloop": "cooperative", "glu_layout": "concat"},
}


@pytest.mark.parametrize("consumer", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_tile_is_the_sum_of_its_blocks_times_their_scales(case, consumer):
    plan = gemm_plan(quant="in=fp8-weights", **CASES[case])
    (tile_m, tile_n), concat = plan.tile, plan.glu_layout == "concat"
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.resize(np.setdiff1d(np.arange(256), [0x7F, 0xFF]), N * K)).reshape(N, K).astype(np.uint8)
    x = rng.integers(-4, 5, (tile_m, K)).astype(float)
    scales = rng.uniform(0.5, 2, (GROUPS, N // 128, -(-K // 128))).astype(np.float32)
    n_tile, group = 1, 1
    columns = n_tile * tile_n + np.arange(tile_n)
    if concat:
        half = n_tile * tile_n // 2 + np.arange(tile_n // 2)
        columns = np.concatenate([half, N // 2 + half])
    machine = Machine(plan, codes[columns], x)
    of_scales = plain(w_scale, ptx=PTX, Int64=lambda value: np.asarray(value, np.int64))
    module = module_on(machine, scales, consumer)
    loop = object.__new__(module.DequantisedLoop)
    loop.plan, loop.x_dtype, loop.concat = plan, None, plan.halved and concat
    loop.share = tile_n // (1 if plan.pingpong else 2)
    loop.blocks = loop.share // 64
    passed = []
    loop.turns = SimpleNamespace(pass_on=lambda consumer: passed.append(len(machine.there)))
    loop.tiled_mma = Mma
    loop.scales = object.__new__(of_scales.WScale)
    loop.await_stage = machine.await_stage
    got = []
    loop.exchange = lambda sums, *_: got.append(sums.copy())
    work = SimpleNamespace(
        extents=SimpleNamespace(k=K, n=N, half_n=N // 2), warp_of_cta=consumer * 4 + WARP, warpgroup=consumer,
        operands=SimpleNamespace(w_scale=SimpleNamespace(toint=lambda: 0)),
    )  # fmt: skip
    sums = np.zeros((loop.blocks * tile_m // 2, 128))
    products = tuple(Registers(machine, tile_m // 2) for _ in range(loop.blocks))
    sets = tuple(Registers(machine, 8) for _ in range(module.SETS))
    where = type("X", (), {"__getitem__": lambda self, at: at})()
    pointer = SimpleNamespace(toint=lambda: 0)
    stages = SimpleNamespace(w=pointer, full=0, empty=0, exchange=None)
    run = loop.of_tile(Run(0, -(-K // 64)), Tile(0, tile_m, n_tile, group, 0), work)
    loop.run_tile(None, (sums, products, sets, where), stages, run, tile_m, consumer, LANE)

    assert passed == [5]
    assert len(machine.released) == len(machine.there) == 5
    values = table("e4m3")[codes[columns]].astype(float)
    for block in range(loop.blocks):
        for index in range(tile_m // 2):
            chunk, (r, c) = index // 4, divmod(index % 4, 2)
            row = (0 if plan.pingpong else consumer * 64) + block * 64 + WARP * 16 + LANE // 4 + r * 8
            token = chunk * 8 + LANE % 4 * 2 + c
            want = np.zeros(128)
            for b in range(-(-K // 128)):
                part = slice(b * 128, (b + 1) * 128)
                exact = np.einsum("tk,tk->t", values[row, part], x[token, part])
                scale = scales[group, columns[row] // 128, b]
                want = (exact.astype(np.float32).astype(float) * scale + want).astype(np.float32).astype(float)
            assert np.array_equal(got[0][block * (tile_m // 2) + index], want)
