"""The kernels of a model's layer: its MLPs, its router and the permutation between the two, as tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan.arch import DEFAULT
from fusekit.plan.operands.split import parts
from fusekit.spec.doors import DOORS, Door
from fusekit.spec.hf_model import Mlp, Model, Router


@dataclass(frozen=True, slots=True)
class Request:
    """The purpose of the file.

    name: the file's stem. tokens: T, the tokens of a launch on one rank. ranks: how many share the experts of a layer.
    training: with a backward pass. origin: what the model was read from. door: one of `DOORS`, for the experts alone
    as it calls them; empty for the whole layer.
    """

    name: str
    arch: str = DEFAULT.name
    tokens: int = 8192
    ranks: int = 1
    training: bool = True
    origin: str = "config.json"
    door: str = ""

    @property
    def outside(self) -> Door | None:
        """The door, if it routes itself."""
        door = DOORS.get(self.door)
        return door if door is not None and door.choices else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model's numbers on one rank; groups and topk are 1 without a router."""

    tokens: int
    groups: int
    topk: int
    hidden: int

    @property
    def rows(self) -> int:
        """Token rows of the experts."""
        return self.tokens * self.topk


@dataclass(frozen=True, slots=True)
class Kernel:
    """One [[kernel]] table. tensors: its arguments with the model's numbers. why: the reason that it is left out."""

    name: str
    summary: str
    tensors: str
    keys: Mapping[str, Any]
    why: str = ""


def sizes_of(model: Model, request: Request) -> Sizes:
    """The model's numbers on one rank. Raises SpecError where the ranks do not divide the experts."""
    router = model.router
    if router is None:
        if request.ranks > 1:
            raise SpecError(f"--expert-parallel {request.ranks}: this model has no experts to share; leave it out")
        return Sizes(request.tokens, 1, 1, model.hidden)
    if router.experts % request.ranks:
        fitting = ", ".join(
            str(ranks) for ranks in range(1, min(router.experts, 4096) + 1) if router.experts % ranks == 0
        )
        raise SpecError(
            f"--expert-parallel {request.ranks}: {router.experts} experts are not shared evenly by {request.ranks} "
            f"ranks; {fitting} do"
        )
    return Sizes(request.tokens, router.experts // request.ranks, router.topk, model.hidden)


def sections(model: Model, sizes: Sizes, request: Request) -> Iterator[tuple[str, list[Kernel]]]:
    """(title, kernels) of each part of the file, in the order of a forward pass."""
    if model.router is not None:
        yield router_section(model.router, sizes, request)
        title = "From the router's choices to the rows of the experts, and back"
        permutation = list(_permutation(model.router, sizes))
        yield title, permutation if request.training else permutation[:3]
    for mlp in model.mlps:
        prefix = "" if mlp.role == "experts" or model.router is None else f"{mlp.role}-"
        mlp_kernels = _MlpKernels(mlp, prefix, sizes)
        kernels = [*mlp_kernels.forward(request), *(mlp_kernels.backward() if request.training else ())]
        yield f"{mlp_title(model, mlp)}; {mlp.weights}", kernels


def router_section(router: Router, sizes: Sizes, request: Request) -> tuple[str, list[Kernel]]:
    """(title, kernels) of the router."""
    kernels = list(_router(router, sizes))
    losses = _loss(router, sizes) if router.aux_loss and not router.why else ()
    return "The router", [*kernels, *losses] if request.training else kernels[:1]


def mlp_title(model: Model, mlp: Mlp) -> str:
    """The title of an MLP's part of the file."""
    rest = "next to the experts" if mlp.layers == "every layer" else "of the layers without experts"
    titles = {
        "experts": "The experts",
        "shared": "The shared experts, as one MLP that every token goes through",
        "dense": "The MLP" if model.router is None else f"The dense MLP {rest}",
    }
    where = f" ({mlp.layers})" if model.router is not None else ""
    return f"{titles[mlp.role]}{where}. I = {mlp.intermediate}"


def _of(name: str, *extents: int) -> str:
    return f"{name}[{', '.join(map(str, extents))}]"


class _MlpKernels:
    """Forward and backward of one MLP: w1[N1, H], N1 being 2 I where it is gated, and w2[H, I]."""

    def __init__(self, mlp: Mlp, prefix: str, sizes: Sizes) -> None:
        self.mlp, self.prefix = mlp, prefix
        self.routed = mlp.role == "experts"
        self.groups, self.rows = (sizes.groups, sizes.rows) if self.routed else (1, sizes.tokens)
        self.hidden, self.inter = sizes.hidden, mlp.intermediate
        self.width = (2 if mlp.gated else 1) * mlp.intermediate
        self.op, self.wgrad = ("grouped-gemm", "grouped-wgrad") if self.routed else ("dense-gemm", "dense-wgrad")
        self.lead = (self.groups,) if self.routed else ()
        self.ends = f", {_of('offsets', self.groups)}" if self.routed else ""
        self.act = (mlp.activation or {}).get("kind", "the activation")

    def forward(self, request: Request) -> Iterator[Kernel]:
        """fc1 for training, for inference, and fc2."""
        first = "Gate and up projection" if self.mlp.gated else "First projection"
        z = f"{first}, z = x . w1^T{' + bias' if self.mlp.bias else ''}, and y = {self.act}(z)"
        bias = {"bias": True} if self.mlp.bias else {}
        keys, problem = {"op": self.op, **bias, **self._epilogue("")}, self._problem(self.width, self.hidden)
        tensors = f"{self._given(self.width, self.hidden)} -> {_of('y', self.rows, self.inter)}"
        if request.training:
            saved = f"{z}; z is kept for the backward pass", f"{tensors}, {_of('preactivation', self.rows, self.width)}"
            yield self._kernel("fc1-fwd", *saved, {**keys, "save_preactivation": True, **problem}, self.mlp.why)
        yield self._kernel("fc1-infer", z, tensors, {**keys, **problem}, self.mlp.why)
        yield self._kernel(
            "fc2-fwd",
            f"Second projection, y = x . w2^T{' + bias' if self.mlp.bias else ''}; x is what fc1 gave",
            f"{self._given(self.hidden, self.inter)} -> {_of('y', self.rows, self.hidden)}",
            {"op": self.op, **bias, **self._problem(self.hidden, self.inter)},
        )

    def backward(self) -> Iterator[Kernel]:
        """Gradients through fc2 and fc1, and of their weights."""
        rows, hidden, inter, width = self.rows, self.hidden, self.inter, self.width
        yield self._kernel(
            "fc2-dgrad",
            f"Gradient through fc2 and {self.act}: da = dy . w2, dz = da . {self.act}'(z); also y = {self.act}(z), for "
            "fc2-wgrad",
            f"{_of('x', rows, hidden)} is dy, {_of('w', *self.lead, hidden, inter)}, "
            f"{_of('preactivation', rows, width)}{self.ends} -> {_of('dz', rows, width)}, {_of('y', rows, inter)}",
            {"op": self.op, "b_major": "n", **self._epilogue("d"), "recompute": True, **self._problem(inter, hidden)},
            self.mlp.why,
        )
        yield self._kernel(
            "fc1-dgrad",
            "Gradient through fc1: dx = dz . w1",
            f"{_of('x', rows, width)} is dz, {_of('w', *self.lead, width, hidden)}{self.ends} -> "
            f"{_of('y', rows, hidden)} is dx",
            {"op": self.op, "b_major": "n", **self._problem(hidden, width)},
        )
        yield self._wgrad("fc1-wgrad", "dw1 = dz^T . x", width, hidden)
        yield self._wgrad("fc2-wgrad", "dw2 = dy^T . a", hidden, inter)

    def _wgrad(self, name: str, formula: str, n: int, k: int) -> Kernel:
        roles = {"fc1-wgrad": ("dz", "fc1's x"), "fc2-wgrad": ("fc2's dy", "fc1's y")}[name]
        dbias = f", {_of('dbias', *self.lead, n)}" if self.mlp.bias else ""
        # Few tiles: parts of the rows make as many as there are SMs.
        split = {"split": True} if not self.routed and parts({"M": self.rows, "N": n, "K": k}) > 1 else {}
        return self._kernel(
            name,
            f"Gradient of the weights{' and the bias' if self.mlp.bias else ''}: {formula}",
            f"{_of('dy', self.rows, n)} is {roles[0]}, {_of('x', self.rows, k)} is {roles[1]}"
            f"{self.ends} -> {_of('dw', *self.lead, n, k)}{dbias}",
            {"op": self.wgrad, **split, **({"dbias": True} if self.mlp.bias else {}), **self._problem(n, k)},
        )

    def _epilogue(self, before: str) -> dict[str, Any]:
        activation = dict(self.mlp.activation or {})
        layout = {"glu_layout": self.mlp.glu_layout} if self.mlp.gated else {}
        return {"activation": activation | {"kind": before + self.act}, **layout}

    def _given(self, n: int, k: int) -> str:
        bias = f", {_of('bias', *self.lead, n)}" if self.mlp.bias else ""
        return f"{_of('x', self.rows, k)}, {_of('w', *self.lead, n, k)}{bias}{self.ends}"

    def _problem(self, n: int, k: int) -> dict[str, Any]:
        return {"problem": {"E": self.groups, "M": self.rows, "N": n, "K": k}}

    def _kernel(self, name: str, summary: str, tensors: str, keys: Mapping[str, Any], why: str = "") -> Kernel:
        return Kernel(self.prefix + name, summary, tensors, keys, why)


def _router(router: Router, sizes: Sizes) -> Iterator[Kernel]:
    """The selection and its backward, on logits = x . Wr^T, which a plain GEMM makes."""
    experts, topk, tokens = router.experts, router.topk, sizes.tokens
    both = {"experts": experts, "topk": topk, "dtype": "f32"}
    rest = {"outputs": "compact", "problem": {"T": tokens}}
    logits, indices = _of("logits", tokens, experts), _of("indices", tokens, topk)
    bias = f", {_of('expert_bias', experts)}" if router.keys.get("expert_bias") else ""
    yield Kernel(
        "router-topk",
        f"{topk} of {experts} experts for each token, and their weights",
        f"{logits}{bias} -> {indices}, {_of('weights', tokens, topk)}",
        {"op": "router-topk", **both, **router.keys, **rest},
        router.why,
    )
    backward = ("score_function", "pre_softmax", "scaling_factor")
    keys = {name: value for name, value in router.keys.items() if name in backward}
    yield Kernel(
        "router-topk-bwd",
        "Gradient of the logits from that of the weights",
        f"{logits}, {indices}, {_of('grad_weights', tokens, topk)} -> {_of('grad_logits', tokens, experts)}",
        {"op": "router-topk-bwd", **both, **keys, **rest},
        router.why,
    )


def _loss(router: Router, sizes: Sizes) -> Iterator[Kernel]:
    """The load-balancing loss and its backward."""
    experts, tokens = router.experts, sizes.tokens
    both = {"experts": experts, "topk": router.topk, "dtype": "f32"}
    problem = {"problem": {"T": tokens}}
    aux = {**both, "score_function": router.keys["score_function"], **problem}
    loss = {**both, "coefficient": router.aux_loss, **problem}
    logits, scores, counts = _of("logits", tokens, experts), _of("scores", tokens, experts), _of("counts", experts)
    grad_scores = _of("grad_scores", tokens, experts)
    total = "" if router.keys["score_function"] == "softmax" else f", {_of('score_sum', tokens)}"
    yield Kernel(
        "router-aux-score",
        "Scores of all experts, for the load-balancing loss",
        f"{logits} -> {scores}{total}, {_of('routing_map', tokens, experts)}",
        {"op": "router-aux-score", **aux},
    )
    yield Kernel(
        "router-aux-score-bwd",
        "Gradient of the logits from that of the scores",
        f"{scores}{total}, {grad_scores} -> {_of('grad_logits', tokens, experts)}",
        {"op": "router-aux-score-bwd", **aux},
    )
    yield Kernel(
        "aux-loss",
        "Load-balancing loss: coefficient X / (K T^2) sum_i counts[i] sum_t scores[t, i]",
        f"{scores}, {counts}, total_tokens -> loss[1]",
        {"op": "moe-aux-loss", **loss},
    )
    yield Kernel(
        "aux-loss-bwd",
        "Gradient of the scores from that of the loss",
        f"{counts}, grad_loss[1], total_tokens -> {grad_scores}",
        {"op": "moe-aux-loss-bwd", **loss},
    )


def _permutation(router: Router, sizes: Sizes) -> Iterator[Kernel]:
    """Rows to experts and back: three kernels forward, two backward.

    The weights multiply what leaves the experts, or what enters them.
    """
    tokens, topk = sizes.tokens, sizes.topk
    scaled = router.scales_input
    keys, problem = {"topk": topk}, {"problem": {"T": tokens, "H": sizes.hidden}}
    inverse, weights = _of("inverse", tokens, topk), _of("weights", tokens, topk)
    yield Kernel(
        "index",
        "The order of rows: all of the first expert, then of the second, and so on",
        f"{_of('indices', tokens, topk)} -> {_of('offsets', sizes.groups)}, {_of('order', sizes.rows)}, {inverse}",
        {"op": "moe-index", "experts": sizes.groups, "topk": topk, "problem": {"T": tokens}},
    )
    yield Kernel(
        "permute",
        "Each token's row to its experts" + (", times its weight" if scaled else ""),
        f"{_by_token('x', sizes)}, {inverse}{', ' + weights if scaled else ''} -> {_by_row('y', sizes)}",
        {"op": "moe-permute", **keys, **({"scaled": True} if scaled else {}), **problem},
    )
    yield Kernel(
        "unpermute",
        f"The {'' if scaled else 'weighted '}sum of each token's rows",
        f"{_by_row('x', sizes)}, {inverse}{'' if scaled else ', ' + weights} -> {_by_token('y', sizes)}",
        {"op": "moe-unpermute", **keys, **({} if scaled else {"weighted": True}), **problem},
    )
    yield from _permutation_backward(scaled, sizes, {**keys, **problem})


def _permutation_backward(scaled: bool, sizes: Sizes, keys: Mapping[str, Any]) -> Iterator[Kernel]:
    inverse, weights = (_of(name, sizes.tokens, sizes.topk) for name in ("inverse", "weights"))
    gradient = _of("grad_weights", sizes.tokens, sizes.topk)
    if scaled:
        yield Kernel(
            "unpermute-bwd",
            "Gradient of each row: that of its token",
            f"{_by_token('x', sizes)} is dy, {inverse} -> {_by_row('y', sizes)}",
            {"op": "moe-permute", **keys},
        )
        yield Kernel(
            "permute-bwd",
            "Gradients of the tokens and of the weights",
            f"{_by_token('x', sizes)} as permute read it, {_by_row('grad_y', sizes)}, {inverse}, {weights} -> "
            f"{_by_token('grad_x', sizes)}, {gradient}",
            {"op": "moe-permute-bwd", **keys},
        )
        return
    yield Kernel(
        "unpermute-bwd",
        "Gradients of the rows and of the weights",
        f"{_by_token('grad_y', sizes)}, {_by_row('x', sizes)} as unpermute read it, {inverse}, {weights} -> "
        f"{_by_row('grad_x', sizes)}, {gradient}",
        {"op": "moe-unpermute-bwd", **keys},
    )
    yield Kernel(
        "permute-bwd",
        "Gradient of each token: the sum of its rows'",
        f"{_by_row('x', sizes)}, {inverse} -> {_by_token('y', sizes)}",
        {"op": "moe-unpermute", **keys},
    )


def _by_token(name: str, sizes: Sizes) -> str:
    return _of(name, sizes.tokens, sizes.hidden)


def _by_row(name: str, sizes: Sizes) -> str:
    return _of(name, sizes.rows, sizes.hidden)
