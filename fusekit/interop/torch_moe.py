"""A mixture-of-experts layer, or a dense MLP, as a PyTorch module over a layer of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import floor, log2, prod
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusekit.errors import ArgumentError
from fusekit.interop.torch_layer import DTYPES, casting, operator_of, quantised
from fusekit.layers import Layer
from fusekit.library import default_library
from fusekit.plan.layer.options import MXFP4

_HOLDERS: WeakSet[MoE] = WeakSet()  # modules that hold their weights in FP8
_MORE = {"logits": ("logits",), "choices": ("indices", "weights")}  # arguments of a call after x, by router.input
_BIASES = ("b1", "b2", "router_bias", "expert_bias")
_NAN = 0x7F  # of e4m3, without its sign
_LARGEST = 6.0  # of e2m1
_EXPERTS = ("w1", "w2", "b1", "b2", "w1_s", "w2_s")  # a rank has those of its own experts


class MoE(nn.Module):  # type: ignore[misc]
    """A mixture-of-experts layer or dense MLP of a store, with its parameters and gradients.

        moe = MoE("qwen3-30b-a3b/moe", device="cuda")
        y = moe(hidden_states)

    The layouts of weights are the layer's, as its spec says: w1 [X, N, H] and w2 [X, H, I], or with `b_major = "n"`
    w1 [X, H, N] and w2 [X, I, H]; N = 2I for a gated activation. So a checkpoint loads as it is. A dense projection
    that a checkpoint has as `gate_proj` and `up_proj`, such as the shared expert's, is joined while it is loaded, and
    experts that it has one by one are stacked. With `weights = "fp8-block"` an FP8 checkpoint loads with its scales,
    with `weights = "mxfp4"` one of gpt-oss, `gate_up_proj_blocks`, `gate_up_proj_scales` and so on.

    `forward` has the arguments of a call. The loss of a layer with `router.aux_loss` is already multiplied by
    `aux_coefficient`. Under autocast, x and the parameters are cast to the layer's dtype. The first call for a count of
    tokens loads kernels; before the capture of a CUDA graph, `moe.layer.load(tokens)` does.

    A call keeps x and `layer.sizes(tokens).kept` bytes for the backward pass; without gradients it keeps nothing. The
    parameters of a layer for inference (`keep = "none"`) have `requires_grad = False`.

    Weight gradients have the dtype `grad_dtype` of the layer. If that is float32 and `accumulate` is off, PyTorch
    rounds `.grad` of a bf16 parameter to bf16, unless the parameter sets `grad_dtype = torch.float32`. With
    `accumulate`, they are added to the float32 tensor `main_grad` of each weight, which the caller allocates and fills
    with 0, as Megatron does; `.grad` of these stays None. Biases of projections and router always have a `.grad`.

    With a `recipe`, each call quantises the weights first, unless `quantise` did that for several calls.

    Parameters
    ----------
    layer : Layer or str
        With `kind = "moe"` or `"mlp"`; or the name of one, ``file/layer``, in the default library.
    device, dtype : optional
        Of the parameters. Default dtype: the layer's. With a name and "cpu" the module computes the layer's definition,
        slowly, on tensors in host memory: for tests without a GPU. Then the layer need not be built, and may be one of
        a spec file: ``FILE.toml/layer``.
    names : dict[str, str], optional
        Names of parameters in this module by their names in the layer. Default: Transformers' (`default_names`).
    aux_coefficient : float
        Factor of the load-balancing loss.
    group : torch.distributed.ProcessGroup, optional
        For a layer over ranks: the processes over which its experts are spread (expert parallelism). The module has the
        experts of its rank, and takes its share of a checkpoint that has all.
    timeout : int
        Milliseconds that a launch waits for another rank. A second or so later a call raises PeerTimeoutError.
    cluster_margin : int, optional
        Reserved clusters: each GEMM of forward and backward passes leaves their SMs to kernels of other streams, such
        as NCCL's. Default: the spec's, which is 0. Results have the same bits.
    in_place : bool
        The backward pass writes dz over z, which saves as much memory as z takes. A second backward pass through the
        same call (`retain_graph=True`) then raises ArgumentError.

    Raises
    ------
    ArgumentError
    """

    def __init__(
        self, layer: Layer | str, *, device: Any = None, dtype: Any = None, names: Mapping[str, str] | None = None,
        aux_coefficient: float = 0.001, group: Any = None, timeout: int = 60_000, cluster_margin: int | None = None,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(layer, str):
            on_cpu = device is not None and torch.device(device).type == "cpu"
            layer = default_library().layer(layer, device="cpu" if on_cpu else None)
        if group is not None:
            layer = over(layer, group, timeout)
        self.operator = operator_of(layer, cluster_margin, in_place)
        layer = self.operator.layer  # an equal one may have been here before, and has the kernels
        self.layer, self.aux_coefficient = layer, aux_coefficient
        known = default_names(layer)
        unknown = sorted(set(names or ()) - known.keys())
        if unknown:
            raise ArgumentError(f"{layer.name} has no parameter {unknown[0]}; it has {', '.join(known)}")
        self.names = {**known, **(names or {})}
        for name, path in self.names.items():
            buffer = layer.record.buffers[name]
            trained = name in self.operator.parameters
            kind = dtype if trained and dtype is not None else DTYPES[buffer.dtype]
            tensor = torch.empty(buffer.extents({}), dtype=kind, device=device)
            _place(self, path, nn.Parameter(tensor, requires_grad=layer.options.trained) if trained else tensor)
        for _, parameter in expert_parameters(self):
            parameter.allreduce = False  # as Megatron marks them
        self._fp8: dict[str, Any] = {}
        self._coded: list[tuple[int, int]] = []  # what they are of
        self._sources: list[Any] = []  # weak references to those tensors: another may come to the same address
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_join)

    def reset_parameters(self) -> None:
        """Initialises weights uniformly within 1 / sqrt(elements of their sums), and biases with 0."""
        options = self.layer.options
        with torch.no_grad():
            for name, path in self.names.items():
                tensor = at(self, path)
                if name.endswith("_s"):
                    continue
                if tensor.dtype == DTYPES["e4m3"]:
                    _any_fp8(tensor, at(self, self.names[f"{name}_s"]))
                    continue
                if options.weights == MXFP4 and tensor.dtype == torch.uint8:
                    _any_mxfp4(tensor, at(self, self.names[f"{name}_s"]))
                    continue
                across = -2 if options.b_major == "n" and name in ("w1", "w2") else -1
                bound = float(tensor.shape[across]) ** -0.5
                tensor.zero_() if name in _BIASES else tensor.uniform_(-bound, bound)

    def forward(self, x: Any, *more: Any, total_tokens: Any = None, residual: Any = None) -> Any:
        """The layer's output.

        Parameters
        ----------
        x : torch.Tensor
            [..., H], of the layer's dtype.
        *more : torch.Tensor
            Nothing; logits [..., X]; or indices and weights [..., K], as the spec's `router.input` says.
        total_tokens : int or torch.Tensor
            The tokens that the load-balancing loss counts: an int, or int32 [1] on the device. Default: those of x.
        residual : torch.Tensor
            As x, for a layer with `residual = true` and no other: added to the output before that is rounded.

        Returns
        -------
        torch.Tensor or tuple
            y [..., H]; with `router.aux_loss` (y, loss), loss a float32 scalar.

        Raises
        ------
        ArgumentError
        """
        operator = self.operator
        tensors = {"x": x, **self._given(more)}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(f"{name} is of type {type(tensor)}; it must be a tensor of PyTorch", argument=name)
            if name != "x":
                if tensor.shape[:-1] not in (x.shape[:-1], (prod(x.shape[:-1]),)):
                    raise ArgumentError(
                        f"{name} is {list(tensor.shape)}, x {list(x.shape)}; all extents but the last must agree",
                        argument=name,
                    )
                tensors[name] = tensor.reshape(-1, *tensor.shape[-1:])
        tensors |= self._added(x, residual)
        for name, path in self.names.items():
            tensors[name] = at(self, path)
        if operator.loss:
            device = x.device
            if total_tokens is None:
                total_tokens = torch.full((1,), prod(x.shape[:-1]), dtype=torch.int32, device=device)
            tensors["total_tokens"] = _count(total_tokens, device)
            tensors["aux_coefficient"] = torch.full((1,), self.aux_coefficient, dtype=torch.float32, device=device)
        return operator({**operator.cast(tensors, everything=casting(x.device.type)), **self._held()}, self._sums())

    def quantise(self, *, hold: bool = True) -> None:
        """Quantises the weights now, for all calls until the next `quantise`.

        Call it after each step of the optimiser if a step has several calls, or once for inference. A call with weights
        that have changed since then raises ArgumentError, but not under torch.compile; writes through `.data` are not
        noticed. The weights must be whole, so it is not for parameters that FSDP2 shards.

        Parameters
        ----------
        hold : bool
            False: each call quantises the weights itself again.

        Raises
        ------
        ArgumentError
            If the layer has no recipe.
        """
        operator = self.operator
        if not operator.fp8:
            raise ArgumentError(f"{self.layer.name} has no recipe, so there is nothing to quantise")
        tensors = {name: at(self, self.names[name]) for name in operator.weights}
        self._coded = _versions(tensors.values()) if hold else []
        self._sources = [ref(tensor) for tensor in tensors.values()] if hold else []
        if hold:
            _watch()
            _HOLDERS.add(self)
        tensors = operator.cast(tensors, everything=True)
        self._fp8 = quantised(operator.name, operator.weights, operator.fp8, tensors) if hold else {}

    def _held(self) -> dict[str, Any]:
        """The FP8 weights that `quantise` holds."""
        if self._fp8 and not torch.compiler.is_compiling():
            tensors = [at(self, self.names[name]) for name in self.operator.weights]
            same = all(each() is tensor for each, tensor in zip(self._sources, tensors, strict=True))
            if not same or _versions(tensors) != self._coded:
                raise ArgumentError(
                    f"the weights of {self.layer.name} have changed since quantise(); call quantise() again, or"
                    " quantise(hold=False), with which each call quantises them"
                )
        return self._fp8

    def extra_repr(self) -> str:
        """The text in a print of the module."""
        options = self.layer.options
        return f"{self.layer.name}, hidden={options.hidden}, intermediate={options.intermediate}" + (
            f", experts={options.experts}, topk={options.topk}" if options.experts else ""
        )

    def _given(self, more: tuple[Any, ...]) -> dict[str, Any]:
        """The call's logits, or indices and weights, by name."""
        options = self.layer.options
        wanted = _MORE.get(options.router["input"], ()) if options.experts else ()
        if len(more) != len(wanted):
            raise ArgumentError(
                f"{self.layer.name} takes x{''.join(f', {name}' for name in wanted)}; {1 + len(more)} were given"
            )
        return dict(zip(wanted, more, strict=True))

    def _added(self, x: Any, residual: Any) -> dict[str, Any]:
        """The call's residual, by name."""
        if self.layer.options.residual and residual is None:
            raise ArgumentError(
                f"{self.layer.name} has residual = true, and was given none; call it with residual=tensor",
                argument="residual",
            )
        if residual is not None and not self.layer.options.residual:
            raise ArgumentError(
                f"{self.layer.name} takes no residual; leave it out, or build the layer with residual = true",
                argument="residual",
            )
        if residual is None:
            return {}
        if not isinstance(residual, torch.Tensor) or residual.shape != x.shape:
            what = list(residual.shape) if isinstance(residual, torch.Tensor) else f"of type {type(residual)}"
            raise ArgumentError(
                f"residual is {what}; it must be a tensor of x's shape, {list(x.shape)}", argument="residual"
            )
        return {"residual": residual}

    def _sums(self) -> list[Any]:
        return [main_grad(at(self, self.names[name]), self.names[name]) for name in self.operator.summed]


def over(layer: Layer, group: Any, timeout: int) -> Layer:
    """The layer as the layer of this process's rank. Raises ArgumentError for one of one GPU."""
    from fusekit.interop.torch_ranks import ranks_of
    from fusekit.layers.ranked import RankedLayer

    if not isinstance(layer, RankedLayer):
        raise ArgumentError(
            f"{layer.name} is a layer of one GPU, which takes no group; say ranks = R in its table, and build it again",
            argument="group",
        )
    ranked = layer.over(ranks_of(layer.devices, group, timeout=timeout))
    ranked.connect(training=False)  # while all ranks are here
    return ranked


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (name, parameter) for the parameters of experts that only this rank has (layers with `ranks` above 1).

    Data parallelism over those ranks must not reduce their gradients, which are sums over the tokens of all ranks
    already. Their attribute `allreduce` is False, as Megatron sets it.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, MoE) and module.layer.options.ranks > 1:
            for name in _EXPERTS:
                if name in module.names:
                    yield f"{prefix}.{module.names[name]}".lstrip("."), at(module, module.names[name])


def main_grad(parameter: Any, name: str) -> Any:
    """The tensor that a parameter's gradient is added to; the parameter if it has no gradient. Raises ArgumentError."""
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter  # the operator wants a tensor, and does not touch it
    main = getattr(parameter, "main_grad", None)
    if main is None:
        raise ArgumentError(
            f"{name} has no main_grad, to which a layer with accumulate = true adds its gradient; set it to"
            " torch.zeros_like(parameter, dtype=torch.float32), or build the layer without accumulate",
            argument=name,
        )
    return main


def default_names(layer: Layer) -> dict[str, str]:
    """Transformers' names of a layer's parameters and expert bias, by the layer's names."""
    options, operator = layer.options, operator_of(layer)
    first = "gate_up_proj" if options.gated else "up_proj"
    router = "router" if options.experts and options.router["bias"] else "gate"
    if options.experts:
        ends = {"w1": first, "w2": "down_proj", "b1": f"{first}_bias", "b2": "down_proj_bias"}
        known = {name: f"experts.{end}" for name, end in ends.items()}
    else:
        known = {"w1": f"{first}.weight", "w2": "down_proj.weight", "b1": f"{first}.bias", "b2": "down_proj.bias"}
    known |= {"router": f"{router}.weight", "router_bias": f"{router}.bias"}
    known |= {"expert_bias": "gate.e_score_correction_bias"}
    known |= {"shared_w1": f"shared_experts.{first}.weight", "shared_w2": "shared_experts.down_proj.weight"}
    known |= {"shared_gate": "shared_expert_gate.weight"}
    buffers = {"expert_bias"}
    if layer.options.weights != "none":  # a recipe's scales are made, no checkpoint has them
        weights = ("w1", "w2", "shared_w1", "shared_w2")
        scales = {f"{name}_s": f"{known[name]}_scale_inv" for name in weights}
        if layer.options.weights == MXFP4:
            scales = {f"{name}_s": f"{known[name]}_scales" for name in weights}
            known |= {name: f"{known[name]}_blocks" for name in weights}
        known |= scales
        buffers |= scales.keys()
    there = {*operator.parameters, *(buffers & set(operator.inputs))}
    return {name: path for name, path in known.items() if name in there}


def _any_fp8(tensor: Any, scales: Any) -> None:
    """Fills FP8 weights with any values, which scales bring within 1 / sqrt(elements of their sums)."""
    codes = tensor.view(torch.uint8).random_(0, 254)
    codes.add_((codes >= _NAN).to(torch.uint8))  # none of NaN
    scales.fill_(float(tensor.shape[-1]) ** -0.5 / torch.finfo(tensor.dtype).max)


def _any_mxfp4(blocks: Any, scales: Any) -> None:
    """Fills MXFP4 weights with any values, which scales bring within 1 / sqrt(elements of their sums)."""
    blocks.random_(0, 256)
    bound = float(blocks.shape[-1] * blocks.shape[-2] * 2) ** -0.5
    scales.fill_(127 + floor(log2(bound / _LARGEST)))


def _count(total: Any, device: Any) -> Any:
    """The tokens that a loss counts as int32 [1]. Raises ArgumentError."""
    if isinstance(total, torch.Tensor):
        return total
    whole = isinstance(total, int) or hasattr(total, "__index__")  # PyTorch 2.11 cannot trace hasattr of a number
    if isinstance(total, bool | float) or not whole or not 0 <= total < 2**31:
        raise ArgumentError(
            f"total_tokens is {total!r}; it must be a whole number from 0 to {2**31 - 1}, or an int32 tensor [1]",
            argument="total_tokens",
        )
    return torch.full((1,), total, dtype=torch.int32, device=device)


def _versions(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """(address, version) of each tensor: changes with each write that PyTorch sees; in inference mode it sees none."""
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


@cache
def _watch() -> None:
    """Registers a hook after each step of an optimiser."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, *_: Any) -> None:
    """Marks held FP8 weights as outdated: fused optimisers do not raise the versions of what they write."""
    written = {
        id(parameter)
        for group in optimizer.param_groups if group.get("fused")
        for parameter in group["params"] if parameter.grad is not None
    }  # fmt: skip
    for module in _HOLDERS:
        if any(id(at(module, module.names[name])) in written for name in module.operator.weights):
            module._coded = []


def _place(module: Any, path: str, tensor: Any) -> None:
    """Puts a parameter or a buffer where `path` says, in modules made for it."""
    *folders, last = path.split(".")
    for folder in folders:
        if not hasattr(module, folder):
            module.add_module(folder, nn.Module())
        module = getattr(module, folder)
    (module.register_parameter if isinstance(tensor, nn.Parameter) else module.register_buffer)(last, tensor)


def at(module: Any, path: str) -> Any:
    """The parameter or buffer at a path of modules."""
    *folders, last = path.split(".")
    if not torch.compiler.is_compiling():  # which cannot follow the shorter way
        try:
            below = module
            for folder in folders:
                below = below._modules[folder]
            return below._parameters[last]
        except KeyError:  # a buffer, or a parametrized parameter
            pass
    for part in (*folders, last):
        module = getattr(module, part)
    return module


def _join(module: MoE, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Makes one dense projection of the two that a checkpoint may have, and one tensor of experts that it has apart;
    takes a rank's share of all experts. Raises ArgumentError for weights that are not in FP8 where the layer's are.
    """
    options, ranks = module.layer.options, getattr(module.layer, "ranks", None)
    if options.experts and options.b_major == "k":
        _stack(module, state, prefix)
    _check_fp8(module, state, prefix)
    if ranks is not None:
        for name in _EXPERTS:
            path = prefix + module.names.get(name, "")
            if path in state and state[path].shape[:1] == (options.experts,):
                state[path] = state[path][ranks.rank * options.local :][: options.local]
    layout = module.layer.options.glu_layout
    if not _joins(options):
        return
    names = ["shared_w1", "shared_w1_s", *(("w1", "b1", "w1_s") if module.layer.options.b_major == "k" else ())]
    for name in names:
        path = prefix + module.names.get(name, "")
        whole, _, end = path.rpartition(".")
        folder = whole.removesuffix("gate_up_proj")
        gate, up = f"{folder}gate_proj.{end}", f"{folder}up_proj.{end}"
        if whole != folder and path not in state and gate in state and up in state:
            state[path] = joined(state.pop(gate), state.pop(up), layout)


def _stack(module: MoE, state: dict[str, Any], prefix: str) -> None:
    """One tensor of all experts' weights, or scales, where a checkpoint has each by itself: `experts.0.up_proj.weight`
    and so on. No arithmetic.
    """
    options = module.layer.options
    for name in _EXPERTS:
        path = prefix + module.names.get(name, "")
        if name not in module.names or path in state:
            continue
        folder, _, last = path.rpartition(".")
        projection = last.removesuffix("_scale_inv").removesuffix("_bias")
        end = {"w": "weight", "b": "bias"}[name[0]] + ("_scale_inv" if name.endswith("_s") else "")
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        if len(parts) > 1 and not _joins(options):
            continue

        keys = [[f"{folder}.{expert}.{part}.{end}" for part in parts] for expert in range(options.experts)]
        if all(key in state for each in keys for key in each):
            given = ([state.pop(key) for key in each] for each in keys)
            state[path] = torch.stack([_one(each, options.glu_layout) for each in given])


def _one(parts: list[Any], layout: str) -> Any:
    """The tensor, or that of gate and up."""
    return joined(parts[0], parts[1], layout) if len(parts) > 1 else parts[0]


def _joins(options: Any) -> bool:
    """Whether gate and up of a checkpoint make one tensor: a scale belongs to rows of one of them, so FP8 weights have
    them one after the other.
    """
    return bool(options.weights == "none" or options.glu_layout == "concat")


def _check_fp8(module: MoE, state: dict[str, Any], prefix: str) -> None:
    """Raises ArgumentError for a checkpoint's weights that PyTorch would cast to FP8, without scales; and for weights
    where those of MXFP4 checkpoints are to be.
    """
    for name, path in module.names.items():
        whole = prefix + path.removesuffix("_blocks")
        if path.endswith("_blocks") and prefix + path not in state and whole in state:
            raise ArgumentError(
                f'{whole} is {state[whole].dtype}; {module.layer.name} has weights = "{MXFP4}" and reads {path} and'
                f" {module.names[f'{name}_s']} of an MXFP4 checkpoint; load such a one, or build the layer without"
                " weights, which reads bf16",
                argument=name,
            )
        wanted, tensor = at(module, path).dtype, state.get(prefix + path)
        if wanted == DTYPES["e4m3"] and tensor is not None and tensor.dtype != wanted:
            raise ArgumentError(
                f"{prefix}{path} is {tensor.dtype}; {module.layer.name} has weights = "
                f'"{module.layer.options.weights}" and reads {wanted} of an FP8 checkpoint, with scales; load such a'
                ' one, or build the layer with recipe = "fp8-block" instead of weights, which quantises',
                argument=name,
            )


def joined(gate: Any, up: Any, layout: str) -> Any:
    """The rows of gate and up in one tensor, as a GLU layout has them."""
    if layout == "concat":
        return torch.cat([gate, up])
    block = 1 if layout == "interleaved" else int(layout.rpartition("-")[2])
    parts = [tensor.unflatten(0, (-1, block)) for tensor in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)
