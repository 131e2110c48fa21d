"""`fusekit ARGUMENTS...` over a stand-in for the driver that doubles: `python standin.py ENTRY.JSON ARGUMENTS...`.

ENTRY.JSON: the launch record of the kernel; one whose tensors are not x and y in float32 computes nothing.
"""

import ctypes
import json
import struct
import sys
from pathlib import Path

import numpy as np

from fusekit.abi import LaunchRecord, PointerParameter
from fusekit.runtime import driver
from fusekit_cli.main import main
from tests.runtime.fake import FakeDriver, Launched

COUNT = 1024  # of the default size of a dim

record = LaunchRecord.from_json(json.loads(Path(sys.argv[1]).read_text()))
places = {each.argument: index for index, each in enumerate(record.parameters) if isinstance(each, PointerParameter)}


def double(launched: Launched) -> None:
    if not places.keys() >= {"x", "y"}:
        return
    x, y = (
        np.frombuffer(
            (ctypes.c_char * (4 * COUNT)).from_address(*struct.unpack("<Q", launched.parameters[places[name]])),
            np.float32,
        )
        for name in ("x", "y")
    )
    y[:] = 2.0 * x


fake = FakeDriver([(each.offset, each.size) for each in record.parameters], record.symbol)
fake.on_launch = double
driver._import_bindings = lambda: fake
sys.exit(main(sys.argv[2:]))
