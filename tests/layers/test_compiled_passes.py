"""Passes fitted by compiled code against passes that are bound: the same launches, byte for byte."""

import ctypes
import random
import struct
from dataclasses import replace
from functools import partialmethod
from math import prod

import pytest

from fusekit.abi import IntegerParameter, PointerParameter, StructParameter, TensorMapParameter
from fusekit.abi.expr import evaluate
from fusekit.abi.symbolic import NotCompiledError, Writer
from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.layers.fitting import Fitted
from fusekit.layers.memory import ALIGNMENT
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE
from fusekit.spec import find
from tests.cabi.layers import with_ladders
from tests.layers import samples
from tests.layers.test_layer import TYPES
from tests.plan.test_layer_program import CASES, FEW, SERVED, options
from tests.records import read_plan
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import Torchlike

SMALL, CALLS = 99, 60
COUNTS = (FEW, FEW + 1, SMALL, SMALL + 1, SMALL + 2)
STREAMS = (0, 77, 78)


def rich(record, change=None):
    """The kernel with all kinds of parameters that follow shapes, and memory of the stream. change: a tensor map's."""
    parameters, at = list(record.parameters), 8 * len(record.parameters)
    first = record.tensors[0]
    extent, stride = first.shape[0], first.stride_variable(0) if first.reads_stride(0) else 1
    parameters += [
        IntegerParameter("count", "i32", ("sub", extent, 3), at),
        StructParameter(
            "all", 24, (IntegerParameter("small", "u8", ("mod", extent, 7), 0),
                        IntegerParameter("bytes", "i64", ("mul", extent, stride, 2), 8),
                        PointerParameter("third", first.name, 16, shift=("mul", 32, extent))), at + 8,
        ),
        PointerParameter("counters", "workspace", at + 32), PointerParameter("partial", "scratch", at + 40),
        PointerParameter("second", first.name, at + 48, shift=("mul", 16, extent)),
        PointerParameter("more", "scratch", at + 56, shift=("mul", 4, extent)),
    ]  # fmt: skip
    at = -(-(at + 64) // 64) * 64
    for tensor in record.tensors:
        if tensor.dtype == "bf16" and len(tensor.shape) == 2:
            rows, columns = tensor.shape
            strides = (("mul", 2, tensor.stride_variable(0)),)
            tensor_map = TensorMapParameter(f"{tensor.name}_map", tensor.name, at, dims=(columns, rows),
                                            strides=strides, box=(64, 8))  # fmt: skip
            parameters.append(change(tensor_map) if change else tensor_map)
            at += 128
    blocks = ("max", 1, ("min", ("ceildiv", extent, 64), ("sub", "sm_count", "cluster_margin")))
    return replace(
        record, parameters=tuple(parameters), grid=(blocks, 1, 1), workspace=64, scratch=("mul", 8, extent),
        values={"half": ("floordiv", extent, 2)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Makes a layer whose kernels change after `SMALL` tokens, one of them a token later, with its fake driver."""
    simple = samples.records

    def layer_of(name, change=None):
        with pytest.MonkeyPatch.context() as patch:
            if name == "built":
                table, rich_records = built()
            else:
                table = replace(options(**CASES.get(name, SERVED)), name=name)
                rich_records = {part: rich(each, change) for part, each in simple(table).items()}
            patch.setattr(samples, "records", lambda table: rich_records)
            library, fake = samples.library(tmp_path_factory.mktemp(name), table, variants=2)
        by_part = {}
        for listed in library.store.names(f"{table.file}/{table.name}"):
            part = listed.record.name.partition("@")[0].rpartition(".")[2]
            by_part.setdefault(part, []).append(listed.record.name)
        layer = library.layer(f"{table.file}/{table.name}")
        return with_ladders(library, layer, lambda part, tokens: by_part[part][tokens > SMALL + (part == "fc2")]), fake

    return layer_of


def built():
    """A packaged layer, and the records of its kernels as they are built."""
    worker = pytest.importorskip("fusekit.compiler.worker")
    specs = {spec.name.partition("@")[0].partition(".")[2]: spec for spec in find(["layer"]) if "." in spec.name}
    return next(iter(specs.values())).layer, {part: read_plan(worker.plan(spec)) for part, spec in specs.items()}


def launched(fake, call):
    """What the driver is given, tensor maps as their fields."""
    fake.launches.clear()
    try:
        call()
    except ArgumentError as error:
        return str(error)

    def parameter(data):
        if len(data) != 128:
            return data
        (number,) = struct.unpack_from("<Q", data, 64)
        modes = {**fake.encoded[number - 1]}
        return data[:64], [modes[name] for name in ("dtype", "swizzle", "interleave", "promotion", "fill")]

    return [(each.function, each.grid, each.stream, each.attributes, list(map(parameter, each.parameters)))
            for each in fake.launches]  # fmt: skip


def call(layer, which, rng, tokens, outputs, wide):
    """Arguments of a pass at random addresses."""
    inputs, all_outputs = layer.arguments(which)
    dims, sizes = layer.dims(tokens), layer.sizes(tokens)
    given, at = {}, 0x100_0000_0000
    for name, buffer in (inputs | all_outputs).items():
        if name in inputs or name in outputs:
            at += rng.randrange(1, 99) << 24
            shape = buffer.extents(dims)
            strides = (shape[1] + 64, 1) if name in wide and len(shape) == 2 else None
            given[name] = Torchlike(shape, TYPES[buffer.dtype], at, strides)
    for name, size in (("kept", sizes.kept), ("scratch", sizes.scratch)):
        if name == "scratch" or which != INFERENCE:
            given[name] = Torchlike((size + 256,), "torch.uint8", 0x7000_0000_0000 + (rng.randrange(1, 99) << 30))
            at += 1 << 40
    return given


@pytest.mark.parametrize(
    "name",
    ["gpt-oss", "deepseek", "fp8-choices", "served", pytest.param("built", marks=pytest.mark.soak("reads 20 kernels"))],
)
def test_any_tokens_at_any_addresses_launch_what_is_bound(layers, monkeypatch, name):
    (layer, fake), rng = layers(name), random.Random(name)
    bound = []
    bind_moving = type(layer)._bind_moving
    monkeypatch.setattr(type(layer), "_bind_moving", lambda *args: bound.append(1) or bind_moving(*args))
    for which in (FORWARD, INFERENCE, *([BACKWARD] if layer.outputs(BACKWARD) else ())):
        names = [*layer.outputs(which)]
        classes = [(set(names), set()), ({rng.choice(names)}, set()), (set(names), {names[0]})]
        bound.clear()
        for _ in range(CALLS):
            outputs, wide = rng.choice(classes)
            tokens, stream = (
                rng.choice([0, 1, *COUNTS, int(2 ** rng.uniform(0, 13))]),
                rng.choice(STREAMS),
            )
            given = call(layer, which, rng, tokens, outputs, wide)
            more = {"in_place": rng.random() < 0.5} if which == BACKWARD else {}
            bind, now = ((layer.bind_backward, layer.backward) if which == BACKWARD
                         else (layer.bind_forward, layer.forward))  # fmt: skip
            want = launched(fake, lambda bind=bind, given=given, more=more, s=stream: bind(**given, **more)(s))
            got = launched(fake, lambda now=now, given=given, more=more, s=stream: now(**given, **more, stream=s))
            assert got == want, (which, tokens, sorted(given), more)
        assert len(bound) < CALLS * 3 // 4, (which, len(bound))


@pytest.mark.parametrize(("word", "bits", "compiled"), [(2, 1 << 21, True), (9, 1 << 31, False), (0, 1 << 5, False)])
def test_a_driver_that_encodes_tensor_maps_in_another_way_encodes_each(layers, monkeypatch, word, bits, compiled):
    """bits: those of a word in which the driver's maps differ from ours."""
    encode = FakeDriver.cuTensorMapEncodeTiled

    def encoded(self, *fields):
        status, tensor_map = encode(self, *fields)
        words = (ctypes.c_uint32 * 16).from_address(tensor_map.getPtr())
        words[word] ^= bits
        return status, tensor_map

    monkeypatch.setattr(FakeDriver, "cuTensorMapEncodeTiled", encoded)
    (layer, fake), rng = layers("gpt-oss"), random.Random(word)
    outputs = set(layer.outputs(FORWARD))
    for tokens in (FEW, FEW + 2, FEW + 5):
        given = call(layer, FORWARD, rng, tokens, outputs, set())
        want = launched(fake, lambda given=given: layer.bind_forward(**given)(77))
        assert launched(fake, lambda given=given: layer.forward(**given, stream=77)) == want
    assert bool(layer._idle) == compiled


@pytest.fixture
def served(monkeypatch):
    """Has an entry for each call that compiled code served."""
    calls, serve = [], Fitted.serve
    monkeypatch.setattr(Fitted, "serve", lambda *given: calls.append(serve(*given)))
    return calls


def as_bound(layer, fake, which, given):
    """Checks that a call launches what a bound pass does. Whether both were refused."""
    bind, now = (layer.bind_backward, layer.backward) if which == BACKWARD else (layer.bind_forward, layer.forward)
    want = launched(fake, lambda: bind(**given)(77))
    assert launched(fake, lambda: now(**given, stream=77)) == want
    return isinstance(want, str)


def step_of(name):
    """The alignment of an argument."""
    return ALIGNMENT if name in ("kept", "scratch") else 16


def exact(layer, which, rng, tokens):
    """Arguments of a pass, none with more memory than it needs, and the bytes of each."""
    buffers, dims, outputs = layer.record.buffers, layer.dims(tokens), set(layer.outputs(which))
    given, plan = call(layer, which, rng, tokens, outputs, set()), layer._plan(which, tokens, outputs)
    needed = {"kept": plan.kept_bytes, "scratch": plan.scratch_bytes}
    given |= {name: replace(given[name], shape=(size,)) for name, size in needed.items()}
    for name in given.keys() - needed.keys():
        needed[name] = DTYPES[buffers[name].dtype].bytes * prod(buffers[name].extents(dims))
    return given, needed


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
def test_arguments_may_touch_in_any_order_but_share_no_memory(layers, served, which):
    (layer, fake), rng = layers("gpt-oss"), random.Random(which)
    given, needed = exact(layer, which, rng, FEW + 2)
    as_bound(layer, fake, which, given)
    refused, order, tokens = 0, list(given), FEW + 2

    def stacked(nearer=0, apart=0):
        """One after the other, as near as their alignment allows, or this far apart; the one of this number nearer."""
        at = 0x100_0000_0000
        for number, name in enumerate(order):
            step, near = step_of(name), number and number == nearer
            at = -(-at // step) * step - step if near else -(-at // step) * step + apart
            given[name] = replace(given[name], address=at)
            at += needed[name]
        return given

    for _ in range(6):
        rng.shuffle(order)
        for number in range(1, len(order)):
            for _ in range(2):  # a pass that was refused is not used again
                as_bound(layer, fake, which, stacked())
            assert served, order
            served.clear()
            if number % 2:  # other sizes in the same order, for which a pass is fitted anew
                tokens = FEW + 2 + (tokens + 1) % 7
                given, needed = exact(layer, which, rng, tokens)
            refused += as_bound(layer, fake, which, stacked(number, apart=2**30 * (number % 2)))
            assert not served, (order, number)  # or a kernel might write what another one reads
    assert refused


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
def test_each_address_is_checked(layers, served, which):
    (layer, fake), rng = layers("gpt-oss"), random.Random(which)
    given, needed = exact(layer, which, rng, FEW + 2)
    as_bound(layer, fake, which, given)
    for name, tensor in given.items():
        step = step_of(name)
        too_high = (2**64 - needed[name]) // step * step + step
        for address in (tensor.address + step // 2, 0, too_high):
            as_bound(layer, fake, which, given | {name: replace(tensor, address=address)})
            assert not served, (name, address)
            for _ in range(2):  # a pass that was refused is not used again
                as_bound(layer, fake, which, given)
            assert served
            served.clear()


@pytest.mark.parametrize("change", [
    lambda each: replace(each, dims=(*each.dims, 1), strides=(*each.strides, 32), box=(64, 8, 1), element_strides=(),
                         interleave="32B"),
    lambda each: replace(each, dtype="u4_align16", box=(128, 8)),
], ids=["interleaved", "padded"])  # fmt: skip
def test_tensor_maps_at_multiples_of_32_bytes_are_left_to_the_driver(layers, monkeypatch, change):
    """It refuses other addresses, which no other check looks at."""
    for name, number in (("cuTensorMapEncodeTiled", 2), ("cuTensorMapReplaceAddress", 1)):

        def refusing(self, *fields, function, number):
            return (CUresult.CUDA_ERROR_INVALID_VALUE, None) if fields[number] % 32 else function(self, *fields)

        refusing = partialmethod(refusing, function=getattr(FakeDriver, name), number=number)
        monkeypatch.setattr(FakeDriver, name, refusing)
    (layer, fake), rng = layers("gpt-oss", change), random.Random(0)
    for tokens in (FEW, FEW + 1, FEW + 2):
        given = call(layer, FORWARD, rng, tokens, set(layer.outputs(FORWARD)), set())
        assert not as_bound(layer, fake, FORWARD, given)
    assert as_bound(layer, fake, FORWARD, given | {"x": replace(given["x"], address=given["x"].address + 16)})


def test_tensor_maps_lie_where_the_driver_takes_them(layers):
    (layer, fake), rng = layers("gpt-oss"), random.Random(1)
    for which in (FORWARD, INFERENCE, BACKWARD):
        for outputs in (set(layer.outputs(which)), {next(iter(layer.outputs(which)))}):
            for tokens in (FEW, SMALL + 1):
                as_bound(layer, fake, which, call(layer, which, rng, tokens, outputs, set()))
    arenas = [moving.fitted._arena for passes in layer._idle.values() for moving in passes.idle]
    begins = [ctypes.addressof(ctypes.c_char.from_buffer(arena.memory)) for arena in arenas]
    assert len(begins) >= 8 and not any(begin % 64 for begin in begins)


def test_compiled_expressions_have_the_values_of_evaluated_ones():
    rng = random.Random(7)
    operators = ["add", "sub", "mul", "floordiv", "ceildiv", "mod", "min", "max", "eq", "ne", "lt", "le", "if",
                 "bit_length", "exp2"]  # fmt: skip

    def expression(depth):
        if depth == 0:
            return rng.choice(["T", rng.randrange(-9, 99)])
        operator = rng.choice(operators)
        count = {"if": 3, "bit_length": 1, "exp2": 1}.get(operator, 2)
        return (operator, *(expression(rng.randrange(depth)) for _ in range(count)))

    compiled = 0
    for _ in range(2000):
        expr, (low, high) = expression(4), sorted(rng.sample(range(1, 5000), 2))
        writer = Writer(low, high)
        try:
            value = writer.define(expr)
        except NotCompiledError:
            continue
        scope = {}
        exec(writer.function("value", str(value)), scope)
        least, greatest = writer.bounds(value)
        for tokens in (low, high, rng.randint(low, high)):
            want = evaluate(expr, {"T": tokens})
            assert scope["value"](tokens) == want and least <= want <= greatest, (expr, tokens)
            compiled += 1
    assert compiled > 2000


def test_what_may_go_beyond_64_bits_is_not_compiled():
    with pytest.raises(NotCompiledError, match="mul may go beyond 64 bits"):
        Writer(1, 2**31).define(("sub", ("mul", "T", 2**33), 5))
    assert Writer(1, 2**20).define(("mul", "T", 2**33)) == "v0"
