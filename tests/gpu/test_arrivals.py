"""A product whose rows come while it runs: another stream brings them, chunk by chunk, as ranks would.

fusekit --store STORE build tests/gpu/matrix.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_arrivals.py
"""

import time

import numpy as np
import pytest

from fusekit.plan.exchange import CAME, CHUNK, EPOCH, HEADER, LOCAL_TOKENS, SENDING, STATUS, WAIT, words
from fusekit.reference import encode
from fusekit.runtime import DeviceArray

TOKENS, GROUPS, TOPK, WIDTH, COLUMNS = 3072, 9, 3, 512, 512
LOCAL_PLACES = (1024, 2048)
NUMBER = 7  # of the launch


class Product:
    """x, the order of its rows by expert, weights, results, and the window's words."""

    def __init__(self, library):
        self.library, source = library, np.random.default_rng(5)
        self.kernel = library.load("matrix/gather-awaits")
        chosen = np.argsort(source.random((TOKENS, GROUPS)), axis=1)[:, :TOPK].ravel()
        order = np.argsort(chosen, kind="stable")
        self.x = encode(source.standard_normal((TOKENS, WIDTH)).astype(np.float32), "bf16")
        w = encode(source.standard_normal((GROUPS, COLUMNS, WIDTH)).astype(np.float32) / 20, "bf16")
        self.words = np.zeros(words(TOKENS), np.int32)
        self.arrays = {
            "x": self.array(np.full_like(self.x, 0x7FC0), "bf16"),
            "w": self.array(w, "bf16"),
            "index": self.array((order // TOPK).astype(np.int32), "i32"),
            "offsets": self.array(np.cumsum(np.bincount(chosen, minlength=GROUPS)).astype(np.int32), "i32"),
            "y": self.array(np.zeros((TOKENS * TOPK, COLUMNS // 2), np.uint16), "bf16"),
            "preactivation": self.array(np.zeros((TOKENS * TOPK, COLUMNS), np.uint16), "bf16"),
            "arrivals": self.array(self.words, "i32"),
        }
        driver = library.devices.driver
        with library.devices.active(library.devices.get(0)):  # one that no copy waits for
            self.stream = int(driver.check(driver.api.cuStreamCreate(1), "cuStreamCreate"))

    def array(self, value, dtype):
        array = DeviceArray(self.library.devices, value.shape, dtype, 0)
        array.upload(np.ascontiguousarray(value))
        return array

    def write(self, address, value):
        driver, value = self.library.devices.driver, np.ascontiguousarray(value)
        with self.library.devices.active(self.library.devices.get(0)):
            driver.check(driver.api.cuMemcpyHtoD(address, value.ctypes.data, value.nbytes), "cuMemcpyHtoD")

    def begin(self, came, milliseconds):
        """came: the launch whose rows are all here."""
        self.words[:] = 0
        self.words[HEADER // 4 :] = came
        for word, value in ((EPOCH, NUMBER), (CAME, came), (WAIT, milliseconds)):
            self.words[word // 4] = value
        self.words[LOCAL_TOKENS // 4 : LOCAL_TOKENS // 4 + 2] = LOCAL_PLACES
        self.arrays["arrivals"].upload(self.words)
        self.kernel(**self.arrays, stream=self.stream)

    def arrive(self, first, last):
        """The chunks [first, last)."""
        rows = slice(first * CHUNK, last * CHUNK)
        self.write(self.arrays["x"].data_ptr() + rows.start * WIDTH * 2, self.x[rows])
        flags = np.full(last - first, NUMBER, np.int32)
        self.write(self.arrays["arrivals"].data_ptr() + HEADER + first * 4, flags)

    def results(self):
        driver = self.library.devices.driver
        with self.library.devices.active(self.library.devices.get(0)):
            driver.check(driver.api.cuStreamSynchronize(self.stream), "cuStreamSynchronize")
        return [bytes(self.arrays[name].download()) for name in ("y", "preactivation")]

    def status(self):
        return np.frombuffer(self.arrays["arrivals"].download(), np.int32)[STATUS // 4 :][:3].tolist()


@pytest.fixture(scope="module")
def product(opened):
    if not opened.store.names("matrix/gather-awaits*"):
        pytest.skip(f"no product that waits in {opened}; build tests/gpu/matrix.toml there and name the store")
    return Product(opened)


@pytest.fixture(scope="module")
def wanted(product):
    """The results where all rows are here before."""
    product.arrays["x"].upload(product.x)
    product.begin(NUMBER, 1000)
    return product.results()


@pytest.mark.parametrize("order", ["own first", "backwards", "at once"])
def test_rows_that_come_late(product, wanted, order):
    product.arrays["x"].upload(np.full_like(product.x, 0x7FC0))
    product.begin(NUMBER - 1, 20_000)
    chunks, local = list(range(TOKENS // CHUNK)), range(LOCAL_PLACES[0] // CHUNK, LOCAL_PLACES[1] // CHUNK)
    if order == "own first":
        chunks = [*local, *(chunk for chunk in chunks if chunk not in local)]
    time.sleep(0.02)
    if order == "at once":
        product.arrive(0, len(chunks))
    else:
        for chunk in chunks if order == "own first" else chunks[::-1]:
            product.arrive(chunk, chunk + 1)
    assert product.results() == wanted
    assert product.status() == [0, 0, 0]


def test_rows_that_never_come_are_zeros_and_reported(product, wanted):
    product.arrays["x"].upload(product.x)
    begin = time.monotonic()
    product.begin(NUMBER - 1, 200)
    product.arrive(0, LOCAL_PLACES[1] // CHUNK)
    actual = [np.frombuffer(result, np.uint16).reshape(TOKENS * TOPK, -1) for result in product.results()]
    assert 0.15 < time.monotonic() - begin < 3
    missing, stage, launch = product.status()
    assert (missing, stage, launch) == (1 + LOCAL_PLACES[1] // (LOCAL_PLACES[1] - LOCAL_PLACES[0]), SENDING, NUMBER)
    places = np.frombuffer(product.arrays["index"].download(), np.int32)
    for item, want in zip(actual, wanted, strict=True):
        want = np.frombuffer(want, np.uint16).reshape(TOKENS * TOPK, -1)
        here = places < LOCAL_PLACES[1]
        assert (item[here] == want[here]).all()
        assert ((item[~here] & 0x7FFF) == 0).all()


def test_a_group_whose_offsets_fall_has_no_rows(product):
    """Its rows would be those of the group before, by another w."""
    product.arrays["x"].upload(product.x)
    offsets, result = product.arrays["offsets"].download(), []
    try:
        for second in (1000, 600):
            product.arrays["offsets"].upload(np.array([1000] + [second] * (GROUPS - 1), np.int32))
            product.begin(NUMBER, 1000)
            result.append(product.results())
    finally:
        product.arrays["offsets"].upload(np.frombuffer(offsets, np.int32))
    assert result[0] == result[1]
