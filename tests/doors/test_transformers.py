"""Transformers' Trainer and fully_shard with fusekit's experts, on the CPU over gloo, in one process."""

from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

from fusekit.cpu import CpuLayer
from fusekit.interop import transformers as interop
from tests.interop import models, training
from tests.plan.test_layer_program import options

pytestmark = pytest.mark.filterwarnings("ignore")
H, I, STEPS = 64, 32, 3  # noqa: E741


@pytest.fixture(autouse=True)
def registered():
    table = {"hidden": H, "intermediate": I, "experts": 8, "topk": 2, "router": {"input": "choices"}, "dtype": "bf16"}
    layer = CpuLayer(options(**table))
    interop.register(SimpleNamespace(layers=lambda: {"l/moe": layer.options}, layer=lambda name: layer), "fusekit-door")


def test_trainer_with_checkpointing(tmp_path):
    losses = {}
    for backend in ("fusekit-door", "eager"):
        model = models.model("mixtral", backend, H, I, dtype=torch.bfloat16)
        rows = training.batches(1, 2 * STEPS, 16)[0]
        given = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, report_to=[],
            use_cpu=True, save_strategy="no", gradient_checkpointing=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=given, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        trainer.train()
        losses[backend] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses["eager"]) == STEPS
    assert losses["fusekit-door"] == pytest.approx(losses["eager"], rel=0.02)


def test_fully_shard_with_float32_parameters(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh, losses = torch.distributed.init_device_mesh("cpu", (1,)), {}
        for backend in ("fusekit-door", "eager"):
            model = models.model("mixtral", backend, H, I, dtype=torch.float32)
            for block in (*model.model.layers, model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            optimizer, losses[backend] = torch.optim.AdamW(model.parameters(), lr=1e-3), []
            for ids in training.batches(STEPS, 2, 16):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[backend].append(loss.item())
        assert losses["fusekit-door"] == pytest.approx(losses["eager"], rel=0.02)
    finally:
        dist.destroy_process_group()
