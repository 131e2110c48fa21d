"""A layer in a spec file: what is refused, and how; what [defaults] give; what an editor marks."""

import jsonschema
import pytest

from fusekit.errors import SpecError
from fusekit.plan.layer import layer_fields, program
from fusekit.plan.layer.options import ROUTER_FIELDS
from fusekit.spec import parse_text, schema
from fusekit.spec.catalog import targets
from fusekit.spec.fields import ACTIVATION_FIELDS
from fusekit.spec.model import DTYPES
from fusekit.spec.schemas import layer_name

MOE = {"name": "moe", "kind": "moe", "arch": "sm_90a", "hidden": 256, "intermediate": 128, "experts": 8, "topk": 2}
MLP = {name: value for name, value in MOE.items() if name not in ("experts", "topk")} | {"name": "mlp", "kind": "mlp"}
GEMM = {"name": "fc", "op": "dense-gemm", "arch": "sm_90a", "tile": [128, 128], "cluster": [2, 1]}
VALIDATOR = jsonschema.Draft7Validator(schema())


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def text_of(*tables, **defaults):
    lines = ["schema = 1", "[defaults]", *(f"{key} = {toml(value)}" for key, value in defaults.items())]
    for table in tables:
        lines += ["[[kernel]]", *(f"{key} = {toml(value)}" for key, value in table.items() if value is not None)]
    return "\n".join(lines)


def problems(*tables, **defaults):
    with pytest.raises(SpecError) as caught:
        parse_text(text_of(*tables, **defaults), "layers")
    return [line.partition(": ")[2] for line in caught.value.problems]


CODED = {"weights": "fp8-block", "keep": "none"}
THREE = (
    'weights = "fp8-block": a checkpoint has FP8 weights, tokens stay bf16; recipe = "fp8-block": bf16 or float32 '
    "weights and tokens are quantised, for training too; weight_dtype: the type of weights that recipe quantises"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts": None}, ["experts = 0: a layer of experts needs it; say experts, 1 at least"]),
        ({"topk": None}, ["topk = 0: a layer of experts needs it; say topk, 1 at least"]),
        *[({key: value}, [f"{key} = {value}: must be from 1 to 2147483647"])
          for key in ("experts", "topk", "ranks") for value in (0, -1)],
        ({"topk": 9}, ["topk = 9: a token cannot have more than all 8 experts; say fewer"]),
        (
            {"bias": True, "router": {"scale": "input"}},
            ["bias = true: the weights multiply the experts' input (scale = \"input\"), and b2 has no row to belong to;"
             " leave one of the two out"],
        ),
        (
            {"router": {"input": "choices", "bias": True, "expert_bias": True, "aux_loss": True}},
            [f'router.{key} = true: needs logits, and input = "choices" gives none; leave it out'
             for key in ("bias", "expert_bias", "aux_loss")],
        ),
        (
            {"experts": 12},
            ["experts = 12: the product that makes the logits has a multiple of 8 columns; say such a number, or "
             'router = { input = "logits" }, and make them yourself'],
        ),
        (
            {"experts": 12, "bias": True, "router": {"input": "choices"}},
            ["experts = 12: dy . b2, of which the router weights' gradients are made, has a column for each expert; "
             "say a multiple of 8"],
        ),
        (
            {"activation": {"kind": "dswiglu"}},
            ['activation.kind = "dswiglu": must be "identity", "gelu", "relu", "silu", "srelu", "geglu", "reglu" or '
             '"swiglu"'],
        ),
        (
            {"activation": {"kind": "identity"}},
            ['activation.kind = "identity": it has no backward activation; say another one, or keep = "none"'],
        ),
        (
            {"hidden": 100, "intermediate": 36, "shared": 4},
            [f"{key} = {value}: a row must be a multiple of 16 bytes; say a multiple of 8"
             for key, value in (("hidden", 100), ("intermediate", 36), ("shared", 4))],
        ),
        (
            {"hidden": 2**23, "intermediate": 2**30},
            [f"{key} = {value}: not all kernels of a layer take rows of so many elements; say 4194304 at most"
             for key, value in (("hidden", 2**23), ("intermediate", 2**30))],
        ),
        (
            {"glu_layout": "interleaved-32", "intermediate": 40, "shared": 24},
            [f"{key} = {value}: interleaved-32 alternates 32 gate and 32 up columns; say a multiple of 32"
             for key, value in (("intermediate", 40), ("shared", 24))],
        ),
        (
            {"activation": {"kind": "relu"}, "glu_layout": "concat"},
            [
                'glu_layout = "concat": the activation relu is not gated, so there is no gate to lay out; for a gated '
                "relu write reglu, else leave it out"
            ],
        ),
        ({"accumulate": True}, ['accumulate = true: sums of many steps want float32; say grad_dtype = "f32"']),
        (
            {"recipe": "fp8-block", "hidden": 264, "intermediate": 96, "shared": 72},
            ["hidden = 264: a row of FP8 values must be a multiple of 16 bytes; say a multiple of 16",
             "intermediate = 96: 64 columns of gate or up have one scale of w1; say a multiple of 64, or another "
             "layout",
             "shared = 72: a row of FP8 values must be a multiple of 16 bytes; say a multiple of 16"],
        ),
        (
            {"recipe": "fp8-block", "dtype": "fp16"},
            ['dtype = "fp16": the kernels that move rows and choose experts take bf16; say dtype = "bf16"'],
        ),
        (
            {"x_blocks": "128x128"},
            ['x_blocks = "128x128": is about FP8 values that a backward pass reads, and there are none; say recipe = '
             '"fp8-block" and keep something, or leave it out'],
        ),
        (
            {"weight_dtype": "f32"},
            ['weight_dtype = "f32": products read weights of dtype = "bf16"; "f32" weights need FP8 operands: say '
             'recipe = "fp8-block", or leave it out'],
        ),
        (
            {"weight_dtype": "fp16", "recipe": "fp8-block"},
            ['weight_dtype = "fp16": products read weights of dtype = "bf16"; "f32" weights need FP8 operands: say '
             'recipe = "fp8-block", or leave it out'],
        ),
        (
            CODED | {"recipe": "fp8-block"},
            [f'weights = "fp8-block": goes with no recipe; say one of the two. {THREE}'],
        ),
        *(
            (
                CODED | {"weight_dtype": dtype},
                [f'weights = "fp8-block": goes with no weight_dtype; leave that out. {THREE}'],
            )
            for dtype in ("bf16", "f32")
        ),
        (
            {"weights": "fp8-block", "hidden": 264, "intermediate": 192},
            ['keep = "z": a backward pass reads weights that an optimiser has changed, and these have no optimiser; '
             'say keep = "none", or recipe = "fp8-block" instead of weights',
             "hidden = 264: a row of FP8 values must be a multiple of 16 bytes; say a multiple of 16",
             "intermediate = 192: a scale of w1 is of 128 columns of gates alone, or of ups; say a multiple of 128, or "
             "another layout"],
        ),
        (
            {"weights": "mxfp4", "hidden": 96, "intermediate": 96, "dtype": "bf16", "b_major": "n", "keep": "none"},
            ['b_major = "n": MXFP4 checkpoints have w1 [X, N, H] and w2 [X, H, I]; say b_major = "k"',
             *(f"{field} = 96: a step of a product reads two scales of 32 values; say a multiple of 64"
               for field in ("hidden", "intermediate"))],
        ),
        (
            CODED | {"b_major": "n"},
            ['b_major = "n": FP8 checkpoints have w1 [X, N, H] and w2 [X, H, I]; say b_major = "k"'],
        ),
        (
            {"recompute_fp8": True},
            ["recompute_fp8 = true: is about FP8 weights that a backward pass reads and its forward pass does not; say "
             'recipe = "fp8-block" and keep = "z", or leave it out'],
        ),
        (
            {"recompute_fp8": True, "recipe": "fp8-block", "keep": "x"},
            ["recompute_fp8 = true: is about FP8 weights that a backward pass reads and its forward pass does not; say "
             'recipe = "fp8-block" and keep = "z", or leave it out'],
        ),
        ({"recipe": "fp8"}, ['recipe = "fp8": must be "none" or "fp8-block"']),
        ({"hiden": 5}, ['hiden = 5: there is no such field; did you mean "hidden"?']),
        ({"router": {"scor": 1}}, None),
        ({"router": {"score_function": "tanh"}}, None),
        ({"kind": "moee"}, ['kind = "moee": must be "moe" or "mlp"; did you mean "moe"?']),
        ({"hidden": None}, ["hidden is missing (H, elements of a token); give an integer"]),
        (
            {"op": "grouped-gemm"},
            ['op = "grouped-gemm": a table has an op, and is a kernel, or a kind, and is a layer; leave one of the two '
             "out"],
        ),
        ({"problem": {"T": 0}}, ["problem.T = 0: must be from 1 to 2147483647"]),
    ],
)  # fmt: skip
def test_what_a_layer_refuses(change, said):
    got = problems(MOE | change)
    assert got == said if said is not None else len(got) == 1


def test_what_an_mlp_refuses():
    others = {"experts": 8, "topk": 2, "shared": 64, "residual": True, "router": {"bias": True}, "ranks": 2}
    shown = {"experts": "8", "topk": "2", "shared": "64", "residual": "true", "router": "{ bias = true }", "ranks": "2"}
    assert problems(MLP | others) == [
        f'{key} = {value}: of kind = "moe" alone; leave it out' for key, value in shown.items()
    ]
    assert problems(MLP | {"ranks": 0}) == ["ranks = 0: must be from 1 to 2147483647"]


def test_float32_weights_need_fp8_values_of_bf16():
    assert problems(MLP | {"dtype": "fp16", "weight_dtype": "f32"}) == [
        'weight_dtype = "f32": products read weights of dtype = "fp16"; "f32" weights need FP8 operands: say '
        'recipe = "fp8-block" and dtype = "bf16", or leave it out'
    ]


def test_an_mlp_as_stored_has_biases_for_inference_alone():
    table = MLP | {"bias": True, "b_major": "n"}
    assert problems(table) == [
        'b_major = "n": b2\'s gradient is the sum of dy, which that of w2 [I, H] cannot give as well; say b_major ='
        ' "k" or keep = "none", or leave bias out'
    ]
    assert parse_text(text_of(table | {"keep": "none"}), "layers")
    assert parse_text(text_of(MLP | {"activation": {"kind": "identity"}, "keep": "none"}), "layers")


def test_what_an_mlp_with_a_recipe_refuses():
    assert problems(MLP | {"recipe": "fp8-block", "dtype": "fp16", "bias": True}) == [
        'dtype = "fp16": FP8 operands are quantised from bf16; say dtype = "bf16", or leave recipe out',
        "bias = true: b2's gradient is the sum of dy, which a weight gradient with FP8 operands does not read; leave "
        "bias or recipe out",
    ]


def test_a_layer_with_a_recipe_for_inference_quantises_no_more_than_it_reads():
    for major, coded in (("k", {False}), ("n", {True})):
        specs = parse_text(text_of(MOE | {"recipe": "fp8-block", "keep": "none", "b_major": major}), "layers")
        parts = {spec.kernel.removeprefix("moe."): spec for spec in specs}
        assert {"quantise-w1", "quantise-w2", "quantise-x"} == {n for n in parts if "quantise" in n}
        assert parts["fc1-infer"].quant.canonical() == "in=fp8-block out=fp8-block"
        assert {parts[f"quantise-{name}"].transpose for name in ("w1", "w2")} == coded


@pytest.mark.parametrize(
    ("change", "turns"),
    [
        ({"glu_layout": "interleaved", "b_major": "n"}, True),
        ({"glu_layout": "interleaved", "bias": True}, True),
        ({"intermediate": 128}, True),
        ({"intermediate": 192}, False),
        ({"intermediate": 192, "activation": {"kind": "gelu"}, "keep": "x"}, True),
    ],
)
def test_a_layer_with_a_recipe_makes_the_kernels_of_its_program(change, turns):
    """Its products make all FP8 values of the activation, and those of dz where their kernels can."""
    specs = parse_text(text_of(MOE | {"recipe": "fp8-block", "shared": 64} | change), "layers")
    parts = {spec.kernel.removeprefix("moe."): spec for spec in specs}
    assert set(parts) == set(program(specs[0].layer).parts)
    coded = {name: str(spec.canonical()["quant"]) for name, spec in parts.items() if hasattr(spec, "quant")}
    coded = {name: text for name, text in coded.items() if text != "none"}
    first = ("fc1-infer", "fc1-recompute" if change.get("keep") == "x" else "fc1-fwd")
    assert set(coded) == {
        f"{of}{part}" for of in ("", "shared-")
        for part in (*first, "fc2", "fc2-dgrad", "fc1-dgrad", "fc2-wgrad", "fc1-wgrad")
    }  # fmt: skip
    out = "in=fp8-block out=fp8-block"
    wanted = {name: out for name in coded if name.endswith(("fc1-infer", "fc1-fwd"))}
    wanted |= {"fc2-dgrad": f"{out} transpose=true"} if turns else {}
    assert coded == {name: wanted.get(name, "in=fp8-block") for name in coded}
    assert {parts[name].operands["gather"] for name in coded} == {"none"}
    quantised = {"w1", "w2", "x", "dy", "x-turned"} | (set() if turns else {"dz", "a-turned"})
    quantised |= {f"shared-{name}" for name in ("w1", "w2", "x", "dy", "a-turned", "x-turned")} | {"dshared-z"}
    assert {name for name in parts if "quantise" in name} == {f"quantise-{name}" for name in quantised}
    gathering = {name for name in quantised if getattr(parts[f"quantise-{name}"], "gather", False)}
    assert gathering == {"dy", "x-turned"}
    assert {name for name in quantised if getattr(parts[f"quantise-{name}"], "topk", 0)} == {"x"}


def test_a_layer_with_float32_weights_makes_fp8_values_of_them_and_float32_gradients():
    table = MOE | {"recipe": "fp8-block", "shared": 64}
    specs = parse_text(text_of(table | {"weight_dtype": "f32"}), "layers")
    parts = {spec.kernel.removeprefix("moe."): spec for spec in specs}
    wide = {name for name, spec in parts.items() if spec.op == "quantise" and spec.dtype == "f32"}
    assert wide == {"quantise-w1", "quantise-w2", "quantise-shared-w1", "quantise-shared-w2"}
    assert {spec.out_dtype for name, spec in parts.items() if name.endswith("wgrad")} == {"f32"}
    buffers = program(specs[0].layer).buffers
    assert {name for name, each in buffers.items() if each.dtype == "f32" and name.endswith(("w1", "w2"))} == {
        f"{of}{name}" for of in ("", "d", "shared_", "dshared_") for name in ("w1", "w2")
    }
    plain, with_dtype = (
        parse_text(text_of(table | more), "layers")[0].layer for more in ({}, {"weight_dtype": "bf16"})
    )
    assert plain == with_dtype and plain.projections == "bf16" and plain.grad_dtype == "bf16"


def test_the_schedule_of_every_gemm():
    for schedule, kinds in (
        ("static", {"static"}),
        (["static", "dynamic"], {"static", "dynamic"}),
        (None, {"dynamic"}),
    ):
        specs = parse_text(text_of(MOE | ({"schedule": schedule} if schedule else {})), "layers")
        assert {spec.schedule for spec in specs if hasattr(spec, "schedule")} == kinds


def test_tiles_of_a_layer_with_a_recipe_are_those_of_its_fp8_values():
    table = MOE | {"recipe": "fp8-block", "glu_layout": "interleaved", "b_major": "n"}
    specs = parse_text(text_of(table | {"tile": [[128, 128], [128, 256]]}), "layers")
    tiles = {spec.kernel.removeprefix("moe."): spec.tile for spec in specs if hasattr(spec, "tile")}
    assert (tiles["fc1-fwd"], tiles["fc2-dgrad"]) == ((128, 256), (128, 128))
    (message,) = problems(table | {"tile": [128, 128]})
    assert message == (
        "tile = [128, 128]: 128 columns have one scale, gate and up 256, so tile N is a multiple of 256; say 256 (of "
        "its kernels fc1-fwd, fc1-infer)"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"router": {"num_groups": 3, "group_topk": 2}},
            "router.num_groups = 3: must be from 1 to 64 and divide the 8 experts; 1, 2, 4, 8 do (of its kernel "
            "router-topk)",
        ),
        (
            {"activation": {"kind": "swiglu", "limit": -1.0}},
            "activation.limit = -1.0: must be above 0; leave it out for no limit (of its kernels fc1-fwd, fc1-infer, "
            "fc2-dgrad)",
        ),
        ({"dtype": "fp16"}, 'dtype = "fp16": the kernels that move rows and choose experts take bf16; say'),
    ],
)
def test_what_a_part_refuses_is_said_once_with_the_kernels(change, said):
    (got,) = problems(MOE | change)
    assert got.startswith(said)


def test_the_names_of_its_kernels_are_its_own():
    (got,) = problems(MOE, GEMM | {"name": "moe.fc1-fwd"})
    assert got == (
        'name = "moe.fc1-fwd": names that begin with "moe." are of the kernels of the layer moe; name it otherwise'
    )
    assert problems(GEMM | {"name": "moe.fc1-fwd"}, MOE)
    assert problems(MOE, MLP | {"name": "moe.mlp"})
    assert problems(MOE, GEMM | {"name": "moe"}) == [
        'name = "moe": [[kernel]] 1 has this name already; name them apart'
    ]
    assert parse_text(text_of(MOE, GEMM | {"name": "moe-fc1"}), "layers")


def test_defaults_that_do_not_concern_a_layer_are_left_aside():
    shared = {"arch": "sm_90a", "op": "dense-gemm", "cluster": [2, 1], "schedule": "static", "dtype": "bf16"}
    table = {name: value for name, value in MLP.items() if name != "arch"}
    specs = parse_text(text_of(table, {"name": "fc", "tile": [128, 128]}, **shared, hidden=512), "layers")
    (layer,) = {spec.layer.name: spec.layer for spec in specs if spec.layer is not None}.values()
    assert layer.hidden == 256
    assert {spec.arch for spec in specs} == {"sm_90a"}
    assert "dynamic" in {getattr(spec, "schedule", None) for spec in specs if spec.layer is not None}
    given = text_of({**table, "hidden": None}, {"name": "fc", "tile": [128, 128]}, **shared, hidden=512)
    assert parse_text(given, "layers")[0].layer.hidden == 512
    (got,) = problems({**table, "hidden": None}, {"name": "fc", "tile": [128, 128]}, **shared, hidden=100)
    assert got.startswith("from [defaults]: hidden = 100")


def test_tables_without_an_op_may_leave_their_kind_to_defaults():
    whole = {name: value for name, value in MOE.items() if name != "name"}
    first, second = {"name": "a"}, {"name": "b", "hidden": 512}
    specs = parse_text(text_of(first, second, GEMM, **whole), "layers")
    layers = {spec.layer.name: spec.layer.hidden for spec in specs if spec.layer is not None}
    assert layers == {"a": MOE["hidden"], "b": 512}
    assert [spec.kernel for spec in specs if spec.layer is None][:1] == [GEMM["name"]]
    (got,) = problems(first, GEMM | {"name": "a.fc1"}, **whole)
    assert "are of the kernels of the layer a" in got
    assert not marked(first, second, GEMM, **whole)
    assert marked({**first, "hiden": 5}, GEMM, **whole) == {("kernel", 0, "hiden")}


def test_a_layer_makes_the_kernels_of_its_program():
    specs = parse_text(text_of(MOE | {"shared": 64, "bias": True}, GEMM), "layers", namespace="team")
    parts = {spec.kernel.removeprefix("moe."): spec for spec in specs if spec.layer is not None}
    options = next(iter(parts.values())).layer
    assert set(parts) == set(program(options).parts)
    assert {layer_name(spec) for spec in parts.values()} == {"team.layers/moe"}
    assert [layer_name(spec) for spec in specs if spec.kernel == "fc"] == [""]


def test_a_layer_has_variants_for_each_number_of_tokens():
    whole = {**MOE, "hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8}

    def tiles(part, **keys):
        specs = [spec for spec in parse_text(text_of(whole | keys), "layers") if spec.kernel == f"moe.{part}"]
        assert len({spec.full_name for spec in specs}) == len(specs)
        assert {spec.problem for spec in specs} == {specs[0].problem}  # of the most tokens
        return {spec.tile for spec in specs}, specs[0].problem.M

    one, few, many = (tiles("fc2", problem={"T": tokens}) for tokens in (1, 64, 8192))
    assert (one[1], few[1], many[1]) == (8, 512, 65536)
    assert {tile[0] for tile in one[0]} >= {16} and not {tile[0] for tile in many[0]} & {16, 32}
    assert tiles("fc2", problem={"T": [64, 1, 8192]}) == (one[0] | few[0] | many[0], 65536)
    assert tiles("fc2", keep="none") == (tiles("fc2", problem={"T": [1, 64, 128, 256, 8192]})[0], 65536)
    assert tiles("fc2") == many
    for part in ("index", "unpermute"):
        specs = parse_text(text_of(whole | {"problem": {"T": [1, 8192]}}), "layers")
        assert len([spec for spec in specs if spec.kernel == f"moe.{part}"]) == 1
    (got,) = problems(whole | {"problem": {"T": [64, 64]}})
    assert "64 appears twice" in got


def test_a_layer_is_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.toml").write_text(text_of(MOE, MLP, GEMM))
    for pattern in ("layers.toml/moe", "layers.toml/mo?", "*.toml/moe"):
        (got,) = targets([pattern])
        assert {layer_name(spec) for spec in got.specs} == {"layers/moe"}
        assert got.means("layers/moe.gone@128x128-c1x1")  # left behind by another table
        assert not got.means("layers/mlp.fc2@128x128-c1x1")
        assert not got.means("layers/moe-fc1@128x128-c1x1")
    (got,) = targets(["layers.toml/moe.fc2"])
    assert {spec.kernel for spec in got.specs} == {"moe.fc2"}
    assert {layer_name(spec) for each in targets(["gpt-oss-*b/moe"]) for spec in each.specs} == {
        "gpt-oss-120b/moe", "gpt-oss-20b/moe",
    }  # fmt: skip


def marked(*tables, **defaults):
    document = {"schema": 1, "defaults": defaults, "kernel": list(tables)}
    return {tuple(error.absolute_path) for error in VALIDATOR.iter_errors(document)}


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({**MOE, "hiden": 5}, "hiden"),
        ({**MOE, "mainloop": "pingpong"}, "mainloop"),
        ({**MOE, "op": "grouped-gemm"}, "op"),
        ({**MOE, "kind": "moee"}, "kind"),
        ({**MOE, "hidden": 0}, "hidden"),
        ({**MOE, "keep": "y"}, "keep"),
        ({**GEMM, "hidden": 5}, "hidden"),
    ],
)
def test_an_editor_marks_the_wrong_key_alone(table, wrong):
    assert marked(GEMM, table) == {("kernel", 1, wrong)}
    assert marked(table, op="grouped-gemm") == {("kernel", 0, wrong)}


def test_an_editor_marks_the_wrong_key_of_a_router():
    assert marked({**MOE, "router": {"biass": True}}) == {("kernel", 0, "router", "biass")}
    assert not marked(MOE, MLP, GEMM, op="dense-gemm", cluster=[2, 1], hidden=64)
    assert not marked(MOE, kind="moe")


def test_every_key_is_explained():
    properties = schema()["definitions"]["layer"]["properties"]
    keys = layer_fields(ACTIVATION_FIELDS, DTYPES)
    assert list(properties) == [key.name for key in keys]
    assert list(properties["router"]["properties"]) == [key.name for key in ROUTER_FIELDS]
    assert all(key.doc.endswith((".", ":")) for key in (*keys, *ROUTER_FIELDS))
