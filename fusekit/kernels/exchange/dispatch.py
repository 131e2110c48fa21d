"""moe-dispatch: every token's row to the ranks of its experts, once to each, with its experts there and their weights.

Token t of rank s lies at [s, t] of the window of each rank that it is sent to. What a rank receives has that place
whatever else is sent, so no counts are exchanged: `indices` of the window say which tokens have experts here, -1 where
there is none, and moe-index makes the rows of groups of them. Of codes, the scales come too. How the ranks agree:
base.py.

As many blocks as send to the other ranks copy what stays here, so that the links are never idle for it. One more waits
for what the ranks send.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.exchange import signals
from fusekit.kernels.exchange.base import CHUNK, NANOSECONDS, ROWS, Exchange, chunks
from fusekit.kernels.ptx import divide
from fusekit.plan.exchange import STATUS
from fusekit.plan.quantise import SIDE


class MoeDispatch(Exchange):
    """The kernel; calling it traces host function and kernel."""

    LINES = 8

    @cute.jit
    def __call__(
        self, x: cute.Tensor, x_s, indices: cute.Tensor, weights, window: tuple, rank: Int32, capacity: Int32,
        timeout: Int32, stream: CUstream,
    ):  # fmt: skip
        """Launch; x_s and weights may be None. window: of every rank."""
        self.kernel(
            x.iterator,
            x_s.iterator if cutlass.const_expr(self.coded) else None,
            indices.iterator,
            weights.iterator if cutlass.const_expr(self.weighted) else None,
            list(window),
            x.shape[0],
            x.shape[1] * self.size,
            Int64(x.stride[0]) * self.size,
            rank,
            capacity,
            timeout,
        ).launch(grid=[2 * self.blocks + 1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, x_s, indices: cute.Pointer, weights, windows: list, tokens: Int32, row_bytes: Int32,
        x_stride: Int64, rank: Int32, capacity: Int32, timeout: Int32,
    ):  # fmt: skip
        """See the module's docstring."""
        thread, _, _ = cute.arch.thread_idx()
        x = (x, x_s)
        deadline = cute.arch.globaltimer() + Int64(timeout) * NANOSECONDS
        own = self.of_rank(windows, rank)
        turn, epoch, failed = self.arrive(own, thread)
        sizes = (tokens, row_bytes, capacity)
        if turn == 0:
            self.open(windows, rank, thread, epoch)
        if turn == 2 * self.blocks:
            self.receive(own, thread, epoch, deadline, failed, sizes)
        elif failed == 0:
            here = Uint32(1) << Uint32(rank)
            if turn >= self.blocks:
                self.send(x, indices, weights, windows, turn - self.blocks, sizes, x_stride, rank, epoch, here)
            elif self.opened(own, thread, epoch, epoch, deadline) != 0:
                self.send(x, indices, weights, windows, turn, sizes, x_stride, rank, epoch, ~here)
        self.leave(own, thread, epoch, Int32(2 * self.blocks + 1))

    @cute.jit
    def send(
        self, x: tuple, indices: cute.Pointer, weights, windows: list, first: Int32, sizes: tuple,
        x_stride: Int64, rank: Int32, epoch: Int32, targets: Uint32,
    ):  # fmt: skip
        """Every `blocks`-th chunk from `first` on to the ranks of `targets`, bits. x: and its scales, or None."""
        thread, _, _ = cute.arch.thread_idx()
        _, row_bytes, capacity = sizes
        flags = self.regions(capacity, row_bytes).flags
        for chunk in cutlass.range(first, chunks(capacity), self.blocks):
            self.choices(indices, weights, windows, chunk, sizes, rank, targets)
            if cutlass.const_expr(self.coded):
                self.scales(x[1], windows, chunk, sizes, rank, targets)
            self.rows(x[0], indices, windows, chunk, sizes, x_stride, rank, targets)
            self.tell(windows, flags + Int64(rank * chunks(capacity) + chunk) * 4, thread, epoch, targets)

    @cute.jit
    def choices(
        self, indices: cute.Pointer, weights, windows: list, chunk: Int32, sizes: tuple, rank: Int32, targets: Uint32
    ):
        """The experts of a chunk's tokens, and their weights, to each target; -1 for those that are not its own."""
        tokens, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        layout = self.regions(capacity, row_bytes)
        first = chunk * (CHUNK * self.topk)  # of the chunk's choices among the rank's
        for at in cutlass.range(thread, CHUNK * self.topk, self.threads):
            choice = first + at
            there = choice < tokens * self.topk
            expert = lanes.load(indices.toint() + Int64(choice) * 4, 4, there, -1)[0]
            if cutlass.const_expr(self.weighted):
                weight = lanes.load(weights.toint() + Int64(choice) * 4, 4, there)[0]
            place = Int64(rank) * (Int64(capacity) * (self.topk * 4)) + Int64(choice) * 4
            for target in cutlass.range_constexpr(self.ranks):
                local = expert - Uint32(target * self.local)
                mine, wanted = local < Uint32(self.local), ((targets >> target) & 1) != 0
                told = cutlass.select_(mine, local, Uint32(0xFFFFFFFF))
                lanes.store(windows[target].toint() + layout.indices + place, [told], 4, wanted)
                if cutlass.const_expr(self.weighted):
                    told = cutlass.select_(mine, weight, Uint32(0))
                    lanes.store(windows[target].toint() + layout.weights + place, [told], 4, wanted)

    @cute.jit
    def scales(self, x_s: cute.Pointer, windows: list, chunk: Int32, sizes: tuple, rank: Int32, targets: Uint32):
        """Those of a chunk's tokens to each target, whether their rows go there or not."""
        tokens, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        layout = self.regions(capacity, row_bytes)
        for at in cutlass.range(thread, CHUNK * (divide(row_bytes - 1, SIDE) + 1), self.threads):
            block = divide(at, CHUNK)
            token = chunk * CHUNK + (at - block * CHUNK)
            word = lanes.load(x_s.toint() + (Int64(block) * tokens + token) * 4, 4, token < tokens)
            place = ((Int64(block) * self.ranks + rank) * capacity + token) * 4
            for target in cutlass.range_constexpr(self.ranks):
                wanted = ((targets >> target) & 1) != 0
                lanes.store(windows[target].toint() + layout.scales + place, word, 4, wanted)

    @cute.jit
    def rows(
        self, x: cute.Pointer, indices: cute.Pointer, windows: list, chunk: Int32, sizes: tuple, x_stride: Int64,
        rank: Int32, targets: Uint32,
    ):  # fmt: skip
        """The rows of a chunk's tokens to those targets that are ranks of their experts."""
        tokens, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, 32))
        layout = self.regions(capacity, row_bytes)
        for at in cutlass.range(warp, CHUNK, self.warps):
            token = chunk * CHUNK + at
            owners = Uint32(0)
            if token < tokens:
                owners = self.owners(indices.toint(), token, lane) & targets
            if owners != 0:
                place = layout.rows + (Int64(rank) * capacity + token) * row_bytes
                source = x.toint() + Int64(token) * x_stride
                for piece in cutlass.range(0, row_bytes, self.piece):
                    start = piece + lane * 16
                    words = self.load_piece(source, start, row_bytes)
                    for target in cutlass.range_constexpr(self.ranks):
                        wanted = ((owners >> target) & 1) != 0
                        self.store_piece(windows[target].toint() + place, start, row_bytes, words, wanted)

    @cute.jit
    def receive(self, own: Int64, thread: Int32, epoch: Int32, deadline: Int64, failed: Int32, sizes: tuple):
        """Waits for every chunk of every rank. Where one is missing, no token has experts here."""
        _, row_bytes, capacity = sizes
        layout = self.regions(capacity, row_bytes)
        came = Int32(failed == 0)
        if failed == 0:
            for chunk in cutlass.range(thread, self.ranks * chunks(capacity), self.threads):
                seen = signals.wait(own + layout.flags + Int64(chunk) * 4, epoch, deadline)
                signals.fail(own + STATUS, divide(chunk, chunks(capacity)), ROWS, epoch, seen == 0)
                came = came & seen
        if signals.every(came) == 0:
            for choice in cutlass.range(thread, self.ranks * capacity * self.topk, self.threads):
                lanes.store(own + layout.indices + Int64(choice) * 4, [Uint32(0xFFFFFFFF)], 4)
