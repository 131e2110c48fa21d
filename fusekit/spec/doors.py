"""The doors to trainers and servers: what each asks of a layer, and on which version of its package it was tried."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Door:
    """A trainer or server that layers run in.

    package: its distribution. tried: the version that tests ran with. choices: it routes
    itself, and gives each token's experts. rows: it also sorts the rows by expert, so that each is a token with one.
    glu_layout: of its weights; empty: the model's. keys: others of the table. biases: whether its experts may have
    them.
    """

    package: str
    tried: str
    choices: bool = True
    rows: bool = False
    glu_layout: str = ""
    keys: Mapping[str, Any] | None = None
    biases: bool = True

    def fits(self, options: Any) -> bool:
        """Whether the door could ask for a layer with these options, for some model."""
        if options.kind != "moe":
            return False
        if not self.choices:
            return True
        layout = self.glu_layout in ("", options.glu_layout) or not options.gated
        return (
            options.router["input"] == "choices"
            and (options.topk == 1 or not self.rows)
            and layout
            and (self.biases or not options.bias)
            and (options.b_major == "k" or not self.glu_layout)
        )


DOORS: Mapping[str, Door] = {
    "transformers": Door("transformers", "5.24.0"),
    "megatron": Door(
        "megatron-core",
        "0.19.2",
        rows=True,
        glu_layout="concat",
        keys={"grad_dtype": "f32", "accumulate": True},
        biases=False,
    ),
    "torchtitan": Door("torchtitan", "0.3.0", glu_layout="interleaved"),
    "vllm": Door("vllm", "0.33.0", keys={"keep": "none"}),
    "sglang": Door("sglang", "0.5.23", keys={"keep": "none"}),
    "transformer-engine": Door("transformer-engine", "2.20.2", rows=True, biases=False),
    "pytorch": Door("torch", "2.13.0", choices=False),
    "jax": Door("jax", "0.10.2", choices=False),
}
