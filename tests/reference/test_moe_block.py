"""Router, row order, permutation, GEMMs and back: the operations fit together into a mixture-of-experts block."""

import numpy as np
import pytest

from fusekit.reference import decode, encode, route
from fusekit.reference import gemm as grouped
from fusekit.reference.permutation import index, unpermute
from fusekit.spec import parse_text

TEXT = """
schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "topk"
op = "router-topk"
experts = {experts}
topk = {topk}
score_function = "sigmoid"
scaling_factor = 2.5
outputs = "compact"
[[kernel]]
name = "index"
op = "moe-index"
experts = {experts}
topk = {topk}
[[kernel]]
name = "permute"
op = "moe-permute"
topk = {topk}
weighted = true
[[kernel]]
name = "fc1"
op = "grouped-gemm"
activation = {{ kind = "swiglu" }}
glu_layout = "concat"
tile = [128, 128]
[[kernel]]
name = "fc2"
op = "grouped-gemm"
row_scale = true
tile = [128, 128]
[[kernel]]
name = "unpermute"
op = "moe-unpermute"
topk = {topk}
"""
H, I = 24, 16  # noqa: E741 - the field's own names


def block(specs, x, router, w1, w2):
    """The block as kernels do it: what one writes, the next reads; no count ever leaves the device."""
    logits = (x @ router.T).astype(np.float32)
    chosen = route(specs["topk"], {"logits": logits})
    rows = index(chosen["indices"], specs["topk"].experts)
    inverse = rows["inverse"]
    permuted = np.zeros((inverse.size, H))
    row_scale = np.zeros(inverse.size, np.float32)
    token, choice = np.nonzero(inverse >= 0)
    permuted[inverse[token, choice]] = x[token]
    row_scale[inverse[token, choice]] = chosen["weights"][token, choice]
    given = {"offsets": rows["offsets"]}
    a = grouped(specs["fc1"], given | {"x": encode(permuted, "bf16"), "w": w1})["y"]
    y = grouped(specs["fc2"], given | {"x": encode(a, "bf16"), "w": w2, "row_scale": row_scale})["y"]
    return chosen, unpermute(y, inverse, None)[0]


@pytest.mark.parametrize(("experts", "topk", "tokens"), [(7, 3, 19), (1, 1, 5), (4, 4, 6), (32, 2, 1)])
def test_a_block_is_the_weighted_sum_of_its_experts(experts, topk, tokens):
    specs = {spec.kernel: spec for spec in parse_text(TEXT.format(experts=experts, topk=topk), "s")}
    rng = np.random.default_rng(experts)
    x = decode(encode(rng.standard_normal((tokens, H)), "bf16"), "bf16").astype(np.float64)
    router = rng.standard_normal((experts, H)) / 4
    w1 = encode(rng.standard_normal((experts, 2 * I, H)) / 5, "bf16")
    w2 = encode(rng.standard_normal((experts, H, I)) / 4, "bf16")
    chosen, got = block(specs, x, router, w1, w2)
    want = np.zeros_like(got)
    for token in range(tokens):
        for expert, weight in zip(chosen["indices"][token], chosen["weights"][token], strict=True):
            z = decode(w1[expert], "bf16").astype(np.float64) @ x[token]
            gate, up = z[:I], z[I:]
            a = decode(encode(gate / (1 + np.exp(-gate)) * up, "bf16"), "bf16").astype(np.float64)
            want[token] += weight * (decode(w2[expert], "bf16").astype(np.float64) @ a)
    assert np.allclose(got, want, rtol=1e-5, atol=1e-6)
