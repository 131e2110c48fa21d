"""A layer over simulated ranks, formula by formula, against the definition and the program of one GPU."""

import numpy as np
import pytest

from fusekit.abi.layer_pass import KEPT
from fusekit.plan.layer import program
from fusekit.plan.layer.options import broken
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.reference import layer as definition
from tests.soak import sample

from . import layer_meaning, ranks_meaning
from .test_layer_program import CASES as ALONE
from .test_layer_program import PLAIN, H, K, defined, options, tensors_of

OVERLAP = {
    f"{name}-overlap": {**ALONE[name], "overlap": True} for name in ("gpt-oss", "recompute", "llama4", "choices")
}
CASES = ALONE | OVERLAP
LAYERS = [name for name in [*PLAIN, *OVERLAP] if not name.startswith("mlp")]
PARTS = ("w1", "w2", "b1", "b2")  # of which a rank has those of its own experts
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def over(ranks, name="plain", **more):
    """The options of a layer over ranks, each with eight experts or four."""
    message = {**CASES[name], **more}
    return options(**message, experts=ranks * (8 if message.get("bias") else 4), ranks=ranks)


def alone(o):
    """The same on one GPU."""
    return options(**{**o.canonical(), "ranks": 1})


def random_layer(o, tokens, seed):
    """(tensors of the whole layer, the definition and its tensors, x of each rank)."""
    source = np.random.default_rng(seed)
    whole = tensors_of(program(alone(o)), source)
    if "expert_bias" in whole:
        whole["expert_bias"] = source.standard_normal(o.experts)
    layer, theirs = defined(alone(o), {"router": source.standard_normal((o.experts, H))} | whole)
    return whole, layer, theirs, [source.standard_normal((count, H)) for count in tokens]


def share(o, whole, rank):
    """What a rank has of the parameters."""
    own = slice(rank * o.local, (rank + 1) * o.local)
    return {name: tensor[own] if name.partition("_")[0] in PARTS else tensor for name, tensor in whole.items()}


def only(plan, which, given):
    return {name: value for name, value in given.items() if name in plan.arguments(which)[0]}


@pytest.mark.parametrize("which", [FORWARD, INFERENCE])
@pytest.mark.parametrize("tokens", [(7, 4), (5, 0, 3, 9)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_pass_is_the_definition(name, tokens, which):
    o = over(len(tokens), name)
    whole, layer, theirs, x = random_layer(o, tokens, len(name))
    plan = program(o).within(ranks_meaning.room(o, max(tokens)))
    wants, given = [], []
    for rank, own in enumerate(x):
        residual = 0.5 * own
        y, loss, kept = definition.forward(layer, own, theirs | ({"residual": residual} if o.residual else {}))
        wants.append((y, loss))
        more = {"x": own, "logits": kept.logits, "indices": kept.indices, "weights": kept.weights}
        more |= {"total_tokens": np.array([len(own)]), "aux_coefficient": np.array([0.25]), "residual": residual}
        given.append(only(plan, which, share(o, whole, rank) | more))
    for actual, (y, loss) in zip(ranks_meaning.World(plan, o.ranks).run(which, given), wants, strict=True):
        np.testing.assert_allclose(actual["y"], y, **CLOSE)
        if layer.aux is not None:
            np.testing.assert_allclose(actual["loss"][0], loss, rtol=1e-12)


@pytest.mark.parametrize("tokens", [(7, 4), (5, 0, 3, 9)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_pass_is_the_definition(name, tokens):
    o = over(len(tokens), name)
    whole, layer, theirs, x = random_layer(o, tokens, len(name))
    plan = program(o).within(ranks_meaning.room(o, max(tokens)))
    world, wants, given, dy = ranks_meaning.World(plan, o.ranks), [], [], []
    for rank, own in enumerate(x):
        _, _, kept = definition.forward(layer, own, theirs)
        dy.append(np.random.default_rng(rank).standard_normal(own.shape))
        wants.append(definition.backward(layer, theirs, kept, dy[-1], grad_loss=0.4 if layer.aux is not None else 0.0))
        if "router" not in plan.buffers:  # what reaches x through logits is the caller's
            wants[-1]["x"] = wants[-1]["x"] - wants[-1]["logits"] @ theirs["router"]
        more = {"x": own, "logits": kept.logits, "indices": kept.indices, "weights": kept.weights}
        more |= {"total_tokens": np.array([len(own)]), "aux_coefficient": np.array([0.25]), "residual": own}
        given.append(share(o, whole, rank) | more)
    forward = world.run(FORWARD, [only(plan, FORWARD, item) for item in given])
    world.run(FORWARD, [only(plan, FORWARD, item) | {"x": item["x"] + 1} for item in given])  # another layer's
    later = [
        only(plan, BACKWARD, item | {"dy": own, "dloss": np.array([0.4])}) | world.kept(known)
        for item, own, known in zip(given, dy, forward, strict=True)
    ]
    for rank, actual in enumerate(world.run(BACKWARD, later)):
        for argument in plan.arguments(BACKWARD)[1]:
            name_ = argument.removeprefix("d")
            want = sum(one[name_] for one in wants) if name_ in PARTS else wants[rank][name_]
            want = want[rank * o.local : (rank + 1) * o.local] if name_ in PARTS else want
            if name_ in ("w1", "w2") and actual[argument].shape != want.shape:
                want = want.swapaxes(-1, -2)
            np.testing.assert_allclose(actual[argument], want, **CLOSE, err_msg=argument)


# -- routings ---------------------------------------------------------------------------------------------------------


def routed(o, source, count, ranks):
    """int [T, K]: distinct experts of each token, of those `ranks` alone."""
    open_to = np.concatenate([np.arange(rank * o.local, (rank + 1) * o.local) for rank in ranks])
    return open_to[np.argsort(source.random((count, len(open_to))), axis=1)[:, :K]]


def routing(seed):
    """(options, tokens of each rank, the ranks whose experts are chosen)."""
    source = np.random.default_rng(seed)
    ranks = int(source.choice([2, 3, 4]))
    tokens = [int(source.integers(0, 12)) for _ in range(ranks)]
    every = list(range(ranks))
    kind = seed % 5
    if kind == 0:
        every = [int(source.integers(ranks))]  # all tokens to one
    elif kind == 1:
        every.remove(int(source.integers(ranks)))  # none to one
    elif kind == 2:
        tokens[int(source.integers(ranks))] = 0
    elif kind == 3:
        tokens = [0] * (ranks - 1) + [9]
    name = ["choices", "llama4-choices", "plain"][int(source.integers(3))]
    more = {"keep": "x"} if source.random() < 0.3 else {}
    return (
        over(ranks, name, **more, **({"router": {"input": "choices"}} if name == "plain" else {})),
        tokens,
        every,
        source,
    )


@pytest.mark.parametrize("seed", sample(range(200), most=40))
def test_any_routing_is_that_of_one_gpu(seed):
    o, tokens, chosen, source = routing(seed)
    plan, one = program(o).within(ranks_meaning.room(o, max(tokens))), program(alone(o))
    whole = tensors_of(one, source)
    given = []
    for rank, count in enumerate(tokens):
        own = {"x": source.standard_normal((count, H)), "indices": routed(o, source, count, chosen)}
        given.append(share(o, whole, rank) | own | {"weights": source.random((count, K))})
    dy = [source.standard_normal((count, H)) for count in tokens]
    world = ranks_meaning.World(plan, o.ranks)
    forward = world.run(FORWARD, [only(plan, FORWARD, item) for item in given])
    later = [
        only(plan, BACKWARD, item | {"dy": own}) | world.kept(known)
        for item, own, known in zip(given, dy, forward, strict=True)
    ]
    back = world.run(BACKWARD, later)
    every = {name: np.concatenate([item[name] for item in given]) for name in ("x", "indices", "weights")}
    first = layer_meaning.run(one, FORWARD, whole | every, sum(tokens))
    stays = {item: first[item] for item, buffer in one.buffers.items() if buffer.place == KEPT}
    want = layer_meaning.run(one, BACKWARD, whole | every | stays | {"dy": np.concatenate(dy)}, sum(tokens))
    np.testing.assert_allclose(np.concatenate([item["y"] for item in forward]), first["y"], **CLOSE)
    for name in one.arguments(BACKWARD)[1]:
        actual = np.concatenate([item[name] for item in back])  # of tokens and of experts, in the order of ranks
        np.testing.assert_allclose(actual, want[name], **CLOSE, err_msg=name)
    assert [int(item["wanted"][0]) for item in forward] == [
        int(((every["indices"] // o.local) == rank).sum()) for rank in range(o.ranks)
    ]


CODED = [name for name in CASES if name.startswith("fp8") and "mlp" not in name]
FEW, MANY = (7, 4), (70, 0, 130)  # tokens of each rank: fewer than a block of 128 rows, and more


@pytest.mark.parametrize(
    ("name", "tokens"),
    sample(
        [(name, tokens) for name in CODED for tokens in (FEW, MANY)],
        *((name, FEW) for name in CODED), *((name, MANY) for name in (CODED[0], CODED[-1])),
    ),
)  # fmt: skip
def test_a_layer_that_reads_fp8_values_is_that_of_one_gpu(name, tokens):
    """The same rows in the same order have the same FP8 values, of rows and along the tokens, whichever rank makes
    them.
    """
    o = over(len(tokens), name)
    plan, one = program(o).within(ranks_meaning.room(o, max(tokens))), program(alone(o))
    source = np.random.default_rng(len(name))
    whole = tensors_of(one, source)
    whole |= {"expert_bias": source.standard_normal(o.experts)} if "expert_bias" in whole else {}
    fp8 = layer_meaning.run(one, QUANTISE, whole, 0)
    whole |= {argument: fp8[argument] for argument in one.arguments(QUANTISE)[1]}
    more = {"aux_coefficient": np.array([0.25]), "total_tokens": np.array([sum(tokens)]), "dloss": np.array([0.0])}
    given = []
    for rank, count in enumerate(tokens):
        own = {item: source.standard_normal((count, o.hidden)) for item in ("x", "dy")}
        own |= {"indices": routed(o, source, count, range(o.ranks)), "weights": source.random((count, K))}
        given.append(share(o, whole, rank) | more | own)
    world = ranks_meaning.World(plan, o.ranks)
    forward = world.run(FORWARD, [only(plan, FORWARD, item) for item in given])
    back = world.run(BACKWARD, [only(plan, BACKWARD, item) | world.kept(known)
                                for item, known in zip(given, forward, strict=True)])  # fmt: skip
    every = {item: np.concatenate([own[item] for own in given]) for item in ("x", "dy", "indices", "weights")}
    first = layer_meaning.run(one, FORWARD, whole | more | every, sum(tokens))
    stays = {item: first[item] for item, buffer in one.buffers.items() if buffer.place == KEPT}
    want = layer_meaning.run(one, BACKWARD, whole | more | every | stays, sum(tokens))
    np.testing.assert_allclose(np.concatenate([item["y"] for item in forward]), first["y"], **CLOSE)
    for entry in one.arguments(BACKWARD)[1]:
        actual = [own[entry] for own in back]
        summed = entry.removeprefix("d") not in (*PARTS, "x", "weights", "logits")
        total = sum(actual) if summed else np.concatenate(actual)
        if entry.startswith("dshared"):  # each rank has blocks of its own tokens
            assert np.linalg.norm(total - want[entry]) < 0.1 * np.linalg.norm(want[entry]), entry
        else:
            np.testing.assert_allclose(total, want[entry], **CLOSE, err_msg=entry)
    sent = [step.part for step in plan.steps[FORWARD] if step.window]
    assert sent == (["dispatch", "combine"] if o.router["scale"] == "input" else ["dispatch-fp8", "combine"])


# -- rows, memory, rules ----------------------------------------------------------------------------------------------


def test_rows_beyond_the_room_are_dropped_and_counted():
    o = over(2, "choices")
    source = np.random.default_rng(4)
    indices = [np.tile([0, 1, 9], (6, 1)), np.tile([2, 8, 10], (5, 1))]  # 17 rows of rank 0, 16 of rank 1
    whole = tensors_of(program(alone(o)), source)
    x = [source.standard_normal((6, H)), source.standard_normal((5, H))]
    given = [
        share(o, whole, rank) | {"x": x[rank], "indices": indices[rank], "weights": source.random((len(x[rank]), K))}
        for rank in range(2)
    ]
    result = {}
    for rows in (None, 16):
        plan = program(o).within(ranks_meaning.room(o, 6, rows))
        world = ranks_meaning.World(plan, 2)
        result[rows] = world.run(INFERENCE, [only(plan, INFERENCE, item) for item in given])
    assert [int(item["wanted"][0]) for item in result[16]] == [17, 16]
    assert [item["overflow"].tolist() for item in result[16]] == [[1, 0, 17, 17]] * 2
    fewer = [only(plan, INFERENCE, item | {"indices": item["indices"][:0], "x": item["x"][:0],
                                           "weights": item["weights"][:0]}) for item in given]  # fmt: skip
    assert [item["overflow"].tolist() for item in world.run(INFERENCE, fewer)] == [[1, 0, 17, 17]] * 2
    assert result[16][0]["offsets"].tolist()[-1] == 16
    np.testing.assert_allclose(result[16][0]["y"], result[None][0]["y"], **CLOSE)
    np.testing.assert_allclose(result[16][1]["y"][:-1], result[None][1]["y"][:-1], **CLOSE)
    assert not np.allclose(result[16][1]["y"][-1], result[None][1]["y"][-1])  # its choice 2 was the last row


@pytest.mark.parametrize("name", LAYERS)
def test_no_window_lies_in_kept_or_scratch_memory(name):
    o = over(2, name)
    plan = program(o).within(ranks_meaning.room(o, 100))
    windows = {item for item, buffer in plan.buffers.items() if buffer.place in ranks_meaning.WINDOWS}
    dims = plan.dims(100)
    slope, rest = plan.kept_line()
    for tokens in (0, 1, 100):
        assert plan.kept(plan.dims(tokens))[1] <= slope * tokens + rest
    for which in (FORWARD, INFERENCE, BACKWARD):
        places, _ = plan.scratch(which, plan.arguments(which)[1], dims)
        assert not windows & places.keys()
        inputs, outputs = plan.arguments(which)
        assert not windows & (inputs.keys() | outputs.keys())


def test_what_no_output_needs_is_not_launched():
    plan = program(over(2, "gpt-oss"))
    parts = [step.part for step in plan.needed(BACKWARD, ["dx"])]
    assert parts[0] == "dispatch" and parts.count("dispatch") == 1 and parts[-1] == "combine-dx"
    parts = [step.part for step in plan.needed(BACKWARD, plan.arguments(BACKWARD)[1])]
    assert parts.count("dispatch") == 2 and parts.index("combine-dx") < parts.index("fc2-wgrad")


def shown(plan, which):
    """The steps of a pass; ^: on the side stream, |: joins it, ~: awaits rows."""
    steps = plan.needed(which, plan.arguments(which)[1])
    marks = [
        "^" * step.on_side + "|" * join + "~" * bool(plan.parts[step.part].get("awaits"))
        for step, join in zip(steps, plan.joins(steps), strict=True)
    ]
    return " ".join(mark + step.part for step, mark in zip(steps, marks, strict=True))


def test_rows_are_sent_on_the_side_stream_and_joined_before_they_are_read():
    apart, again = "^dispatch-rows dispatch-choices", "^dispatch-rows dispatch-begun"
    plan = program(over(2, "plain", overlap=True, router={"input": "choices"}))
    assert shown(plan, FORWARD) == f"{apart} index ~fc1-fwd |fc2 combine"
    assert shown(plan, BACKWARD) == (
        f"{again} ~fc2-dgrad |fc1-dgrad weights-bwd combine-dx {again} fc2-wgrad |fc1-wgrad"
    )
    plan = program(over(2, "recompute", overlap=True, router={"input": "choices"}, bias=False, shared=0))
    assert shown(plan, BACKWARD).startswith(f"{again} ~fc1-recompute {again} ~fc2-dgrad |fc1-dgrad")
    plan = program(over(2, "choices-overlap"))
    assert shown(plan, BACKWARD).startswith(f"{apart} ~fc2-dgrad"), "dy . b2 is of the choices"
    for name in OVERLAP:
        plan = program(over(2, name))
        for which in (FORWARD, INFERENCE, BACKWARD):
            pending = set()
            for step, join in zip(plan.steps[which], plan.joins(plan.steps[which]), strict=True):
                keys = plan.parts[step.part]
                assert not (
                    join and (step.on_side or keys.get("awaits") or keys.get("sends") in ("choices", "nothing"))
                )
                pending = set() if join or step.on_side else pending
                assert keys.get("awaits") or not pending & set(step.arguments.values()), (name, which, step.part)
                pending |= set(step.writes.values()) if step.on_side else set()


@pytest.mark.parametrize("name", [name for name in LAYERS if "choices" in name])
def test_gradients_of_given_weights_come_with_dx_or_alone(name):
    """And no pass needs more scratch memory than the one with all outputs."""
    plan = program(over(2, name)).within(ranks_meaning.room(over(2, name), 100))
    outputs = plan.arguments(BACKWARD)[1].keys()
    for left in ((), ("dx",), ("dw1", "dw2"), ("dx", "dweights"), ("dx", "dw1", "dw2")):
        asked = outputs - set(left)
        parts = [step.part for step in plan.needed(BACKWARD, asked)]
        alone = "dx" not in asked and "dweights" in asked
        assert ("combine-dx" in parts, "weights-return" in parts) == ("dx" in asked, alone)
        assert plan.scratch(BACKWARD, asked, plan.dims(100))[1] <= plan.scratch(BACKWARD, outputs, plan.dims(100))[1]


@pytest.mark.parametrize(
    ("said", "key", "text"),
    [
        ({"experts": 8, "overlap": True}, "overlap", "say ranks, or leave overlap out"),
        ({"experts": 8, "ranks": 3}, "ranks", "say a divisor"),
        ({"experts": 8, "ranks": 0}, "ranks", "say a divisor"),
        ({"experts": 64, "ranks": 64}, "ranks", "from 1 to 32"),
        ({"experts": 8, "ranks": 2, "bias": True}, "ranks", "a multiple of 8"),
        ({"experts": 8, "ranks": 2, "overlap": True, "recipe": "fp8-block"}, "overlap", "leave recipe or overlap out"),
        ({"kind": "mlp", "ranks": 2}, "ranks", 'of kind = "moe" alone'),
    ],
)
def test_wrong_ranks_are_refused_in_words(said, key, text):
    assert [text in rule for where, _, rule in broken(options(**said)) if where == key] == [True]
