"""Layers over ranks inside jax.shard_map, on several of XLA's CPU devices: windows on host memory, kernels by formula.

`test_jax.py` runs it.
"""

import ctypes
import itertools
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fusekit
from fusekit.errors import ArgumentError, PeerTimeoutError
from fusekit.exchange import Ranks
from fusekit.plan.layer.record import unproved
from fusekit.spec import parse_file

jax = pytest.importorskip("jax", reason="JAX is not installed")
jax.config.update("jax_num_cpu_devices", 3)
from tests.layers.host_ranks import HostLibrary, HostRanked  # noqa: E402
from tests.plan.test_layer_ranks import PARTS, alone, over  # noqa: E402
from tests.soak import sample  # noqa: E402

from .plain_jax import arguments, plain  # noqa: E402

jnp, P = jax.numpy, jax.sharding.PartitionSpec
_NUMBERS = itertools.count()
EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_ranks.py"
HERE = threading.local()  # `device` of the handler that runs
HEADER = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"


class Ordinal(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("more", ctypes.c_void_p), ("context", ctypes.c_void_p),
                ("device", ctypes.c_int32))  # fmt: skip


def stream_of(frame):
    """XLA's CPU has no streams, but devices with numbers, which CUDA's contexts have on a GPU."""
    names = re.findall(r"API_STRUCT_FIELD\((\w+)\);", HEADER.read_text())
    distance = names.index("XLA_FFI_DeviceOrdinal_Get") - names.index("XLA_FFI_Stream_Get")
    api = type(frame.api.contents)
    place = ctypes.addressof(frame.api.contents) + api.stream_get.offset + 8 * distance
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Ordinal))(ctypes.c_void_p.from_address(place).value)
    asked = Ordinal(ctypes.sizeof(Ordinal), None, frame.context, -1)
    assert not function(ctypes.byref(asked))
    HERE.device = asked.device
    return None, 0x70 + asked.device


class Ranked(HostRanked):
    """The layer of a rank, each on a thread of XLA's: the last one to come runs what all have queued."""

    def over(self, ranks):
        ranked = Ranked(self._library, self.record, ranks=ranks, tokens=self.capacity, rows=self.rows)
        self._library.layers[ranks.rank] = ranked
        return ranked

    def load(self, tokens=None):
        self._library.loaded.append((self.ranks.rank, tokens))

    def current_device(self):
        return HERE.device

    def _call(self, *given, **more):
        library = self._library
        with library.lock:
            super()._call(*given, **more)
        if library.barrier.wait() == 0:
            library.machine.run()
        library.barrier.wait()


@pytest.fixture
def jax_ranked(monkeypatch):
    """jax_ranked(options, mesh, **said) -> (library, f)."""
    from fusekit.interop import jax as interop

    monkeypatch.setattr(interop.xla, "stream_of", stream_of)
    moe = interop.moe

    def make(o, mesh, tokens=40, patience=60, **said):
        library = HostLibrary(o, devices=3)
        library.lock, library.loaded = threading.Lock(), []
        library.barrier = threading.Barrier(o.ranks, timeout=patience)
        layer = Ranked(library, unproved(o, "sm_90a", lambda part, tokens: part), tokens=tokens)
        name = f"fusekit_test_ranks_{next(_NUMBERS)}"
        return library, moe(layer, name, mesh=mesh, platform="cpu", **{"axis": "experts", **said})

    return make


def mesh_of(*order):
    return jax.sharding.Mesh(np.array([jax.devices()[device] for device in order]), ("experts",))


def inputs_of(o, tokens, layer):
    """Arguments of all ranks, one after the other; tokens: of a rank."""
    buffers = {**layer.inputs("forward"), **layer.inputs("quantise")}
    buffers = {name: buffer for name, buffer in buffers.items() if name not in layer.outputs("quantise")}
    return arguments(alone(o), buffers, tokens * o.ranks, jax.random.key(0))


def whole(o, tokens):
    """x, params and more of the layer on one GPU."""
    from tests.layers.host import HostLayer

    return inputs_of(o, tokens, HostLayer(alone(o)))


def specs(params, more):
    of = {name: P("experts") if name in PARTS else P() for name in params}
    return P("experts"), of, {name: P("experts") if each.ndim else P() for name, each in more.items()}


def total(y, aux):
    return (jnp.sin(y.astype("float32")) * jnp.arange(1, y.shape[-1] + 1)).sum() + 3 * aux


def loss(f, x, params, more):
    result = f(x, params, **more)
    return total(*(result if isinstance(result, tuple) else (result, 0.0)))


def wanted(o, x, params, more, floats):
    """The sum of what each rank's tokens give on one GPU, and its gradients."""
    count = len(x) // o.ranks

    def summed(x, params, floats):
        every = {**more, **floats}
        return sum(
            loss(plain(alone(o)), x[rank * count :][:count], params,
                 {name: each[rank * count :][:count] if each.ndim else each for name, each in every.items()})
            for rank in range(o.ranks)
        )  # fmt: skip

    return jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2)))(x, params, floats)


def close(found, right, tolerance=1e-4):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max(initial=0))))

    jax.tree.map(check, found, right)


@pytest.mark.parametrize(
    ("name", "order", "checked"),
    sample(
        [(name, (0, 1), True) for name in ("gpt-oss", "deepseek", "llama4", "logits", "recompute")]
        + [("choices", (2, 0, 1), True), ("gpt-oss", (1, 0), False), ("choices", (0, 1), False)],
        ("choices", (2, 0, 1), True),
    ),
)
def test_values_and_gradients_are_those_of_one_gpu(jax_ranked, name, order, checked):
    """A derivative of a shard_map, and one within it."""
    o = over(len(order), name, dtype="f32", grad_dtype="f32")
    mesh = mesh_of(*order)
    library, f = jax_ranked(o, mesh)
    x, params, more = whole(o, 11)
    floats = {each: array for each, array in more.items() if each in ("logits", "weights")}
    spread = partial(jax.shard_map, mesh=mesh, check_vma=checked)
    places = (*specs(params, more), specs(params, floats)[2])

    def own(x, params, more, floats):
        return loss(f, x, params, {**more, **floats})[None]

    def outside(x, params, floats):
        return spread(own, in_specs=places, out_specs=P("experts"))(x, params, more, floats).sum()

    with jax.default_matmul_precision("highest"):
        right = wanted(o, x, params, more, floats)
        got = jax.jit(jax.value_and_grad(outside, argnums=(0, 1, 2)))(x, params, floats)
        close(got, right)
        inside = spread(
            jax.grad(lambda *given: own(*given)[0], argnums=(0, 1, 3)),
            in_specs=places, out_specs=(places[0], {each: P("experts") for each in params}, places[3]) if not checked
            else (places[0], places[1], places[3]),
        )  # fmt: skip
        got = jax.jit(inside)(x, params, more, floats)
    if not checked:  # then a rank's own gradients of what all have: its user sums them
        summed = {
            each: array if each in PARTS else array.reshape(o.ranks, *params[each].shape).sum(axis=0)
            for each, array in got[1].items()
        }
        got = (got[0], summed, got[2])
    close(got, right[1])
    together = library.machine.together
    assert together.count("dispatch") and together[: len(together) // 2] == together[len(together) // 2 :]
    assert sorted(set(library.loaded)) == [(rank, 11) for rank in range(o.ranks)]


@pytest.mark.soak("takes as long as all others; a layer of one GPU with a recipe is differentiated in jax_layers.py")
def test_a_layer_with_a_recipe_sends_fp8_values(jax_ranked):
    """Near to plain JAX; FP8 values that are made once for several calls give the same bits."""
    o, mesh = over(2, "fp8-deepseek", dtype="f32", grad_dtype="f32"), mesh_of(0, 1)
    library, f = jax_ranked(o, mesh)
    x, params, more = whole(o, 30)
    places = specs(params, more)
    spread = partial(jax.shard_map, mesh=mesh)
    fp8 = jax.jit(spread(f.quantise, in_specs=places[1:2], out_specs={
        each: P() if each.startswith("shared") else P("experts") for each in library.layers[0].outputs("quantise")
    }, check_vma=False))(params)  # fmt: skip

    def gradients(params, places):
        def summed(x, params):
            run = spread(lambda *given: loss(f, *given)[None], in_specs=places, out_specs=P("experts"))
            return run(x, params, more).sum()

        return jax.jit(jax.grad(summed, argnums=(0, 1)))(x, params)

    got = gradients(params, places)
    right = wanted(o, x, params, more, {})[1]
    for each, want in zip(jax.tree.leaves(got), jax.tree.leaves(right[:2]), strict=True):
        assert not want.any() or jnp.linalg.norm(each - want) < 0.2 * jnp.linalg.norm(want)
    assert library.machine.together[:2] == ["dispatch-fp8", "combine"]
    of_fp8 = {each: P() if each.startswith("shared") else P("experts") for each in fp8}
    again = gradients({**params, **fp8}, (places[0], {**places[1], **of_fp8}, places[2]))
    jax.tree.map(np.testing.assert_array_equal, {each: again[1][each] for each in params}, got[1])


def test_nothing_is_kept_without_a_derivative_and_layers_share_windows(jax_ranked):
    o, mesh = over(2, "choices", dtype="f32"), mesh_of(1, 0)
    library, f = jax_ranked(o, mesh)
    x, params, more = whole(o, 7)
    places = specs(params, more)

    def twice(x, params, more):
        return f(f(x, params, **more), params, **more)

    y = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=places, out_specs=P("experts")))(x, params, more)
    right = plain(alone(o))
    with jax.default_matmul_precision("highest"):
        close(y, right(right(x, params, **more), params, **more))
    assert library.machine.together == ["dispatch", "combine"] * 2
    f.check()
    f.close()
    assert not library.driver.memory


def test_a_rank_that_does_not_come_is_an_error_in_words(jax_ranked, monkeypatch):
    o, mesh = over(2, "choices", dtype="f32"), mesh_of(0, 1)
    library, f = jax_ranked(o, mesh)
    x, params, more = whole(o, 7)
    run = jax.jit(
        jax.shard_map(lambda *given: f(given[0], given[1], **given[2]), mesh=mesh, in_specs=specs(params, more),
                      out_specs=P("experts"))
    )  # fmt: skip
    jax.block_until_ready(run(x, params, more))

    def late(self):
        raise PeerTimeoutError("rank 0 waited in launch 3 on this window for rank 1", rank=1)

    monkeypatch.setattr(Ranks, "check", late)
    with pytest.raises(PeerTimeoutError, match="for rank 1"):
        f.check()
    for layer in library.layers.values():
        layer._looked = 0.0
    with pytest.raises(Exception, match="rank 0 waited in launch 3 on this window for rank 1"):
        jax.block_until_ready(run(x, params, more))


def test_calls_that_do_not_fit_are_refused_in_words(jax_ranked):
    o, mesh = over(2, "choices", dtype="f32"), mesh_of(0, 1)
    _, f = jax_ranked(o, mesh, patience=1)
    x, params, more = whole(o, 7)
    share = {name: each[: o.local] if name in PARTS else each for name, each in params.items()}
    with pytest.raises(
        ArgumentError, match=r"2 ranks along the axis 'experts', and there is none here; call it inside"
    ):
        f(x, share, **more)
    three = jax.sharding.Mesh(np.array(jax.devices()), ("experts",))
    with pytest.raises(ArgumentError, match="2 ranks along the axis 'experts', and it has 3 places there"):
        jax.shard_map(lambda x: f(x, share, **more), mesh=three, in_specs=P(), out_specs=P())(x)
    many = whole(o, 129)
    with pytest.raises(ArgumentError, match="129 tokens of a rank; the windows have room for 128; open the layer with"):
        jax.shard_map(lambda *given: f(given[0], given[1], **given[2]), mesh=mesh, in_specs=specs(many[1], many[2]),
                      out_specs=P("experts"))(*many)  # fmt: skip
    other = jax.sharding.Mesh(np.array([jax.devices()[0], jax.devices()[2]]), ("experts",))
    run = jax.shard_map(lambda *given: f(given[0], given[1], **given[2]), mesh=other, in_specs=specs(params, more),
                        out_specs=P("experts"))  # fmt: skip
    with pytest.raises(Exception, match="called on device 2; its ranks are on devices 0, 1"):
        jax.block_until_ready(jax.jit(run)(x, params, more))


@pytest.mark.parametrize(
    ("ranks", "order", "axis", "said"),
    [
        (2, (), None, "is over 2 ranks; give the mesh of jax.shard_map, and the axis"),
        (2, (0, 1), "data", "the mesh has no axis 'data'; it has experts"),
        (2, (0, 1, 2), "experts", "is over 2 ranks, and there are 3; start as many"),
        (1, (0, 1), "experts", "is a layer of one GPU, which takes no mesh"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_in_words(jax_ranked, ranks, order, axis, said):
    from fusekit.interop import jax as interop
    from tests.layers.host import HostLayer

    mesh = mesh_of(*order) if order else None
    with pytest.raises(ArgumentError, match=said):
        if ranks == 1:
            interop.moe(HostLayer(alone(over(2, "choices"))), "fusekit_test_refused", mesh=mesh, axis=axis)
        else:
            jax_ranked(over(2, "choices"), mesh, axis=axis)


def test_each_place_of_another_axis_has_ranks_of_its_own():
    from fusekit.interop.jax_ranks import ranks_of
    from fusekit.runtime import Devices, Driver
    from tests.exchange.test_windows import PeerDriver

    devices = Devices(Driver(PeerDriver(devices=3)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(3, 1), ("data", "experts"))
    ranks = ranks_of(devices, mesh, "experts", timeout=99)
    assert [(each.rank, each.count, each.device, each.timeout) for each in ranks] == [(0, 1, d, 99) for d in range(3)]
    assert ranks_of(devices, mesh, "experts", timeout=99) is ranks
    turned = ranks_of(devices, jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names), "data")
    assert [(each.rank, each.count, each.device) for each in turned] == [(0, 3, 2), (1, 3, 1), (2, 3, 0)]


def test_the_example(jax_ranked, monkeypatch, capsys):
    from fusekit.interop import jax as interop

    o = parse_file(EXAMPLE.with_name("ranks.toml"))[0].layer

    def layer(name, tokens):
        return SimpleNamespace(options=o, tokens=tokens)

    def moe(layer, name, **said):
        _, f = jax_ranked(o, said.pop("mesh"), tokens=layer.tokens, **said)
        return f

    monkeypatch.setattr(fusekit, "open_library", lambda: SimpleNamespace(layer=layer))
    monkeypatch.setattr(interop, "moe", moe)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name])
    runpy.run_path(str(EXAMPLE))
    assert capsys.readouterr().out == "rank 0: right\nrank 1: right\n"


PROCESS = """
import sys
import jax, numpy as np
from fusekit.interop.jax_ranks import ranks_of
from fusekit.runtime import Devices, Driver
from tests.exchange.test_windows import PeerDriver

jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("experts",))
devices = Devices(Driver(PeerDriver()))
(ranks,) = ranks_of(devices, mesh, "experts")
assert (ranks.rank, ranks.count) == (1 - int(sys.argv[2]), 2), ranks
window = ranks.window(("sent",), 1000)
assert len(window.peers) == 2 and window.peers[ranks.rank] in devices.driver.api.memory
ranks.close()
print("all there")
"""


def test_processes_find_each_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(rank)], cwd=Path(__file__).parents[2], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for each in started:
        out, problems = each.communicate(timeout=120)
        assert out.endswith("all there\n"), problems


def test_layers_of_one_gpu_are_differentiated_in_a_shard_map(jax_ranked, monkeypatch):
    """With data parallel devices, whose gradients of parameters shard_map sums."""
    from fusekit.interop import jax as interop
    from tests.layers.host import HostLayer

    o = alone(over(2, "gpt-oss", dtype="f32", grad_dtype="f32"))
    layer = HostLayer(o)
    layer.current_device = lambda: 0
    monkeypatch.setattr(interop.xla, "stream_of", stream_of)
    f = interop.moe(layer, f"fusekit_test_ranks_{next(_NUMBERS)}", platform="cpu")
    x, params, _ = arguments(o, layer.inputs("forward"), 12, jax.random.key(0))
    spread = jax.shard_map(
        lambda x, params: loss(f, x, params, {})[None], mesh=mesh_of(0, 1), in_specs=(P("experts"), P()),
        out_specs=P("experts"),
    )  # fmt: skip
    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(lambda *given: spread(*given).sum(), argnums=(0, 1)))(x, params)
        close(got, jax.grad(lambda *given: loss(plain(o), *given, {}), argnums=(0, 1))(x, params))
