"""Random inputs of the router's operations, and whether a kernel's outputs are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fusekit.reference import router as ref
from fusekit.reference.formats import Array, encode
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.reference.tokens import canonical

if TYPE_CHECKING:
    from fusekit.spec import RouterSpec

# What float32 arithmetic may lose of a score or of the terms of a gradient: approximate exponentials and reciprocals
# cost 2**-22 each, a sum over 4096 experts 2**-19 at worst.
ARITHMETIC = 2.0**-18
# x - max is rounded to 2**-24 of itself before the exponential is taken: so much more of the allowance for each unit.
PER_UNIT = 2.0**-5
FLUSHED = 2.0**-118  # results and terms below the least normal float32 may be 0
# By how much a rejected score may beat a taken one where scores are computed before the selection.
SELECTION = 2.0**-20


def router_inputs(spec: RouterSpec | Mapping[str, Any], *, T: int, seed: int = 0) -> dict[str, Any]:
    """Every input of a router operation by its argument name, for T tokens; choices are those of random logits."""
    keys = canonical(spec)
    rng = np.random.default_rng(seed)
    shape = (T, keys["experts"])

    def matrix(dtype: str, scale: float = 1.0) -> Array:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return encode(values, "bf16") if dtype == "bf16" else values

    op = keys["op"]
    inputs: dict[str, Any] = {}
    if op in ("moe-aux-loss", "moe-aux-loss-bwd"):
        counts = rng.integers(0, 2 * T * keys["topk"] // keys["experts"] + 2, keys["experts"], dtype=np.int32)
        inputs = {"counts": counts, "total_tokens": max(1, T), "tokens": T}
        if keys.get("scalars") == "device":
            inputs["total_tokens"] = np.array([T], np.int32)
            inputs["coefficient"] = np.array([0.0625], np.float32)
        if op == "moe-aux-loss":
            return inputs | {"scores": encode(rng.random(shape, dtype=np.float32), keys["out_dtype"])}
        return inputs | {"grad_loss": np.array([0.75], np.float32)}
    if op != "router-aux-score-bwd":
        inputs["logits"] = matrix(keys["dtype"], 2.0)
    if keys["expert_bias"]:
        inputs["expert_bias"] = rng.standard_normal(keys["experts"], dtype=np.float32) * np.float32(0.1)
    if op == "router-topk-bwd":
        chosen = np.argpartition(rng.random(shape, dtype=np.float32), keys["topk"] - 1, axis=1)[:, : keys["topk"]]
        if keys["outputs"] == "compact":
            inputs["indices"] = chosen.astype(np.int32)
            inputs["grad_weights"] = rng.standard_normal(chosen.shape, dtype=np.float32)
        else:
            inputs["routing_map"] = ref.pack_map(keys, chosen.astype(np.int64))
            inputs["grad_probs"] = matrix(keys["out_dtype"])
        if keys.get("addend"):
            inputs["addend"] = matrix("f32", 0.1)
    if op == "router-aux-score-bwd":
        forward = {**keys, "op": "router-aux-score"}
        scores, total = ref.aux_scores(forward, {"logits": rng.standard_normal(shape) * 2.0} | {"dtype": "f32"})
        inputs["scores"] = encode(scores, "bf16") if keys["out_dtype"] == "bf16" else scores.astype(np.float32)
        if total is not None:
            inputs["score_sum"] = total[:, 0].astype(np.float32)
        inputs["grad_scores"] = matrix(keys["out_dtype"])
    return inputs


def router_check(
    spec: RouterSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> tuple[list[Measurement], list[str]]:
    """Measures every output of floats, and says in words what is wrong with the choices. Rows are tokens."""
    keys = canonical(spec)
    with np.errstate(all="ignore"):
        if keys["op"] in ("moe-aux-loss", "moe-aux-loss-bwd"):
            ((name, want),) = ref.route(keys, inputs).items()
            got = {name: np.atleast_2d(outputs[name])}
            want = np.atleast_2d(want)
            return [_measure(name, got, "f32" if name == "loss" else keys["out_dtype"], want, want)], []
        if keys["op"] in ("router-topk-bwd", "router-aux-score-bwd"):
            result, size = (ref.topk_gradient if keys["op"] == "router-topk-bwd" else ref.aux_gradient)(keys, inputs)
            if keys["op"] == "router-topk-bwd" and keys["score_function"] == "softmax":
                size = size * (
                    1 + PER_UNIT * ref.spread(ref.logits_of(keys, inputs)).max(axis=1, keepdims=True, initial=0)
                )
            more, dtype = ref.addend(keys, inputs), keys.get("grad_dtype", keys["dtype"])
            return [_measure("grad_logits", outputs, dtype, result + more, size + np.abs(more))], []
        chosen, problems = _choices(keys, inputs, outputs)
        if keys["op"] == "router-aux-score":
            scores, total = ref.aux_scores(keys, inputs)
            size = scores
            if keys["score_function"] == "softmax":
                size = scores * (1 + PER_UNIT * ref.spread(ref.logits_of(keys, inputs)))
            measured = [_measure("scores", outputs, keys["out_dtype"], scores, size)]
            if total is not None:
                sums = {"score_sum": np.asarray(outputs["score_sum"])[:, None]}
                measured.append(_measure("score_sum", sums, "f32", total, total))
            return measured, problems
        weights = ref.weights(keys, inputs, chosen)
        name, dtype = ("weights", "f32") if keys["outputs"] == "compact" else ("probs", keys["out_dtype"])
        want = ref.choice_outputs(keys, chosen, weights)[name]
        size = ref.choice_outputs(keys, chosen, weights * (1 + PER_UNIT * ref.weight_spread(keys, inputs, chosen)))[
            name
        ]
        return [_measure(name, outputs, dtype, want, size)], problems


def _measure(name: str, outputs: Mapping[str, Array], dtype: str, want: Array, size: Array) -> Measurement:
    got = np.asarray(outputs[name])
    slack = np.abs(size) * ARITHMETIC + FLUSHED
    slack[size == 0] = 0.0  # what is not chosen is 0, exactly
    # Equal weights are all rounded the same way: the error of the whole may be as large as that of one.
    limit = 2.0**-8 if dtype == "bf16" else 2 * ARITHMETIC
    return measure(name, got, Expected(dtype, np.arange(len(got)), want, slack, limit=limit))


def _choices(
    keys: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> tuple[ref.Indices, list[str]]:
    """The choices to compare weights for, and what is wrong with the kernel's."""
    want = ref.select(keys, inputs)
    if keys["outputs"] == "compact":
        name, got = "indices", np.asarray(outputs["indices"]).astype(np.int64)
        if got.size and (got.min() < 0 or got.max() >= keys["experts"]):
            return want, [f"indices: {got.min()}..{got.max()}; there are {keys['experts']} experts"]
        flags = np.zeros((len(got), keys["experts"]), dtype=bool)
        np.put_along_axis(flags, got, True, axis=1)
    else:
        name, packed = "routing_map", np.asarray(outputs["routing_map"])
        flags = ref.unpack_map(keys, packed)
        if not np.array_equal(ref.pack_flags(keys, flags), packed):
            return want, ["routing_map: bytes other than 0 and 1, or bits beyond the last expert"]
    counts = flags.sum(axis=1)
    if (counts != keys["topk"]).any():
        row = int(np.argmax(counts != keys["topk"]))
        return want, [f"{name}: token {row} has {int(counts[row])} different experts, not {keys['topk']}"]
    if keys["outputs"] != "compact":
        got = np.nonzero(flags)[1].reshape(want.shape)
    expected = np.zeros_like(flags)
    np.put_along_axis(expected, want, True, axis=1)
    wrong = (expected != flags).any(axis=1)
    if ref.exact(keys):
        if keys["outputs"] == "compact":
            return want, _where(name, (got != want).any(axis=1), got, want)  # the order counts
        return want, _where(name, wrong, flags, expected)
    by, summed = ref.selection_scores(keys, inputs)
    for row in np.flatnonzero(wrong).tolist():
        wrong[row] = not _near(keys, by[row], summed[row], flags[row])
    return got, _where(name, wrong, flags, expected)


def _near(keys: Mapping[str, Any], by: Array, summed: Array, flags: Array) -> bool:
    """Whether no expert left out beats one taken by more than rounding; groups likewise."""
    allowed = np.ones(keys["experts"], dtype=bool)
    if keys["num_groups"]:
        size, kept = keys["experts"] // keys["num_groups"], keys["group_topk"]
        sums = ref.group_scores(keys, summed[None])[0]
        used = flags.reshape(keys["num_groups"], size).any(axis=1)
        # A group that gives an expert is kept; of the others, the best may be kept as well.
        floor = sums[np.argsort(ref.order_of(sums))[-kept]]
        slack = SELECTION * _magnitude(sums) * (keys["topk"] // kept)
        if used.sum() > kept or any(_beats(floor, magnitude, slack) for magnitude in sums[used]):
            return False
        allowed = np.repeat(used | np.array([_beats(magnitude, floor, slack) for magnitude in sums]), size)
    rest = by[allowed & ~flags]
    if not rest.size:
        return True
    taken = by[flags]
    best, least = rest[np.argmax(ref.order_of(rest))], taken[np.argmin(ref.order_of(taken))]
    return not _beats(best, least, SELECTION * max(1.0, _magnitude(taken)))


def _beats(one: float, other: float, slack: float) -> bool:
    """Whether a value ranks above another by more than `slack`; a NaN above infinity, and that above all numbers."""
    if np.isfinite(one) and np.isfinite(other):
        return bool(one > other + slack)
    first, second = ref.order_of(np.array([one, other], np.float64))
    return bool(first > second)


def _magnitude(values: Array) -> float:
    """The greatest, of those that are numbers."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _where(name: str, wrong: Array, got: Array, want: Array) -> list[str]:
    if not wrong.any():
        return []
    row = int(np.argmax(wrong))
    shown, expected = (array[row] if array.dtype != bool else np.flatnonzero(array[row]) for array in (got, want))
    return [
        f"{name}: {int(wrong.sum())} tokens chose wrongly, the first {row}: {shown.tolist()} for {expected.tolist()}"
    ]
