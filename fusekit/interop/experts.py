"""The layer of a store that computes the experts, the block or the dense MLP of a trainer's or a server's module."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, NotBuiltError
from fusekit.plan.arch import DEFAULT

if TYPE_CHECKING:
    from fusekit.layers import LayerOptions
    from fusekit.library import Library
    from fusekit.plan.layer import Options

KEEPS = ("z", "x", "none")  # the sooner, the rather a layer is taken


@dataclass(frozen=True, slots=True)
class Experts:
    """The computation of an experts module, or of a whole block, as keys of a spec; with 0 experts, of a dense MLP.

    router: what is not the default. recompute_fp8: whether the layer must have that; another may.
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    dtype: str
    activation: tuple[tuple[str, Any], ...]
    glu_layout: str
    bias: bool
    b_major: str
    recipe: str = "none"
    weight_dtype: str = ""
    router: tuple[tuple[str, Any], ...] = (("input", "choices"),)
    router_dtype: str = ""
    shared: int = 0
    shared_gate: bool = False
    weights: str = "none"
    residual: bool = False
    recompute_fp8: bool = False

    @classmethod
    def of(cls, options: Options | LayerOptions) -> Experts:
        """What a layer computes."""
        plain = {field_.name: getattr(options, field_.name) for field_ in fields(cls) if field_.name in _COPIED}
        return cls(**plain, activation=given_parameters(options.activation), router=_given_routing(options.router))

    @property
    def kind(self) -> str:
        """The layer's, in a spec."""
        return "moe" if self.experts else "mlp"

    def fits(self, options: LayerOptions) -> bool:
        """Whether a layer computes this, and nothing more. Weights that it wants in dtype are cast to that."""
        return (
            options.kind == self.kind
            and options.ranks == 1
            and options.weight_dtype in ("", self.weight_dtype)
            and (options.recompute_fp8 or not self.recompute_fp8)
            and _given_routing(options.router) == self.router
            and given_parameters(options.activation) == self.activation
            and all(getattr(options, name) == getattr(self, name) for name in _COPIED)
        )

    def table(self, arch: str = DEFAULT.name, inference: bool = False) -> str:
        """A spec file with this layer, for `arch`. inference: without a backward pass."""
        activation = ", ".join(f"{name} = {_toml(value)}" for name, value in self.activation)
        lines = ["schema = 1", "", "[[kernel]]", f'name = "{self.kind}"', f'kind = "{self.kind}"', f'arch = "{arch}"']
        for name in ("dtype", "hidden", "intermediate", *(("experts", "topk") if self.experts else ())):
            lines.append(f"{name} = {_toml(getattr(self, name))}")
        routing = [*self.router, *([("weight_dtype", "f32")] if self.router_dtype == "f32" else [])]
        if routing:
            lines += [f"router = {{ {', '.join(f'{name} = {_toml(value)}' for name, value in routing)} }}"]
        lines += [f"activation = {{ {activation} }}"]
        lines += [f"glu_layout = {_toml(self.glu_layout)}"] if self.glu_layout != "none" else []
        lines += [f"bias = {_toml(self.bias)}", f"b_major = {_toml(self.b_major)}"]
        lines += [f"shared = {self.shared}"] if self.shared else []
        flags = ("shared_gate", "residual", "recompute_fp8")
        lines += [f"{name} = true" for name in flags if getattr(self, name)]
        if self.recipe != "none":
            lines += [f"recipe = {_toml(self.recipe)}"]
            lines += [f"weight_dtype = {_toml(self.weight_dtype)}"] if self.weight_dtype == "f32" else []
        lines += [f"weights = {_toml(self.weights)}"] if self.weights != "none" else []
        lines += ['keep = "none"'] if inference or self.weights != "none" else []
        return "\n".join(lines) + "\n"

    def size(self) -> str:
        """In words, for messages."""
        bias = ", with biases" if self.bias else ""
        weights = f", {self.weights} weights" if self.weights != "none" else ""
        return (
            f"experts {self.experts} x [{self.hidden} -> {self.intermediate}], top {self.topk}, {self.activation[0][1]}"
            f" ({self.glu_layout}){bias}, {self.dtype}{weights}"
        )


_COPIED = ("hidden", "intermediate", "experts", "topk", "dtype", "glu_layout", "bias", "b_major", "recipe", "shared",
           "shared_gate", "weights", "residual")  # fmt: skip


def layer_for(library: Library, layers: str, experts: Experts, module: str, accumulate: bool = False) -> str:
    """The name of the layer that fits, sooner one with this `accumulate`.

    Raises NotBuiltError; ArgumentError for a dtype that no layer has.
    """
    known = library.layers()
    fitting = [name for name, options in known.items() if fnmatchcase(name, layers) and experts.fits(options)]
    if fitting:

        def rank(name: str) -> tuple[Any, ...]:
            o = known[name]
            casts = o.weight_dtype != experts.weight_dtype
            casts_router = experts.router_dtype not in ("", o.router.get("weight_dtype"))
            loss = o.router.get("aux_loss", False)
            again = o.recompute_fp8 != experts.recompute_fp8
            return casts, casts_router, loss, again, o.accumulate != accumulate, KEEPS.index(o.keep), name

        return min(fitting, key=rank)
    if experts.dtype != "bf16":
        raise ArgumentError(
            f"{module} has parameters of {experts.dtype}; layers have bf16: load the model with"
            ' dtype="bfloat16", or run it under autocast',
            argument="dtype",
        )
    what = "these experts" if experts.experts else "this MLP"
    error = NotBuiltError(
        f"{module}: no layer of the store computes {what}; save this as experts.toml and build it with: fusekit build"
        f" experts.toml\n\n{experts.table()}",
        name=f"experts/{experts.kind}",
        command="fusekit build experts.toml",
    )
    error.one_line = False
    raise error


def given_parameters(activation: Any) -> tuple[tuple[str, Any], ...]:
    """An activation without what its kind does not have or what is the default, so that equal ones are equal."""
    defaults = {"approximate": "none", "alpha": 1.0, "limit": None, "up_offset": 0.0}
    given = {name: value for name, value in activation.items() if name in defaults and value != defaults[name]}
    if given.get("limit") in ("inf", float("inf")):
        del given["limit"]
    if activation["kind"] not in ("gelu", "geglu"):
        given.pop("approximate", None)
    if activation["kind"] != "swiglu":
        given.pop("alpha", None)
    return (("kind", activation["kind"]), *sorted((name, _plain(value)) for name, value in given.items()))


def _given_routing(router: Any) -> tuple[tuple[str, Any], ...]:
    """How experts are chosen, without defaults, the loss, and the weights' type: what must agree."""
    defaults = {"input": "x", "score_function": "softmax", "scaling_factor": 1.0, "scale": "output"}
    apart = ("aux_loss", "weight_dtype")
    return tuple(
        sorted((name, value) for name, value in router.items() if name not in apart and value != defaults.get(name, 0))
    )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
