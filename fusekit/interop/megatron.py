"""fusekit's experts in Megatron-Core 0.19: `ExpertsBuilder`s, a `BackendSpecProvider`, and a whole MoE layer.

    spec = fusekit.interop.megatron.fused(get_gpt_layer_local_spec(num_experts=128))
    model = GPTModel(config, spec, ...)

Megatron keeps the router, its losses and the shared experts. Nothing of Megatron is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer

from fusekit.errors import ArgumentError
from fusekit.interop.experts import Experts, given_parameters, layer_for
from fusekit.interop.torch_layer import DTYPES, operator_of
from fusekit.interop.torch_moe import main_grad, over
from fusekit.layers import Layer
from fusekit.library import Library, open_library

_ACTIVATIONS: dict[Any, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    torch.nn.functional.silu: ({"kind": "swiglu"}, {"kind": "silu"}),
    torch.nn.functional.gelu: ({"kind": "geglu"}, {"kind": "gelu"}),
    torch.nn.functional.relu: ({"kind": "reglu"}, {"kind": "relu"}),
    quick_gelu: ({"kind": "swiglu", "alpha": 1.702}, None),
    squared_relu: (None, {"kind": "srelu"}),
}
"""Of a config's `activation_func`: (gated, not gated)."""

_WANTED = {
    "add_bias_linear": False, "fp8": None, "fp4": None, "moe_apply_probs_on_input": False, "moe_latent_size": None,
    "delay_wgrad_compute": False, "overlap_dispatch_backward_with_experts_wgrad": False,
    "activation_func_fp8_input_store": False, "moe_paged_stash": False, "moe_ncclep_zero_copy": False,
    "use_transformer_engine_op_fuser": False,
}  # fmt: skip
"""Settings of a config that the experts cannot honour, with the value that they can."""

_WANTED_BY_WHOLE = {"moe_shared_expert_overlap": False, "overlap_moe_expert_parallel_comm": False}
_INSIDE = {"recompute_modules": {"moe_act"}, "offload_modules": {"expert_fc1", "moe_act", "fused_group_mlp"}}
_INSIDE_WHOLE = {"cuda_graph_modules": {"moe_router", "moe_preprocess"}}


_EXTRA = "_extra_state"


class FusedExperts(MegatronModule):  # type: ignore[misc]
    """Experts on rows that a dispatcher of Megatron's has sorted: an `ExpertsBuilder`, and its module.

    To the layer each row is a token with one expert, so its table has `topk = 1`, `experts` those of one rank, and
    `router = { input = "choices" }`. The parameters are w1 [X, 2I, H], the gate's rows first, and w2 [X, H, I]; sharded
    checkpoints have the keys and bits of Megatron's SequentialMLP and TEGroupedMLP.

    Parameters
    ----------
    num_local_experts, config, pg_collection, name
        As Megatron gives them.
    layer : Layer or str, optional
        The layer, or its name in `library`; without a GPU a name opens its definition (device="cpu"). Default: one that
        computes what `config` says; with `accumulate` if `config.gradient_accumulation_fusion` is on.
    library : Library, optional
        Default: that of the environment.
    timeout : int
        Milliseconds that a launch of a layer over ranks waits for another rank.

    Raises
    ------
    ArgumentError
        For settings of `config` that the layer cannot honour, and for a layer that computes something else.
    NotBuiltError
        If no layer of the store fits; with the spec to build.
    """

    def __init__(
        self, num_local_experts: int, config: Any, /, *, pg_collection: Any, name: str | None = None,
        layer: Layer | str | None = None, library: Library | None = None, timeout: int = 60_000,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.num_local_experts, self.ep_group, self.dp_group = (
            num_local_experts,
            pg_collection.ep,
            pg_collection.expt_dp,
        )
        self._refuse(config, pg_collection)
        self.operator = operator_of(self._opened(layer, library, timeout))
        H, I, X = config.hidden_size, config.moe_ffn_hidden_size, num_local_experts  # noqa: E741, N806
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.gated = bool(config.gated_linear_unit)
        for path, shape in (("w1", (X, I * (1 + self.gated), H)), ("w2", (X, H, I))):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            weight.allreduce = not config.expert_model_parallel_size > 1  # which processes average its gradient
            tensor_parallel.layers.set_tensor_model_parallel_attributes(weight, True, 1 + (path == "w2"), 1)
            self.register_parameter(path, weight)
        if config.perform_initialization:
            self._initialise(config)
        self.register_load_state_dict_pre_hook(_without_extra_states)

    _whole = False

    def _refuse(self, config: Any, groups: Any) -> None:
        wanted = {**_WANTED, **(_WANTED_BY_WHOLE if self._whole else {})}
        inside = {**_INSIDE, **(_INSIDE_WHOLE if self._whole else {})}
        for setting, value in wanted.items():
            if (given := getattr(config, setting, value)) != value:
                raise ArgumentError(
                    f"{setting} = {given!r}: fusekit's experts have no such path; set {setting} = {value!r}, or keep"
                    " Megatron's experts",
                    argument=setting,
                )
        for setting, modules in inside.items():
            names = {str(getattr(module, "name", module)) for module in getattr(config, setting, None) or ()}
            if refused := sorted(names & modules):
                raise ArgumentError(
                    f"{setting} has {refused[0]!r}, which is inside fusekit's kernels; leave it out of {setting}",
                    argument=setting,
                )
        if config.transformer_impl == "inference_optimized":
            raise ArgumentError(
                "transformer_impl = 'inference_optimized': fusekit's experts are for training; set transformer_impl ="
                " 'local' or 'transformer_engine'",
                argument="transformer_impl",
            )
        if (size := groups.expt_tp.size()) > 1:
            raise ArgumentError(
                f"expert tensor parallelism over {size} processes: fusekit's experts are whole; set"
                " expert_tensor_parallel_size = 1",
                argument="expert_tensor_parallel_size",
            )
        if self._whole and (size := groups.tp.size()) > 1:
            raise ArgumentError(
                f"tensor parallelism over {size} processes: the whole layer has all tokens of a sequence;"
                " set tensor_model_parallel_size = 1, or leave whole = True out",
                argument="tensor_model_parallel_size",
            )

    def _opened(self, layer: Layer | str | None, library: Library | None, timeout: int) -> Layer:
        """The layer that computes the config's experts. Raises ArgumentError, NotBuiltError."""
        config, ranks = self.config, self.ep_group.size() if self._whole else 1
        experts = self.num_local_experts * ranks
        wanted = described(config, experts, config.moe_router_topk if self._whole else 1)
        if not isinstance(layer, Layer):
            library = open_library() if library is None else library
            if layer is None and ranks > 1:
                raise ArgumentError(
                    f"expert parallelism over {ranks} processes: the whole layer needs the name of a layer with ranks ="
                    f" {ranks} and experts = {experts}; give layer=..., or leave whole = True out",
                    argument="layer",
                )
            accumulate = bool(config.gradient_accumulation_fusion)
            name = layer_for(library, "*", wanted, type(self).__name__, accumulate) if layer is None else layer
            layer = library.layer(name, device=None if torch.cuda.is_available() else "cpu")
        options = layer.options
        computed = Experts.of(options)
        wanted = replace(wanted, recipe=options.recipe)  # a matter of choice
        if computed != wanted or options.ranks != ranks:
            pairs = {field: (getattr(computed, field), getattr(wanted, field)) for field in computed.__slots__}
            pairs["ranks"] = options.ranks, ranks
            other = (f"{field} is {is_!r}, not {should!r}" for field, (is_, should) in pairs.items() if is_ != should)
            raise ArgumentError(f"{layer.name} computes other experts: {'; '.join(other)}", argument="layer")
        return over(layer, self.ep_group, timeout) if ranks > 1 else layer

    def _initialise(self, config: Any) -> None:
        """Draws each expert's weights in Megatron's order. On the CPU, where processes draw the same numbers, those of
        other ranks are drawn too.
        """
        on_cpu, first = config.use_cpu_initialization, 0
        count = self.num_local_experts
        if on_cpu:
            first, count = -self.ep_group.rank() * count, self.ep_group.size() * count
        fork = nullcontext() if on_cpu else get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        with torch.no_grad(), fork:
            for expert in range(first, first + count):
                for weight, initialise in (
                    (self.w1, config.init_method), (self.w2, config.output_layer_init_method),
                ):  # fmt: skip
                    drawn = torch.empty(weight.shape[1:], dtype=torch.float32) if on_cpu else weight[expert]
                    initialise(drawn)
                    if on_cpu and 0 <= expert < len(weight):
                        weight[expert] = drawn

    def forward(self, rows: Any, tokens_per_expert: Any, probs: Any) -> tuple[Any, None]:
        """Megatron's call: rows [R, H], counts [X] on either device, probs [R] to (y [R, H], None). Rows beyond the
        counts, as dispatchers of a fixed size have them, give 0. Nothing waits for the device.
        """
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0)
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        return self._run(rows, expert[:, None], probs[:, None]), None

    def _run(self, x: Any, indices: Any, weights: Any) -> Any:
        operator = self.operator
        given = {"x": x, "indices": indices, "weights": weights, "w1": self.w1, "w2": self.w2}
        return operator(operator.cast(given), [main_grad(getattr(self, each), each) for each in operator.summed])

    def backward_dw(self) -> None:
        """Nothing: the backward pass has the weights' gradients already."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """One factory for each parameter, so that the optimizer's states follow it; and, of no content, what Megatron's
        linear layers save beside their weights.
        """
        singleton = (metadata or {}).get("singleton_local_shards", False)
        state = {}
        for path, projection, halves in (("w1", "linear_fc1", 1 + self.gated), ("w2", "linear_fc2", 1)):
            build = partial(self._shards, sharded_offsets, halves, singleton)
            key, replica = f"{prefix}experts.{projection}.weight", (0, 0, self.dp_group.rank())
            state[prefix + path] = ShardedTensorFactory(key, getattr(self, path), build, _merged, replica)
            for number in range(self.num_local_experts):
                name, at = self._place(key.removesuffix("weight") + _EXTRA, number, sharded_offsets, singleton)
                sizes = tuple((size, offset) for _, offset, size in at) or ((1, 0),)
                shape, offset = zip(*sizes, strict=True)
                state[f"{prefix}{projection}.{number}.{_EXTRA}"] = ShardedObject(name, None, shape, offset, replica)
        return state

    def _place(self, key: str, number: int, offsets: tuple[Any, ...], singleton: bool) -> tuple[str, tuple[Any, ...]]:
        """The key and offsets of one expert's tensors: as SequentialMLP's, by expert or with one more axis."""
        expert = self.ep_group.rank() * self.num_local_experts + number
        if singleton:
            head, _, tail = key.rpartition("experts.")
            return f"{head}experts.{expert}.{tail}", offsets
        return key, (*offsets, (len(offsets), expert, self.ep_group.size() * self.num_local_experts))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _shards(
        self, offsets: tuple[Any, ...], halves: int, singleton: bool, key: str, tensor: Any, replica_id: Any, _: Any
    ) -> list[list[Any]]:
        """For each expert its tensors, as SequentialMLP's sharded state has them."""
        shards = []
        for number, weight in enumerate(tensor):
            name, at = self._place(key, number, offsets, singleton)
            parts = []
            for half, part in enumerate(weight.chunk(halves)):
                apart = singleton and halves > 1
                place = () if apart or halves == 1 else ((len(at), half, halves),)
                end = ("_w", "_v")[half] if apart else ""
                parts.append(
                    ShardedTensor.from_rank_offsets(
                        name + end, part, *at, *place, replica_id=replica_id, prepend_axis_num=len(at)
                    )
                )
            shards.append(parts)
        return shards


class ChosenExperts(FusedExperts):
    """The experts of a `WholeMoELayer`: its layer has the `topk` of the model. Called with x, indices and weights."""

    _whole = True

    def forward(self, x: Any, indices: Any, weights: Any) -> Any:
        """x [..., H], indices and weights [T, K] to [..., H]."""
        return self._run(x, indices, weights)


class WholeMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoELayer with permutation, experts and their weighted sum in one layer: no dispatcher runs, and
    nothing waits for the device. Its `experts` are `ChosenExperts`. With expert parallelism the layer is one over
    ranks, whose kernels exchange tokens themselves, within one NVLink domain.
    """

    def forward(
        self, hidden_states: Any, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Any, None]:
        """Megatron's call: [S, B, H] to ([S, B, H], None)."""
        if intermediate_tensors is not None:
            raise ArgumentError("the whole layer runs in one piece; leave whole = True out to have Megatron split it")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._compute, False, hidden_states, padding_mask), None
        return self._compute(hidden_states, padding_mask), None

    def _compute(self, hidden_states: Any, padding_mask: Any) -> Any:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        weights, indices = probs.topk(self.config.moe_router_topk, dim=-1)
        # Of a token with fewer experts, such as one whose experts are full, the rest are none.
        indices = indices.masked_fill(~routing_map.bool().gather(-1, indices), probs.shape[-1])
        y = self.experts(hidden_states, indices, weights)
        return y if shared is None else y + shared


class SpecProvider:
    """A `BackendSpecProvider`: that of `backend`, such as LocalSpecProvider() or TESpecProvider(), with fusekit's
    experts. settings: those of `FusedExperts`.
    """

    def __init__(self, backend: Any, **settings: Any) -> None:
        self._backend, self._settings = backend, settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., Any]:
        """The `ExpertsBuilder`."""
        return partial(FusedExperts, **self._settings)


def fused(spec: Any, *, whole: bool = False, **settings: Any) -> Any:
    """A copy of a layer's or a block's spec, with fusekit's experts in each MoE layer.

    Parameters
    ----------
    spec : ModuleSpec or TransformerBlockSubmodules
        As `get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`, `get_gpt_decoder_block_spec` give
        it.
    whole : bool
        MoE layers become `WholeMoELayer`.
    **settings
        Those of `FusedExperts`.

    Raises
    ------
    ArgumentError
        If the spec has no MoE layer.
    """
    copy, count = _fused(spec, whole, settings)
    if not count:
        raise ArgumentError("the spec has no MoE layer; give num_experts where it is made", argument="spec")
    return copy


def _fused(spec: Any, whole: bool, settings: dict[str, Any]) -> tuple[Any, int]:
    if hasattr(spec, "layer_specs"):
        copies = [_fused(layer, whole, settings) for layer in spec.layer_specs]
        return replace(spec, layer_specs=[copy for copy, _ in copies]), sum(count for _, count in copies)
    mlp: Any = getattr(spec.submodules, "mlp", None)
    parts = mlp.keywords.get("submodules") if isinstance(mlp, partial) else None
    if parts is None or not hasattr(parts, "experts"):
        return spec, 0
    experts = partial(ChosenExperts if whole else FusedExperts, **settings)
    keywords = {**mlp.keywords, "submodules": replace(parts, experts=experts)}
    mlp = partial(WholeMoELayer if whole else mlp.func, *mlp.args, **keywords)
    return replace(spec, submodules=replace(spec.submodules, mlp=mlp)), 1


def described(config: Any, experts: int, topk: int) -> Experts:
    """The computation of a config's experts. Raises ArgumentError if fusekit has no kernel for it."""
    gated = bool(config.gated_linear_unit)
    activation = _ACTIVATIONS.get(config.activation_func, (None, None))[not gated]
    if activation is None:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        raise ArgumentError(
            f"activation_func = {name}{', gated' if gated else ''}: fusekit has no kernel for it; it has silu, gelu,"
            " relu and quick_gelu gated, and silu, gelu, relu and squared_relu not gated",
            argument="activation_func",
        )
    if gated:
        activation = {**activation, "limit": getattr(config, "activation_func_clamp_value", None),
                      "up_offset": getattr(config, "glu_linear_offset", 0.0)}  # fmt: skip
    block = getattr(config, "moe_mlp_glu_interleave_size", None)
    if block not in (None, 32):
        raise ArgumentError(
            f"moe_mlp_glu_interleave_size = {block}: fusekit's kernels interleave by 32, or not at all (None)",
            argument="moe_mlp_glu_interleave_size",
        )
    layout = "none" if not gated else "concat" if block is None else "interleaved-32"
    kinds = [name for name, kind in DTYPES.items() if kind == config.params_dtype]
    dtype = kinds[0] if kinds else str(config.params_dtype)
    hidden, intermediate = config.hidden_size, config.moe_ffn_hidden_size
    given = given_parameters(activation)
    return Experts(hidden, intermediate, experts, topk, dtype, given, layout, False, "k")


def _without_extra_states(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and key.endswith(_EXTRA)]:
        del state[key]


def _merged(state: list[list[Any]]) -> Any:
    """The parameter of its experts' tensors."""
    return torch.stack([torch.cat(parts) for parts in state])
