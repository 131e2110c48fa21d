"""moe-combine: what the experts made of each token back to its rank, one row from each rank that has some of them.

    of rank d, for token t of rank s   part[s, t] = sum over k of weights[s, t, k] x[inverse[s, t, k]], as moe-unpermute
    of rank s                          y[t] = sum over d of what d sent for t, in float32, in the order of ranks

Each part is rounded to the rows' type once, and so is the sum: a token whose experts are all of one rank has the bits
of moe-unpermute. Addends [T, H] are added after the parts, before the sum is rounded. With gradients,
grad_weights[s, t, k] go back too, each from the rank of its expert; or alone, where the sums need what is made of them.

With overflow, each rank writes as it opens its window how many rows its experts wanted, if they have no room for them.
The first block that sends waits for all ranks to do so, and reports it to the host: so every rank knows it of the same
launch.

Each part is rounded wherever it is made: what y is does not depend on which rank has the token.

The blocks that send to other ranks are the first to run; each of the others sums one chunk of tokens, its own rank's
part and, as soon as they are there, those of the others. How the ranks agree: base.py. Which rows a warp sends:
shares.py.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.exchange import shares, signals
from fusekit.kernels.exchange.base import CHUNK, NANOSECONDS, SENDING, Exchange, chunks
from fusekit.kernels.floats import choose, fma
from fusekit.kernels.lanes import WARP
from fusekit.kernels.permutation.permute import LINE
from fusekit.kernels.ptx import divide
from fusekit.plan.exchange import DRAWN, OPEN, OVER, STATUS

NAN = 0x7FFFFFFF
WORDS, TOGETHER = 64, 8  # that a lane has asked for at a time, and of how many rows, at most


class MoeCombine(Exchange):
    """The kernel; calling it traces host function and kernel."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.overflow = spec.overflow
        # A lane asks for its share of so many choices' rows before it adds up the first.
        self.together = min(self.topk, TOGETHER)
        self.lines = min(self.LINES, WORDS // (4 * self.together))
        self.piece = self.lines * LINE

    @cute.jit
    def __call__(
        self, x, inverse, weights, grad_weights, indices: cute.Tensor, addend0, addend1, wanted, overflow, y, returned,
        window: tuple, rank: Int32, capacity: Int32, timeout: Int32, stream: CUstream,
    ):  # fmt: skip
        """Launch; what the spec does without is None. window: of every rank."""
        gradients = (grad_weights.iterator, returned.iterator) if cutlass.const_expr(self.gradients) else None
        summing = cutlass.max((indices.shape[0] - 1) // CHUNK + 1, 1)
        addends = (addend0, addend1)[: self.addends]
        self.kernel(
            self.rows_at(x) if cutlass.const_expr(self.wide) else None,
            inverse.iterator if cutlass.const_expr(self.wide) else None,
            weights.iterator if cutlass.const_expr(self.weighted) else None,
            gradients,
            (wanted.iterator, overflow.iterator, x.shape[0]) if cutlass.const_expr(self.overflow) else None,
            indices.iterator,
            [self.rows_at(tensor) for tensor in (y, *addends)] if cutlass.const_expr(self.wide) else [],
            list(window),
            indices.shape[0],
            y.shape[1] * self.size if cutlass.const_expr(self.wide) else Int32(0),
            rank,
            capacity,
            timeout,
        ).launch(
            grid=[self.blocks + summing, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,  # else registers are spilled, so that two fit
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x, inverse, weights, gradients, overflow, indices: cute.Pointer, y: list, windows: list, tokens: Int32,
        row_bytes: Int32, rank: Int32, capacity: Int32, timeout: Int32,
    ):  # fmt: skip
        """See the module's docstring. x: as `rows_at` gives it; y: the result and the addends, likewise. overflow: the
        rows wanted, what the host reads, and the rows that there is room for.
        """
        cute.arch.griddepcontrol_wait()  # until what was launched before is done: this launch began before its end
        thread, _, _ = cute.arch.thread_idx()
        blocks, _, _ = cute.arch.grid_dim()
        deadline = cute.arch.globaltimer() + Int64(timeout) * NANOSECONDS
        window = self.of_rank(windows, rank)
        turn, epoch, failed, drawing = self.arrive(window, thread)
        sizes, source = (tokens, row_bytes, capacity), (x, inverse, weights, gradients)
        if turn == 0:
            if cutlass.const_expr(self.overflow):
                self.say_overflow(windows, overflow, rank, thread, epoch)
            self.open(windows, rank, thread, epoch)
        if (turn < self.blocks) & (failed == 0):
            self.send_all(windows, source, overflow, drawing, turn, sizes, rank, epoch, deadline)
        self.leave(window, thread, epoch, blocks)
        if turn >= self.blocks:
            self.sum(window, source, indices, y, turn - self.blocks, sizes, rank, epoch, failed, deadline)

    @cute.jit
    def say_overflow(self, windows: list, overflow: tuple, rank: Int32, thread: Int32, epoch: Int32):
        """To all windows, before this rank's is opened: the rows that it has no room for."""
        if thread < self.ranks:
            wanted = lanes.load(overflow[0].toint(), 4)[0]
            wanted = cutlass.select_(Int32(wanted) > overflow[2], wanted, Uint32(0))
            lanes.store(self.of_rank(windows, thread) + over(epoch, rank), [wanted], 4)

    @cute.jit
    def report_overflow(self, window: Int64, overflow: tuple, thread: Int32, epoch: Int32):
        """Reports to the host the overflow of this launch, once all ranks have opened their windows."""
        if thread < WARP:
            wanted = signals.load_word(window + over(epoch, thread), thread < self.ranks)
            most = lanes.redux(wanted, "max")
            where = lanes.redux(cutlass.select_(wanted == most, Uint32(thread), Uint32(WARP)), "min")
            if (most != 0) & (thread == 0):
                words = overflow[1].toint()
                before = cutlass.max(Int32(signals.load(words + 12)), Int32(most))
                lanes.store(words + 4, [where], 4)
                lanes.store(words + 8, [most], 4)
                lanes.store(words + 12, [Uint32(before)], 4)
                signals.release(words, Int32(signals.load(words)) + 1)  # last: the host looks at this word first

    @cute.jit
    def send_all(
        self, windows: list, source: tuple, overflow, drawing: Int32, turn: Int32, sizes: tuple, rank: Int32,
        epoch: Int32, deadline: Int64,
    ):  # fmt: skip
        """Chunks of the other ranks until none is left, once all may be sent to."""
        _, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        others, window = self.ranks - 1, self.of_rank(windows, rank)
        flag = self.regions(capacity, row_bytes).flags + Int64(rank * chunks(capacity)) * 4
        share, last = (drawing, window + DRAWN, turn, Int32(self.blocks)), chunks(capacity) * others
        slot, at, row = shares.draw(*share)
        placed = self.placed_there(source, at, row, sizes, rank)  # read while the others open their windows
        if self.opened(window, thread, epoch, deadline) != 0:
            if cutlass.const_expr(self.overflow):  # noqa: SIM102
                if turn == 0:
                    self.report_overflow(window, overflow, thread, epoch)
            while at < last:
                chunk, target = self.there(at, rank)
                there = self.of_rank(windows, target)
                self.send(there, source, placed, target, chunk * CHUNK, row, sizes, rank)
                if (shares.sent(slot) != 0) & (cute.arch.lane_idx() == 0):
                    signals.release(there + flag + Int64(chunk) * 4, epoch)
                slot, at, row = shares.draw(*share)
                placed = self.placed_there(source, at, row, sizes, rank)

    def there(self, at: Int32, rank: Int32):
        """(chunk, rank) of the `at`-th to send: the ranks in turn, so that no link is idle, from the next one on."""
        others = max(self.ranks - 1, 1)
        chunk = divide(at, others)
        target = rank + 1 + (at - chunk * others)
        return chunk, cutlass.select_(target < self.ranks, target, target - self.ranks)

    def placed_there(self, source: tuple, at: Int32, row: Int32, sizes: tuple, rank: Int32) -> tuple:
        """`placed` of a row of the `at`-th chunk to send; of any where there is none."""
        if cutlass.const_expr(not self.wide):
            return ()
        _, row_bytes, capacity = sizes
        last = chunks(capacity) * max(self.ranks - 1, 1)
        chunk, target = self.there(cutlass.min(at, last - 1), rank)
        placed = self.placed(source, target * capacity + chunk * CHUNK + row, cute.arch.lane_idx())
        self.soon(source, placed[0], row_bytes, at < last)
        return placed

    def part(self, source: tuple, rows: list, given: list, start: Int32, row_bytes: Int32) -> list:
        """A piece of this rank's part of a token, rounded, as words. rows, given: of its choices, by lane."""
        (base, stride), _, weights, _ = source
        sums = [Float32(0.0)] * (self.piece // WARP // self.size)
        for first in range(0, self.topk, self.together):
            asked = []
            for choice in range(first, min(first + self.together, self.topk)):
                row = Int32(self.of_choice(rows, choice))
                words = self.load_piece(self.row_of(base.toint(), row, stride), start, row_bytes, row >= 0)
                asked.append((choice, row, words))
            for choice, row, words in asked:
                if weights is not None:
                    weight = lanes.float_of(Uint32(self.of_choice(given, choice)))
                    weight = choose(row >= 0, weight, Float32(0.0))
                    sums = [fma(value, weight, total) for value, total in zip(self.floats(words), sums, strict=True)]
                else:
                    sums = [value + total for value, total in zip(self.floats(words), sums, strict=True)]
        return lanes.pack(sums, self.dtype)

    def placed(self, source: tuple, place: Int32, lane: Int32):
        """(rows, weights) of the choices of a place, by lane."""
        _, inverse, weights, _ = source
        rows = self.per_choice(inverse.toint(), place, lane, -1)
        return rows, rows if weights is None else self.per_choice(weights.toint(), place, lane, 0)

    @cute.jit
    def send(
        self, there: Int64, source: tuple, placed: tuple, target: Int32, first: Int32, at: Int32, sizes: tuple,
        rank: Int32,
    ):  # fmt: skip
        """To the window of rank `target`, by a warp: token `first` + `at`, if this rank has an expert of it, and a
        share of the gradients of its chunk, which begins with `first`.
        """
        _, row_bytes, capacity = sizes
        lane = cute.arch.lane_idx()
        layout = self.regions(capacity, row_bytes)
        if cutlass.const_expr(self.wide):
            rows, given = placed
            some = Uint32(0)
            for row in rows:
                some = some | cutlass.select_(Int32(row) >= 0, Uint32(1), Uint32(0))
            if signals.union(some) != 0:
                place = there + layout.rows + (Int64(rank) * capacity + first + at) * row_bytes
                for piece in cutlass.range(0, row_bytes, self.piece):
                    start = piece + lane * 16
                    words = self.part(source, rows, given, start, row_bytes)
                    self.store_piece(place, start, row_bytes, words, row_bytes > 0)
        if cutlass.const_expr(self.gradients):
            from_here = source[3][0].toint() + (Int64(target) * capacity + first) * (self.topk * 4)
            place = there + layout.weights + (Int64(rank) * capacity + first) * (self.topk * 4)
            for choice in cutlass.range(at * WARP + lane, CHUNK * self.topk, CHUNK * WARP):
                lanes.store(place + Int64(choice) * 4, lanes.load(from_here + Int64(choice) * 4, 4), 4)

    def soon(self, source: tuple, rows: list, row_bytes: Int32, there) -> None:
        """Asks L2 for rows, by lane, if they are `there`."""
        for row in rows:
            place = self.row_of(source[0][0].toint(), Int32(row), source[0][1])
            lanes.prefetch(place, row_bytes, (Int32(row) >= 0) & there)

    @cute.jit
    def sum(
        self, window: Int64, source: tuple, indices: cute.Pointer, y: list, chunk: Int32, sizes: tuple, rank: Int32,
        epoch: Int32, failed: Int32, deadline: Int64,
    ):  # fmt: skip
        """A chunk of this rank's tokens from the parts of all ranks; NaN where one did not come."""
        tokens, row_bytes, capacity = sizes
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        layout = self.regions(capacity, row_bytes)
        known = None
        if cutlass.const_expr(self.wide and self.warps == CHUNK):  # read while the others' rows are under way
            known = self.needed(source, indices, chunk * CHUNK + warp, sizes, rank, lane)
            self.soon(source, known[1], row_bytes, chunk * CHUNK + warp < tokens)
        came = Int32(failed == 0)
        if (failed == 0) & (chunk * CHUNK < tokens) & (thread < self.ranks) & (thread != rank):
            came = signals.wait(window + layout.flags + Int64(thread * chunks(capacity) + chunk) * 4, epoch, deadline)
            signals.fail(window + STATUS, thread, SENDING, epoch, came == 0)
        fine = signals.every(came)
        if cutlass.const_expr(self.wide):
            for at in cutlass.range(warp, CHUNK, self.warps):
                token = chunk * CHUNK + at
                if token < tokens:
                    if cutlass.const_expr(known is None):
                        self.add(window, source, y, self.needed(source, indices, token, sizes, rank, lane), token,
                                 sizes, rank, fine)  # fmt: skip
                    else:
                        self.add(window, source, y, known, token, sizes, rank, fine)
        if cutlass.const_expr(self.gradients):
            self.gather_gradients(window, indices, source[3], chunk, sizes, rank, fine)

    @cute.jit
    def add(
        self, window: Int64, source: tuple, y: list, needed: tuple, token: Int32, sizes: tuple, rank: Int32, fine: Int32
    ):
        """One token's row of y, from `needed`'s own part and what the other ranks sent."""
        _, row_bytes, capacity = sizes
        owners, rows, given = needed
        lane = cute.arch.lane_idx()
        begin = choose(fine, Float32(0.0), lanes.float_of(Uint32(NAN)))
        from_others = window + self.regions(capacity, row_bytes).rows
        for piece in cutlass.range(0, row_bytes, self.piece):
            first = piece + lane * 16
            words_here = self.part(source, rows, given, first, row_bytes)
            sums = [begin] * (self.piece // WARP // self.size)
            for other in cutlass.range_constexpr(self.ranks):
                sent = (((owners >> other) & 1) != 0) & (fine != 0) & (rank != other)
                place = from_others + (Int64(other) * capacity + token) * row_bytes + Int64(first)
                words = self.received(place, first, row_bytes, sent)
                words = [cutlass.select_(rank == other, a, b) for a, b in zip(words_here, words, strict=True)]
                sums = [value + total for value, total in zip(self.floats(words), sums, strict=True)]
            for addend, stride in y[1:]:
                words = self.load_piece(addend.toint() + Int64(token) * stride, first, row_bytes)
                sums = [total + value for value, total in zip(self.floats(words), sums, strict=True)]
            base, stride = y[0]
            result = lanes.pack(sums, self.dtype)
            self.store_piece(base.toint() + Int64(token) * stride, first, row_bytes, result, fine >= 0)

    def needed(self, source: tuple, indices: cute.Pointer, token: Int32, sizes: tuple, rank: Int32, lane: Int32):
        """For a token of this rank: the ranks of its experts, and rows and weights of its choices here, by lane."""
        tokens, _, capacity = sizes
        # What does not exist is read from somewhere else, and not used.
        token = cutlass.max(cutlass.min(token, tokens - 1), 0)
        chosen = cutlass.select_(tokens > 0, indices.toint(), source[1].toint())
        rows, given = self.placed(source, rank * capacity + token, lane)
        return self.owners(chosen, token, lane), rows, given

    def received(self, place: Int64, first: Int32, row_bytes: Int32, sent) -> list:
        """`load_piece` of what a peer stored while this kernel ran."""
        words: list = []
        for line in range(self.lines):
            words += signals.load_received(place, (first + line * LINE < row_bytes) & sent, line * LINE)
        return words

    @cute.jit
    def gather_gradients(
        self,
        window: Int64,
        indices: cute.Pointer,
        gradients: tuple,
        chunk: Int32,
        sizes: tuple,
        rank: Int32,
        fine: Int32,
    ):
        """Each choice's gradient from the rank of its expert; 0 where it has none."""
        tokens, row_bytes, capacity = sizes
        grad_weights, returned = gradients
        thread, _, _ = cute.arch.thread_idx()
        weights = self.regions(capacity, row_bytes).weights
        for at in cutlass.range(thread, CHUNK * self.topk, self.threads):
            choice = chunk * (CHUNK * self.topk) + at
            there = choice < tokens * self.topk
            expert = lanes.load(indices.toint() + Int64(choice) * 4, 4, there, -1)[0]
            owner = Int32(expert // Uint32(self.local))
            known = there & (expert < Uint32(self.experts)) & (fine != 0)
            source = Int64(owner) * capacity * (self.topk * 4) + Int64(choice) * 4
            sent = signals.load_word(window + weights + source, known & (owner != rank))
            local = lanes.load(grad_weights.toint() + source, 4, known & (owner == rank))[0]
            value = cutlass.select_(fine != 0, sent | local, Uint32(NAN))
            lanes.store(returned.toint() + Int64(choice) * 4, [value], 4, there)


def over(epoch: Int32, rank: Int32) -> Int64:
    """Where the word of a rank's overflow in a launch lies in a window."""
    return OVER + Int64((epoch & 1) * (OVER - OPEN) + rank * 4)
