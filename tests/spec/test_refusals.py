"""What a spec file may not say, and how the error says it."""

import codecs

import pytest

from fusekit.errors import SpecError
from fusekit.spec import parse_file
from tests.spec.refusals import GATED, GOOD, WGRAD, problem, problems

AT = "[[kernel]] 1 (fc1): "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bais = true", 'bais = true: there is no such field; did you mean "bias"?'),
        ("save-preactivation = true", 'there is no such field; did you mean "save_preactivation"?'),
        ("zzz = 3", "zzz = 3: there is no such field; the fields are name, summary, op, arch,"),
        ('dtype = "bf17"', 'dtype = "bf17": must be "bf16" or "fp16"; did you mean "bf16"?'),
        ('dtype = "BF16"', 'dtype = "BF16": must be "bf16" or "fp16"; did you mean "bf16"?'),
        ("dtype = 16", 'dtype = 16: must be a string, "bf16" or "fp16", is an integer'),
        ('dtype = ["bf16", "fp16"]', "is an array"),
        ('bias = "yes"', 'bias = "yes": must be true or false, is a string'),
        ("bias = 1", "bias = 1: must be true or false, is an integer"),
        ('b_major = "m"', 'b_major = "m": must be "k" or "n"'),
        ('quant = "fp8"', 'quant = "fp8": must be "none", or a table { in = .., x_format = ..'),
        (
            'quant = { in = "fp8-rows" }',
            'must be "none", "fp8-tensor", "fp8-row", "fp8-block", "fp8-weights" or "mxfp4-weights"; did',
        ),
        (
            'quant = { x_format = "e5m2" }',
            'quant.x_format = "e5m2": it is about in, which is "none"; say in = "fp8-block"',
        ),
        ("quant = { keep = true }", 'quant.keep = true: it is about out, which is "none"; say out = "fp8-block"'),
        ("quant = { transpose = true }", "quant.transpose = true: it is about out"),
        ('quant = { in = "fp8-row", scales = "f32" }', 'quant.scales = "f32": it is about out'),
        ('quant = { out = "mxfp8", scales = "f32" }', 'it is about out, which is "mxfp8"; say out = "fp8-block"'),
        (
            'quant = { out = "amax", keep = true }',
            'quant.keep = true: it is about out, which is "amax"; say out = "fp8-block"',
        ),
        ("quant = { rht_amax = true }", 'it is about out, which is "none"; say out = "amax"'),
        ('quant = { out = "fp8-block", scale_layout = "swizzled" }', 'which is "fp8-block"; say out = "mxfp8"'),
        ('quant = { out = "mxfp8", transpose = true }', "say group_alignment = 128, and keep to it"),
        (
            'quant = { out = "mxfp8", scale_layout = "swizzled" }',
            'quant.scale_layout = "swizzled": its blocks begin at',
        ),
        (
            'quant = { out = "mxfp8", group_alignment = 64 }',
            "quant.group_alignment = 64: must be 1, or 128 where every",
        ),
        (
            'quant = { out = "mxfp8", transpose = true, group_alignment = 128, y_blocks = "128x128" }',
            'quant.y_blocks = "128x128": it is about out, which is "mxfp8"; say out = "fp8-block"',
        ),
        ('quant = { out = "amax" }\nout_dtype = "f32"', 'FP8 output is quantised from bf16, and out_dtype is "f32"'),
        (
            'quant = { out = "fp8-block" }\nout_dtype = "f32"',
            'FP8 output is quantised from bf16, and out_dtype is "f32"',
        ),
        (
            'quant = { out = "fp8-block", transpose = true }\ngather = "x"',
            "gathered rows have FP8 values along their columns alone; leave it or transpose out",
        ),
        ('quant = { in = "fp8-row", x_format = "e5m2", accumulation = "fast" }', 'only in = "fp8-tensor" has it'),
        ('quant = { in = "fp8-block", accumulation = "fast" }', "scales change along K, so float32 takes over"),
        ('quant = { in = "fp8-row" }\nb_major = "n"', "FP8 factors are contiguous along K"),
        ('quant = { in = "fp8-block", x_blocks = "128x128" }', "of a weight gradient's x; blocks of other factors are"),
        (
            'quant = { out = "fp8-block", y_blocks = "128x128" }',
            'quant.y_blocks = "128x128": it is about transpose, which is false; say transpose = true',
        ),
        (
            'quant = { out = "fp8-block", transpose = true, dz_blocks = "128x128" }',
            'quant.dz_blocks = "128x128": only backward activations make dz, not identity; leave it out',
        ),
        ('quant = { x_blocks = "128x128" }', 'it is about in, which is "none"; say in = "fp8-block"'),
        (
            'quant = { in = "fp8-row" }\nmainloop = "pingpong"',
            "one warpgroup adds up while the other multiplies",
        ),
        ('schedule = "fastest"', 'schedule = "fastest": must be "static" or "dynamic"'),
        ("accumulate = true", "accumulate = true: only a weight gradient adds to what is there, not grouped-gemm"),
        ("split = true", "split = true: only dense-wgrad takes its rows in parts, not grouped-gemm; leave it out"),
        ('dtype = "f32"', 'dtype = "f32": must be "bf16" or "fp16"'),
        ('schedule = ["static", "static"]', '"static" appears twice; a sweep names each value once'),
        ("schedule = []", "schedule = []: an empty sweep makes no kernel"),
        ('mainloop = "ping-pong"', 'must be "pingpong", "cooperative" or "swap-ab"; did you mean "pingpong"?'),
        ("cluster = [2, 2]", "cluster = [2, 2]: must be [1, 1], [2, 1] or [1, 2]"),
        ("cluster = [[1, 1], [4, 1]]", "cluster = [4, 1]: must be [1, 1], [2, 1] or [1, 2]"),
        ("cluster = [2]", "cluster = [2]: must be a pair of integers [M, N], or a list of such pairs"),
        ("cluster = [2, true]", "cluster = [2, true]: must be a pair of integers"),
        ("cluster_margin = -1", "cluster_margin = -1: must be from 0 to 2147483647"),
        ("cluster_margin = 1.0", "cluster_margin = 1.0: must be an integer, is a float"),
        ("cluster_margin = true", "cluster_margin = true: must be an integer, is a boolean"),
        ("summary = 2020-01-01", "summary = 2020-01-01: must be a string, is a date or time"),
        ("activation = 3", "must be a table { kind = .., approximate = .., alpha = .., limit = .. }, is an integer"),
        ("activation = {}", "activation.kind is missing (The function; "),
        ('activation = { kind = "swigul" }', 'activation.kind = "swigul": must be "identity", '),
        ('activation = { kind = "gelu", aproximate = "tanh" }', 'did you mean "approximate"?'),
        ('activation = { kind = "silu", approximate = "tanh" }', "only gelu and geglu have it, not silu; leave it out"),
        ('activation = { kind = "silu", alpha = 2 }', "activation.alpha = 2.0: only swiglu has it, not silu"),
        ('activation = { kind = "geglu", alpha = 2 }', "activation.alpha = 2.0: only swiglu has it, not geglu"),
        ('activation = { kind = "relu", limit = 7.0 }', "activation.limit = 7.0: only gated activations have it"),
        ('activation = { kind = "relu", up_offset = 1 }', "activation.up_offset = 1.0: only gated activations have it"),
        ('activation = { kind = "swiglu", limit = 0 }', "activation.limit = 0.0: must be above 0"),
        ('activation = { kind = "swiglu", limit = inf }', "activation.limit = inf: must be finite; leave limit out"),
        ('activation = { kind = "swiglu", alpha = nan }', "activation.alpha = nan: must be finite"),
        (
            'activation = { kind = "swiglu", alpha = 3.5e38 }',
            "alpha = 3.5e+38: a launch passes a float32, up to 3.4028235e+38",
        ),
        ('activation = { kind = "swiglu", limit = 1e-60 }', "limit = 1e-60: a launch passes a float32"),
        ('activation = { kind = "swiglu", alpha = "1" }', 'activation.alpha = "1": must be a number, is a string'),
        ('glu_layout = "concat"', "the activation identity is not gated, so there is no gate to lay out"),
        ('glu_layout = "interleaved32"', 'did you mean "interleaved-32"?'),
        ("problem = { E = 1, M = 8, K = 8 }", "problem.N is missing"),
        ("problem = { E = 0, M = 8, N = 8, K = 8 }", "problem.E = 0: must be from 1 to 2147483647"),
        ("problem = { E = 1, M = 8, N = 12, K = 8 }", "a row of y has 12 elements of 2 bytes = 24 bytes"),
        (
            "problem = { E = 1, M = 8, N = 8, K = 20 }",
            "20 elements of 2 bytes = 40 bytes, which must be a multiple of 16",
        ),
        ("problem = { E = 1, M = 8, N = 8, K = 20 }", "say 16 or 24"),
    ],
)
def test_bad_line(line, message):
    got = problem(GOOD + line + "\n")
    assert got.startswith(AT)
    assert message in got


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "an empty sweep makes no kernel; give a pair of integers [M, N], or a list of them"),
        ("[128]", "tile = [128]: must be a pair of integers [M, N], or a list of such pairs"),
        ("[128, 128, 64]", "must be a pair of integers [M, N]"),
        ("[[128, 128], 64]", "tile = 64: must be a pair of integers [M, N]"),
        ('"128x128"', 'tile = "128x128": must be a pair of integers'),
        ("[0, 128]", "tile = [0, 128]: both must be from 1 to 2147483647"),
        ("[[128, 160], [128, 160]]", "[128, 160] appears twice"),
        ("[96, 128]", "tile M = 96 does not fit the cooperative main loop, which has 128 or 256"),
        ("[128, 100]", "tile N = 100 must be a multiple of 16 from 16 to 256"),
        ("[128, 100]", "the nearest: 96 or 112"),
        ("[128, 272]", "tile N = 272 must be a multiple of 16 from 16 to 256"),
        ("[256, 256]", "256 x 256 / 256 threads = 256 accumulator registers a thread (cooperative); at most 192"),
    ],
)
def test_bad_tile(value, message):
    got = problem(GOOD.replace("[128, 128]", value))
    assert got.startswith(AT + "tile = ")
    assert message in got


def test_main_loop_that_cannot_hold_the_tile():
    text = GOOD.replace("[128, 128]", "[128, 256]") + 'mainloop = "pingpong"\n'
    assert "128 x 256 / 128 threads = 256 accumulator registers a thread (pingpong)" in problem(text)
    assert 'or mainloop = "cooperative"' in problem(text)
    text = GOOD.replace("[128, 128]", "[256, 128]") + 'mainloop = "pingpong"\n'
    assert 'which has 64 or 128; take mainloop = "cooperative" for 256' in problem(text)


@pytest.mark.parametrize(
    ("keys", "tile_n", "multiple"),
    [
        ('glu_layout = "concat"', 176, 32),
        ('glu_layout = "interleaved"', 176, 32),
        ('glu_layout = "interleaved-32"', 160, 64),
        ('glu_layout = "concat"\nb_major = "n"', 192, 128),
        ('glu_layout = "interleaved"\nb_major = "n"', 160, 64),
        ('glu_layout = "interleaved-32"\nb_major = "n"', 160, 64),
    ],
)
def test_gated_tile_n(keys, tile_n, multiple):
    text = GATED.replace("[128, 128]", f"[128, {tile_n}]") + keys + "\n"
    assert f"tile N = {tile_n} must be a multiple of {multiple}" in problem(text)


def test_gated_problem():
    odd = GATED + "problem = { E = 1, M = 8, N = 33, K = 8 }\n"
    assert "swiglu is gated: N = 2 I, and 33 / 2 = 16.5 is no whole I; say an even N" in problem(odd)
    half = GATED + "problem = { E = 1, M = 8, N = 40, K = 8 }\n"
    assert "a row of y has N / 2 = 20 elements of 2 bytes = 40 bytes" in problem(half)
    blocks = GATED + 'glu_layout = "interleaved-32"\nproblem = { E = 1, M = 8, N = 96, K = 8 }\n'
    assert "N is a multiple of 64, and 96 = 64 x 1 + 32; say 64 or 128" in problem(blocks)


def test_gated_needs_a_layout():
    assert "swiglu is gated: say how gate and up lie along N" in problem(GATED + 'glu_layout = "none"\n')


def of(op):
    return GOOD.replace("grouped-gemm", op)


def test_dense_has_no_groups():
    dense = of("dense-gemm")
    assert "dense-gemm has no groups to scale apart" in problem(dense + 'alpha = "group"\n')
    got = problem(dense + "problem = { E = 2, M = 8, N = 8, K = 8 }\n")
    assert "problem.E = 2: dense-gemm has one group; say E = 1" in got
    got = problem(of("dense-wgrad") + "problem = { E = 2, M = 8, N = 8, K = 8 }\n")
    assert "problem.E = 2: dense-wgrad has one group; say E = 1" in got


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "bias = true",
            "bias = true: grouped-wgrad takes no bias: it has no epilogue: dw is the plain sum; leave it out",
        ),
        ('alpha = "scalar"', 'alpha = "scalar": grouped-wgrad takes no alpha'),
        ('b_major = "n"', 'b_major = "n": grouped-wgrad takes no b_major: both its operands have a row for each token'),
        ("row_scale = true", "row_scale = true: grouped-wgrad takes no row_scale: its rows are those of a weight"),
        ("save_preactivation = true", "save_preactivation = true: grouped-wgrad takes no save_preactivation"),
        ('activation = { kind = "relu" }', 'activation.kind = "relu": grouped-wgrad takes no activation'),
        ('activation = { kind = "swiglu" }', 'activation.kind = "swiglu": grouped-wgrad takes no activation'),
        ('glu_layout = "concat"', 'glu_layout = "concat": the activation identity is not gated'),
        ("split = true", "split = true: only dense-wgrad takes its rows in parts, not grouped-wgrad; leave it out"),
        ("recompute = true", 'recompute = true: only a backward activation such as "dswiglu" has it, not identity'),
        ("dbias = true\ndprob = true", 'dprob = true: only a backward activation such as "dswiglu" has it'),
        ("accumulate = true", 'accumulate = true: main gradients are float32, and out_dtype is "bf16"'),
        ('accumulate = true\nout_dtype = "fp16"', 'say out_dtype = "f32"'),
        ("problem = { E = 1, M = 9, N = 12, K = 8 }", "problem.N = 12: a row of dy has 12 elements of 2 bytes"),
        ("problem = { E = 1, M = 9, N = 8, K = 12 }", "problem.K = 12: a row of x has 12 elements of 2 bytes"),
    ],
)
def test_weight_gradients_have_no_epilogue(line, message):
    assert message in problem(WGRAD + line + "\n")


@pytest.mark.parametrize(
    ("tile", "cluster", "message"),
    [
        ("[128, 160]", "[1, 1]", "tile N = 160 must be a multiple of 64 from 64 to 256 with grouped-wgrad"),
        ("[128, 96]", "[2, 1]", "tile N = 96 must be a multiple of 64 from 64 to 256 with grouped-wgrad"),
        ("[192, 128]", "[1, 1]", "tile M = 192 does not fit the cooperative main loop"),
    ],
)
def test_weight_gradients_are_fetched_in_boxes(tile, cluster, message):
    assert message in problem(WGRAD.replace("[128, 128]", tile) + f"cluster = {cluster}\n")


BACKWARD = GOOD + 'activation = { kind = "dswiglu" }\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD + "recompute = true",
            'recompute = true: only a backward activation such as "dswiglu" has it, not identity',
        ),
        (GATED + "dbias = true", 'dbias = true: only a backward activation such as "dswiglu" has it, not swiglu'),
        (GOOD + "dbias = true", 'dbias = true: only a backward activation such as "dswiglu" has it, not identity'),
        (GATED + "row_scale = true\ndprob = true", "dprob = true: only a backward activation"),
        (GOOD + 'activation = { kind = "didentity" }', 'activation.kind = "didentity": must be "identity"'),
        (GOOD + 'activation = { kind = "drelu", limit = 1 }', "only gated activations have it, not drelu"),
        (GOOD + 'activation = { kind = "dgeglu", alpha = 2 }', "only swiglu has it, not dgeglu"),
        (GOOD + 'activation = { kind = "dsilu", approximate = "tanh" }', "only gelu and geglu have it, not dsilu"),
        (GOOD + 'activation = { kind = "dsilu" }\nglu_layout = "concat"', "for a gated dsilu write dswiglu"),
        (
            GOOD + 'activation = "silu"\nglu_layout = "concat"',
            "for a gated silu write swiglu, else leave it out",
        ),
        (
            GOOD + 'activation = "srelu"\nglu_layout = "concat"',
            "no gate to lay out; leave it out",
        ),
        (
            GOOD + "bias = true\nrow_scale = true",
            "row_scale = true: a bias that row_scale multiplies has no right gradient, and neither has row_scale;"
            " leave row_scale out and let moe-unpermute multiply: weighted = true",
        ),
        (BACKWARD + 'glu_layout = "none"', "dswiglu is gated: say how gate and up lie along N"),
        (BACKWARD + "bias = true", "bias = true: dswiglu takes no bias: the bias took part in z"),
        (BACKWARD + 'alpha = "scalar"', 'alpha = "scalar": dswiglu takes no alpha'),
        (BACKWARD + "save_preactivation = true", "dswiglu takes no save_preactivation: it reads z and stores dz"),
        (
            BACKWARD + "dprob = true",
            "dprob = true: it is the gradient of row_scale, which is false; say row_scale = true",
        ),
        (BACKWARD + 'out_dtype = "fp16"', 'out_dtype = "fp16": dz has dtype, "bf16", and there is no y'),
        (BACKWARD + 'out_dtype = "f32"', 'out_dtype = "f32": dswiglu gives dz and y in 16 bits; say "bf16" or "fp16"'),
        (BACKWARD + 'recompute = true\nout_dtype = "f32"', "dswiglu gives dz and y in 16 bits"),
        (BACKWARD + "problem = { E = 1, M = 8, N = 12, K = 8 }", "problem.N = 12: a row of da has 12 elements"),
        (
            BACKWARD + 'glu_layout = "interleaved-32"\nproblem = { E = 1, M = 8, N = 40, K = 8 }',
            "so N = I is a multiple of 32; say 32 or 64",
        ),
        (
            BACKWARD.replace("[128, 128]", "[128, 144]"),
            'tile N = 144 must be a multiple of 32 from 32 to 256 with b_major = "k", glu_layout = "concat" (gate',
        ),
        (
            BACKWARD.replace("[128, 128]", "[128, 160]") + 'b_major = "n"',
            'tile N = 160 must be a multiple of 64 from 64 to 256 with b_major = "n" (an n-major box',
        ),
        (BACKWARD.replace("grouped-gemm", "grouped-wgrad"), "grouped-wgrad takes no activation"),
    ],
)
def test_backward_activations(text, message):
    assert message in problem(text + "\n")


@pytest.mark.parametrize("key", ["op", "name"])
def test_missing_key(key):
    lines = [line for line in GOOD.splitlines() if not line.startswith(key)]
    assert problem("\n".join(lines)).startswith(f"{AT if key != 'name' else '[[kernel]] 1: '}{key} is missing (")


def test_unknown_arch_lists_the_known():
    assert 'arch = "sm_90": must be "sm_90a"; did you mean "sm_90a"?' in problem(GOOD.replace("sm_90a", "sm_90"))


def test_unknown_op():
    assert 'must be "dense-gemm", "grouped-gemm"' in problem(GOOD.replace("grouped-gemm", "conv"))


def test_names():
    assert "name is missing" in problem(GOOD.replace('name = "fc1"', ""))
    for bad in ("FC1", "a b", "", "../up", "-x", "é", "x" * 65, "a/b", "a@b"):
        assert "a name is lower-case letters, digits" in problem(GOOD.replace('"fc1"', f'"{bad}"'))


def test_two_kernels_of_one_name():
    text = GOOD + GOOD.partition("schema = 1\n")[2]
    assert problem(text) == '[[kernel]] 2 (fc1): name = "fc1": [[kernel]] 1 has this name already; name them apart'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; a spec has schema = 1 and at least one [[kernel]] table"),
        (" \n\n", "the file is empty"),
        ("# nothing\n", "schema is missing: begin the file with schema = 1"),
        ("schema = 1\n", "there is no [[kernel]] table; a spec file names at least one kernel"),
        ("schema = 1\nkernel = []\n", "there is no [[kernel]] table"),
        ("schema = 1\nkernel = 3\n", "kernel = 3: must be [[kernel]] tables"),
        ("schema = 1\n[kernel]\n", "[kernel] is a single table; write [[kernel]], with two brackets"),
        ('schema = 1\n[[layer]]\nkind = "moe"\n', 'a layer is a [[kernel]] table with kind = "moe" or "mlp"'),
        ("schema = 1\n[[kernels]]\n", 'did you mean "kernel"?'),
        (GOOD.replace("schema = 1", "schema = 2"), "schema = 2: this version of fusekit reads schema = 1"),
        (GOOD.replace("schema = 1", "schema = true"), "schema = true: this version"),
        (GOOD.replace("schema = 1", "schema = 1.0"), "schema = 1.0: this version"),
        (GOOD.replace("schema = 1", "schema = 1\nsummary = 3"), "summary = 3: must be a string, is an integer"),
        (GOOD.replace("schema = 1", "schema = 1\nbias = true"), "bias belongs into a [[kernel]] table or [defaults]"),
        (GOOD.replace("schema = 1", "schema = 1\ndefault = {}"), 'did you mean "defaults"?'),
        (GOOD.replace("schema = 1", "schema = 1\ndefaults = 1"), "must be a table, is an integer; write [defaults]"),
        (
            GOOD.replace("schema = 1", "schema = 1\n[defaults]\nname = 'x'"),
            '[defaults]: name = "x": there is no such field',
        ),
        ("schema = ", "not TOML: "),
        (GOOD + 'name = "twice"\n', "not TOML: "),
    ],
)
def test_bad_file(text, message):
    assert any(message in line for line in problems(text))


def test_toml_error_has_the_line():
    assert "at line 2" in problem("schema = 1\n[[kernel\n")


def test_fault_in_defaults_is_told_once_and_there():
    text = (
        GOOD.replace("schema = 1", 'schema = 1\n[defaults]\ndtype = "f16"')
        + '[[kernel]]\nname = "b"\nop = "dense-gemm"\n'
    )
    text += 'arch = "sm_90a"\ntile = [64, 64]\n'
    assert problem(text).startswith('[defaults]: dtype = "f16": must be')


def test_combination_says_that_a_value_comes_from_defaults():
    text = GOOD.replace("schema = 1", 'schema = 1\n[defaults]\nglu_layout = "concat"')
    assert problem(text).startswith(f'{AT}from [defaults]: glu_layout = "concat": ')


def test_all_problems_come_together_once_each():
    text = GOOD.replace('"sm_90a"', '"sm_91"') + 'bias = 3\n[[kernel]]\nname = "b"\nop = "x"\n'
    got = problems(text)
    assert len(got) == 3
    assert [line.partition(" =")[0].partition(" is")[0] for line in got] == [
        "[[kernel]] 1 (fc1): arch",
        "[[kernel]] 1 (fc1): bias",
        "[[kernel]] 2 (b): op",
    ]
    swept = GATED + "cluster = [[1, 1], [2, 1], [1, 2]]\nproblem = { E = 1, M = 8, N = 33, K = 8 }\n"
    assert "33 / 2" in problem(swept)


@pytest.mark.parametrize(
    "line", ['op = "extren"\nsource = "a:b"\nparams = { n = 1 }', "op = 3\nbia = true", 'op = "x"\ntile = 3\nhiden = 1']
)
def test_an_unknown_operation_is_one_problem(line):
    text = f'schema = 1\n[[kernel]]\nname = "fc1"\narch = "sm_90a"\n{line}\n'
    assert problem(text).startswith(f"{AT}op = ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[defaults]\nop = "extren"\nsource = "a:b"\n[[kernel]]\nname = "a"\n[[kernel]]\nname = "b"\nbia = 1',
         '[defaults]: op = "extren": must be'),
        ('[defaults]\nop = "grouped-gemm"\nsource = "a:b"\n[[kernel]]\nname = "fc1"\nop = "x"', f'{AT}op = "x"'),
        ('[[kernel]]\nname = "fc1"\narch = "sm_90a"\nsource = "a:b"\ntile = 3', f"{AT}op is missing"),
        ('[[layer]]\nname = "moe"\nkind = "mo"', "top level: layer = "),
    ],
)  # fmt: skip
def test_without_an_operation_that_there_is_no_field_is_a_problem(text, expected):
    assert problem(f"schema = 1\n{text}\n").startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ('"sm_90a"', '"sm_100a"', 'must be "sm_90a"; only a foreign kernel (op = "extern") can be for sm_100a'),
        ('"sm_90a"', '"sm_90"', 'must be "sm_90a"; did you mean "sm_90a"?'),
        (
            'name = "fc1"',
            'name = "fc1"\ndtype = "fp8"',
            'and, of a GEMM, quant = { in = "fp8-tensor" }',
        ),
        ('name = "fc1"', 'name = "fc1"\ndtype = "bfloat16"', 'must be "bf16" or "fp16"; say "bf16"'),
        ('name = "fc1"', 'name = "fc1"\ndtype = "bf61"', 'did you mean "bf16"?'),
    ],
)
def test_architectures_and_types_of_others(old, new, hint):
    assert hint in problem(GOOD.replace(old, new))


def test_too_wide_a_sweep():
    tiles = [f"[{m}, {n}]" for m in range(1, 21) for n in range(1, 21)]
    fits = [f"[{m}, {n}]" for m in (64, 128, 256) for n in range(16, 129, 16)]
    sweep = GOOD.replace("[128, 128]", f"[{', '.join(fits)}]") + "cluster = [[1, 1], [2, 1], [1, 2]]\n"
    text = sweep + "".join(sweep.replace("schema = 1", "").replace('"fc1"', f'"f{each}"') for each in range(57))
    message = "[[kernel]] 57 (f55): 24 tile x 3 cluster = 72 kernels; a file makes at most 4096; sweep less"
    assert message in problem(text)
    assert "tile = [[1, 1], [1, 2]," in problem(GOOD.replace("[128, 128]", f"[{', '.join(tiles)}]"))
    assert "400 values; a list has at most 256" in problem(GOOD.replace("[128, 128]", f"[{', '.join(tiles)}]"))


def test_long_values_are_shortened():
    assert len(problem(GOOD + f'b_major = "{"x" * 500}"\n')) < 300


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="there is no such file"):
        parse_file(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        parse_file(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes(b'summary = "\xe9"')
    with pytest.raises(SpecError, match="byte 11 is not UTF-8"):
        parse_file(tmp_path / "latin.toml")
    (tmp_path / "marked.toml").write_bytes(codecs.BOM_UTF8 + GOOD.encode())
    assert parse_file(tmp_path / "marked.toml")
    (tmp_path / "Upper Case.toml").write_text(GOOD)
    with pytest.raises(SpecError, match='the stem "Upper Case" begins every kernel\'s name'):
        parse_file(tmp_path / "Upper Case.toml")
