"""What a model's config says of its MLPs and its router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# hidden_act -> the activation of a gated MLP, and of a plain one.
GATED: dict[str, dict[str, Any]] = {
    "silu": {"kind": "swiglu"},
    "swish": {"kind": "swiglu"},
    "quick_gelu": {"kind": "swiglu", "alpha": 1.702},
    "gelu": {"kind": "geglu"},
    "gelu_pytorch_tanh": {"kind": "geglu", "approximate": "tanh"},
    "gelu_new": {"kind": "geglu", "approximate": "tanh"},
    "gelu_fast": {"kind": "geglu", "approximate": "tanh"},
    "relu": {"kind": "reglu"},
}
PLAIN = {
    "silu": {"kind": "silu"},
    "swish": {"kind": "silu"},
    "gelu": {"kind": "gelu"},
    "gelu_pytorch_tanh": {"kind": "gelu", "approximate": "tanh"},
    "gelu_new": {"kind": "gelu", "approximate": "tanh"},
    "gelu_fast": {"kind": "gelu", "approximate": "tanh"},
    "relu": {"kind": "relu"},
    "relu2": {"kind": "srelu"},
}

SEPARATE = "w1 is gate_proj.weight over up_proj.weight, stacked once; w2 is down_proj.weight"
STACKED = "w1[e] is gate_proj.weight over up_proj.weight of expert e, w2[e] its down_proj.weight; both stacked once"
UNGATED = "w1[e] is up_proj.weight of expert e, w2[e] its down_proj.weight; both stacked once"
NUMBERED = "w1[e] is w1.weight over w3.weight of expert e, stacked once; w2[e] is its w2.weight"
FUSED = "w1 is gate_up_proj.weight and w2 is down_proj.weight, as the checkpoint has them"
LINEARS = "w1 is {0}.input_linear.weight and w2 is {0}.output_linear.weight, as the checkpoint has them"
AS_STORED = "w1 is gate_up_proj [X, H, 2 I] and w2 is down_proj [X, I, H], as the checkpoint has them"
IN_BLOCKS = "w1 is gate_up_proj_blocks, w1_s gate_up_proj_scales, w2 and w2_s those of down_proj"
TRANSPOSED = (
    "w1 and w2 are the transposes, made once, of gate_up_proj [E, H, 2 I] and down_proj [E, I, H]. To use those as "
    'they are, exchange b_major = "k", the default, and "n" in the GEMMs, and dy and x in a launch of grouped-wgrad, '
    "which then sums no gradient of a bias"
)


@dataclass(frozen=True, slots=True)
class Mlp:
    """One kind of MLP of the model: w2[H, I], and w1[2 I, H] where it is gated, else [I, H].

    role: "experts", "shared" (experts that every token goes through) or "dense". activation: a spec's table; None
    where fusekit has no such activation, and `why` then says so. weights: where w1 and w2 are in the checkpoint.
    layers: which layers have it. scaled: whether sigmoid(x . gate) multiplies its output.
    """

    role: str
    intermediate: int
    activation: Mapping[str, Any] | None
    gated: bool = True
    glu_layout: str = "concat"
    bias: bool = False
    weights: str = SEPARATE
    layers: str = "every layer"
    why: str = ""
    scaled: bool = False

    @property
    def b_major(self) -> str:
        """Which dimension of its weights is contiguous in the checkpoint, as a spec says it."""
        return "n" if self.weights == TRANSPOSED else "k"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen; the fields are those of `router-topk`.

    scales_input: the weight multiplies the expert's input, not its output. aux_loss: coefficient of the load-balancing
    loss, 0 where the model has none; aux_note: how the model's loss differs. why: what the kernels cannot do of it.
    bias: of the logits. by_sequence: whether that loss is one of each sequence.
    """

    experts: int
    topk: int
    keys: Mapping[str, Any]
    scales_input: bool = False
    aux_loss: float = 0.0
    aux_note: str = ""
    why: str = ""
    bias: bool = False
    by_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of a model that its kernels depend on. hidden: H. dtype: "bf16" or "fp16". weights: those of its
    checkpoint, as a layer for inference has them.
    """

    model_type: str
    hidden: int
    mlps: tuple[Mlp, ...]
    router: Router | None = None
    dtype: str = "bf16"
    notes: tuple[str, ...] = ()
    weights: str = "none"
