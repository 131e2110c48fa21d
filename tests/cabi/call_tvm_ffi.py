"""Calls an exported library of TVM-FFI functions from PyTorch or JAX; prints the addresses of the tensors.

python call_tvm_ffi.py torch|jax|ranks LIBRARY ON_CUDA
"""

import json
import sys

import tvm_ffi

SHAPES = {"x": (100, 512), "router": (8, 512), "w1": (8, 512, 512), "w2": (8, 512, 256), "y": (100, 512)}


def memory(count):
    import torch

    whole = torch.zeros(count + 256, dtype=torch.uint8)
    begin = -whole.data_ptr() % 256
    return whole[begin : begin + count]


def tensor(*shape, dtype=None):
    import torch

    dtype = dtype or torch.bfloat16
    count = torch.Size(shape).numel() * dtype.itemsize
    return memory(max(count, 1))[:count].view(dtype).view(*shape)


def callers(moe, shim):
    """Calls a function by its name, with tensors of the host as a device's; the same, but gives the error."""

    def called(name, *args):
        shim.aim(moe.get_function(name))
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 77):
            return shim.on_cuda(*args)

    def refused(name, *args):
        try:
            called(name, *args)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return None

    return called, refused


def of_torch(moe, shim):
    import torch

    called, refused = callers(moe, shim)
    given = {name: tensor(*shape) for name, shape in SHAPES.items()}
    forward = [*given.values()]
    kept, scratch = memory(moe.layer_moe_kept_bytes(100)), memory(moe.layer_moe_forward_bytes(100))
    moe.prepare(0)
    other = tensor(100, 512)
    wide = tensor(100, 576)[:, :512]
    for y in (given["y"], given["y"], other, wide):  # the second time, its launches are known
        called("layer_moe_forward", *forward[:4], y, kept, scratch)
    called("layer_moe_inference", *forward, scratch, 5)
    gradients = {name: tensor(*SHAPES[name[1:]]) for name in ("dy", "dx", "dw1", "dw2")}
    gradients["dy"] = tensor(100, 512)
    backward = gradients | given
    order = ("dy", "w2", "w1", "router", "x", "dx", "dw2", "dw1")
    more = memory(moe.layer_moe_backward_bytes(100))
    arguments = [backward[name] for name in order]
    arguments[5] = None  # no dx
    called("layer_moe_backward", *arguments, None, kept, more, None, 1)
    fc1 = [tensor(1024, 512), tensor(8, 1536, 512), tensor(1024, 768), tensor(8, dtype=torch.int32)]
    called("quickstart_moe_fc1", *fc1)
    called("quickstart_moe_fc1", *fc1, 1.5)
    named = given | gradients | {"kept": kept, "scratch": scratch, "other": other, "wide": wide, "more": more}
    return {
        "addresses": {name: each.data_ptr() for name, each in named.items()},
        "refused": [
            refused("layer_moe_forward", *forward),
            refused("layer_moe_forward", *forward, kept, scratch[:256]),
            refused("layer_moe_forward", forward[0], None, *forward[2:], kept, scratch),
            refused("layer_moe_forward", forward[0].float(), *forward[1:], kept, scratch),
            refused("layer_moe_forward", forward[0], forward[1][:, :256], *forward[2:], kept, scratch),
            refused("layer_moe_forward", *forward, memory(kept.numel() + 1)[1:], scratch),
            refused("layer_moe_forward", *forward, "kept", scratch),
            refused("layer_moe_forward", *forward[:4], forward[4].expand(100, 512).t(), kept, scratch),
            refused("layer_moe_forward", *forward, kept, scratch, None, None),
            refused("layer_moe_inference", *forward, scratch, 500),
            refused("layer_moe_inference", *forward),
            refused("layer_moe_inference"),
            refused("layer_moe_kept_bytes", -1),
            refused("quickstart_moe_fc1", *fc1[:3]),
            refused("quickstart_moe_fc1", fc1[0][:, :500], *fc1[1:]),
            refused("quickstart_moe_fc1", *fc1, forward[0]),
        ],
    }


def of_ranks(moe, shim):
    import torch

    called, refused = callers(moe, shim)
    results, name = [], "layers_choices_overlap"
    for call in json.load(sys.stdin):
        which, tokens = call["which"], call["tokens"]
        _, _, capacity, rows, *_ = call["ranks"]
        arguments = {
            each: tensor(*shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            for each, (shape, dtype) in call["tensors"].items()
        }
        sizes = [moe[f"{name}_{what}_bytes"](tokens, capacity, rows) for what in (which, "kept")]
        sizes += [moe[f"{name}_{window}_bytes"](capacity) for window in ("sent", "grads", "sums", "returned")]
        arguments |= {"scratch": memory(sizes[0]), "kept": memory(sizes[1])}
        ranks = torch.tensor(call["ranks"])
        *tensors, scratch, kept = arguments.values()
        for _ in range(2):  # the second time, its launches are known
            called(f"{name}_{which}", *tensors, kept, ranks, scratch)
        results.append({"bytes": sizes, "addresses": {each: given.data_ptr() for each, given in arguments.items()}})
    name = f"{name}_{which}"
    wrong = {index: torch.tensor([*call["ranks"][:index], value, *call["ranks"][index + 1 :]]) for index, value in
             ((0, 4), (1, 1 << 32))}  # fmt: skip
    return {
        "calls": results,
        "refused": [
            refused(name, *tensors, kept, ranks[:-1], scratch),
            refused(name, *tensors, kept, kept, scratch),
            refused(name, *tensors, kept, None, scratch),
            refused(name, *tensors, kept, wrong[0], scratch),
            refused(name, *tensors, kept, wrong[1], scratch),
            refused("layers_choices_overlap_kept_bytes", 5),
            refused("layers_choices_overlap_sent_bytes"),
            refused("layers_choices_overlap_kept_bytes", 0, 0),
        ],
    }


def of_jax(moe, shim):
    import jax
    import jax.numpy as jnp
    import jax_tvm_ffi

    shim.aim(moe.layer_moe_inference)
    jax_tvm_ffi.register_ffi_target("moe", shim.on_cuda, ["args", "rets"], platform="cpu")
    given = [jnp.zeros(SHAPES[name], jnp.bfloat16) for name in ("x", "router", "w1", "w2")]
    bytes_ = moe.layer_moe_inference_bytes(100)
    for more in range(0, 1 << 16, 1 << 12):  # on a CPU, XLA aligns memory to 64 bytes; scratch memory begins at 128
        results = jax.ShapeDtypeStruct(SHAPES["y"], jnp.bfloat16), jax.ShapeDtypeStruct((bytes_ + more,), jnp.uint8)
        try:
            y, scratch = jax.jit(lambda *args, results=results: jax.ffi.ffi_call("moe", results)(*args))(*given)
            break
        except jax.errors.JaxRuntimeError as error:
            if "scratch begins at" not in str(error):
                raise
    names = dict(zip(("x", "router", "w1", "w2", "y", "scratch"), (*given, y, scratch), strict=True))
    return {"addresses": {name: each.unsafe_buffer_pointer() for name, each in names.items()}}


if __name__ == "__main__":
    framework, *files = sys.argv[1:]
    json.dump(
        {"torch": of_torch, "jax": of_jax, "ranks": of_ranks}[framework](*map(tvm_ffi.load_module, files)), sys.stdout
    )
