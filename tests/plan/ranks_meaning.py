"""The program of a layer over ranks, run for all ranks at once, formula by formula in float64, without a device.

Launches that all ranks make together are told here; the others are those of layer_meaning. What a window holds is what
the last launches left there, NaN before the first: a row that nobody sent must change nothing.
"""

import numpy as np

from fusekit.abi.layer_pass import KEPT
from fusekit.plan.layer.program import CHECKED
from fusekit.plan.layer.ranks import WINDOWS, room
from fusekit.reference import exchange, permutation

from . import layer_meaning


class World:
    """The windows of all ranks of `program`, which has its room."""

    def __init__(self, program, ranks):
        self.program, self.ranks = program, ranks
        dims = program.dims(0)
        inside = [buffer for buffer in program.buffers.values() if buffer.place in (*WINDOWS, CHECKED)]
        self.windows = [
            {item.name: np.full(item.extents(dims), 0 if item.place == CHECKED else np.nan) for item in inside}
            for _ in range(ranks)
        ]

    def run(self, which, given, wanted=None):
        """Every buffer of every rank after a pass. given: of each rank, what it is given and what it kept."""
        program = self.program
        lead = "dy" if which == "backward" else "x"
        counts = [len(item[lead]) for item in given]
        known = [dict(item) for item in given]
        for rank, window in enumerate(self.windows):
            known[rank] |= window
        steps = program.needed(which, program.arguments(which)[1] if wanted is None else wanted)
        for step in steps:
            keys = program.parts[step.part]
            inout = {name: buffer for name, buffer in step.writes.items() if name in INOUT}
            reads = [{name: item[buffer] for name, buffer in (step.reads | inout).items()} for item in known]
            if step.window:
                results = EXCHANGES[keys["op"]](keys, reads, self, step)
            else:
                results = []
                for rank, arguments in enumerate(reads):
                    actual = layer_meaning.OPERATIONS[keys["op"]](keys, arguments, program.dims(counts[rank]))
                    results.append({name: actual[name] for name in step.writes})
            for rank, own in enumerate(results):
                for name, buffer in step.writes.items():
                    if name in own:
                        extents = program.buffers[buffer].extents(program.dims(counts[rank]))
                        assert own[name].shape == extents, (step.part, name)
                        known[rank][buffer] = own[name]
                        if buffer in self.windows[rank]:
                            self.windows[rank][buffer] = own[name]
            for rank, window in enumerate(self.windows):
                known[rank] |= window
        return known

    def kept(self, known):
        """What stays of a forward pass; windows do not count on."""
        return {name: known[name] for name, buffer in self.program.buffers.items() if buffer.place == KEPT}


def owner(keys, indices):
    """The rank of each choice; -1: of none."""
    there = (indices >= 0) & (indices < keys["experts"])
    return np.where(there, indices // (keys["experts"] // keys["ranks"]), -1)


def dispatch(keys, reads, world, step):
    """Into the windows: rows that are sent; all choices and weights of all places."""
    ranks, local = keys["ranks"], keys["experts"] // keys["ranks"]
    capacity = world.program.room["S"] // ranks
    sends = keys.get("sends", "all")
    if sends == "nothing":
        return [{} for _ in range(ranks)]
    for target in range(ranks):
        window = world.windows[target]
        rows = window[f"{step.window}.rows"].copy().reshape(ranks, capacity, -1)
        chosen = np.full((ranks, capacity, keys["topk"]), -1)
        weights = np.zeros(chosen.shape)
        for source, own in enumerate(reads):
            count = len(own["indices"])
            assert count <= capacity
            local_ = owner(keys, own["indices"]) == target
            if sends != "choices":
                rows[source, :count][local_.any(axis=1)] = own["x"][local_.any(axis=1)]
            chosen[source, :count] = np.where(local_, own["indices"] - target * local, -1)
            if sends != "rows":
                weights[source, :count] = np.where(local_, own["weights"], 0)
        window[f"{step.window}.rows"] = rows.reshape(ranks * capacity, -1)
        if sends == "rows":
            continue
        window[f"{step.window}.indices"] = chosen.reshape(ranks * capacity, -1)
        window[f"{step.window}.weights"] = weights.reshape(ranks * capacity, -1)
        for source, own in enumerate(reads):
            if "x_s" in own:
                scales, place = window[f"{step.window}.scales"], source * capacity
                scales[:, place : place + len(own["x"])] = own["x_s"]
    return [{} for _ in range(ranks)]


def combine(keys, reads, world, step):
    ranks = keys["ranks"]
    capacity = world.program.room["S"] // ranks
    results = [{} for _ in range(ranks)]
    for rank, own in enumerate(reads):
        owners = owner(keys, own["indices"])
        places = rank * capacity + np.arange(len(owners))
        if keys.get("gradients"):
            actual = np.zeros(owners.shape)
            for source, other in enumerate(reads):
                actual = np.where(owners == source, other["grad_weights"][places], actual)
            results[rank]["returned"] = actual
        if keys.get("rows", True):
            total = sum(own[f"addend{number}"] for number in range(keys["addends"])) + np.zeros((len(owners), 1))
            for source, other in enumerate(reads):
                factors = other["weights"][places] if keys["weighted"] else None
                part = permutation.unpermute(other["x"], other["inverse"][places], factors)[0]
                total = total + np.where((owners == source).any(axis=1)[:, None], part, 0)
            results[rank]["y"] = total
    if keys.get("overflow"):
        wanted, rows = [int(own["wanted"][0]) for own in reads], [len(own["x"]) for own in reads]
        for rank, own in enumerate(reads):
            results[rank]["overflow"] = exchange.overflow(own["overflow"], wanted, rows)
    return results


INOUT = ("rows", "overflow")  # arguments that are read, too
EXCHANGES = {"moe-dispatch": dispatch, "moe-combine": combine}

__all__ = ["WINDOWS", "World", "room"]
