"""Layers exported as C on the GPU: a program in C gives the bits that Python gives.

fusekit --store STORE build layer gpt-oss-20b examples/ranks.toml
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_c_layer.py
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fusekit.cabi.identifiers import members
from fusekit.runtime import DeviceArray
from tests.exchange.layers import LayerRanks

EXAMPLES = Path(__file__).parents[2] / "examples" / "c"
STEPS, RATE = 10, np.float32(0.001)


@pytest.fixture
def export(opened, tmp_path):
    """Writes and compiles moe.c of a layer; gives the layer, with the variants of the export, and its record."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")

    def export_layer(name, tokens):
        records = [listed.record for listed in opened.store.names(name, "sm_90a")]
        if not records:
            pytest.skip(f"the store has no {name}; build it there")
        layer = opened.layer(name)
        store = opened.store.roots[0].path
        command = [sys.executable, "-m", "fusekit", "--store", store, "export", "--lang", "c", tmp_path, name,
                   "--prefix", "moe"]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return layer, layer.record

    return export_layer


def compiled(folder, source):
    command = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{folder}", f"-I{EXAMPLES}", source,
               folder / "moe.c", "-ldl", "-o", folder / "program"]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "program"


def wide(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16).astype(np.uint16)


def tensors(opened, layer, tokens, rng):
    """Device memory of every argument, inputs with numbers; by name, with its contents."""
    dims, arrays, given = layer.dims(tokens), {}, {}
    for which in ("forward", "backward"):
        for name, buffer in (layer.inputs(which) | layer.outputs(which)).items():
            if name in arrays:
                continue
            array = arrays[name] = DeviceArray(opened.devices, buffer.extents(dims), buffer.dtype)
            spread = 1.0 if name in ("x", "dy") else buffer.extents(dims)[-1] ** -0.5
            if name == "dy" or (buffer.dtype == "bf16" and not name.startswith("d")):
                given[name] = narrow(spread * rng.standard_normal(array.shape, dtype=np.float32))
                array.upload(given[name])
            else:
                array.fill(0)
    sizes = layer.sizes(tokens)
    memory = {name: DeviceArray(opened.devices, (size + 1,), "u8")
              for name, size in (("kept", sizes.kept), ("scratch", sizes.scratch))}  # fmt: skip
    return arrays, given, memory


def bits(array):
    return np.frombuffer(array.download(), np.uint16).reshape(array.shape)


def passes(layer, arrays, memory):
    forward, backward = (
        {name: arrays[name] for name in (*layer.inputs(which), *layer.outputs(which))}
        for which in ("forward", "backward")
    )
    return layer.bind_forward(**forward, **memory), layer.bind_backward(**backward, **memory)


def test_a_layer_trained_in_c_has_the_bits_of_python(opened, export, tmp_path):
    tokens = 1000
    layer, _ = export("layer/moe", tokens)
    arrays, given, memory = tensors(opened, layer, tokens, np.random.default_rng(0))
    target = narrow(np.random.default_rng(1).standard_normal(arrays["y"].shape, dtype=np.float32))
    for name in ("x", "router", "w1", "w2"):
        given[name].tofile(tmp_path / f"{name}.bin")
    target.tofile(tmp_path / "target.bin")
    forward, backward = passes(layer, arrays, memory)
    for _ in range(STEPS):
        forward("legacy")
        arrays["dy"].upload(narrow(wide(bits(arrays["y"])) - wide(target)))
        backward("legacy")
        for name in ("router", "w1", "w2"):
            arrays[name].upload(narrow(wide(bits(arrays[name])) - RATE * wide(bits(arrays[f"d{name}"]))))
    program = compiled(tmp_path, EXAMPLES / "train.c")
    done = subprocess.run([program, tmp_path, str(tokens)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("y", "dx", "router", "w1", "w2"):
        assert (tmp_path / f"{name}.bin").read_bytes() == bytes(arrays[name].download()), f"{name} differs"
    assert not np.array_equal(bits(arrays["w1"]), given["w1"])


PROGRAM = """
#include "moe.h"

#include "device.h"

#include <stdint.h>

static char known[64][32];
static void *places[64];
static int count;

static void *at(const driver *api, const char *folder, const char *name, size_t size, int read) {
    int index;
    for (index = 0; index < count; ++index)
        if (strcmp(known[index], name) == 0) return places[index];
    snprintf(known[count], sizeof known[count], "%s", name);
    return places[count++] = (void *)(uintptr_t)load(api, folder, name, size, read);
}

int main(int words_count, char **words) {
    static moe_LAYER_forward_args forward;
    static moe_LAYER_backward_args backward;
    moe_driver *loader;
    moe_LAYER *layer;
    moe_sizes bytes;
    moe_error error;
    driver api;
    void *context, *stream;
    size_t most;
    if (words_count != 2 || failed(moe_driver_open(&loader, &error), &error) || !find(&api) ||
        api.retain(&context, 0) != 0 || api.set_current(context) != 0 || api.stream_create(&stream, 1) != 0 ||
        failed(moe_LAYER_load(loader, 0, &layer, &error), &error) ||
        failed(moe_LAYER_sizes(layer, TOKENS, NULL, &bytes, &error), &error))
        return 1;
    most = bytes.forward > bytes.backward ? bytes.forward : bytes.backward;
    forward.tokens = backward.tokens = TOKENS;
PLACED
    forward.kept.data = backward.kept.data = at(&api, words[1], "kept", bytes.kept, 0);
    forward.scratch.data = backward.scratch.data = at(&api, words[1], "scratch", most, 0);
    forward.kept.bytes = backward.kept.bytes = bytes.kept;
    forward.scratch.bytes = backward.scratch.bytes = most;
    if (failed(moe_LAYER_forward(layer, &forward, stream, &error), &error) ||
        failed(moe_LAYER_backward(layer, &backward, stream, &error), &error) || api.stream_wait(stream) != 0)
        return 1;
    return SAVED ? 0 : 1;
}
"""


def one_pass(record, layer, given, tokens):
    """A program that makes a forward and a backward pass of any layer."""
    placed, saved = [], []
    for which in ("forward", "backward"):
        inputs, outputs = layer.inputs(which), layer.outputs(which)
        each = record.passes[which]
        names = members((), (*each.inputs, *each.outputs))
        for name in (*each.inputs, *each.outputs):
            size = (inputs | outputs)[name].bytes(layer.dims(tokens))
            place = f'at(&api, words[1], "{name}", {size}u, {int(name in given)})'
            placed.append(f"    {which}.{names[name]} = {place};")
            if name in outputs:
                address = f"(unsigned long long)(uintptr_t){which}.{names[name]}"
                saved.append(f'save(&api, words[1], "{name}", {address}, {size}u)')
    text = PROGRAM.replace("LAYER", record.name.replace("/", "_").replace("-", "_")).replace("TOKENS", str(tokens))
    return text.replace("PLACED", "\n".join(placed)).replace("SAVED", " && ".join(saved))


@pytest.mark.parametrize("name", ["layer/moe", "gpt-oss-20b/moe"])
def test_a_pass_in_c_has_the_bits_of_python(opened, export, tmp_path, name):
    tokens = 1000
    layer, record = export(name, tokens)
    arrays, given, memory = tensors(opened, layer, tokens, np.random.default_rng(2))
    for each, values in given.items():
        values.tofile(tmp_path / f"{each}.bin")
    (tmp_path / "pass.c").write_text(one_pass(record, layer, given, tokens))
    for bound in passes(layer, arrays, memory):
        bound("legacy")
    program = compiled(tmp_path, tmp_path / "pass.c")
    done = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for each in (*layer.outputs("forward"), *layer.outputs("backward")):
        assert (tmp_path / f"{each}.bin").read_bytes() == bytes(arrays[each].download()), f"{each} differs"


@pytest.mark.parametrize("tokens", [(300, 400), (0, 128), (1, 77), (1280, 1280)])
def test_both_ranks_in_c_have_the_bits_of_python(opened, export, tmp_path, tokens):
    """On two devices, or on two streams of one."""
    export("ranks/moe", max(tokens))
    devices = [rank % opened.devices.count for rank in (0, 1)]
    ranks = LayerRanks(opened, "ranks/moe", devices, max(tokens))
    ranks.fill(list(tokens), 7)
    for rank, (layer, arrays) in enumerate(zip(ranks.layers, ranks.tensors, strict=True)):
        (tmp_path / str(rank)).mkdir()
        for name in layer.inputs("forward") | layer.inputs("backward"):
            (tmp_path / str(rank) / f"{name}.bin").write_bytes(bytes(arrays[name].download()))
    ranks.launch()
    program = compiled(tmp_path, EXAMPLES / "ranks.c")
    command = [program, tmp_path, *map(str, (*tokens, *devices))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, (layer, arrays) in enumerate(zip(ranks.layers, ranks.tensors, strict=True)):
        for name in layer.outputs("forward") | layer.outputs("backward"):
            assert (tmp_path / str(rank) / f"{name}.bin").read_bytes() == bytes(arrays[name].download()), (rank, name)
    ranks.close()
