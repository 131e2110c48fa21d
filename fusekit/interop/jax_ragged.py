"""jax.lax.ragged_dot and a grouped SwiGLU MLP, with gradients, by the kernels of `ragged-dot` in the store.

    y = fusekit.interop.jax.ragged_dot(x, w, group_sizes)               # x [M, K], w [E, K, N], group_sizes [E]
    y = tokamax.ragged_dot(x, w, group_sizes, implementation=[tokamax_ragged_dot, "triton", "xla"])

The weights lie as JAX programs have them, and nothing is transposed or copied. Rows after the last group are zeros, as
JAX defines it; they are cleared behind the GEMM, by a launch that reads the groups' end on the device. Without a GPU
the functions are those of JAX itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from fusekit.errors import ArgumentError, FusekitError
from fusekit.interop.jax_calls import operator
from fusekit.library import Library, default_library
from fusekit.runtime import Kernel

FILE = "ragged-dot"
_ALIGNED = 8  # elements: rows are multiples of 16 bytes
_BF16 = jnp.dtype("bfloat16")
_DIMS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


class UnsupportedError(ArgumentError, NotImplementedError):
    """What the kernels do not compute. `jax.lax.ragged_dot` does, so programs that try several take the next."""


def ragged_dot(
    lhs: Any, rhs: Any, group_sizes: Any, precision: Any = None, preferred_element_type: Any = None,
    group_offset: Any = None, out_sharding: Any = None, *, library: Library | None = None,
) -> Any:  # fmt: skip
    """`jax.lax.ragged_dot`: the rows of each group of lhs times the group's matrix of rhs, summed in float32.

    Inside jax.jit, jax.grad and jax.shard_map. Gradients are bf16, and with a float32 result its gradient is rounded to
    bf16 before it is multiplied. The bits of a row depend on that row alone.

    Parameters
    ----------
    lhs : array, bf16 [M, K]
    rhs : array, bf16 [E, K, N]
        K and N are multiples of 8.
    group_sizes : array, int [E]
        Rows of each group, on the device. Rows of lhs after their sum give zeros.
    precision : optional
        None or "default": there is only one.
    preferred_element_type : dtype, optional
        bfloat16 (the default) or float32.
    group_offset, out_sharding : None
        As in JAX; not supported.
    library : Library, optional
        Has the kernels, `fusekit build ragged-dot`. Default: that of the environment.

    Returns
    -------
    array, [M, N]

    Raises
    ------
    UnsupportedError
        For what the kernels do not compute; also a NotImplementedError.
    ArgumentError
        Shapes that do not fit each other.
    NotBuiltError, ArchMismatchError
        As `Library.load`.

    Sources
    -------
    jax.lax.ragged_dot, JAX 0.10.
    """
    out = jnp.dtype(preferred_element_type or _BF16)
    _check(lhs, rhs, group_sizes)
    _refuse("precision", precision, precision in (None, "default", jax.lax.Precision.DEFAULT), "leave it out")
    _refuse("preferred_element_type", out, out in (_BF16, jnp.dtype("float32")), "bfloat16 or float32")
    _refuse("group_offset", group_offset, group_offset is None, "leave it out")
    _refuse("out_sharding", out_sharding, out_sharding is None, "use jax.shard_map")
    if not _on_gpu():
        return jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=out)
    return _dot(library or default_library(), out.name, lhs, rhs, _offsets(group_sizes))


def grouped_mlp(x: Any, w13: Any, w2: Any, group_sizes: Any, *, library: Library | None = None) -> Any:
    """A SwiGLU MLP of each group: y = (silu(x . gate) * (x . up)) . w2, with the activation inside the first GEMM.

    Three kernels forward and five backward; the backward pass computes the activation again from the stored product.

    Parameters
    ----------
    x : array, bf16 [M, H]
        Rows in the order of their groups.
    w13 : array, bf16 [E, H, 2 I]
        Gate and up projection, gate first. H and I are multiples of 8.
    w2 : array, bf16 [E, I, H]
    group_sizes : array, int [E]
        Rows of each group; rows of x after their sum give zeros.
    library : Library, optional
        As for `ragged_dot`.

    Returns
    -------
    array, bf16 [M, H]

    Raises
    ------
    UnsupportedError, ArgumentError, NotBuiltError, ArchMismatchError
        As `ragged_dot`.
    """
    _check(x, w13, group_sizes)
    rows, half = jnp.shape(x)[0], jnp.shape(w13)[2] // 2
    if jnp.shape(w13)[2] % (2 * _ALIGNED):
        _refuse("w13", jnp.shape(w13), False, f"[E, H, 2 I], I a multiple of {_ALIGNED}")
    _check(jax.ShapeDtypeStruct((rows, half), x.dtype), w2, group_sizes)
    if jnp.shape(w2)[2] != jnp.shape(x)[1]:
        raise ArgumentError(
            f"w2 is {list(jnp.shape(w2))}; it must be [E, I, H] with H = {jnp.shape(x)[1]}", argument="w2"
        )
    if not _on_gpu():
        gate, up = jnp.split(jax.lax.ragged_dot(x, w13, group_sizes, preferred_element_type=jnp.float32), 2, axis=1)
        return jax.lax.ragged_dot((jax.nn.silu(gate) * up).astype(x.dtype), w2, group_sizes)
    return _mlp(library or default_library(), x, w13, w2, _offsets(group_sizes))


def tokamax_ragged_dot(
    lhs: Any, rhs: Any, *, group_sizes: Any, ragged_dot_dimension_numbers: Any = _DIMS, precision: Any = None,
    preferred_element_type: Any = None, activation: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """`ragged_dot` as an element of `implementation` of tokamax.ragged_dot (tokamax 0.0.12).

    Raises NotImplementedError for all that it does not compute, so that tokamax takes the next implementation.
    """
    if ragged_dot_dimension_numbers != _DIMS:
        raise NotImplementedError("fusekit multiplies lhs [M, K] by rhs [E, K, N], with groups of rows")
    sizes = getattr(group_sizes, "value", group_sizes)  # tokamax's GroupSizes has a typical value next to it
    out = preferred_element_type or _BF16
    try:
        if activation is None:
            return ragged_dot(lhs, rhs, sizes, precision, out)
        product = ragged_dot(lhs, rhs, sizes, precision, jnp.float32)
    except FusekitError as error:
        raise NotImplementedError(str(error)) from error
    return activation(product).astype(out)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(library: Library, out: str, lhs: Any, rhs: Any, offsets: Any) -> Any:
    (m, k), (e, _, n) = lhs.shape, rhs.shape
    name = "dot" if out == _BF16.name else "dot-f32"
    return _kernel(library, name, e, m, n, k)(x=lhs, w=rhs, offsets=offsets)


def _dot_forward(library: Library, out: str, lhs: Any, rhs: Any, offsets: Any) -> tuple[Any, Any]:
    return _dot(library, out, lhs, rhs, offsets), (lhs, rhs, offsets)


def _dot_backward(library: Library, out: str, residual: Any, dy: Any) -> tuple[Any, Any, None]:
    lhs, rhs, offsets = residual
    dy = dy.astype(_BF16)
    return _dlhs(library, dy, rhs, offsets), _drhs(library, lhs, dy, offsets), None


_dot.defvjp(_dot_forward, _dot_backward)


def _dlhs(library: Library, dy: Any, rhs: Any, offsets: Any) -> Any:
    (m, n), (e, k, _) = dy.shape, rhs.shape
    return _kernel(library, "dlhs", e, m, k, n)(x=dy, w=rhs, offsets=offsets)


def _drhs(library: Library, lhs: Any, dy: Any, offsets: Any) -> Any:
    (m, k), n = lhs.shape, dy.shape[1]
    return _kernel(library, "drhs", offsets.shape[0], m, k, n)(dy=lhs, x=dy, offsets=offsets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(library: Library, x: Any, w13: Any, w2: Any, offsets: Any) -> Any:
    a = _kernel(library, "swiglu-infer", *_sizes(x, w13))(x=x, w=w13, offsets=offsets)
    return _dot(library, _BF16.name, a, w2, offsets)


def _mlp_forward(library: Library, x: Any, w13: Any, w2: Any, offsets: Any) -> tuple[Any, Any]:
    a, z = _kernel(library, "swiglu", *_sizes(x, w13))(x=x, w=w13, offsets=offsets)
    return _dot(library, _BF16.name, a, w2, offsets), (x, w13, w2, offsets, z)


def _mlp_backward(library: Library, residual: Any, dy: Any) -> tuple[Any, Any, Any, None]:
    x, w13, w2, offsets, z = residual
    e, i, h = w2.shape
    dz, a = _kernel(library, "dswiglu", e, x.shape[0], i, h)(x=dy, w=w2, preactivation=z, offsets=offsets)
    return _dlhs(library, dz, w13, offsets), _drhs(library, x, dz, offsets), _drhs(library, a, dy, offsets), None


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _sizes(x: Any, w: Any) -> tuple[int, int, int, int]:
    """E, M, N and K of the product."""
    return w.shape[0], x.shape[0], w.shape[2], w.shape[1]


def _offsets(group_sizes: Any) -> Any:
    return jnp.cumsum(group_sizes, dtype=jnp.int32)


def _on_gpu() -> bool:
    return bool(jax.default_backend() == "gpu")


class _Zeroing:
    """A kernel whose result has zeros in its spare rows: `zero` clears them after it."""

    def __init__(self, kernel: Kernel, zero: Kernel) -> None:
        self._kernel, self._zero = kernel, zero

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, *, stream: Any, **arguments: Any) -> None:
        self._kernel(**arguments, stream=stream)
        self._zero(offsets=arguments["offsets"], y=arguments["y"], stream=stream)

    def prepare(self, device: int) -> None:
        self._kernel.prepare(device)
        self._zero.prepare(device)


ZEROS = {"dot": "zero", "dot-f32": "zero-f32", "dlhs": "zero"}  # results that callers see


@cache
def _kernel(library: Library, name: str, e: int, m: int, n: int, k: int) -> Callable[..., Any]:
    """The variant of the kernel `name` for a problem, as a function of arrays."""
    chosen = library.find(f"{FILE}/{name}", problem={"E": e, "M": m, "N": n, "K": k})
    return _operator(library, chosen.name, ZEROS.get(name))


@cache
def _operator(library: Library, name: str, zero: str | None) -> Callable[..., Any]:
    kernel: Any = library.load(name)
    if zero is not None:
        kernel = _Zeroing(kernel, library.load(f"{FILE}/{zero}"))
    return operator(kernel, f"fusekit {id(library):x} {name}")


def _check(lhs: Any, rhs: Any, group_sizes: Any) -> None:
    """Raises ArgumentError for shapes that do not fit each other, UnsupportedError for what no kernel takes."""
    rows, weights, groups = jnp.shape(lhs), jnp.shape(rhs), jnp.shape(group_sizes)
    if len(rows) != 2 or len(weights) != 3 or groups != weights[:1] or rows[1] != weights[1]:
        raise ArgumentError(
            f"shapes {list(rows)}, {list(weights)} and {list(groups)}; they must be [M, K], [E, K, N] and [E]"
        )
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        _refuse(name, array.dtype, array.dtype == _BF16, "bfloat16; cast it")
        even = not array.shape[-1] % _ALIGNED and prod(array.shape[1:]) > 0
        _refuse(name, list(array.shape), even, f"of rows that are a multiple of {_ALIGNED} elements; pad them")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ArgumentError(f"group_sizes is {group_sizes.dtype}; it must be int32", argument="group_sizes")


def _refuse(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise UnsupportedError(
            f"ragged_dot: {name} is {value}; it must be {wanted}, or take jax.lax.ragged_dot", argument=name
        )
