"""What a spec file may not say of gathered and quantised operands, and how the error says it."""

import pytest

from fusekit.spec import parse_text
from tests.spec.refusals import GOOD, WGRAD, problem, problems

GATHER = GOOD + 'gather = "x"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + 'gather = "w"\n', 'gather = "w": must be "none", "x" or "dy"'),
        (GOOD + 'gather = "dy"\n', 'only grouped-wgrad has dy; grouped-gemm gathers its rows with gather = "x"'),
        (GATHER + "cluster = [1, 2]\n", "share x, and each gathers its own rows; say [2, 1] or [1, 1]"),
        (WGRAD + 'gather = "x"\ncluster = [2, 1]\n', "share x, and each gathers its own rows; say [1, 2] or [1, 1]"),
        (WGRAD + 'gather = "dy"\ncluster = [1, 2]\n', "share dy, and each gathers its own rows; say [2, 1] or [1, 1]"),
    ],
)
def test_what_cannot_be_gathered(text, message):
    assert message in problem(text)


@pytest.mark.parametrize(
    ("text", "cluster"), [(GATHER, (2, 1)), (WGRAD + 'gather = "x"\n', (1, 2)), (WGRAD + 'gather = "dy"\n', (2, 1))]
)
def test_a_cluster_is_chosen_that_does_not_share_the_gathered_operand(text, cluster):
    (spec,) = parse_text(text + "problem = { E = 8, M = 65536, N = 8, K = 8192 }\n", "model")
    assert spec.cluster == cluster


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('tile = [128, 160]\nquant = { in = "fp8-block" }', "tile N of 160 columns must be a multiple of 64"),
        (
            'tile = [128, 192]\nquant = { in = "fp8-block" }\nactivation = { kind = "swiglu" }',
            "a gate half of 96 columns must be a multiple of 64",
        ),
        ('tile = [256, 192]\nquant = { in = "fp8-row" }', "(256 / 2 + 64) x 192 / 128 threads = 288 accumulator"),
        (
            'tile = [128, 128]\nquant = { in = "fp8-row" }\nproblem = { E = 1, M = 1, N = 8, K = 24 }',
            "24 elements of 1 byte = 24 bytes, which must be a multiple of 16; say 16 or 32",
        ),
    ],
)
def test_tiles_of_quantised_factors(keys, message):
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n{keys}\n'
    assert any(message in line for line in problems(text))


FP8_W = 'quant = { in = "fp8-weights" }\n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "tile = [128, 192]",
            "tile = [128, 192]: tiles of FP8 weights are [128, 128], or 16 or 32 or 64 high; say one of these",
        ),
        ('tile = [128, 128]\nmainloop = "pingpong"', "tiles of FP8 weights are [128, 128], or 16 or 32 or 64 high"),
        ('tile = [16, 64]\nb_major = "n"', 'FP8 weights are contiguous along K: w is [E, N, K]; say b_major = "k"'),
        ('tile = [16, 64]\ndtype = "fp16"', 'bf16 is made of FP8 weights, as x is; say dtype = "bf16"'),
        (
            'tile = [128, 128]\nactivation = { kind = "dsrelu" }',
            'a gradient reads weights of dtype; say in = "fp8-block", or leave quant out',
        ),
        (
            "tile = [16, 64]\nproblem = { E = 1, M = 1, N = 8, K = 24 }",
            "a row of w has 24 elements of 1 byte = 24 bytes, which must be a multiple of 16; say 16 or 32",
        ),
        (
            "tile = [16, 64]\n" + 'activation = { kind = "swiglu" }\nproblem = { E = 1, M = 1, N = 384, K = 64 }',
            "N / 2 = 192 elements, and this kernel takes multiples of 128; say 256 or 512",
        ),
    ],
)
def test_what_fp8_weights_need(keys, message):
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n{keys}\n'
    assert any(message in line for line in problems(text + FP8_W))


@pytest.mark.parametrize(("key", "value"), [("x_format", "e5m2"), ("accumulation", "fast"), ("out", "fp8-block")])
def test_keys_that_are_about_fp8_rows_go_with_no_fp8_weights(key, value):
    text = 'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\ntile = [16, 64]\n'
    table = f'quant = {{ in = "fp8-weights", {key} = "{value}" }}\n'
    assert any(line.startswith("[[kernel]] 1 (k): quant." + key) for line in problems(text + table))


@pytest.mark.parametrize(
    ("tile", "mainloop"),
    [((16, 64), "swap-ab"), ((32, 128), "swap-ab"), ((64, 128), "swap-ab"), ((128, 128), "cooperative")],
)
def test_the_main_loop_of_fp8_weights_follows_from_the_tile(tile, mainloop):
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\ntile = {list(tile)}\n'
    assert {spec.mainloop for spec in parse_text(text + FP8_W, "k")} == {mainloop}


MX_W = 'quant = { in = "mxfp4-weights" }\n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "tile = [16, 64]",
            "tiles of MXFP4 weights are [128, 128], or 16 or 32 or 64 high and 128 wide; say one of these",
        ),
        ("tile = [128, 128]\ncluster = [2, 1]", "CTAs do not share tiles of MXFP4 weights; say [1, 1]"),
        ('tile = [16, 128]\nb_major = "n"', 'MXFP4 weights are contiguous along K: w is [E, N, K]; say b_major = "k"'),
        ('tile = [16, 128]\ndtype = "fp16"', 'bf16 is made of MXFP4 weights, as x is; say dtype = "bf16"'),
        (
            "tile = [16, 128]\nproblem = { E = 1, M = 1, N = 8, K = 96 }",
            "problem.K = 96: a step reads two scales of 32 values of w, so K is a multiple of 64; say 64 or 128",
        ),
    ],
)
def test_what_mxfp4_weights_need(keys, message):
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n{keys}\n'
    assert any(message in line for line in problems(text + MX_W))


@pytest.mark.parametrize(
    ("tile", "mainloop"), [((16, 128), "swap-ab"), ((64, 128), "swap-ab"), ((128, 128), "cooperative")]
)
def test_tiles_of_mxfp4_weights_have_a_main_loop_and_no_neighbour(tile, mainloop):
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\ntile = {list(tile)}\n'
    assert {(spec.mainloop, spec.cluster) for spec in parse_text(text + MX_W, "k")} == {(mainloop, (1, 1))}


@pytest.mark.parametrize("weights", [FP8_W, MX_W])
def test_weights_alone_have_tiles_for_few_rows_and_for_many(weights):
    text = 'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n' + weights
    for rows, height in ((64, 16), (1024, 64), (65536, 128)):
        specs = parse_text(text + f"problem = {{ E = 32, M = {rows}, N = 2880, K = 2880 }}\n", "k")
        assert specs[0].tile == (height, 128)


SWIGLU = 'activation = { kind = "swiglu" }\nglu_layout = "%s"\n'


@pytest.mark.parametrize(
    ("keys", "good", "wrong", "message"),
    [
        ('out_dtype = "f32"\n', 8, 12, "12 elements, and this kernel takes multiples of 8; say 8 or 16"),
        ('quant = { out = "fp8-block" }\n', 16, 24, "24 elements of 1 byte = 24 bytes, which must be a multiple of 16"),
        (SWIGLU % "concat", 16, 24, "N / 2 = 12 elements of 2 bytes = 24 bytes, which must be a multiple of 16; say"),
        (
            SWIGLU % "concat" + 'out_dtype = "f32"\n', 16, 24,
            "N / 2 = 12 elements, and this kernel takes multiples of 8; say 16 or 32",
        ),
        (
            'activation = { kind = "dswiglu" }\nglu_layout = "interleaved"\nquant = { out = "fp8-block" }\n', 16, 24,
            "a row of da has 24 elements, and this kernel takes multiples of 16; say 16 or 32",
        ),
    ],
)  # fmt: skip
def test_a_problem_keeps_to_what_a_launch_does(keys, good, wrong, message):
    """The multiple is that of the launch record's dim, and the bytes are those of the type that is written."""
    text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\ntile = [128, 128]\n{keys}'
    problem = "problem = {{ E = 1, M = 8, N = {}, K = 128 }}\n"
    parse_text(text + problem.format(good), "k", "k.toml")
    assert message in "".join(problems(text + problem.format(wrong)))


FP8 = 'quant = { out = "fp8-block", transpose = true }\n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            'tile = [128, 192]\nactivation = { kind = "swiglu" }\n' + FP8,
            "gate and up 256, so tile N is a multiple of 256",
        ),
        ("tile = [128, 160]\n" + FP8, "128 columns have one scale, so tile N is a multiple of 128; say 128"),
        ("tile = [256, 128]\n" + FP8, "a tile is one block of 128 tokens of the transpose; say 128 rows"),
        ('tile = [128, 128]\nmainloop = "pingpong"\n' + FP8, "both warpgroups share a block of 128 tokens"),
        (
            'tile = [128, 256]\nactivation = { kind = "dsrelu" }\n' + FP8,
            "shared memory has room for 128 columns of da",
        ),
        (
            'tile = [128, 160]\nactivation = { kind = "drelu" }\nquant = { out = "fp8-block" }\n',
            "so tile N is a multiple of 128",
        ),
        (
            'tile = [128, 128]\nactivation = { kind = "dswiglu" }\nquant = { out = "fp8-block" }\n'
            "problem = { E = 1, M = 1, N = 2880, K = 16 }\n",
            'so N = I is a multiple of 128; say 2816 or 2944, or glu_layout = "interleaved"',
        ),
    ],
)
def test_results_as_fp8_values_that_cannot_be(keys, message):
    text = 'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n'
    assert any(message in line for line in problems(text + keys)), problems(text + keys)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ('out = "fp8-block"', "dw is added up in its own dtype"),
        ('in = "fp8-row"', "scales of rows are inside the sum"),
    ],
)
def test_weight_gradients_that_are_refused(quant, message):
    text = 'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-wgrad"\narch = "sm_90a"\ntile = [128, 128]\n'
    assert any(message in line for line in problems(f"{text}quant = {{ {quant} }}\n"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('out = "fp8-row"\ngather = true', 'gather = true: fp8-row has none; say out = "fp8-block"'),
        ('out = "mxfp8"\ntranspose = true\nrows = false', "rows = false: mxfp8 has none"),
        ('out = "mxfp8"\ntranspose = true\ngroups = false', "groups = false: mxfp8 has none"),
        ('out = "mxfp8"\ndtype = "f32"', 'mxfp8 takes bf16 alone; say out = "fp8-block", or leave dtype out'),
        ('out = "amax"\ntranspose = true', 'amax has none; say out = "fp8-block" or "mxfp8"'),
        ('out = "fp8-block"\nscale_layout = "swizzled"', 'fp8-block has none; say out = "mxfp8"'),
        ('out = "fp8-block"\nblocks = "128x128"\ngather = true', 'rows of tokens; say blocks = "1x128"'),
        ('out = "fp8-block"\nrows = false', "rows = false: is for kernels that transpose; say transpose = true"),
        (
            'out = "fp8-block"\nblocks = "128x128"\nrows = false',
            "rows = false: is for kernels that transpose; say transpose = true",
        ),
        ('out = "fp8-block"\ngroups = false', "groups = false: is for kernels that transpose"),
        ('out = "fp8-block"\ntopk = 17', "topk = 17: must be from 1 to 16, or 0 for none"),
        ('out = "fp8-block"\ntopk = 2\ngather = true', "lie in their own order; leave it or gather out"),
        ('out = "fp8-block"\ntopk = 2\ntranspose = true', "lie in their own order; leave it or transpose out"),
        ('out = "fp8-row"\ntopk = 2', 'topk = 2: fp8-row has none; say out = "fp8-block"'),
        ('out = "fp8-block"\nblocks = "128x128"\ntopk = 2', 'rows of tokens; say blocks = "1x128"'),
        (
            'out = "fp8-block"\ntranspose_blocks = "128x128"',
            "is for kernels that transpose",
        ),
        (
            'out = "mxfp8"\ntranspose = true\ntranspose_blocks = "128x128"',
            "mxfp8 has none",
        ),
    ],
)
def test_what_quantise_refuses(keys, message):
    got = problem(f'schema = 1\n[[kernel]]\nname = "k"\nop = "quantise"\narch = "sm_90a"\n{keys}\n')
    assert message in got
