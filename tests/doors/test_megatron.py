"""Megatron-Core 0.19 with fusekit's experts: a small GPT on the CPU, its own trainer's parts, gloo."""

from contextlib import nullcontext
from functools import partial

import pytest

pytest.importorskip("megatron.core.transformer.moe.moe_layer", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from fusekit.errors import ArgumentError
from fusekit.interop import megatron
from tests.doors.megatron_cpu import LENGTH, E, H, I, K, config, error, gpt, gradients, layer, loss, spec, start

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    start(0, 1, tmp_path_factory.mktemp("gloo") / "store")
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "whole"])
def test_loss_and_gradients_are_those_of_its_own_experts(dispatcher):
    whole = dispatcher == "whole"
    settings = config(moe_token_dispatcher_type="alltoall" if whole else dispatcher)
    theirs, ours = (
        gpt(settings, spec()),
        gpt(settings, megatron.fused(spec(), layer=layer(topk=K if whole else 1), whole=whole)),
    )
    losses = [loss(theirs), loss(ours)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for each in losses:
        each.backward()
    wanted, results = gradients(theirs), gradients(ours)
    assert results.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert error(results[name], gradient) < 3e-2, name


def test_a_provider_for_specs():
    mlp = get_moe_module_spec_for_backend(megatron.SpecProvider(LocalSpecProvider(), layer=layer()), num_experts=E)
    assert mlp.keywords["submodules"].experts.func is megatron.FusedExperts
    assert mlp.keywords["submodules"].shared_experts is not None


@pytest.mark.parametrize("singleton", [False, True])
def test_checkpoints_of_its_own_experts_are_ours_and_the_other_way(tmp_path, singleton):
    settings, metadata = config(), {"singleton_local_shards": singleton, "dp_cp_group": dist.group.WORLD}
    specs = spec(), megatron.fused(spec(), layer=layer())
    for number, (source, target) in enumerate((specs, specs[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        saved = gpt(settings, source)
        with torch.no_grad():
            for parameter in saved.parameters():
                parameter.normal_()
        dist_checkpointing.save(saved.sharded_state_dict(metadata=metadata), folder)
        loaded = gpt(settings, target)
        state = dist_checkpointing.load(loaded.sharded_state_dict(metadata=metadata), folder)
        loaded.load_state_dict(state)
        assert weights(loaded).keys() == weights(saved).keys()
        assert all(torch.equal(weights(loaded)[name], weight) for name, weight in weights(saved).items())


def weights(model):
    return gradients(model, "data")


def parallel(specs, overlap, distributed):
    """A small GPT, and it under Megatron's DDP."""
    model = gpt(config(), specs)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=distributed
    )
    return model, DistributedDataParallel(config(), settings, model)


@pytest.mark.parametrize("to", ["ours", "theirs"])
@pytest.mark.parametrize("distributed", [False, True])
def test_states_of_the_optimizer_go_with_a_checkpoint(tmp_path, monkeypatch, distributed, to):
    metadata = {"dp_cp_group": dist.group.WORLD, "distrib_optim_sharding_type": "fully_reshardable"}
    trained, models, optimizers = [], [], []
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=distributed)
    for kind in ("theirs", "ours") if to == "ours" else ("ours", "theirs"):
        specs = spec() if kind == "theirs" else megatron.fused(spec(), layer=layer())
        model, ddp = parallel(specs, False, distributed)
        optimizer = get_megatron_optimizer(settings, [ddp])
        loss(ddp, len(trained)).backward()  # each with a state of its own
        ddp.finish_grad_sync()
        optimizer.step()
        models.append(model), optimizers.append(optimizer)
        trained.append(states(model, optimizer))
    sharded = models[0].sharded_state_dict(metadata=metadata)
    dist_checkpointing.save(
        sharded | {"optimizer": optimizers[0].sharded_state_dict(sharded, metadata=metadata)}, tmp_path
    )
    sharded = models[1].sharded_state_dict(metadata=metadata)
    wanted = sharded | {"optimizer": optimizers[1].sharded_state_dict(sharded, is_loading=True, metadata=metadata)}
    # Without Apex and Transformer Engine Megatron loads all tensors of a state but saves no `step`.
    load = DistributedOptimizer._set_main_param_and_optimizer_states
    monkeypatch.setattr(
        DistributedOptimizer, load.__name__, lambda self, weight, saved: load(self, weight, {"step": None} | saved)
    )
    optimizers[1].load_state_dict(dist_checkpointing.load(wanted, tmp_path)["optimizer"])
    for name, state in states(models[1], optimizers[1]).items():
        assert torch.equal(state, trained[0][name]), name
        assert not torch.equal(state, trained[1][name]), name


def states(model, optimizer):
    """Float32 weights and both moments of each parameter, flat, experts stacked."""
    single, result = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer, {}
    for parameter in model.parameters():
        parameter.exp_avg, parameter.exp_avg_sq = (
            single.state[parameter.main_param][name] for name in ("exp_avg", "exp_avg_sq")
        )
    for kind in ("main_param", "exp_avg", "exp_avg_sq"):
        result |= {f"{kind} of {name}": value.flatten().clone() for name, value in gradients(model, kind).items()}
    return result


def reduced(kind, overlap, distributed):
    """Losses of two micro-batches under Megatron's DDP, and the main gradients."""
    specs = spec() if kind == "theirs" else megatron.fused(spec(), layer=layer(accumulate=kind == "accumulating"))
    model, ddp = parallel(specs, overlap, distributed)
    ddp.zero_grad_buffer()
    losses = []
    for micro in range(2):
        with ddp.no_sync() if micro == 0 else nullcontext():
            losses.append(loss(ddp, micro))
            losses[-1].backward()
    ddp.finish_grad_sync()
    return [each.item() for each in losses], gradients(model, "main_grad")


@pytest.mark.parametrize(("overlap", "distributed"), [(False, False), (True, False), (True, True)])
def test_main_gradients_under_its_data_parallelism(overlap, distributed):
    wanted, gradients_wanted = reduced("theirs", overlap, distributed)
    for kind in ("rounding", "accumulating"):
        losses, results = reduced(kind, overlap, distributed)
        assert losses == pytest.approx(wanted, rel=1e-3)
        for name, gradient in gradients_wanted.items():
            assert error(results[name], gradient) < 3e-2, (kind, name)


def over_two(rank, file, dispatcher, results):
    """One process of two: the losses and gradients of both, with the experts in two halves."""
    start(rank, 2, file, expert_parallel=2)
    settings = config(moe_token_dispatcher_type=dispatcher, expert_model_parallel_size=2)
    pairs = [spec(), megatron.fused(spec(), layer=layer(E // 2))]
    models = [gpt(settings, each) for each in pairs]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    for block, other in zip(models[0].decoder.layers, models[1].decoder.layers, strict=True):
        for path, projection in (("w1", "linear_fc1"), ("w2", "linear_fc2")):
            weights = [getattr(expert, projection).weight for expert in block.mlp.experts.local_experts]
            getattr(other.mlp.experts, path).data.copy_(torch.stack(weights))
    losses = [loss(model, rank) for model in models]
    for each in losses:
        each.backward()
    wanted, found = map(gradients, models)
    assert all(not each.allreduce for each in models[1].decoder.layers[0].mlp.experts.parameters())
    worst = max(error(found[name], gradient) for name, gradient in wanted.items())
    results.put((rank, losses[0].item(), losses[1].item(), worst))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_expert_parallelism_by_its_dispatchers(tmp_path, dispatcher):
    context = processes.get_context("spawn")
    results = context.Queue()
    processes.spawn(over_two, (tmp_path / "store", dispatcher, results), nprocs=2)
    for _ in range(2):
        _, wanted, ours, worst = results.get(timeout=10)
        assert ours == pytest.approx(wanted, rel=1e-3)
        assert worst < 3e-2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"add_bias_linear": True}, "add_bias_linear = True.*set add_bias_linear = False"),
        ({"activation_func": torch.tanh}, "activation_func = tanh, gated: fusekit has no kernel for it"),
        ({"moe_mlp_glu_interleave_size": 16}, "interleave by 32"),
        ({"hidden_size": 128}, "computes other experts: hidden is 64, not 128"),
    ],
)
def test_what_it_cannot_honour_is_refused(settings, words):
    build = partial(gpt, config(**settings))
    with pytest.raises(ArgumentError, match=words):
        build(megatron.fused(spec(), layer=layer()))


def test_a_spec_without_experts_is_refused():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with pytest.raises(ArgumentError, match="no MoE layer"):
        megatron.fused(get_gpt_layer_local_spec())


def test_the_benchmark_trains_each_variant(monkeypatch):
    from tests.benchmarks import megatron as benchmark

    sizes = {"HIDDEN": H, "INTERMEDIATE": I, "EXPERTS": E, "LENGTH": LENGTH, "ROWS": 2, "corpus": lambda: b"abcde" * 99}
    for name, size in sizes.items():
        monkeypatch.setattr(benchmark, name, size)
    monkeypatch.setattr(benchmark, "model_parallel_cuda_manual_seed", lambda *_, **__: None)
    runs = {}
    for variant in ("megatron", "megatron+turned", "fused", "whole"):
        whole, given = variant == "whole", spec()
        if "megatron" not in variant:
            given = megatron.fused(given, layer=layer(topk=K if whole else 1, accumulate=True), whole=whole)
        runs[variant] = benchmark.train(variant, 6, 1e-2, given, use_cpu_initialization=True)
    first, row = runs.pop("megatron")
    assert first[-1] < first[0] - 0.1 and list(row["losses"]) == [1, 2, 6]
    for losses, other in runs.values():
        assert other["weights"] == pytest.approx(row["weights"], rel=1e-9)
        assert losses != first and 0 < benchmark.apart(losses, first)["most"] < 2
