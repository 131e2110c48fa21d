"""Loops whose end depends on the arguments.

One form is known, that of the next power of two and of fast division's logarithm: while p < x: p = 2 * p, c = c + 1. It
is recognised by what one round does to the loop's variables, not by trying it. What any other loop leaves is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusekit.compiler.hostcode.bits import Bits, Graph
from fusekit.errors import BuildError

if TYPE_CHECKING:
    from fusekit.compiler.hostcode.machine import Ending, Memory, Run


def leave(run: Run, number: int, way: int, memory: Memory) -> Ending:
    """Where execution goes on after the loop that block `number` leaves by target `way`, with what is known then.

    The values of this round's variables are in the run's slots.
    """
    from fusekit.compiler.hostcode.machine import Ending

    function, graph = run.function, run.graph
    block, last = function.blocks[number], function.blocks[number].last
    loop = function.loops[number]
    target, passed = last.targets[way]
    for instruction in (item for number in loop for item in function.blocks[number].instructions):
        if instruction.name == "call":
            raise BuildError(
                f"host code: a loop on the arguments makes calls: {instruction.place}; a launch record launches always"
                " the same"
            )
    ways_out = {after for number in loop for after, _ in function.blocks[number].last.targets if after not in loop}
    if {after for after in ways_out if function.blocks[after].last.name != "unreachable"} != {target}:
        raise BuildError(f"host code: a loop on the arguments with several ways out: {last.place}")
    before = [run.slots[slot] for slot in block.arguments]
    if not all(isinstance(value, Bits) for value in before):
        raise BuildError(f"host code: a loop on the arguments moves addresses: {last.place}")
    fresh = [
        graph.argument(f"loop {function.name}.{number}.{index}", value.width) for index, value in enumerate(before)
    ]
    after, condition, changed = _round(run, number, way, fresh, memory)
    why = f"a loop on the arguments makes it: {last.place}"
    values = _results(graph, before, fresh, after, condition, way, why)
    for slot in _defined(run, loop):
        value = run.slots.get(slot)
        if isinstance(value, Bits):
            run.slots[slot] = graph.unknown(why, value.width)
    run.slots.update(zip(block.arguments, values, strict=True))
    for instruction in block.instructions[:-1]:
        run.execute(instruction, memory)
    for name, cells in changed.items():
        for offset, (size, value) in cells.items():
            if memory.get(name, {}).get(offset) != (size, value):
                memory.setdefault(name, {})[offset] = (size, graph.unknown(why, 8 * size))
    return Ending(target, [run.slots[slot] for slot in passed], memory)


def _round(
    run: Run, number: int, way: int, fresh: list[Bits], memory: Memory
) -> tuple[list[Any], Bits, Memory]:  # fmt: skip
    """One round from the loop's head, its variables being `fresh`: what they become, the branch's condition there, and
    memory afterwards. A head that is not block `number` gives no values.
    """
    block, last = run.function.blocks[number], run.function.blocks[number].last
    copied = {name: dict(cells) for name, cells in memory.items()}
    run.slots.update(zip(block.arguments, fresh, strict=True))
    for instruction in block.instructions[:-1]:
        run.execute(instruction, copied)
    condition = run.slots[last.operands[0]]
    inside, slots = last.targets[1 - way]
    run.machine.conditions.append(condition)
    ending = run.blocks(inside, [run.slots[slot] for slot in slots], copied, number)
    run.machine.conditions.pop()
    if ending is None:
        raise BuildError(f"host code: a loop on the arguments always traps: {last.place}")
    return ending.values, condition, ending.memory


def _results(
    graph: Graph, before: list[Bits], fresh: list[Bits], after: list[Any], condition: Bits, way: int, why: str
) -> list[Bits]:
    """What each of the loop's variables is when it ends."""
    known = [
        value if new is variable else graph.unknown(why, value.width)
        for value, variable, new in zip(before, fresh, after, strict=True)
    ]
    less = {"icmp_ult": 1, "icmp_slt": 1, "icmp_ugt": -1, "icmp_sgt": -1}.get(condition.op, 0)
    power, limit = condition.args[::less] if less else (None, None)
    if way == 0 or power not in fresh:
        return known
    at = fresh.index(power)
    start = before[at]
    doubled = (
        graph.make("mul", power.width, power, graph.const(2, power.width)),
        graph.make("mul", power.width, graph.const(2, power.width), power),
        graph.make("shl", power.width, power, graph.const(1, power.width)),
        graph.make("add", power.width, power, power),
    )
    power_of_two = start.is_const and start.number and start.number & start.number - 1 == 0
    if after[at] not in doubled or not power_of_two or _reads(limit, set(fresh)):
        return known
    exponent = start.number.bit_length() - 1
    most = power.width - (1 if condition.op[5] == "u" else 2)  # the last power that the width holds
    rounds = graph.make("doublings", power.width, limit, exponent, most, f"{condition.op[5]}lt")
    known[at] = graph.make("shl", power.width, start, rounds)
    for index, (variable, new) in enumerate(zip(fresh, after, strict=True)):
        if new is graph.make("add", variable.width, variable, graph.const(1, variable.width)):
            rounds = graph.make("doublings", variable.width, limit, exponent, most, condition.op[5:])
            known[index] = graph.make("add", variable.width, before[index], rounds)
    return known


def _reads(node: Bits, variables: set[Bits]) -> bool:
    seen: set[Bits] = set()
    todo = [node]
    while todo:
        bits = todo.pop()
        if bits in variables:
            return True
        if bits not in seen:
            seen.add(bits)
            todo += [item for item in bits.args if isinstance(item, Bits)]
    return False


def _defined(run: Run, loop: frozenset[int]) -> list[int]:
    """The slots that the loop's blocks fill."""
    slots: list[int] = []
    for number in loop:
        block = run.function.blocks[number]
        slots += block.arguments
        slots += [instruction.result for instruction in block.instructions if instruction.result is not None]
    return slots
