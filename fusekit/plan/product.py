"""The facts of a GEMM in its spec, before any operand is asked: types, sides of a tile, columns of the product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusekit.dtypes import DTYPES
from fusekit.plan.activations import Kind, kind
from fusekit.plan.arch import ARCHITECTURES
from fusekit.plan.quant import MX_SIDE, W_FORMAT, Quant

if TYPE_CHECKING:
    from fusekit.abi import Expr

VECTOR_BYTES = 16  # the granule of TMA addresses and strides


class Product:
    """The product of `spec`: a KernelSpec, or anything that has its attributes. tile and cluster are (M, N).

    epilogue: "forward", "backward" (after the derivative of an activation) or "wgrad". kind: the activation. pingpong:
    each consumer warpgroup has tiles of its own; swapped: tiles have few rows, and those of w take the side of the MMA
    that has 64.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.arch = ARCHITECTURES[spec.arch]
        self.dtype: str = spec.dtype
        self.out_dtype: str = spec.out_dtype
        self.tile: tuple[int, int] = spec.tile
        self.cluster: tuple[int, int] = spec.cluster
        self.swapped: bool = spec.mainloop == "swap-ab"
        self.dynamic: bool = spec.schedule == "dynamic"
        self.epilogue: str = spec.epilogue
        self.grouped: bool = spec.grouped
        self.quant: Quant = spec.quant
        self.pingpong: bool = spec.mainloop == "pingpong" or (self.swapped and not self._shares)
        # 16-bit operands of a weight gradient have a row for each token, FP8 operands a column.
        self.b_major: str = "n" if self.wgrad and not self.quant.coded_inputs else spec.b_major
        self.glu_layout: str = spec.glu_layout
        self.gather: str = spec.operands["gather"]
        self.kind: Kind = kind(spec.activation.kind)
        self.approximate: str = spec.activation.approximate

    @property
    def wgrad(self) -> bool:
        """Whether the reduction runs over rows."""
        return self.epilogue == "wgrad"

    @property
    def backward(self) -> bool:
        """Whether it takes a gradient through an activation."""
        return self.epilogue == "backward"

    @property
    def halved(self) -> bool:
        """Whether two columns of the product, gate and up, make one column of the output."""
        return self.epilogue == "forward" and self.kind.gated

    @property
    def sides(self) -> int:
        """Columns of z for each column of da (backward) or of the output: 2 where gate and up are apart."""
        return 2 if self.kind.gated else 1

    @property
    def factors(self) -> tuple[str, str]:
        """Types of x and w; of grouped-wgrad, dy and x."""
        if self.quant.weights_alone:
            return self.dtype, self.quant.w_format
        return (self.quant.x_format, W_FORMAT) if self.quant.coded_inputs else (self.dtype, self.dtype)

    @property
    def element(self) -> int:
        """Bytes of an element of the factors; of x, where w is FP8 values alone."""
        return DTYPES[self.factors[0]].bytes

    @property
    def vector(self) -> int:
        """Elements of the factors in 16 bytes; of w, where they are more; of MXFP4, of two scales."""
        return 2 * MX_SIDE if self.quant.mx_weights else VECTOR_BYTES // self.w_element

    @property
    def w_element(self) -> int:
        """Bytes of an element of w."""
        return DTYPES[self.factors[1]].bytes

    @property
    def exchanged(self) -> bool:
        """Whether rows of w take the side of the MMA that has 64, so that products are turned before the epilogue."""
        return self.swapped or self.quant.weights_alone

    @property
    def _shares(self) -> bool:
        """Whether warpgroups that make factors of w share a tile of few rows: its columns are enough for both."""
        return self.quant.weights_alone and self.tile[1] % (self.arch.consumer_warpgroups * self.arch.mma_rows) == 0

    @property
    def alternates(self) -> bool:
        """Whether both consumer warpgroups multiply a tile, and finish one after the other, all rows of it."""
        return self.swapped and not self.pingpong

    @property
    def tile_k(self) -> int:
        """Elements of the reduction in one stage: one swizzle row of x; two, where w is FP8 or MXFP4."""
        return (2 if self.quant.weights_alone else 1) * self.arch.swizzle_bytes // self.element

    @property
    def w_tile_k(self) -> int:
        """Elements of w's tensor in a row of one stage: bytes of two values of MXFP4."""
        return self.tile_k // (2 if self.quant.mx_weights else 1)

    @property
    def out_tile_n(self) -> int:
        """Columns of the output that one tile makes."""
        return self.tile[1] // 2 if self.halved else self.tile[1]

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def n(self) -> Expr:
        """Columns of the product."""
        if self.backward:
            return self.width
        return ["mul", 2, "I"] if self.kind.gated else "N"

    @property
    def width(self) -> Expr:
        """Columns of y."""
        return "I" if self.kind.gated else "N"

    @property
    def z_width(self) -> Expr:
        """Columns of z."""
        return ["mul", 2, "I"] if self.kind.gated else "N"

    @property
    def leading(self) -> tuple[Expr, ...]:
        """The dim of groups, where there are any."""
        return ("E",) if self.grouped else ()
