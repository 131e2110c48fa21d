"""The protocol of moe-dispatch and moe-combine as a state machine, and a memory that delivers stores in any order.

A block is a generator of operations, step by step what fusekit/kernels/exchange does, with the names of base.py.
Ordinary stores of a block are delivered whenever the scheduler likes, in any order but that of one address; a release
is delivered when all stores of its block before it are. Loads after a wait see what is delivered. A launch ends when
its blocks have and all their stores are delivered. At most `resident` blocks of a launch run at a time, begun in any
order, or `pool` of all ranks, which then share a GPU. Of timeouts there are none: a rank that waits for ever is a
deadlock, which is found.

`Faults` are mistakes that the protocol could have. Each must be found (test_protocol.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

Operation = tuple[Any, ...]
Block = Generator[Operation, Any, None]
FAULTS = (
    "flags do not wait for the rows", "rows are sent to windows that are not open",
    "windows open before they were read", "flags of earlier launches count", "blocks that wait run first",
    "one flag is never written",
    "a window opens before its sums are made", "the epoch is counted by the first block to end",
    "choices end before the rows begin", "rows learn their launch after they began", "readers wait for no row",
    "all rows are said to be here before they are", "choices are read before they are announced",
    "chunks of earlier launches stay drawn", "an overflow is said when the window is open",
    "overflows of two launches share a word",
)  # fmt: skip
MAIN, SIDE, JOIN = "main", "side", "join"  # streams of a rank, and that the first waits for the other


class BrokenError(AssertionError):
    """The protocol did not do what it must."""


@dataclass(frozen=True)
class Setting:
    """ranks, blocks that send, chunks of a rank (one token each), blocks resident at a time; pool: of all ranks.

    program: the launches of every rank's stream, d for a dispatch and what reads its rows, a for one in two launches
    with readers that wait, n for one whose choices are known, c for a combine. Where they take turns each does the
    other's waiting, so they are tried alone as well.
    """

    ranks: int
    blocks: int
    chunks: int
    program: str
    resident: int
    seed: int
    fault: str = ""
    pool: int = 10**6

    @property
    def largest(self) -> int:
        """Blocks of the largest launch of `program`."""
        return max(self.blocks + self.chunks if kind == "c" else 2 * self.blocks + 1 for kind in self.program)


@dataclass
class Running:
    """A block that runs: its generator, its stream, the operation that is next, and its stores that are not delivered
    yet.
    """

    body: Block
    lane: str
    next: Operation | None = None
    stores: list[Operation] = field(default_factory=list)


class Rank:
    """One GPU: its memory, and the launches and reads of its streams."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.memory: dict[Any, Any] = {}
        self.stream = self._stream()
        self.waiting: list[tuple[str, Block]] = []  # blocks that have not begun
        self.running: list[Running] = []
        self.joining = self.done = False
        # The launch of choices keeps a block until those of rows have begun.
        self.resident = max(machine.setting.resident, 2 if {*"an"} & {*machine.setting.program} else 1)

    def _stream(self) -> Iterator[tuple[str, list[Block]]]:
        setting = self.machine.setting
        for launch, kind in enumerate(setting.program, start=1):
            if kind == "d":
                yield MAIN, [dispatch(self, launch) for _ in range(2 * setting.blocks + 1)]
                yield MAIN, [consume(self, launch)]
            elif kind in "an":
                yield SIDE, [send_rows(self, launch) for _ in range(2 * setting.blocks + 1)]
                if kind == "a":
                    yield MAIN, [send_choices(self, launch) for _ in range(setting.blocks + 1)]
                    yield MAIN, [read_choices(self, launch)]
                else:
                    yield MAIN, [send_nothing(self)]
                yield MAIN, [gather(self, launch) for _ in range(self.resident)]  # they take all multiprocessors
                yield JOIN, []
                yield MAIN, [consume(self, launch, kind == "a")]
            else:
                yield MAIN, [combine(self, launch) for _ in range(setting.blocks + setting.chunks)]

    def _busy(self, lane: str) -> bool:
        return any(each == lane for each, _ in self.waiting) or any(each.lane == lane for each in self.running)

    def advance(self) -> None:
        """The next launches, when nothing is left of the main stream's last one."""
        while not self.done and not self._busy(MAIN) and not (self.joining and self._busy(SIDE)):
            lane, blocks = next(self.stream, ("", []))
            self.joining, self.done = lane == JOIN, not lane
            self.waiting += [(lane, block) for block in blocks]

    def actions(self) -> list[Callable[[], None]]:
        """What could happen next."""
        got: list[Callable[[], None]] = []
        if self.waiting and self.active < self.resident and self.machine.active < self.machine.setting.pool:
            got.append(self._begin)
        for block in self.running:
            if block.next is not None and self._enabled(block.next):
                got += [lambda block=block: self._step(block)] * 2
            got += [lambda block=block, store=store: self._deliver(block, store) for store in self._ready(block)]
        return got

    @property
    def active(self) -> int:
        """Blocks that run."""
        return sum(each.next is not None for each in self.running)

    def _begin(self) -> None:
        lane, body = self.waiting.pop(self.machine.source.randrange(len(self.waiting)))
        block = Running(body, lane)
        self.running.append(block)
        self._resume(block, None)

    def _resume(self, block: Running, value: Any) -> None:
        try:
            block.next = block.body.send(value)
        except StopIteration:
            block.next = None
        self._forget(block)

    def _forget(self, block: Running) -> None:
        if block.next is None and not block.stores:
            self.running.remove(block)
            self.advance()

    def _enabled(self, operation: Operation) -> bool:
        return operation[0] != "wait" or self.memory.get(operation[1], 0) >= operation[2]

    def _step(self, block: Running) -> None:
        assert block.next is not None
        kind, *given = block.next
        value = None
        if kind in ("store", "release"):
            block.stores.append(block.next)
        elif kind == "add":
            value = self.memory.get(given[0], 0)
            self.memory[given[0]] = value + 1
        elif kind == "set":
            self.memory[given[0]] = given[1]
        elif kind == "read":
            value = self.memory.get(given[0], 0)
        self._resume(block, value)

    def _ready(self, block: Running) -> Iterator[Operation]:
        """Stores that may be delivered: a release only as the oldest, any other as the oldest of its address."""
        seen = set()
        for index, store in enumerate(block.stores):
            place = store[1:3]
            if place not in seen and (store[0] == "store" or index == 0):
                yield store
            seen.add(place)

    def _deliver(self, block: Running, store: Operation) -> None:
        block.stores.remove(store)
        _, target, address, value = store
        self.machine.ranks[target].memory[address] = value
        self._forget(block)


class Machine:
    """All ranks, and the order in which things happen."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.source = random.Random(setting.seed)
        self.routes = {
            (launch, rank, token): frozenset(each for each in range(setting.ranks) if self.source.random() < 0.6)
            for launch in range(1, len(setting.program) + 1)
            for rank in range(setting.ranks)
            for token in range(setting.chunks)
        }
        launches = [(launch, rank) for launch in range(1, len(setting.program) + 1) for rank in range(setting.ranks)]
        self.idle = {each for each in launches if self.source.random() < 0.3}  # a rank has no tokens to sum
        self.overflow = {each: self.source.randrange(3) for each in launches}  # rows without room
        self.ranks = [Rank(self, number) for number in range(setting.ranks)]

    @property
    def active(self) -> int:
        """Blocks that run, of all ranks."""
        return sum(rank.active for rank in self.ranks)

    def run(self) -> int:
        """Until all streams are empty; how many steps. Raises BrokenError for wrong rows and for a deadlock."""
        for rank in self.ranks:
            rank.advance()
        steps, ahead = 0, 0
        while not all(rank.done for rank in self.ranks):
            able = {rank.number: actions for rank in self.ranks if (actions := rank.actions())}
            if not able:
                raise BrokenError(f"all ranks wait: {self.setting}")
            if self.source.random() < 0.02:  # another rank runs ahead of the others
                ahead = self.source.randrange(self.setting.ranks)
            chosen = ahead if ahead in able and self.source.random() < 0.7 else self.source.choice(list(able))
            self.source.choice(able[chosen])()
            steps += 1
        return steps


def arrive(rank: Rank, window: str) -> Generator[Operation, Any, tuple[int, int]]:
    turn = yield ("add", (window, "ticket"))
    epoch = yield ("read", (window, "epoch"))
    return turn, epoch + 1


def draw_anew(rank: Rank, window: str) -> Block:
    """The next launch draws all chunks."""
    if rank.machine.setting.fault != "chunks of earlier launches stay drawn":
        for copying in (False, True):
            yield ("set", (window, "drawn", copying), 0)


def leave(rank: Rank, window: str, epoch: int, blocks: int, draws: bool = True) -> Block:
    ended = (yield ("add", (window, "done"))) + 1
    last = ended == blocks
    if last:
        if draws:
            yield from draw_anew(rank, window)
        yield ("set", (window, "ticket"), 0)
        yield ("set", (window, "done"), 0)
    if last or (ended == 1 and rank.machine.setting.fault == "the epoch is counted by the first block to end"):
        yield ("set", (window, "epoch"), epoch)


def open_window(rank: Rank, window: str, epoch: int) -> Block:
    for other in range(rank.machine.setting.ranks):
        yield ("release", other, (window, "open", rank.number), epoch)


def opened(rank: Rank, window: str, epoch: int) -> Block:
    if rank.machine.setting.fault != "rows are sent to windows that are not open":
        for other in range(rank.machine.setting.ranks):
            yield ("wait", (window, "open", other), epoch)


def tell(rank: Rank, target: int, window: str, chunk: int, epoch: int) -> Block:
    fault = rank.machine.setting.fault
    kind = "store" if fault == "flags do not wait for the rows" else "release"
    if fault != "one flag is never written" or (chunk, epoch) != (0, 2):
        yield (kind, target, (window, "flag", rank.number, chunk), epoch)


def seen(rank: Rank, window: str, source: int, chunk: int, epoch: int) -> Block:
    epoch = min(epoch, 1) if rank.machine.setting.fault == "flags of earlier launches count" else epoch
    yield ("wait", (window, "flag", source, chunk), epoch)


def dispatch(rank: Rank, launch: int) -> Block:
    """A block of moe-dispatch. launch: which it really is, to make rows that say so."""
    setting, routes, number = rank.machine.setting, rank.machine.routes, rank.number
    turn, epoch = yield from arrive(rank, "rows")
    if setting.fault == "blocks that wait run first":
        turn = (turn - 1) % (2 * setting.blocks + 1)
    early = setting.fault == "windows open before they were read"
    if turn == 0:
        yield from open_window(rank, "rows", epoch + early)
    receiving = turn == 2 * setting.blocks
    if receiving:
        yield from leave(rank, "rows", epoch, 2 * setting.blocks + 1)
        for source in range(setting.ranks):
            for chunk in range(setting.chunks):
                yield from seen(rank, "rows", source, chunk, epoch)
    else:
        targets = [number] if turn >= setting.blocks else [each for each in range(setting.ranks) if each != number]
        if turn < setting.blocks:
            yield from opened(rank, "rows", epoch)
        chunk, drawn = turn % setting.blocks, ("rows", "drawn", turn >= setting.blocks)
        while chunk < setting.chunks:
            for target in targets:
                sent = target in routes[launch, number, chunk]
                yield ("store", target, ("rows", "indices", number, chunk), (launch, sent))
                if sent:
                    yield ("store", target, ("rows", "row", number, chunk), (launch, number, chunk))
            for target in targets:
                yield from tell(rank, target, "rows", chunk, epoch)
            chunk = setting.blocks + (yield ("add", drawn))
    if not receiving:
        yield from leave(rank, "rows", epoch, 2 * setting.blocks + 1)


def send_choices(rank: Rank, launch: int) -> Block:
    """A block of moe-dispatch that sends choices."""
    setting, routes, number = rank.machine.setting, rank.machine.routes, rank.number
    turn, epoch = yield from arrive(rank, "rows")
    if turn == 0:
        yield from open_window(rank, "rows", epoch)
    if turn == setting.blocks:
        for source in range(setting.ranks):
            for block in range(setting.blocks):
                if setting.fault != "choices are read before they are announced":
                    yield ("wait", ("rows", "announced", source, block), epoch)
        if setting.fault != "choices end before the rows begin":
            yield ("wait", ("rows", "begun"), epoch)
    else:
        yield from opened(rank, "rows", epoch)
        for target in range(setting.ranks):
            for token in range(turn, setting.chunks, setting.blocks):
                sent = target in routes[launch, number, token]
                yield ("store", target, ("rows", "indices", number, token), (launch, sent))
        for target in range(setting.ranks):
            yield ("release", target, ("rows", "announced", number, turn), epoch)
    yield from leave(rank, "rows", epoch, setting.blocks + 1, draws=False)


def send_nothing(rank: Rank) -> Block:
    """The block of moe-dispatch that only sees to it that all ranks send their rows."""
    _, epoch = yield from arrive(rank, "rows")
    yield from open_window(rank, "rows", epoch)
    yield from opened(rank, "rows", epoch)
    if rank.machine.setting.fault != "choices end before the rows begin":
        yield ("wait", ("rows", "begun"), epoch)
    yield from leave(rank, "rows", epoch, 1, draws=False)


def send_rows(rank: Rank, launch: int) -> Block:
    """A block of moe-dispatch that sends rows."""
    setting, routes, number = rank.machine.setting, rank.machine.routes, rank.number
    late = setting.fault == "rows learn their launch after they began"
    epoch = 0 if late else (yield ("read", ("rows", "epoch"))) + 1
    turn = yield ("add", ("rows", "rows ticket"))
    if turn == 2 * setting.blocks:
        yield ("release", number, ("rows", "begun"), launch if late else epoch)
    epoch = (yield ("read", ("rows", "epoch"))) + 1 if late else epoch
    if turn == 0:
        yield from open_window(rank, "rows", epoch)
    if turn == 2 * setting.blocks:
        if setting.fault == "all rows are said to be here before they are":
            yield ("release", number, ("rows", "came"), epoch)
        for source in range(setting.ranks):
            for chunk in range(setting.chunks):
                yield from seen(rank, "rows", source, chunk, epoch)
        yield ("release", number, ("rows", "came"), epoch)
    else:
        targets = [number] if turn >= setting.blocks else [each for each in range(setting.ranks) if each != number]
        if turn < setting.blocks:
            yield from opened(rank, "rows", epoch)
        chunk, drawn = turn % setting.blocks, ("rows", "drawn", turn >= setting.blocks)
        while chunk < setting.chunks:
            for target in targets:
                if target in routes[launch, number, chunk]:
                    yield ("store", target, ("rows", "row", number, chunk), (launch, number, chunk))
                yield from tell(rank, target, "rows", chunk, epoch)
            chunk = setting.blocks + (yield ("add", drawn))
    ended = (yield ("add", ("rows", "rows done"))) + 1
    if ended == 2 * setting.blocks + 1:
        yield from draw_anew(rank, "rows")
        yield ("set", ("rows", "rows ticket"), 0)
        yield ("set", ("rows", "rows done"), 0)


def read_choices(rank: Rank, launch: int) -> Block:
    """moe-index."""
    for source in range(rank.machine.setting.ranks):
        for token in range(rank.machine.setting.chunks):
            yield from read_choice(rank, launch, source, token)


def read_choice(rank: Rank, launch: int, source: int, token: int) -> Block:
    """Whether the token has an expert of this rank."""
    sent = rank.number in rank.machine.routes[launch, source, token]
    got = yield ("read", ("rows", "indices", source, token))
    if got != (launch, sent):
        raise BrokenError(f"rank {rank.number} has indices {got} of {source}, {token} in launch {launch}")
    return sent


def gather(rank: Rank, launch: int) -> Block:
    """A block of a product that reads rows as they come."""
    setting, routes = rank.machine.setting, rank.machine.routes
    epoch = yield ("read", ("rows", "epoch"))
    for source in range(setting.ranks):
        for token in range(setting.chunks):
            if rank.number in routes[launch, source, token]:
                came = yield ("read", ("rows", "came"))
                if came != epoch and setting.fault != "readers wait for no row":
                    yield from seen(rank, "rows", source, token, epoch)
                row = yield ("read", ("rows", "row", source, token))
                if row != (launch, source, token):
                    raise BrokenError(f"rank {rank.number} reads row {row} of {source}, {token} in launch {launch}")


def consume(rank: Rank, launch: int, announces: bool = True) -> Block:
    """The launches between: they read what has come, bit by bit. announces: whether choices came."""
    for source in range(rank.machine.setting.ranks):
        for token in range(rank.machine.setting.chunks):
            sent = rank.number in rank.machine.routes[launch, source, token]
            if announces:
                yield from read_choice(rank, launch, source, token)
            row = yield ("read", ("rows", "row", source, token))
            if sent and row != (launch, source, token):
                raise BrokenError(f"rank {rank.number} has row {row} of {source}, {token} in launch {launch}")


def say_overflow(rank: Rank, launch: int, epoch: int) -> Block:
    for other in range(rank.machine.setting.ranks):
        yield ("store", other, over(rank, epoch, rank.number), rank.machine.overflow[launch, rank.number])


def tell_overflow(rank: Rank, launch: int, epoch: int) -> Block:
    for source in range(rank.machine.setting.ranks):
        got = yield ("read", over(rank, epoch, source))
        if got != rank.machine.overflow[launch, source]:
            raise BrokenError(f"rank {rank.number} has an overflow of {got} rows of {source} in launch {launch}")


def over(rank: Rank, epoch: int, source: int) -> tuple[Any, ...]:
    shared = rank.machine.setting.fault == "overflows of two launches share a word"
    return ("parts", "over", 0 if shared else epoch % 2, source)


def combine(rank: Rank, launch: int) -> Block:
    """A block of moe-combine."""
    setting, routes, number = rank.machine.setting, rank.machine.routes, rank.number
    turn, epoch = yield from arrive(rank, "parts")
    if turn == 0:
        late = setting.fault == "an overflow is said when the window is open"
        if not late:
            yield from say_overflow(rank, launch, epoch)
        yield from open_window(rank, "parts", epoch + (setting.fault == "a window opens before its sums are made"))
        if late:
            yield from say_overflow(rank, launch, epoch)
    if turn >= setting.blocks:
        yield from leave(rank, "parts", epoch, setting.blocks + setting.chunks)
        if (launch, number) in rank.machine.idle:
            return
        chunk = turn - setting.blocks
        for source in range(setting.ranks):
            if source != number:
                yield from seen(rank, "parts", source, chunk, epoch)
        for source in range(setting.ranks):
            part = yield ("read", ("parts", "row", source, chunk))
            if source != number and source in routes[launch, number, chunk] and part != (launch, source, number, chunk):
                raise BrokenError(f"rank {number} has part {part} of {source} for {chunk} in launch {launch}")
    else:
        yield from opened(rank, "parts", epoch)
        if turn == 0:
            yield from tell_overflow(rank, launch, epoch)
        at = turn
        while at < setting.chunks * (setting.ranks - 1):
            chunk, step = divmod(at, setting.ranks - 1)
            target = (number + 1 + step) % setting.ranks
            if number in routes[launch, target, chunk]:
                yield ("store", target, ("parts", "row", number, chunk), (launch, number, target, chunk))
            yield from tell(rank, target, "parts", chunk, epoch)
            at = setting.blocks + (yield ("add", ("parts", "drawn", False)))
        yield from leave(rank, "parts", epoch, setting.blocks + setting.chunks)
