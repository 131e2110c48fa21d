"""What the tests of doors to servers share: a library of layers on the CPU, random experts, and what they give."""

import torch

from fusekit.cpu import CpuLayer
from tests.plan.test_layer_program import options

E, H, I, K, T = 8, 128, 96, 2, 33  # noqa: E741
GPT_OSS = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


class Library:
    """Stands in for a library: layers by name, each what a spec says."""

    def __init__(self, **specs):
        shared = {"dtype": "bf16", "hidden": H, "intermediate": I, "experts": E, "topk": K, "keep": "none",
                  "router": {"input": "choices"}}  # fmt: skip
        self._layers = {f"store/{name}": CpuLayer(options(**shared | spec, file="store", name=name))
                        for name, spec in specs.items()}  # fmt: skip
        self.searched = 0

    def layers(self):
        self.searched += 1
        return {name: layer.options for name, layer in self._layers.items()}

    def layer(self, name, device=None):
        assert device == "cpu"
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
    )


class Problem:
    """Random experts and tokens; biases where `bias`."""

    def __init__(self, bias=False, bias_dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.x = randn(T, H).bfloat16()
        self.w1, self.w2 = (randn(E, 2 * I, H) * H**-0.5).bfloat16(), (randn(E, H, I) * I**-0.5).bfloat16()
        self.b1 = randn(E, 2 * I).bfloat16().to(bias_dtype) if bias else None
        self.b2 = randn(E, H).bfloat16().to(bias_dtype) if bias else None
        weights, ids = randn(T, E).softmax(-1).topk(K)
        self.weights, self.ids = weights, ids.int()

    def wanted(self, gpt_oss=False, local=range(E), limit=None):
        """y in float32, of the experts in `local`."""
        y = torch.zeros(T, H)
        for token in range(T):
            for expert, weight in zip(self.ids[token].tolist(), self.weights[token], strict=True):
                if expert not in local:
                    continue
                z = self.w1[expert].float() @ self.x[token].float()
                z = z if self.b1 is None else z + self.b1[expert].float()
                gate, up = (z[0::2], z[1::2]) if gpt_oss else z.chunk(2)
                if gpt_oss or limit:
                    gate, up = gate.clamp(max=limit or 7.0), up.clamp(-(limit or 7.0), limit or 7.0)
                h = gate * torch.sigmoid((1.702 if gpt_oss else 1.0) * gate) * (up + (1.0 if gpt_oss else 0.0))
                out = self.w2[expert].float() @ h
                y[token] += weight * (out if self.b2 is None else out + self.b2[expert].float())
        return y


def error(result, wanted):
    return ((result.float() - wanted).norm() / wanted.norm()).item()
