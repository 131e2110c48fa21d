"""The tensor map codec against cuTensorMapEncodeTiled of the driver at hand: every field, edges and random ones."""

import math
import random

import pytest

from fusekit.abi import RecordError
from fusekit.abi.parameters import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLE_BYTES
from fusekit.abi.tensormap import DEFINED_BYTES, TensorMap, decode, encode, rewritten
from fusekit.dtypes import DTYPES

TYPES = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "i32": "INT32", "u64": "UINT64", "i64": "INT64",
    "fp16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "bf16": "BFLOAT16",
}  # fmt: skip
BLOCK_SHARED_BYTES = 227 * 1024  # the driver refuses most boxes above
SWIZZLES = tuple(SWIZZLE_BYTES)
BASE = {
    "address": 0x7F0000001000, "dtype": "bf16", "dims": (264, 1000), "strides": (1024,), "box": (64, 64),
    "element_strides": (1, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def driver():
    """cuTensorMapEncodeTiled as a function from TensorMap to 64 bytes, None where the driver refuses."""
    cuda = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    try:
        started = cuda.cuInit(0)[0]
    except Exception as error:  # cuda-bindings has several for a missing libcuda
        pytest.skip(f"no CUDA driver: {error}")
    if started != 0:
        pytest.skip(f"no usable GPU: {started.name}")
    context = cuda.cuDevicePrimaryCtxRetain(0)[1]
    cuda.cuCtxPushCurrent(context)

    def encode_tiled(tensor_map):
        result, descriptor = cuda.cuTensorMapEncodeTiled(
            getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{TYPES[tensor_map.dtype]}"),
            tensor_map.rank,
            tensor_map.address,
            [cuda.cuuint64_t(extent) for extent in tensor_map.dims],
            # At rank 1 there is none, but the driver wants a pointer all the same.
            [cuda.cuuint64_t(stride) for stride in tensor_map.strides or (16,)],
            [cuda.cuuint32_t(extent) for extent in tensor_map.box],
            [cuda.cuuint32_t(step) for step in tensor_map.element_strides],
            cuda.CUtensorMapInterleave(INTERLEAVES.index(tensor_map.interleave)),
            cuda.CUtensorMapSwizzle(SWIZZLES.index(tensor_map.swizzle)),
            cuda.CUtensorMapL2promotion(L2_PROMOTIONS.index(tensor_map.l2_promotion)),
            cuda.CUtensorMapFloatOOBfill(OOB_FILLS.index(tensor_map.oob_fill)),
        )
        if result != 0:
            assert result.name == "CUDA_ERROR_INVALID_VALUE", result.name
            return None
        return b"".join(int(word).to_bytes(8, "little") for word in descriptor.opaque)[:DEFINED_BYTES]

    yield encode_tiled
    cuda.cuCtxPopCurrent()
    cuda.cuDevicePrimaryCtxRelease(0)


def same(driver, tensor_map):
    """Whether the driver takes it; asserts that the codec does the same, to the bit."""
    assert DTYPES[tensor_map.dtype].bytes * math.prod(tensor_map.box) <= BLOCK_SHARED_BYTES, tensor_map
    theirs = driver(tensor_map)
    try:
        ours = encode(tensor_map)[:DEFINED_BYTES]
    except RecordError as error:
        assert theirs is None, f"the driver takes {tensor_map}, the codec says {error}"
        return False
    assert theirs is not None, f"the driver refuses {tensor_map}"
    assert ours.hex() == theirs.hex(), tensor_map
    assert decode(theirs) == tensor_map
    return True


def one_field():
    for power in range(4, 64):
        yield {"address": 1 << power}
    for power in range(4, 42):
        yield {"strides": (1 << power,)}
        yield {"strides": ((1 << power) - 16,)}
    for power in range(34):
        for extent in (1 << power, (1 << power) - 1):
            yield {"dims": (extent, 5)}
            yield {"dims": (8, extent)}
    for extent in range(258):
        yield {"box": (extent, 1), "dtype": "u8"}
        yield {"box": (8, extent)}
    for step in range(10):
        yield {"element_strides": (step, 1)}
        yield {"element_strides": (1, step)}
    for dtype in TYPES:
        for fill in OOB_FILLS:
            yield {"dtype": dtype, "oob_fill": fill, "box": (16, 8)}
    for swizzle in SWIZZLES:
        for promotion in L2_PROMOTIONS:
            for width in (8, 16, 32, 64, 128):
                yield {"swizzle": swizzle, "l2_promotion": promotion, "box": (width, 8)}


def test_one_field_at_a_time(driver):
    taken = [same(driver, TensorMap(**{**BASE, **change})) for change in one_field()]
    assert sum(taken) > 500
    assert not all(taken)


@pytest.mark.parametrize("rank", range(1, 6))
def test_random_ones_of_every_rank(driver, rank):
    source = random.Random(rank)
    taken = 0
    for _ in range(2000):
        dtype = source.choice(list(TYPES))
        size = DTYPES[dtype].bytes
        swizzle = source.choice(SWIZZLES)
        interleave = source.choice(("none", "none", *INTERLEAVES)) if rank >= 3 else "none"
        widest = (SWIZZLE_BYTES[swizzle] or 256 * size) // size
        inner = source.choice([extent for extent in range(1, 257) if extent * size % 16 == 0 and extent <= widest])
        box = [inner, *(source.randrange(1, 1 << source.randrange(1, 9)) for _ in range(rank - 1))]
        while size * math.prod(box) > BLOCK_SHARED_BYTES:
            box[1:] = [(extent + 1) // 2 for extent in box[1:]]
        tensor_map = TensorMap(
            address=32 * source.randrange(1 << source.randrange(1, 52)),
            dtype=dtype,
            dims=tuple(source.randrange(1, (1 << source.randrange(1, 33)) + 1) for _ in range(rank)),
            strides=tuple(32 * source.randrange(1 << source.randrange(1, 36)) for _ in range(rank - 1)),
            box=tuple(box),
            element_strides=tuple(source.choice((1, 1, source.randrange(1, 9))) for _ in range(rank)),
            interleave=interleave,
            swizzle=swizzle,
            l2_promotion=source.choice(L2_PROMOTIONS),
            oob_fill=source.choice(OOB_FILLS),
        )
        taken += same(driver, tensor_map)
    assert taken > 300


def test_another_address_put_in_is_the_same_as_encoding_with_it(driver):
    from cuda.bindings import driver as cuda

    first, second = (TensorMap(**{**BASE, "address": address}) for address in (1 << 40, (1 << 46) + 4096))
    encoded = cuda.CUtensorMap()
    encoded.opaque = [cuda.cuuint64_t(int.from_bytes(encode(first)[at : at + 8], "little")) for at in range(0, 128, 8)]
    assert cuda.cuTensorMapReplaceAddress(encoded, second.address)[0] == 0
    result = b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)[:DEFINED_BYTES]
    assert result.hex() == driver(second).hex()


@pytest.mark.parametrize("rank", range(1, 6))
def test_other_dims_and_strides_written_in_are_the_same_as_encoding_with_them(driver, rank):
    source = random.Random(rank)
    modes = {"dtype": "bf16", "box": (8,) * rank, "element_strides": (1,) * rank, "swizzle": "128B"}
    maps = [
        TensorMap(
            address=32 * source.randrange(1 << 51),
            dims=tuple(source.randrange(1, 2**32 + 1) for _ in range(rank)),
            strides=tuple(32 * source.randrange(1 << 35) for _ in range(rank - 1)), **modes,
        )
        for _ in range(500)
    ]  # fmt: skip
    before = driver(maps[0])
    for other in maps:
        assert rewritten(before, other.address, other.dims, other.strides).hex() == driver(other).hex(), other
