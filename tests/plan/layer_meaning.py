"""The program of a layer run formula by formula in float64, without a device; `OPERATIONS` compute all groups."""

import numpy as np

from fusekit.reference import steps


def _whole(operation):
    def computed(*given):
        results = operation(*given)
        return {name: np.asarray(each) if isinstance(each, steps.ByGroup) else each for name, each in results.items()}

    return computed


OPERATIONS = {name: _whole(operation) for name, operation in steps.OPERATIONS.items()}


def run(program, which, given, tokens, wanted=None):
    """Every buffer after a pass; given: the arguments, and what was kept. wanted: the outputs asked for."""
    known, dims = dict(given), program.dims(tokens)
    outputs = program.arguments(which)[1]
    for step in program.needed(which, outputs if wanted is None else wanted):
        if not program.launches(step.part, tokens):
            continue
        keys = program.parts[step.part]
        reads = {name: known[buffer] for name, buffer in step.reads.items()}
        results = OPERATIONS[keys["op"]](keys, reads, dims)
        assert set(step.writes) <= set(results), (step.part, set(step.writes) - set(results))
        for name, buffer in step.writes.items():
            assert results[name].shape == program.buffers[buffer].extents(dims), (step.part, name)
            known[buffer] = results[name]
    return known
