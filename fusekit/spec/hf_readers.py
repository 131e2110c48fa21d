"""What the readers of all model types share."""

from typing import Any

from fusekit.spec.config_fields import Fields
from fusekit.spec.hf_model import GATED, PLAIN, Mlp, Router
from fusekit.spec.values import show

MAX_LAYERS = 10_000
Parts = tuple[tuple[Mlp, ...], Router | None]
"""A family's reader: the MLPs of its layers, and their router."""
ACT = ("hidden_act", "silu")  # the field of the activation, and its default
TANH = ("hidden_activation", "gelu_pytorch_tanh")
TWO_LAYERS = "w1 is {}.weight and w2 is {}.weight, as the checkpoint has them"


def activation_of(fields: Fields, gated: bool, name: str = ACT[0], default: str = ACT[1]) -> tuple[Any, str]:
    """The activation's table, or None and why there is none."""
    value = fields.word(name, default=default)
    table = (GATED if gated else PLAIN).get(value)
    if table is not None:
        return table, ""
    known = ", ".join(GATED if gated else PLAIN)
    kind = "gated" if gated else "plain"
    return None, f"{name} = {show(value)} is no activation of a {kind} MLP that fusekit computes; it computes {known}"


def mlp_of(
    fields: Fields, role: str, intermediate: int, act: tuple[str, str] = ACT, why: str = "", **rest: Any
) -> Mlp:  # fmt: skip
    """An MLP with the activation of the field `act`: its name and default."""
    activation, unknown = activation_of(fields, rest.get("gated", True), *act)
    return Mlp(role, intermediate, activation, why=why or unknown, **rest)


def softmax_router(fields: Fields, experts: int, topk: int, normalised: bool) -> Router:
    """Softmax over all experts, divided by the sum of the chosen where `normalised`: then it is over those alone."""
    keys: dict[str, Any] = {"score_function": "softmax"}
    if not normalised:
        keys["pre_softmax"] = True
    aux = fields.number("router_aux_loss_coef", default=0.001)
    note = "Transformers' load_balancing_loss_func gives K times what aux-loss gives, over all layers at once"
    return checked(fields, Router(experts, topk, keys, aux_loss=aux, aux_note=note))


def checked(fields: Fields, router: Router) -> Router:
    """`router`; SpecError where it chooses more experts than there are."""
    if router.topk > router.experts:
        raise fields.error(
            f"num_experts_per_tok = {router.topk}: there are {router.experts} experts; correct one of the two numbers"
        )
    return router


def layer_count(some: int, total: int) -> str:
    return "every layer" if some == total else f"{some} of {total} layers"
