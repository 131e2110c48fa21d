"""A GEMM that puts few choices in order itself has the order of moe-index, and the bits of a GEMM after it.

fusekit --store STORE build tests/gpu/choices.toml         on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_choices.py
"""

from pathlib import Path

import pytest

from fusekit.spec import parse_file

torch = pytest.importorskip("torch", reason="torch is not installed")

SPECS = {spec.full_name: spec for spec in parse_file(Path(__file__).with_name("choices.toml"))}
INSIDE = [name for name in SPECS if "/inside@" in name]
E, N, K, TOPK, UNTOUCHED = 128, 512, 256, 8, -7


@pytest.fixture(scope="module")
def kernels(opened):
    if not opened.store.names("choices/*"):
        pytest.skip(f"no kernels of choices in {opened}; build tests/gpu/choices.toml there and name the store")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return {name: opened.load(name) for name in SPECS}


def random_choices(tokens, trial):
    """indices [T, K]: different experts; some of them none; all tokens' the same."""
    indices = torch.rand(tokens, E, device="cuda").argsort(1)[:, :TOPK].int().contiguous()
    if trial % 3 == 1:
        indices[torch.rand(tokens, TOPK, device="cuda") < 0.3] = (-1, E, 2**31 - 1)[trial % 2]
    if trial % 3 == 2:
        indices[:] = indices[0].clone()
    return indices


@pytest.mark.parametrize("name", INSIDE)
def test_order_and_bits(kernels, name):
    torch.manual_seed(0)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
    bias = torch.randn(E, N, device="cuda", dtype=torch.bfloat16)
    (given,) = (each for each in SPECS if "/given@" in each)
    (index,) = (each for each in SPECS if "/index@" in each)
    for trial in range(24):
        tokens, spare = 1 + trial % 8, trial % 5
        rows = tokens * TOPK
        x, indices = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16), random_choices(tokens, trial)

        def outputs(rows=rows, tokens=tokens, spare=spare):
            ints = {"offsets": (E,), "token": (rows,), "inverse": (tokens, TOPK)}
            new = {key: torch.full(shape, UNTOUCHED, dtype=torch.int32, device="cuda") for key, shape in ints.items()}
            return new | {"y": torch.full((rows + spare, N // 2), 7.0, device="cuda", dtype=torch.bfloat16)}

        want, found, order = outputs(spare=0), outputs(), torch.empty(rows, dtype=torch.int32, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        ordered = {key: want[key] for key in ("offsets", "token", "inverse")}
        kernels[index](indices=indices, order=order, stream=stream, **ordered)
        read = {"offsets": want["offsets"], "index": want["token"]}
        kernels[given](x=x, w=w, bias=bias, y=want["y"], stream=stream, **read)
        written = {"offsets": found["offsets"], "index": found["token"], "inverse": found["inverse"]}
        kernels[name](x=x, w=w, bias=bias, y=found["y"], indices=indices, stream=stream, **written)
        torch.cuda.synchronize()
        for key in ("offsets", "token", "inverse"):
            assert torch.equal(found[key], want[key]), (trial, key)
        assert torch.equal(found["y"][:rows].view(torch.int16), want["y"].view(torch.int16)), trial
        assert (found["y"][rows:] == 7.0).all()
