"""A consumer warpgroup on the CPU: shared memory as TMA leaves it, registers as arrays with an element for each thread,
wgmma in flight, and an interpreter of the PTX that device code has in line.
"""

import re
from types import SimpleNamespace

import numpy as np

PTX = SimpleNamespace(divide=lambda a, b: a // b, modulo=lambda a, b: a % b, minimum_of=np.minimum)
THREADS = np.arange(128)
LANE, WARP = THREADS % 32, THREADS // 32


def bf16(words):
    """The two numbers of each register."""
    return (words << 16 & 0xFFFFFFFF).view(np.float32), (words & 0xFFFF0000).view(np.float32)


class Machine:
    """Shared memory, the wgmma in flight, and what was released when."""

    def __init__(self, plan, w, x):
        self.plan, self.w, self.x = plan, w, x
        self.flying, self.open, self.there, self.released = [], [], [], []
        self.held = self.flown = 0  # the most stages that were there at once; the most groups of wgmma in flight
        self.memory = np.zeros(plan.stages * plan.tile[1] * plan.w_row_bytes, np.uint8)
        self.steps = plan.tile_k // 16  # of a stage, one wgmma each

    def load(self, stage, number):
        """A stage's 64 or 128 bytes of rows of w, whose units of 16 are exchanged by address bits from 7 on."""
        width = self.plan.w_row_bytes
        part = np.zeros((self.plan.tile[1], width), np.uint8)
        given = self.w[:, number * width : (number + 1) * width]
        part[:, : given.shape[1]] = given
        address = np.arange(part.size)
        begin = stage * part.size
        self.memory[begin + (address ^ (address >> 7 & (width // 16 - 1)) << 4)] = part.reshape(-1)

    def await_stage(self, barrier, phase):
        stage, number = barrier, len(self.there)
        if self.there and (stage, phase) == self.last:  # no stage is left; that one is there still
            assert len(self.released) < number
            return
        self.last = stage, phase
        assert (stage, phase) == (number % self.plan.stages, number // self.plan.stages & 1)
        assert number - len(self.released) < self.plan.stages  # else it could not have come
        self.load(stage, number)
        self.there.append(stage)
        self.held = max(self.held, len(self.there) - len(self.released))

    def release(self, plan, barrier, lane):
        number = len(self.released)
        assert barrier == number % plan.stages
        assert not any(read == number for group in (*self.flying, self.open) for *_, read in group)
        self.released.append(barrier)

    def gemm(self, mma, product, factors, where, same):
        assert product is same
        (words, step), (_, _, part, stage) = factors, where
        number = next(n for n in range(len(self.there) - 1, -1, -1) if n % self.plan.stages == stage)
        assert number >= len(self.released)
        a = np.full((64, 16), np.nan, np.float32)
        for r in range(2):
            for high in range(2):
                pair = bf16(words.words[step * 4 + high * 2 + r])
                for c in range(2):
                    a[WARP * 16 + LANE // 4 + r * 8, high * 8 + LANE % 4 * 2 + c] = pair[c]
        first = (number * self.steps + part) * 16
        x = np.zeros((self.plan.tile[0], 16))
        given = self.x[:, first : first + 16]
        x[:, : given.shape[1]] = given
        flat = product.numbers
        assert len(flat) == mma.rows // 2
        if not mma.fields["accumulate"]:
            flat[:] = 0
        for index in range(len(flat)):
            chunk, (r, c) = index // 4, divmod(index % 4, 2)
            rows, columns = WARP * 16 + LANE // 4 + r * 8, chunk * 8 + LANE % 4 * 2 + c
            flat[index] += np.einsum("tk,tk->t", a[rows].astype(float), x[columns])
        self.open.append((words, product, number))

    def commit(self):
        self.flying.append(self.open)
        self.flown = max(self.flown, len(self.flying))
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


def interpreted(machine, scales=None):
    """What runs PTX in line. scales: float32 in global memory, from address 0 on."""

    def loaded(kind, address):
        """An unsigned number of each thread."""
        size = {"u16": 2, "b32": 4}[kind]
        assert not (address % size).any()
        return sum(machine.memory[address + byte].astype(np.uint32) << 8 * byte for byte in range(size))

    def run(result, text, *given):
        registers = {f"{{$r{number}}}": value for number, value in enumerate(given)}

        def value(word):
            return registers[word] if word in registers else np.uint32(int(word, 0))

        text = re.sub(r"^\{ (.*) \}$", r"\1", text)
        for line in text.split(";"):
            op, _, rest = line.strip().partition(" ")
            if not op or op == ".reg":
                continue
            if op.startswith("ld."):
                to, _, place = rest.rpartition(", ")
                place, _, offset = place.strip("[]").partition("}+")
                address = registers[place + "}" if offset else place] + int(offset or 0)
                *_, width, kind = op.split(".")
                if op == "ld.global.nc.f32":
                    registers[to] = scales.reshape(-1)[address // 4].astype(float)
                elif width.startswith("v"):
                    names = re.findall(r"\{\$w\d\}|\w+_", to)
                    assert len(names) == int(width[1:]) and not (address % (4 * len(names))).any()
                    registers |= {name: loaded(kind, address + 4 * n) for n, name in enumerate(names)}
                else:
                    registers[to] = loaded(kind, address)
                continue
            to, *words = rest.split(", ")
            registers[to] = RUN[op.partition(".")[0]](*map(value, words))
        outputs = [registers[f"{{$w{number}}}"] for number in range(len(result) if isinstance(result, list) else 1)]
        return outputs if isinstance(result, list) else outputs[0]

    return run


def permuted(a, b, selector):
    """prmt: bytes of both words, or the sign of one."""
    both = np.stack(np.broadcast_arrays(*(word >> np.uint32(8 * n) & 255 for word in (a, b) for n in range(4))))
    picked = 0
    for n in range(4):
        nibble = np.broadcast_to(selector >> np.uint32(4 * n) & 15, both.shape[1:])
        byte = np.take_along_axis(both, (nibble & 7)[None].astype(int), 0)[0]
        picked = picked | np.where(nibble & 8, (byte >> 7) * 255, byte).astype(np.uint32) << np.uint32(8 * n)
    return picked


def packed(halves):
    """bf16 of both numbers, which must be exact."""
    words = [np.asarray(half).astype(np.float32).view(np.uint32) for half in halves]
    assert not any((word & 0xFFFF).any() for word in words)
    return words[0] >> 16 | words[1]


def words_of(operation):
    """The operation of unsigned words."""

    def run(*words):
        return np.asarray(operation(*(np.asarray(word).astype(np.int64) for word in words))).astype(np.uint32)

    return run


RUN = {
    "prmt": permuted,
    "mul": lambda a, b: packed([x * y for x, y in zip(bf16(a), bf16(np.uint32(b)), strict=True)]),
    "fma": lambda a, b, c: packed(
        [x.astype(float) * y + z for x, y, z in zip(bf16(a), bf16(b), bf16(c), strict=True)]
    ),
    "mad": lambda a, b, c: a * int(b) + c,
    "mov": lambda a: a,
    "setp": lambda a, b: a == b,
    "selp": lambda a, b, flag: a if flag else b,
    **{
        name: words_of(operation)
        for name, operation in {
            "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b, "add": lambda a, b: a + b,
        }.items()
    },
}  # fmt: skip


class Mma:
    """wgmma with so many rows of x."""

    def __init__(self, rows):
        self.fields, self.rows = {}, rows

    def set(self, field, value):
        self.fields[field] = value
