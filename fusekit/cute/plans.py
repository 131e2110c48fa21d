"""Plans: the compile calls that packages make for a model, made by the packages' own code on stand-ins for tensors.

Run by `fusekit warm` below `fusekit exec`, on a machine without a GPU: `python -m fusekit.cute.plans JSON`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fusekit.errors import UsageError

Calls = Iterator[Callable[[], Any]]

_OSS_ALPHA, _OSS_LIMIT = 1.702, 7.0
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Model:
    """What of a Hugging Face config.json decides which kernels a model needs. experts, top_k, expert_size: 0 without a
    mixture of experts. window: of sliding-window attention, else 0. norms_heads: whether queries and keys are
    normalized. sinks: whether attention has learned sinks. swiglu: alpha, beta and limit of its SwiGLU; empty: plain.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    top_k: int
    expert_size: int
    window: int
    norms_heads: bool
    sinks: bool
    swiglu: tuple[float, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> Model:
        """The model of `config`. Raises UsageError for one that lacks a key."""
        config = config.get("text_config") or config
        kind = str(config.get("model_type", ""))
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
            top_k = int(config["num_experts_per_tok"]) if experts else 0
            size = int(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0
            kv_heads = int(config.get("num_key_value_heads") or heads)
            window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{source}: {error.args[0]} is missing or not a number; give the config.json of a Hugging Face model"
            ) from None
        head_size = int(config.get("head_dim") or hidden // heads)
        is_oss = kind == "gpt_oss"
        swiglu = (_OSS_ALPHA, 1.0, float(config.get("swiglu_limit", _OSS_LIMIT))) if is_oss else ()
        moe = experts, top_k, size
        return cls(hidden, heads, kv_heads, head_size, *moe, window, kind.startswith("qwen3"), is_oss, swiglu)


@dataclass(frozen=True, slots=True)
class Work:
    """What `main` does. tokens: per step, ascending. ranks: of expert parallelism. sms: of the device. tactics: `all`
    that a package's tuner tries, or its `default`. jobs, job: of so many processes, which one this is.
    """

    models: tuple[Model, ...]
    plans: tuple[str, ...]
    tokens: tuple[int, ...]
    ranks: int
    sms: int
    tactics: str
    jobs: int
    job: int = -1

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Work:
        values: dict[str, Any] = json.loads(text)
        models = tuple(Model(**{**model, "swiglu": tuple(model["swiglu"])}) for model in values.pop("models"))
        plans, tokens = tuple(values.pop("plans")), tuple(values.pop("tokens"))
        return cls(models, plans, tokens, **values)


def _quack(model: Model, work: Work) -> Calls:
    """RMSNorm forward (for inference and training, with and without a residual) and backward, over the hidden size, and
    over a head where queries and keys are normalized.
    """
    import cutlass
    from quack.rmsnorm import _compile_rmsnorm_bwd, _compile_rmsnorm_fwd

    kind = cutlass.BFloat16
    for size in (model.hidden, *((model.head_size,) if model.norms_heads else ())):
        for residual in (None, kind):
            for trains in (False, True):
                types = kind, kind, residual, kind, None, residual
                yield partial(_compile_rmsnorm_fwd, *types, size, trains, False, False, False)
            yield partial(_compile_rmsnorm_bwd, size, kind, kind, kind, kind, False, residual, residual, True)


def _flash_attn(model: Model, work: Work) -> Calls:
    """The forward pass, causal and of the sliding window, for each number of tokens."""
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(tokens: int, window: int) -> None:
        with FakeTensorMode():
            counts = model.heads, model.kv_heads, model.kv_heads
            q, k, v = (
                torch.empty(1, tokens, count, model.head_size, dtype=torch.bfloat16, device="cuda") for count in counts
            )
            sink = torch.empty(model.heads, dtype=torch.bfloat16, device="cuda") if model.sinks else None
            left = {"window_size_left": window - 1, "window_size_right": 0} if window else {"causal": True}
            _flash_attn_fwd(q, k, v, learnable_sink=sink, **left)

    for tokens in work.tokens:
        for window in dict.fromkeys((0, model.window)):
            yield partial(call, tokens, window)


def _flashinfer(model: Model, work: Work) -> Calls:
    """Both GEMMs of the SM90 mixture of experts (`cute_dsl_fused_moe_bf16`), with the tactics of its tuner."""
    if not model.experts:
        return
    import torch
    from flashinfer.fused_moe.cute_dsl import sm90_contiguous_gather_grouped_gemm_act_fusion as first
    from flashinfer.fused_moe.cute_dsl import sm90_contiguous_grouped_gemm_finalize_fusion as second
    from flashinfer.fused_moe.cute_dsl import sm90_tuner as tuner
    from flashinfer.fused_moe.cute_dsl.moe_utils import get_max_num_permuted_tokens

    def empty(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    local = model.experts // work.ranks
    swiglu = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), model.swiglu, strict=False))
    w1 = empty(local, 2 * model.expert_size, model.hidden)
    w2 = empty(local, model.hidden, model.expert_size)
    moe = tuner.CuteDslFusedMoESm90Runner(lambda *args, **kwargs: None, model.experts, model.top_k, local, **swiglu)

    def run(module: Any, getter: str, function: str, *args: Any, **kwargs: Any) -> None:
        """Call a package's function up to its launch."""
        compile, launch = getattr(module, getter), mock.Mock()
        with (
            mock.patch.object(module, getter, lambda **given: (compile(**given), launch)[1]),
            mock.patch.object(module, "get_compute_capability", lambda device: (9, 0)),
            mock.patch.object(module, "get_max_active_clusters", lambda size: work.sms // size),
            mock.patch("torch.cuda.current_stream", lambda device=None: SimpleNamespace(cuda_stream=0)),
            mock.patch("torch.Tensor.data_ptr", lambda tensor: 0),
        ):
            getattr(module, function)(*args, topk=model.top_k, **kwargs)
        assert launch.called

    firsts: dict[Any, int] = {}
    seconds: dict[Any, int] = {}
    for tokens in work.tokens:
        x, y = empty(tokens, model.hidden), empty(tokens, model.hidden)
        routing = empty(tokens, model.top_k, dtype=torch.int32), empty(tokens, model.top_k, dtype=torch.float32)
        tactics = moe.get_valid_tactics([x, *routing, w1, w2, y], None)
        for tactic in tactics if work.tactics == "all" else [-1]:
            chosen: Any = tuner.DEFAULT_SM90_MOE_TACTIC if tactic == -1 else tactic
            firsts.setdefault(chosen[1], tokens)
            seconds.setdefault(chosen[2], tokens)

    def shapes(tokens: int, tile: int) -> tuple[int, list[Any]]:
        rows = get_max_num_permuted_tokens(tokens, model.top_k, local, tile)
        return rows, [empty(count, dtype=torch.int32) for count in (rows // tile, rows // tile, rows, 1)]

    def gemm1(tactic: Any, tokens: int) -> None:
        tile, swizzle = tactic
        rows, (experts, limits, mapping, count) = shapes(tokens, tile[0])
        run(
            first, "_get_compiled_gather_kernel", first.sm90_contiguous_gather_grouped_gemm_act_fusion.__name__,
            empty(tokens, model.hidden), w1, experts, limits, mapping, count, permuted_m=rows, tile_shape_mn=tile,
            swizzle_size=swizzle, **swiglu,
        )  # fmt: skip

    def gemm2(tactic: Any, tokens: int) -> None:
        tile, cluster, raster = tactic
        rows, (experts, limits, mapping, count) = shapes(tokens, tile[0])
        run(
            second, "_get_compiled_finalize_kernel", second.sm90_contiguous_grouped_gemm_finalize_fusion.__name__,
            empty(rows, model.expert_size), w2, experts, limits, mapping, count,
            empty(tokens, model.top_k, dtype=torch.float32), empty(tokens, model.hidden), tile_shape_mn=tile,
            cluster_shape_mn=cluster, raster_along_m=raster,
        )  # fmt: skip

    for one, tokens in firsts.items():
        yield partial(gemm1, one, tokens)
    for two, tokens in seconds.items():
        yield partial(gemm2, two, tokens)


PLANS: dict[str, Callable[[Model, Work], Calls]] = {
    "quack": _quack, "flash_attn": _flash_attn, "flashinfer": _flashinfer,
}  # fmt: skip
"""By the package that is imported."""


def environment(arch: str, sms: int) -> dict[str, str]:
    """The variables by which the DSL and packages of `PLANS` take a device that is not there for one of `arch`."""
    number = arch.removeprefix("sm_").rstrip("af")
    return {
        "CUTE_DSL_ARCH": arch, "QUACK_ARCH": number, "QUACK_CACHE_ENABLED": "0",
        "FLASH_ATTENTION_ARCH": f"sm_{number}", "FLASH_ATTENTION_NUM_SMS": str(sms),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    }  # fmt: skip


def main(text: str) -> int:
    """Do the work `text` in as many processes as it says. Returns the exit code."""
    work = Work.from_text(text)
    if work.job < 0:
        command = (sys.executable, "-m", "fusekit.cute.plans")
        shares = [replace(work, job=job).to_text() for job in range(work.jobs)]
        processes = [subprocess.Popen([*command, share]) for share in shares]
        return max([process.wait() for process in processes])
    failed = 0
    calls = [(plan, call) for plan in work.plans for model in work.models for call in PLANS[plan](model, work)]
    for plan, call in calls[work.job :: work.jobs]:
        try:
            call()
        except Exception as error:
            if type(error).__name__ == "NotBuiltError":
                raise
            failed += 1
            sys.stderr.write(f"{plan}: a call failed: {type(error).__name__}: {error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
