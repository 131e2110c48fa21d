"""The fields of a tensor map, read out of the eight words that host code fills in, or has the driver encode.

The layout is that of `fusekit.abi.tensormap`, its words of 32 bits in pairs. Two bits that the encoder keeps for itself
are not looked at; any other bit that no field explains is an error. A field that host code cuts to its width is taken
for the whole value: a launcher refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusekit.abi import RecordError
from fusekit.abi.tensormap import DEFINED_BYTES, ENCODER_BITS, MAX_RANK, TensorMap, decode
from fusekit.compiler.hostcode.bits import Bits
from fusekit.compiler.hostcode.encoded import WORD, Encoded
from fusekit.compiler.hostcode.lower import Lowering
from fusekit.compiler.hostcode.terms import Algebra, Term
from fusekit.errors import BuildError

WORDS = 8  # of 64 bits that describe the tensor; as many more are the encoder's own
_CONTROL = 2  # the word of rank, type, swizzle and other modes
_ADDRESS_BITS, _STRIDE_BITS, _DIM_BITS = 57, 40, 32


@dataclass(frozen=True, slots=True)
class MapFields:
    """A tensor map's fields; `modes` has those that are constants (its address, dims and strides mean nothing).

    raw: whether the address may wrap below 0, which the driver's encoder refuses.
    """

    address: Term
    dims: tuple[Term, ...]
    strides: tuple[Term, ...]
    modes: TensorMap
    raw: bool


def read(words: Sequence[Bits], lowering: Lowering) -> MapFields:
    """The fields of the descriptor in `words`, 64 bits each. Raises BuildError for what no field explains."""
    words = list(words)
    if words[0].op == WORD:
        return _encoded(words, lowering)
    words[_CONTROL // 2] = _without(words[_CONTROL // 2], ENCODER_BITS, lowering)
    fields = _Fields(lowering.algebra, [lowering.lower(word) for word in words])
    data = bytearray(DEFINED_BYTES)
    for word in (_CONTROL, 13, 14, 15):
        data[4 * word : 4 * word + 4] = fields.constant(word).to_bytes(4, "little")
    try:
        modes = decode(bytes(data))
    except RecordError as error:
        raise BuildError(f"host code: {error}") from error
    rank = modes.rank
    if rank == 1:
        fields.zero(7)
    for word in (*range(3 + rank - 1, 3 + MAX_RANK - 1), *range(8 + rank, 8 + MAX_RANK)):
        fields.zero(word)
    address = fields.whole(fields.pair(0), _ADDRESS_BITS)
    return MapFields(
        address,
        tuple(fields.dim(index) for index in range(rank)),
        tuple(fields.stride(index, last=index == rank - 2) for index in range(rank - 1)),
        modes,
        raw=address.low < 0,
    )


def _encoded(words: Sequence[Bits], lowering: Lowering) -> MapFields:
    """The fields of a descriptor that the driver encodes."""
    encoded: Encoded = words[0].args[0]
    if any(word is not lowering.graph.make(WORD, 64, encoded, index) for index, word in enumerate(words)):
        raise BuildError("host code: it changes a tensor map that the driver encoded; encode one for each launch")
    modes = TensorMap(
        0, dims=(1,) * len(encoded.dims), strides=(0,) * len(encoded.strides), box=encoded.box,
        element_strides=encoded.element_strides, **encoded.modes,
    )  # fmt: skip
    dims, strides = (tuple(map(lowering.unsigned, items)) for items in (encoded.dims, encoded.strides))
    return MapFields(lowering.lower(encoded.address), dims, strides, modes, raw=False)


def _without(word: Bits, mask: int, lowering: Lowering) -> Bits:
    """`word` without single bits in `mask` that were put into it: no launch depends on them."""
    if word.op == "or":
        a, b = (_without(item, mask, lowering) for item in word.args)
        return lowering.graph.make("or", word.width, a, b)
    flag = word.op == "shl" and word.args[1].is_const and word.args[0].op == "zext" and word.args[0].args[0].width == 1
    return lowering.graph.const(0, word.width) if flag and 1 << word.args[1].number & mask else word


class _Fields:
    def __init__(self, algebra: Algebra, words: list[Term]) -> None:
        self._algebra, self._words = algebra, words

    def pair(self, word: int) -> Term:
        """Words `word` and `word` + 1."""
        return self._cut(self._words[word // 2], 0, 64)

    def bits(self, word: int, low: int, high: int) -> Term:
        """Bits [low, high) of a word."""
        shift = 32 * (word % 2)
        return self._cut(self._words[word // 2], shift + low, shift + high)

    def _cut(self, term: Term, low: int, high: int) -> Term:
        algebra = self._algebra
        return algebra.floordiv(algebra.mod(term, algebra.const(1 << high)), algebra.const(1 << low))

    def constant(self, word: int) -> int:
        """A word that does not depend on the arguments."""
        term = self.bits(word, 0, 32)
        if not term.is_const:
            raise BuildError(f"host code: tensor map: word {word} depends on the arguments; {_KNOWN}")
        return term.value

    def zero(self, word: int) -> None:
        if self.bits(word, 0, 32) is not self._algebra.const(0):
            raise BuildError(f"host code: tensor map: word {word} has more than its fields; {_KNOWN}")

    def dim(self, index: int) -> Term:
        """The extent of a dim, of which the map has one less."""
        return self._algebra.plus(self.whole(self.bits(8 + index, 0, 32), _DIM_BITS), 1)

    def stride(self, index: int, last: bool) -> Term:
        """The stride of dim `index` + 1 in bytes, of which bits 4-35 and 36-39 are apart.

        The last one may run on into bits that belong to no field: a launcher refuses one of more than 40 bits.
        """
        low = self.bits(3 + index, 0, 32)
        # One of more than 32 bits was cut for this word; one that was computed in 32 bits has nothing in the other.
        for units in (low.args[0], low) if low.op == "mod" else (low,):
            whole = self._algebra.scale(units, 16)
            if self._cut(whole, 4, 36) is low and self._rest_is(whole, 4 * index, last):
                return self._near_zero(whole, _STRIDE_BITS)
        raise BuildError(f"host code: tensor map: the two parts of stride {index} are not of one value; {_KNOWN}")

    def _rest_is(self, stride: Term, at: int, last: bool) -> bool:
        """Whether the bits from `at` of word 7 on are the upper bits of `stride`."""
        if not last:
            return self.bits(7, at, at + 4) is self._cut(stride, 36, 40)
        rest = self.bits(7, at, 32)
        return rest is self._cut(stride, 36, 40) or rest is self._cut(stride, 36, 68 - at)

    def whole(self, term: Term, bits: int) -> Term:
        """The value that was cut to `bits` bits."""
        constant, parts = self._algebra.linear(term)
        if constant == 0 and len(parts) == 1:
            ((part, factor),) = parts.items()
            if part.op == "mod" and part.args[1].is_const and factor * part.args[1].value == 1 << bits:
                return self._near_zero(self._algebra.scale(part.args[0], factor), bits)
        return term

    def _near_zero(self, term: Term, bits: int) -> Term:
        """Its constant is known modulo 2**bits only: a negative one comes back as such."""
        constant, _ = self._algebra.linear(term)
        constant %= 1 << bits
        return self._algebra.plus(term, -(1 << bits)) if constant >> bits - 1 else term


_KNOWN = "only descriptors as cuTensorMapEncodeTiled makes them are known"
