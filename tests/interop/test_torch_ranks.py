"""Layers over ranks as PyTorch modules, without a GPU: ranks that are threads with stand-in layers, and processes that
find each other through torch.distributed.
"""

import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest

from fusekit.errors import ArgumentError
from fusekit.exchange import Ranks
from fusekit.layers.ranked import RankedLayer
from fusekit.plan.layer.record import unproved

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from tests.interop.rank_layers import Meeting, RankedStandIn, StandIn  # noqa: E402
from tests.layers.host_ranks import HostLibrary  # noqa: E402
from tests.plan.test_layer_program import K  # noqa: E402
from tests.plan.test_layer_ranks import PARTS, alone, over  # noqa: E402
from tests.soak import sample  # noqa: E402

ROOT = Path(__file__).parents[2]
COEFFICIENT = 0.3
NAMES = ("plain", "gpt-oss", "gpt-oss-as-stored", "deepseek", "llama4", "choices", "logits")


def modules(name, tokens, seed=0):
    """The module of one GPU, and those of the ranks with the same parameters."""
    o = over(len(tokens), name, dtype="f32")
    torch.manual_seed(seed)
    one = interop.MoE(StandIn(**alone(o).canonical()), aux_coefficient=COEFFICIENT)
    with torch.no_grad():
        for tensor in one.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    meeting = Meeting(o, max(tokens))
    ranks = []
    for rank in range(o.ranks):
        moe = interop.MoE(RankedStandIn(rank, meeting, **o.canonical()), aux_coefficient=COEFFICIENT)
        moe.load_state_dict(one.state_dict())  # each takes its share
        ranks.append(moe)
    return o, one, ranks


def given_of(o, count, seed):
    torch.manual_seed(seed)
    x = torch.randn(count, o.hidden, requires_grad=True)
    kind = o.router["input"]
    if kind == "logits":
        return x, torch.randn(count, o.experts, requires_grad=True)
    if kind == "choices":
        return x, torch.rand(count, o.experts).argsort(1)[:, :K], torch.rand(count, K, requires_grad=True)
    return (x,)


def step(moe, given):
    outputs = moe(*given)
    y, loss = outputs if isinstance(outputs, tuple) else (outputs, None)
    total = (y * torch.arange(y.shape[-1]).cos()).sum()
    (total if loss is None else total + 0.7 * loss).backward()
    return y.detach()


def together(bodies):
    """Each in a thread."""
    failed = []

    def run(body):
        try:
            body()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


@pytest.mark.parametrize(("name", "tokens"), sample(product(NAMES, [(7, 4), (5, 0, 9)]), most=5))
def test_a_module_over_ranks_is_that_of_one_gpu(name, tokens):
    o, one, ranks = modules(name, tokens)
    given = [given_of(o, count, rank) for rank, count in enumerate(tokens)]
    result = [None] * len(ranks)

    def body(rank):
        result[rank] = step(ranks[rank], given[rank])

    together([lambda rank=rank: body(rank) for rank in range(len(ranks))])
    got = [[each.grad for each in rank_inputs if each.requires_grad] for rank_inputs in given]
    for rank_inputs in given:
        for each in rank_inputs:
            each.grad = None
    shared = {path: torch.zeros_like(tensor) for path, tensor in one.named_parameters()}
    for rank, rank_inputs in enumerate(given):
        one.zero_grad()
        torch.testing.assert_close(result[rank], step(one, rank_inputs), rtol=1e-4, atol=1e-4)
        for left, right in zip(got[rank], [each.grad for each in rank_inputs if each.requires_grad], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
        for path, parameter in one.named_parameters():
            shared[path] += parameter.grad
            if path not in [one.names[name] for name in PARTS if name in one.names]:
                gradient = ranks[rank].get_parameter(path).grad
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-3)
    for name_ in PARTS:
        if name_ in one.names:
            path = one.names[name_]
            whole = torch.cat([moe.get_parameter(path).grad for moe in ranks])
            torch.testing.assert_close(whole, shared[path], rtol=1e-4, atol=1e-3)


def test_a_module_over_ranks_with_a_recipe():
    """Tokens of one rank alone: those of the other have none, so FP8 values along the tokens are those of one GPU."""
    o, one, ranks = modules("fp8-choices", (30, 0))
    given = [given_of(o, count, rank) for rank, count in enumerate((30, 0))]
    result = [None, None]

    def body(rank):
        result[rank] = step(ranks[rank], given[rank])

    together([lambda: body(0), lambda: body(1)])
    gradients = [each.grad.clone() for each in given[0] if each.requires_grad]
    for each in given[0]:
        each.grad = None
    torch.testing.assert_close(result[0], step(one, given[0]), rtol=1e-5, atol=1e-5)
    for left, right in zip(gradients, [each.grad for each in given[0] if each.requires_grad], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    for name in ("w1", "w2"):
        path = one.names[name]
        whole = torch.cat([moe.get_parameter(path).grad for moe in ranks])
        torch.testing.assert_close(whole, one.get_parameter(path).grad, rtol=1e-5, atol=1e-5)


def test_a_rank_has_its_share_and_saves_it():
    o, one, ranks = modules("gpt-oss", (5, 5))
    whole = one.state_dict()
    for rank, moe in enumerate(ranks):
        share = moe.state_dict()
        assert share["experts.gate_up_proj"].shape[0] == o.local == 8
        assert torch.equal(share["experts.down_proj_bias"], whole["experts.down_proj_bias"][8 * rank :][:8])
        assert torch.equal(share["router.weight"], whole["router.weight"])
        moe.load_state_dict(share)


def test_a_group_is_for_layers_over_ranks():
    with pytest.raises(ArgumentError, match="is a layer of one GPU, which takes no group"):
        interop.MoE(StandIn(**alone(over(2)).canonical()), group=object())


def test_a_module_of_a_group_has_its_windows(monkeypatch):
    """They are made where all ranks come together, and modules share them."""
    o = over(2, "choices")
    library = HostLibrary(o)
    ranks, other = Ranks.in_process(library.devices, [0, 1])
    monkeypatch.setattr("fusekit.interop.torch_ranks.ranks_of", lambda devices, group, *, timeout: ranks)
    layer = RankedLayer(library, unproved(o, "sm_90a", lambda part, tokens: part), tokens=40)
    first, second = (interop.MoE(layer, group=object()) for _ in range(2))
    assert first.layer.ranks is ranks and first.experts.down_proj.shape[0] == o.local
    assert set(first.layer._windows) == {"sent", "sums"} and first.layer._windows == second.layer._windows
    assert (
        other.window(("sums", 128, first.layer.sizes().windows["sums"]), 1).peers == first.layer._windows["sums"].peers
    )


PROCESS = """
import os, sys, time, datetime
import torch.distributed as dist
from fusekit.errors import PeerTimeoutError
from fusekit.interop.torch_ranks import gather

file, missing = sys.argv[1:]
rank, count = int(os.fork() == 0), 2  # what is imported is imported once
store = dist.FileStore(file, count)
dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=60))
if missing == "never" and rank == 1:
    time.sleep(6)
    sys.exit()
begin = time.monotonic()
try:
    exchange = gather(dist.group.WORLD, 3000)
    assert exchange(bytes([rank])) == [bytes([each]) for each in range(count)]
    if missing == "later" and rank == 1:
        time.sleep(6)
        sys.exit()
    assert exchange(b"again")[0] == b"again"
    os.write(1, b"all there\\n")
except PeerTimeoutError as error:
    print(f"{time.monotonic() - begin:.1f} s: {error}")
"""


@pytest.mark.parametrize("missing", sample(["", "never", "later"], "never"))
def test_processes_find_each_other_or_say_so_in_time(tmp_path, missing):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path / "store"), missing], cwd=ROOT, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    out, problems = done.stdout, done.stderr
    if not missing:
        assert out == "all there\n" * 2, problems
        return
    assert "rank 0 waited 3 s for the other 1 ranks to make windows with it" in out, problems
    assert float(out.partition(" s:")[0]) < 5
    assert time.monotonic() - begin < 60


STATE = """
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from fusekit.interop.torch import MoE, expert_parameters
from fusekit.interop.torch_ranks import sharded_state_dict
from tests.interop.rank_layers import Meeting, RankedStandIn, StandIn
from tests.plan.test_layer_ranks import alone, over

folder, child = sys.argv[1], os.fork()  # what is imported is imported once
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
o = over(2, "gpt-oss", dtype="f32")


def model():
    moe = MoE(RankedStandIn(rank, Meeting(o, 4), **o.canonical()))
    return torch.nn.Sequential(torch.nn.Linear(o.hidden, o.hidden), moe)


def of_ranks(tensor):
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor.detach())
    return found


torch.manual_seed(rank)
own = model()
experts = dict(expert_parameters(own))
paths = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
assert [*experts] == [f"1.experts.{path}" for path in paths]
assert {name for name, each in own.named_parameters() if not getattr(each, "allreduce", True)} == experts.keys()
before = {name: each.detach().clone() for name, each in own.named_parameters()}

# DDP makes all parameters those of rank 0, but for the experts.
DDP._set_params_and_buffers_to_ignore_for_model(own, [*experts])
DDP(own)
for name, each in own.named_parameters():
    first, second = of_ranks(each)
    assert torch.equal(each, before[name]) if name in experts else torch.equal(first, second), name

# One GPU loads what the ranks save, and the ranks what it saves.
dcp.save(sharded_state_dict(own), checkpoint_id=f"{folder}/ranks")
whole = torch.nn.Sequential(torch.nn.Linear(o.hidden, o.hidden), MoE(StandIn(**alone(o).canonical())))
state = whole.state_dict()
dcp.load(state, checkpoint_id=f"{folder}/ranks")
whole.load_state_dict(state)
for name, each in own.state_dict().items():
    assert torch.equal(state[name], torch.cat(of_ranks(each)) if name in experts else each), name
with torch.no_grad():
    for each in whole.parameters():
        each.copy_(torch.arange(each.numel()).view(each.shape))
dcp.save(whole.state_dict(), checkpoint_id=f"{folder}/whole")
other = model()
dcp.load(sharded_state_dict(other), checkpoint_id=f"{folder}/whole")
for name, each in whole.state_dict().items():
    share = each[o.local * rank :][: o.local] if name in experts else each
    assert torch.equal(other.state_dict()[name], share), name

# FSDP2 shards all but the experts.
fully_shard(other, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(dict(expert_parameters(other)).values()))
for name, each in other.named_parameters():
    assert isinstance(each, DTensor) != (name in experts), name
os.write(1, b"right\\n")
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_state_of_all_ranks_is_that_of_one_gpu(tmp_path):
    """And data parallelism leaves the parameters of a rank's experts alone."""
    done = subprocess.run(
        [sys.executable, "-c", STATE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.returncode) == ("right\nright\n", 0), done.stderr
