"""Kernel specs for these tests, in the form that a store keeps."""


def canonical(**changes):
    """A grouped swiglu with every epilogue stage, keys replaced by ``changes``."""
    keys = {
        "op": "grouped-gemm",
        "dtype": "bf16",
        "out_dtype": "bf16",
        "b_major": "k",
        "alpha": "none",
        "bias": False,
        "save_preactivation": False,
        "activation": {"kind": "identity"},
        "glu_layout": "none",
        "row_scale": False,
        "accumulate": False,
        "recompute": False,
        "dprob": False,
        "dbias": False,
        "quant": "none",
    }
    return keys | changes


GPT_OSS = canonical(
    alpha="group",
    bias=True,
    save_preactivation=True,
    activation={"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
    glu_layout="interleaved",
    row_scale=True,
)
