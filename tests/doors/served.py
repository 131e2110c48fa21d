"""What the tests of doors to servers share: a library of layers on the CPU, random experts, and what they give."""

import torch

from fusekit.cpu import CpuLayer
from fusekit.plan.quant import SIDE
from fusekit.reference import mxfp4 as reference
from tests.plan.test_layer_program import options

E, H, I, K, T = 8, 256, 128, 2, 33  # noqa: E741
GPT_OSS = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


class Library:
    """Stands in for a library: layers by name, each what a spec says."""

    def __init__(self, **specs):
        shared = {"dtype": "bf16", "hidden": H, "intermediate": I, "experts": E, "topk": K, "keep": "none",
                  "router": {"input": "choices"}}  # fmt: skip
        self._layers = {f"store/{name}": CpuLayer(options(**shared | spec, file="store", name=name))
                        for name, spec in specs.items()}  # fmt: skip
        self.searched, self.ran = 0, set()

    def layers(self):
        self.searched += 1
        return {name: layer.options for name, layer in self._layers.items()}

    def layer(self, name, device=None):
        assert device == "cpu"
        self.ran.add(name)
        return self._layers[name]


def library():
    gpt_oss = {"activation": GPT_OSS, "glu_layout": "interleaved", "bias": True}
    return Library(
        plain={},
        trained={"keep": "z", "grad_dtype": "bf16"},
        local={"experts": 4},
        one={"topk": 1},
        one_trained={"topk": 1, "keep": "z", "grad_dtype": "bf16"},
        gpt_oss=gpt_oss,
        fp8={"weights": "fp8-block"},
        mxfp4=gpt_oss | {"weights": "mxfp4"},
    )


class Problem:
    """Random experts and tokens; biases where `bias`; with `fp8` e4m3 weights, and their scales s1 and s2; with `mxfp4`
    bytes of two e2m1 values, [..., K / 2].
    """

    s1 = s2 = None

    def __init__(self, bias=False, bias_dtype=torch.bfloat16, fp8=False, mxfp4=False):
        generator = torch.Generator().manual_seed(0)
        randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.x = randn(T, H).bfloat16()
        self.w1, self.w2 = (randn(E, 2 * I, H) * H**-0.5).bfloat16(), (randn(E, H, I) * I**-0.5).bfloat16()
        if fp8:
            (self.w1, self.s1), (self.w2, self.s2) = quantised(self.w1), quantised(self.w2)
        if mxfp4:
            coded = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator).byte()  # noqa: E731
            self.w1, self.s1 = coded(0, 256, E, 2 * I, H // 2), coded(118, 124, E, 2 * I, H // 32)
            self.w2, self.s2 = coded(0, 256, E, H, I // 2), coded(118, 124, E, H, I // 32)
        self.b1 = randn(E, 2 * I).bfloat16().to(bias_dtype) if bias else None
        self.b2 = randn(E, H).bfloat16().to(bias_dtype) if bias else None
        weights, ids = randn(T, E).softmax(-1).topk(K)
        self.weights, self.ids = weights, ids.int()

    def wanted(self, gpt_oss=False, local=range(E), limit=None):
        """y in float32, of the experts in `local`."""
        y, w1, w2 = torch.zeros(T, H), dequantised(self.w1, self.s1), dequantised(self.w2, self.s2)
        for token in range(T):
            for expert, weight in zip(self.ids[token].tolist(), self.weights[token], strict=True):
                if expert not in local:
                    continue
                z = w1[expert] @ self.x[token].float()
                z = z if self.b1 is None else z + self.b1[expert].float()
                gate, up = (z[0::2], z[1::2]) if gpt_oss else z.chunk(2)
                if gpt_oss or limit:
                    gate, up = gate.clamp(max=limit or 7.0), up.clamp(-(limit or 7.0), limit or 7.0)
                h = gate * torch.sigmoid((1.702 if gpt_oss else 1.0) * gate) * (up + (1.0 if gpt_oss else 0.0))
                out = w2[expert] @ h
                y[token] += weight * (out if self.b2 is None else out + self.b2[expert].float())
        return y


def quantised(weights):
    """e4m3 values and float32 scales of 128 x 128, as an FP8 checkpoint has them: weights are values times scales."""
    blocks = weights.float().unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE))
    scales = blocks.abs().amax((-3, -1), keepdim=True) / 448
    values = (blocks / scales).to(torch.float8_e4m3fn)
    return values.reshape(weights.shape), scales[..., 0, :, 0].contiguous()


def dequantised(weights, scales):
    """In float32."""
    if scales is None:
        return weights.float()
    if weights.dtype == torch.uint8:
        return torch.from_numpy(reference.decode(weights.unflatten(-1, (-1, 16)).numpy(), scales.numpy())).float()
    each = scales.float().repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
    return weights.float() * each[..., : weights.shape[-2], : weights.shape[-1]]


def error(result, wanted):
    return ((result.float() - wanted).norm() / wanted.norm()).item()
