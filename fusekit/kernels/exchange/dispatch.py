"""moe-dispatch: every token's row to the ranks of its experts, once to each, with its experts there and their weights.

Token t of rank s lies at [s, t] of the window of each rank that it is sent to. What a rank receives has that place
whatever else is sent, so no counts are exchanged: `indices` of the window hold which tokens have experts here, -1 where
there is none, and moe-index makes the rows of groups of them. With FP8 values, their scales come too. How the ranks
agree: base.py.

Blocks of their own copy what stays here, so that the links are never idle for it. One more waits for what the ranks
send.

Which rows a warp sends: shares.py. Choices may go in a launch of their own, all at once; where those that came before
still hold, a launch that sends nothing takes its place.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.exchange import shares, signals
from fusekit.kernels.exchange.base import CHUNK, NANOSECONDS, SENDING, WARP, Exchange, chunks
from fusekit.kernels.ptx import divide
from fusekit.plan.exchange import (
    ALL,
    BEGINNING,
    BEGUN,
    CAME,
    CHOICE_SENDERS,
    CHOICES,
    DRAWN,
    LOCAL_TOKENS,
    NOTHING,
    ROWS,
    STATUS,
    WAIT,
    wide,
)
from fusekit.plan.quantise import SIDE

COPIES = 64  # blocks that copy what stays here, next to kernels that want it soon


class MoeDispatch(Exchange):
    """The kernel; calling it traces host function and kernel. senders: blocks that send to other ranks."""

    LINES = 8

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.sends, self.wide = spec.sends, wide(vars(spec))
        self.senders, self.copies = self.blocks, self.blocks
        self.apart = self.sends == ROWS
        if self.sends == CHOICES:
            self.senders, self.copies, self.draws = min(self.blocks, CHOICE_SENDERS), 0, False
        elif self.sends == NOTHING:
            self.senders, self.copies, self.draws = 0, 0, False
        elif self.apart:
            self.copies = COPIES
        self.grid_blocks = self.senders + self.copies + 1

    @cute.jit
    def __call__(
        self, x, x_s, indices, weights, window: tuple, rank: Int32, capacity: Int32, timeout: Int32, stream: CUstream
    ):
        """Launch; what the spec does without is None. window: of every rank."""
        self.kernel(
            self.rows_at(x) if cutlass.const_expr(self.wide) else None,
            None if cutlass.const_expr(x_s is None) else x_s.iterator,
            None if cutlass.const_expr(indices is None) else indices.iterator,
            None if cutlass.const_expr(weights is None) else weights.iterator,
            list(window),
            indices.shape[0] if cutlass.const_expr(indices is not None) else Int32(0),
            x.shape[1] * self.size if cutlass.const_expr(self.wide) else Int32(0),
            rank,
            capacity,
            timeout,
        ).launch(
            grid=[self.grid_blocks, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,  # else registers are spilled, so that two fit
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x, x_s, indices, weights, windows: list, tokens: Int32, row_bytes: Int32, rank: Int32, capacity: Int32,
        timeout: Int32,
    ):  # fmt: skip
        """See the module's docstring. x: as `rows_at` gives it."""
        cute.arch.griddepcontrol_wait()  # until what was launched before is done: this launch began before its end
        thread, _, _ = cute.arch.thread_idx()
        deadline = cute.arch.globaltimer() + Int64(timeout) * NANOSECONDS
        window = self.of_rank(windows, rank)
        turn, epoch, failed, drawing = self.arrive(window, thread)
        sizes, source = (tokens, row_bytes, capacity), (x, indices, weights, x_s)
        receiving = turn == self.grid_blocks - 1
        if turn == 0:  # of both launches, whichever runs first
            self.open(windows, rank, thread, epoch)
            self.publish_rows(window, thread, rank, capacity, timeout)
        early = receiving & (self.sends == ALL)  # else the other launch may not have read EPOCH yet
        if early:
            self.leave(window, thread, epoch, Int32(self.grid_blocks))
        if cutlass.const_expr(self.sends == NOTHING):
            # A rank that is behind may need another kernel of this GPU, for which what follows may leave no room.
            if failed == 0:  # noqa: SIM102
                if self.opened(window, thread, epoch, deadline) != 0:
                    self.rows_begun(window, thread, rank, epoch, deadline)
        elif receiving:
            if cutlass.const_expr(self.apart):  # noqa: SIM102
                if thread == 0:
                    signals.release(window + BEGUN, epoch)
            self.receive(window, thread, epoch, deadline, failed, sizes, rank)
        elif failed == 0:
            copying = turn >= self.senders
            here = Uint32(1) << Uint32(rank)
            targets = cutlass.select_(copying, here, ~here if self.copies else Uint32(0xFFFFFFFF))
            if cutlass.const_expr(self.sends == CHOICES):
                if self.opened(window, thread, epoch, deadline) != 0:
                    self.send_choices(windows, source, turn, sizes, rank, epoch, targets)
            else:
                first = cutlass.select_(copying, turn - self.senders, turn)
                step = cutlass.select_(copying, Int32(self.copies), Int32(self.senders))
                counter = window + DRAWN + cutlass.select_(copying, Int64(4), Int64(0))
                share = (drawing, counter, first, step)
                self.send(windows, source, share, sizes, rank, epoch, targets, copying, deadline)
        if ~early:
            self.leave(window, thread, epoch, Int32(self.grid_blocks))

    @cute.jit
    def publish_rows(self, window: Int64, thread: Int32, rank: Int32, capacity: Int32, timeout: Int32):
        """Writes the words of the window that waiting kernels read."""
        if thread == 0:
            signals.store(window + LOCAL_TOKENS, rank * capacity)
            signals.store(window + (LOCAL_TOKENS + 4), (rank + 1) * capacity)
            signals.store(window + WAIT, timeout)

    @cute.jit
    def send_choices(
        self, windows: list, source: tuple, turn: Int32, sizes: tuple, rank: Int32, epoch: Int32, targets: Uint32
    ):
        """Sends a block's choices to the ranks of `targets`, bits."""
        _, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        for at in cutlass.range(turn * self.threads + thread, capacity * self.topk, self.senders * self.threads):
            self.choice(windows, source, at, sizes, rank, targets)
        cute.arch.sync_threads()
        flags = self.regions(capacity, row_bytes).choice_flags
        self.signal(windows, flags + Int64(rank * CHOICE_SENDERS + turn) * 4, thread, epoch, targets)

    @cute.jit
    def send(
        self, windows: list, source: tuple, share: tuple, sizes: tuple, rank: Int32, epoch: Int32, targets: Uint32,
        copying, deadline: Int64,
    ):  # fmt: skip
        """Sends chunks to the ranks of `targets`, bits, until none is left. share: what `shares.draw` takes."""
        _, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        lane, count = thread & 31, chunks(capacity)
        slot, chunk, at = shares.draw(*share)
        owners = self.owners_of(source, chunk * CHUNK + at, sizes)  # read while the others open their windows
        last = count
        if ~copying:  # noqa: SIM102
            if self.opened(self.of_rank(windows, rank), thread, epoch, deadline) == 0:
                last = Int32(0)
        while chunk < last:
            piece = (at * WARP + lane, CHUNK * WARP)
            if cutlass.const_expr(self.sends == ALL):
                for choice in cutlass.range(piece[0], CHUNK * self.topk, piece[1]):
                    self.choice(windows, source, chunk * (CHUNK * self.topk) + choice, sizes, rank, targets)
            if cutlass.const_expr(self.coded):
                self.scales(windows, source[3], chunk, piece, sizes, rank, targets)
            self.row(windows, source[0], chunk * CHUNK + at, owners & targets, sizes, rank)
            if shares.sent(slot) != 0:
                flag = self.regions(capacity, row_bytes).flags + Int64(rank * count + chunk) * 4
                self.signal(windows, flag, lane, epoch, targets)
            slot, chunk, at = shares.draw(*share)
            owners = self.owners_of(source, chunk * CHUNK + at, sizes)

    @cute.jit
    def owners_of(self, source: tuple, token: Int32, sizes: tuple):
        """`owners` of a token, none where there is no such token; L2 is asked for its row meanwhile."""
        owners = Uint32(0)
        if token < sizes[0]:
            if cutlass.const_expr(self.wide):
                rows, stride = source[0]
                lanes.prefetch(rows.toint() + Int64(token) * stride, sizes[1], cute.arch.lane_idx() == 0)
            owners = self.owners(source[1].toint(), token, cute.arch.lane_idx())
        return owners

    @cute.jit
    def scales(
        self, windows: list, x_s: cute.Pointer, chunk: Int32, share: tuple, sizes: tuple, rank: Int32, targets: Uint32
    ):
        """Sends the scales of a chunk's tokens to each target, whether their rows go there or not. share: (first,
        step).
        """
        (first, step), (tokens, row_bytes, capacity) = share, sizes
        layout = self.regions(capacity, row_bytes)
        for at in cutlass.range(first, CHUNK * (divide(row_bytes - 1, SIDE) + 1), step):
            block = divide(at, CHUNK)
            token = chunk * CHUNK + (at - block * CHUNK)
            word = lanes.load(x_s.toint() + (Int64(block) * tokens + token) * 4, 4, token < tokens)
            place = ((Int64(block) * self.ranks + rank) * capacity + token) * 4
            for target in cutlass.range_constexpr(self.ranks):
                wanted = ((targets >> target) & 1) != 0
                lanes.store(windows[target].toint() + layout.scales + place, word, 4, wanted)

    @cute.jit
    def choice(self, windows: list, source: tuple, choice: Int32, sizes: tuple, rank: Int32, targets: Uint32):
        """Sends a choice's expert and weight to each target; -1 where the expert is not the target's."""
        tokens, row_bytes, capacity = sizes
        _, indices, weights, _ = source
        layout = self.regions(capacity, row_bytes)
        there = choice < tokens * self.topk
        expert = lanes.load(indices.toint() + Int64(choice) * 4, 4, there, -1)[0]
        if cutlass.const_expr(self.weighted):
            weight = lanes.load(weights.toint() + Int64(choice) * 4, 4, there)[0]
        place = Int64(rank) * (Int64(capacity) * (self.topk * 4)) + Int64(choice) * 4
        for target in cutlass.range_constexpr(self.ranks):
            local = expert - Uint32(target * self.local)
            held, wanted = local < Uint32(self.local), ((targets >> target) & 1) != 0
            word = cutlass.select_(held, local, Uint32(0xFFFFFFFF))
            lanes.store(windows[target].toint() + layout.indices + place, [word], 4, wanted)
            if cutlass.const_expr(self.weighted):
                word = cutlass.select_(held, weight, Uint32(0))
                lanes.store(windows[target].toint() + layout.weights + place, [word], 4, wanted)

    @cute.jit
    def row(self, windows: list, x: tuple, token: Int32, owners: Uint32, sizes: tuple, rank: Int32):
        """Sends a row, by a warp, to its owners."""
        _, row_bytes, capacity = sizes
        lane = cute.arch.lane_idx()
        if owners != 0:
            place = self.regions(capacity, row_bytes).rows + (Int64(rank) * capacity + token) * row_bytes
            source = x[0].toint() + Int64(token) * x[1]
            for piece in cutlass.range(0, row_bytes, self.piece):
                start = piece + lane * 16
                words = self.load_piece(source, start, row_bytes)
                for target in cutlass.range_constexpr(self.ranks):
                    wanted = ((owners >> target) & 1) != 0
                    self.store_piece(windows[target].toint() + place, start, row_bytes, words, wanted)

    @cute.jit
    def rows_begun(self, window: Int64, thread: Int32, rank: Int32, epoch: Int32, deadline: Int64):
        """Waits until all blocks of the launch of rows have begun: 1, or 0 where they have not in time."""
        seen = Int32(1)
        if thread == 0:
            seen = signals.wait(window + BEGUN, epoch, deadline)
            signals.fail(window + STATUS, rank, BEGINNING, epoch, seen == 0)
        return seen

    @cute.jit
    def receive(
        self, window: Int64, thread: Int32, epoch: Int32, deadline: Int64, failed: Int32, sizes: tuple, rank: Int32
    ):
        """Waits for all chunks, or all choices, of every rank. Where one is missing, no token has experts here."""
        _, row_bytes, capacity = sizes
        layout = self.regions(capacity, row_bytes)
        first, count, room = layout.flags, chunks(capacity), chunks(capacity)
        if cutlass.const_expr(self.sends == CHOICES):
            first, count, room = layout.choice_flags, Int32(self.senders), Int32(CHOICE_SENDERS)
        came = Int32(failed == 0)
        if failed == 0:
            for at in cutlass.range(thread, self.ranks * count, self.threads):
                source = divide(at, count)
                flag = source * room + (at - source * count)
                seen = signals.wait(window + first + Int64(flag) * 4, epoch, deadline)
                signals.fail(window + STATUS, source, SENDING, epoch, seen == 0)
                came = came & seen
            if cutlass.const_expr(self.sends == CHOICES):
                came = came & self.rows_begun(window, thread, rank, epoch, deadline)
        if signals.every(came) == 0:
            for choice in cutlass.range(thread, self.ranks * capacity * self.topk, self.threads):
                lanes.store(window + layout.indices + Int64(choice) * 4, [Uint32(0xFFFFFFFF)], 4)
        elif cutlass.const_expr(self.apart):  # noqa: SIM102
            if thread == 0:
                signals.release(window + CAME, epoch)
