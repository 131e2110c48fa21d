"""The cubins that a process gets from the DSL's engines, whoever compiled them."""

import hashlib
import re
import struct

# A fat binary: magic, version, size of its head; its first image: kind (ELF), size of its head, size.
_FATBIN = re.compile(rb"\x50\xed\x55\xba\x01\x00\x10\x00.{8}\x02\x00", re.DOTALL)
_HEAD, _SIZES = 16, struct.Struct("<4xIQ")
_NAME = "kernels_binary"


def places(data):
    """Where the cubins are in a host object, or in a constant of its IR."""
    for match in _FATBIN.finditer(data):
        head, size = _SIZES.unpack_from(data, match.start() + _HEAD)
        begin = match.start() + _HEAD + head
        assert data[begin:].startswith(b"\x7fELF") and begin + size <= len(data)
        yield slice(begin, begin + size)


class Given:
    """What the DSL's engines get from now on: host objects, and the IR of what is compiled for this process alone."""

    def __init__(self):
        from cutlass._mlir import execution_engine
        from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine

        self.data = []
        of_objects, of_modules = _execution_engine.BinaryExecutionEngine, execution_engine.ExecutionEngine

        def host_object(host, *rest):
            self.data.append(bytes(host))
            return of_objects(host, *rest)

        def module(module, *rest, **options):
            constants = (each.attributes for each in module.body.operations if "value" in each.attributes)
            self.data += [each["value"].value_bytes for each in constants if _NAME in str(each["sym_name"])]
            return of_modules(module, *rest, **options)

        _execution_engine.BinaryExecutionEngine, execution_engine.ExecutionEngine = host_object, module

    def take(self):
        """SHA-256 of the cubin of the last call. It may have come more than once, and there is no other."""
        digests = {hashlib.sha256(data[place]).hexdigest() for data in self.data for place in places(data)}
        self.data.clear()
        (digest,) = digests
        return digest
