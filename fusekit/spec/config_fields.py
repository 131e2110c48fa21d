"""The fields of a model's `config.json`, taken one by one, with an error for each that is not what it must be."""

import sys
from collections.abc import Mapping
from typing import Any

from fusekit.errors import SpecError
from fusekit.spec.fields import INT32_MAX
from fusekit.spec.values import show, type_name

# Fields that change an MLP or a router of some model type: where the type at hand does not read one, that is said.
TELLING = (
    *("mlp_bias", "use_bias", "swiglu_limit", "num_experts", "num_local_experts", "n_routed_experts"),
    *("moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
    *("decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step", "moe_layers", "norm_topk_prob"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "mlp_hidden_act"),
    *("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor"),
)

ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function", "ffn_act_fn")


class Fields:
    """The fields of one config, taken one by one. A null is a field left out."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.source = source
        self.read: set[str] = set()
        self.notes: list[str] = []

    def error(self, text: str) -> SpecError:
        """The error with this text, which begins with the file's name."""
        return SpecError(f"{self.source}: {text}")

    def peek(self, name: str, default: Any = None) -> Any:
        """The field, of any type; one left out is not worth a note."""
        self.read.add(name)
        return self.values.get(name, default)

    def size(
        self, *names: str, default: int | None = None, minimum: int = 1, most: int = INT32_MAX, quiet: bool = False
    ) -> int:
        """The whole number under any of `names`; those that are there must agree. quiet: no note of the default."""
        value = self._take(names, default, quiet)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= most:
            raise self.error(f"{names[0]} = {show(value)}: it must be a whole number from {minimum} to {most}")
        return value

    def number(self, *names: str, default: float | None = None, quiet: bool = False) -> float:
        """The finite number under any of `names`."""
        value = self._take(names, default, quiet)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{names[0]} = {show(value)}: it must be a number, is {type_name(value)}")
        if not abs(value) <= sys.float_info.max:  # math.isfinite raises for an int that is larger
            raise self.error(f"{names[0]} = {show(value)}: it must be a finite float64")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self._take((name,), default)
        if not isinstance(value, bool):
            raise self.error(f"{name} = {show(value)}: it must be true or false, is {type_name(value)}")
        return value

    def word(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._take((name,), default)
        if not isinstance(value, str):
            raise self.error(f"{name} = {show(value)}: it must be a string, is {type_name(value)}")
        return value

    def layers(self, name: str) -> list[int]:
        """A list of layer numbers; empty where it is left out."""
        value = self.peek(name, [])
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.error(f"{name} = {show(value)}: it must be a list of layer numbers")
        return value

    def check_activations(self, family: str) -> None:
        """Raises SpecError where the config names an activation that a model type not its own would not compute."""
        read = [name for name in ACTIVATIONS if name in self.read]
        computed = [self.values.get(name) for name in read]
        for name in ACTIVATIONS:
            if name in self.values and name not in read and self.values[name] not in computed:
                raise self.error(
                    f"{name} = {show(self.values[name])}: {family} reads {' or '.join(read)} instead, and would "
                    f"compute another MLP; choose another --family or, if its MLPs are those of {family}, give "
                    f"{read[0]} alone"
                )

    def unread(self) -> list[str]:
        """A note for each telling field that was not read."""
        return [
            f"{name} = {show(self.values[name])} is in the config, and this model type does not read it: it "
            "changes nothing below; check that the model type is right"
            for name in TELLING
            if self.values.get(name) not in (None, False, [], 0) and name not in self.read
        ]

    def _take(self, names: tuple[str, ...], default: Any, quiet: bool = False) -> Any:
        self.read.update(names)
        given = {name: self.values[name] for name in names if name in self.values}
        if len(set(map(show, given.values()))) > 1:
            pairs = " and ".join(f"{name} = {show(value)}" for name, value in given.items())
            raise self.error(f"{pairs} contradict each other; both name the same number; correct one of them")
        if given:
            return next(iter(given.values()))
        if default is None:
            raise self.error(f"{' or '.join(names)} is missing, and has no usual value; add it to the file")
        if not quiet:
            self.notes.append(f"{names[0]} is left out of the config: {show(default)}, Transformers' default, is taken")
        return default
