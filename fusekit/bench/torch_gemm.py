"""What a PyTorch program runs instead of one fused GEMM: a matrix product, and the rest of the epilogue after it.

`how` says which product: "grouped" is torch._grouped_mm, counts on the device; "loop" one cuBLAS call a group, with
counts that the host would first have to wait for; "compile" is "grouped" with the rest under torch.compile (of a
backward pass, the activation and its gradient). The rest is plain eager code on 16-bit tensors, gradients by autograd,
as a model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusekit.dtypes import DTYPES as ROWS
from fusekit.errors import UsageError
from fusekit.interop.torch import DTYPES
from fusekit.plan.activations import kind as kind_of
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import ROW, SIDE, Quant
from fusekit.reference.mxfp4 import E2M1
from fusekit.runtime import DeviceArray

_CHUNK = 1 << 26  # elements that are widened at a time


class _Memory:
    """An array as ``__cuda_array_interface__``, as integers: it has no bfloat16."""

    def __init__(self, array: DeviceArray) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": f"<i{ROWS[array.dtype].bytes}", "data": (array.data_ptr(), False),
            "version": 3,
        }  # fmt: skip


def view(array: DeviceArray) -> Tensor:
    """The array's own memory as a tensor; the array must outlive it."""
    return torch.as_tensor(_Memory(array), device=f"cuda:{array.device}").view(DTYPES[array.dtype])


def on_stream(work: Callable[[], Any], device: int) -> Callable[[int], Any]:
    """`work` on PyTorch's side, as something that is queued in the stream of a handle."""

    def run(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
            work()

    return run


def release() -> None:
    """Gives back the device memory that PyTorch keeps for later: others need it too."""
    torch.cuda.empty_cache()


class Dense:
    """One dense product of random operands, [rows, k] times [n, k] transposed, through cuBLAS: the yardstick."""

    def __init__(self, rows: int, n: int, k: int, dtype: str, device: str) -> None:
        kind = DTYPES[dtype]
        self._x = torch.randn(rows, k, dtype=kind, device=device)
        self._w = torch.randn(n, k, dtype=kind, device=device)
        self._y = torch.empty(rows, n, dtype=kind, device=device)
        self.flops = 2 * rows * n * k

    def __call__(self) -> Tensor:
        return torch.mm(self._x, self._w.T, out=self._y)


class Unfused:
    """The unfused twin of a GEMM of `spec` (canonical form); calling it gives its outputs by argument name.

    tensors: the kernel's arguments. scalars: alpha and the activation's. sizes: rows of each group, used by "loop".
    """

    def __init__(
        self, spec: Mapping[str, Any], tensors: Mapping[str, Tensor], scalars: Mapping[str, float],
        sizes: Sequence[int], how: str = "grouped",
    ) -> None:  # fmt: skip
        self.spec, self.how, self._scalars = spec, how, dict(scalars)
        self._t = dict(tensors)
        self._gathered = spec.get("gather", "none")
        self._tokens = tensors.get(self._gathered)
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + int(size))
        backward, compiled = kind_of(spec["activation"]["kind"]).backward, how == "compile"
        activation = _Activation(spec, self._scalars)
        self._activation: Callable[[Tensor], Tensor] = (
            torch.compile(activation, dynamic=False) if compiled and backward else activation
        )
        first = next(iter(tensors.values()))
        operation = OPERATIONS[spec["op"]]
        self._grouped, self._wgrad = bool(operation.ragged), operation.reduces_rows
        by_row = self._grouped and (not self._wgrad or spec["dbias"])
        self._group_of_row = (
            torch.repeat_interleave(torch.tensor([int(size) for size in sizes])).to(first.device) if by_row else None
        )
        if spec["accumulate"]:
            self._main = {name: self._t[name].clone() for name in ("dw", "dbias") if name in self._t}
        rest = self._backward if backward else self._forward
        self._rest = torch.compile(rest, dynamic=False) if compiled and not backward else rest

    def __call__(self) -> dict[str, Tensor]:
        if self._tokens is not None:
            self._t[self._gathered] = self._tokens.index_select(0, self._t["index"])
        if self._wgrad:
            return {"dw": self._weight_gradient()} | ({"dbias": self._bias_gradient()} if self.spec["dbias"] else {})
        return self._rest(self._product())

    def _product(self) -> Tensor:
        if Quant.of(self.spec["quant"]).coded_inputs:
            return self._scaled_product()
        x, w = self._t["x"], self._t["w"]
        if Quant.of(self.spec["quant"]).weights_alone:
            w = self._dequantised(w, x.dtype)
        w = w.transpose(-1, -2) if self.spec["b_major"] == "k" else w
        if not self._grouped:
            return torch.mm(x, w)
        if self.how != "loop":
            return torch._grouped_mm(x, w, offs=self._t["offsets"])
        out = torch.empty(x.shape[0], w.shape[-1], dtype=x.dtype, device=x.device)
        for group, (start, end) in enumerate(pairwise(self._ends)):
            if end > start:
                torch.mm(x[start:end], w[group], out=out[start:end])
        return out

    def _scaled_product(self) -> Tensor:
        """PyTorch's FP8 GEMM with scales of rows and columns; for block scales a GEMM of the dequantised values."""
        quant, grouped = Quant.of(self.spec["quant"]), self._grouped
        x, w, x_s, w_s = (self._t[name] for name in ("x", "w", "x_s", "w_s"))
        dtype = DTYPES[self.spec["dtype"]]
        if quant.by_block:
            x = (x.float() * x_s.T.repeat_interleave(SIDE, 1)[:, : x.shape[1]]).to(dtype)
            w = self._dequantised(w, dtype).transpose(-1, -2)
            return torch._grouped_mm(x, w, offs=self._t["offsets"]) if grouped else torch.mm(x, w)
        if quant.inputs != ROW:
            x_s = x_s.expand(x.shape[0]).contiguous()
            w_s = w_s[:, None].expand(w.shape[:-1]).contiguous() if grouped else w_s.expand(w.shape[0]).contiguous()
        options = {"out_dtype": dtype, "use_fast_accum": not quant.promoted}
        w = w.transpose(-1, -2)
        if grouped:
            return torch._scaled_grouped_mm(x, w, x_s, w_s, offs=self._t["offsets"], **options)
        return torch._scaled_mm(x, w, x_s[:, None], w_s[None], **options)

    def _dequantised(self, w: Tensor, dtype: Any) -> Tensor:
        """FP8 weights times their scales of 128 x 128; MXFP4 weights times theirs of 32."""
        if Quant.of(self.spec["quant"]).mx_weights:
            low, high = w & 15, w >> 4
            table = torch.tensor(E2M1, dtype=torch.float32, device=w.device)
            values = table[torch.stack([low, high], -1).flatten(-2).long()]
            return torch.ldexp(values, self._t["w_s"].int()[..., None] - 127).flatten(-2).to(dtype)
        scale = self._t["w_s"].repeat_interleave(SIDE, -2)[..., : w.shape[-2], :]
        return (w.float() * scale.repeat_interleave(SIDE, -1)[..., : w.shape[-1]]).to(dtype)

    def _weight_gradient(self) -> Tensor:
        dy, x = self._t["dy"], self._t["x"]
        if not self._grouped:
            dw = torch.mm(dy.T, x)
        elif self.how != "loop":
            dw = torch._grouped_mm(dy.T, x, offs=self._t["offsets"])
        else:
            dw = torch.zeros(len(self._ends) - 1, dy.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
            for group, (start, end) in enumerate(pairwise(self._ends)):
                if end > start:
                    torch.mm(dy[start:end].T, x[start:end], out=dw[group])
        if self.spec["accumulate"]:
            return self._main["dw"].add_(dw)
        return dw.to(DTYPES[self.spec["out_dtype"]])

    def _bias_gradient(self) -> Tensor:
        dy = self._t["dy"].float()
        sums = self._sums_of_groups(dy) if self._grouped else dy.sum(dim=0)
        return self._main["dbias"].add_(sums) if self.spec["accumulate"] else sums

    def _sums_of_groups(self, rows: Tensor) -> Tensor:
        sums = torch.zeros(len(self._ends) - 1, rows.shape[1], device=rows.device)
        return sums.index_add_(0, self._group_of_row, rows)

    def _scaled(self, product: Tensor) -> Tensor:
        if self.spec["alpha"] == "scalar":
            return product * self._scalars["alpha"]
        if self.spec["alpha"] == "group":
            return (product * self._t["alpha"][self._group_of_row][:, None]).to(product.dtype)
        return product

    def _forward(self, product: Tensor) -> dict[str, Tensor]:
        z = self._scaled(product)
        if self.spec["bias"]:
            bias = self._t["bias"]
            z = z + (bias if self._group_of_row is None else bias[self._group_of_row])
        y = self._activation(z)
        if self.spec["row_scale"]:
            y = y * self._t["row_scale"][:, None]
        outputs = {"y": y.to(DTYPES[self.spec["out_dtype"]])}
        if self.spec["save_preactivation"]:
            outputs["preactivation"] = z
        return outputs

    def _backward(self, product: Tensor) -> dict[str, Tensor]:
        gradient = self._scaled(product)
        z = self._t["preactivation"].detach().requires_grad_()
        y = self._activation(z)
        outputs: dict[str, Tensor] = {}
        value = y.detach()
        if self.spec["dprob"]:
            outputs["dprob"] = (gradient.float() * value.float()).sum(dim=-1)
        if self.spec["row_scale"]:
            scale = self._t["row_scale"][:, None]
            gradient, value = (gradient * scale).to(y.dtype), (value * scale).to(y.dtype)
        (outputs["dz"],) = torch.autograd.grad(y, z, gradient)
        if self.spec["recompute"]:
            outputs["y"] = value.to(DTYPES[self.spec["out_dtype"]])
        if self.spec["dbias"]:
            dz = outputs["dz"].float()
            outputs["dbias"] = dz.sum(dim=0) if self._group_of_row is None else self._sums_of_groups(dz)
        return outputs


class _Activation:
    """The activation of a spec, forward; of a backward spec the one whose derivative it is."""

    def __init__(self, spec: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        kind, self._layout = kind_of(spec["activation"]["kind"]), spec["glu_layout"]
        self._gated = kind.gated
        self._approximate = spec["activation"]["approximate"]
        self._alpha = float(scalars.get("act_alpha", 1.0))
        self._limit = float(scalars.get("act_limit", float("inf")))
        self._up_offset = float(scalars.get("act_up_offset", 0.0))
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "identity": lambda z: z,
            "relu": functional.relu,
            "srelu": lambda z: functional.relu(z).square(),
            "silu": functional.silu,
            "gelu": self._gelu,
            "swiglu": self._swish,
            "geglu": self._gelu,
            "reglu": functional.relu,
        }
        if kind.function not in functions:
            raise UsageError(f"activation {kind.function} is of another package, and has no code for PyTorch here")
        self._function = functions[kind.function]

    def __call__(self, z: Tensor) -> Tensor:
        if not self._gated:
            return self._function(z)
        gate, up = self._split(z)
        if self._limit != float("inf"):
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return self._function(gate) * (up + self._up_offset if self._up_offset else up)

    def _split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self._layout == "concat":
            gate, up = z.chunk(2, dim=-1)
            return gate, up
        if self._layout == "interleaved":
            return z[..., 0::2], z[..., 1::2]
        gate, up = z.unflatten(-1, (-1, 2, 32)).unbind(-2)
        return gate.flatten(-2), up.flatten(-2)

    def _gelu(self, z: Tensor) -> Tensor:
        return functional.gelu(z, approximate=self._approximate)

    def _swish(self, gate: Tensor) -> Tensor:
        return functional.silu(gate) if self._alpha == 1.0 else gate * torch.sigmoid(self._alpha * gate)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius distance, in float32 a chunk at a time; NaN where either holds one."""
    got, want = got.reshape(-1), want.reshape(-1)
    apart = torch.zeros((), dtype=torch.float64, device=got.device)
    size = torch.zeros_like(apart)
    for start in range(0, got.numel(), _CHUNK):
        a, b = got[start : start + _CHUNK].float(), want[start : start + _CHUNK].float()
        apart += (a - b).square().sum(dtype=torch.float64)
        size += b.square().sum(dtype=torch.float64)
    return float((apart / size.clamp(min=1e-300)).sqrt())
