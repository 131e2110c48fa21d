"""A function of the host module, decoded once: blocks, instructions with numbered operands, where branches meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fusekit.compiler import dsl
from fusekit.errors import BuildError

_LOCATION = re.compile(r'"([^"]+)":([0-9]+):')
EXIT = -1
"""Stands for the end of the function among block numbers."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """name: of the operation, without ``llvm.``. operands, result: slots; result is None where there is none.

    targets: of a branch, (block, the slots that it passes).
    """

    name: str
    operands: tuple[int, ...]
    result: int | None
    operation: Any
    targets: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def attributes(self) -> Any:
        return self.operation.attributes

    @property
    def place(self) -> str:
        """Its place: the source line where the DSL gives it, else the operation itself."""
        lines = _LOCATION.findall(str(self.operation.location))
        text = str(self.operation).split(" loc(")[0].strip()
        text = text if len(text) <= 90 else text[:87] + "..."
        return f"{text} ({lines[-1][0]}, line {lines[-1][1]})" if lines else text


@dataclass(slots=True)
class Block:
    arguments: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def last(self) -> Instruction:
        return self.instructions[-1]


class Function:
    """A decoded function. joins: for each block, the block in which all ways out of it meet (or EXIT); ways that end
    in a trap do not count. loops: for each block, the blocks of the cycle that it is part of.
    """

    def __init__(self, operation: Any) -> None:
        self.name: str = operation.attributes["sym_name"].value
        regions = list(operation.regions[0].blocks)
        numbers = {block: index for index, block in enumerate(regions)}
        slots: dict[Any, int] = {}
        count = 0
        self.blocks: list[Block] = []
        for block in regions:
            self.blocks.append(Block(tuple(range(count, count + len(block.arguments)))))
            slots[block] = count
            count += len(block.arguments)
            for item in block.operations:
                if len(item.results):
                    slots[item.operation] = count
                    count += 1
        for block, decoded in zip(regions, self.blocks, strict=True):
            decoded.instructions += [_decode(item, slots, numbers) for item in block.operations]
        self.argument_types = [argument.type for argument in regions[0].arguments]
        self._successors = [[target for target, _ in block.last.targets] for block in self.blocks]
        self.joins = self._joins()
        self.loops = self._loops()

    def _joins(self) -> list[int]:
        """Immediate post-dominators."""
        dead = {number for number, block in enumerate(self.blocks) if block.last.name == "unreachable"}
        while True:
            more = {
                number
                for number, after in enumerate(self._successors)
                if number not in dead and after and all(target in dead for target in after)
            }
            if not more:
                break
            dead |= more
        after = {
            number: [target for target in targets if target not in dead] or [EXIT]
            for number, targets in enumerate(self._successors)
            if number not in dead
        }
        everything = {*after, EXIT}
        post = dict.fromkeys(after, everything) | {EXIT: {EXIT}}
        changed = True
        while changed:
            changed = False
            for number in reversed(after):
                dominators = {number} | set.intersection(*(post[target] for target in after[number]))
                if dominators != post[number]:
                    post[number], changed = dominators, True
        return [
            max(post[number] - {number}, key=lambda target: len(post[target])) if number in after else EXIT
            for number in range(len(self.blocks))
        ]

    def _loops(self) -> list[frozenset[int]]:
        reach = [self._reachable(number) for number in range(len(self.blocks))]
        return [
            frozenset(other for other in reach[number] if number in reach[other]) for number in range(len(self.blocks))
        ]

    def _reachable(self, start: int) -> set[int]:
        seen: set[int] = set()
        todo = list(self._successors[start])
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += self._successors[number]
        return seen


def functions(module: Any) -> Iterator[Any]:
    """The module's functions that have a body, as MLIR operations."""
    for operation in module.body.operations:
        if operation.operation.name == "llvm.func" and len(operation.regions[0].blocks):
            yield operation


def _decode(operation: Any, slots: dict[Any, int], numbers: dict[Any, int]) -> Instruction:
    name = operation.operation.name
    if not name.startswith("llvm."):
        raise BuildError(f"host code: {name} is of another dialect than LLVM's; this fusekit does not know the DSL")
    operands = tuple(_slot(operand, slots) for operand in operation.operands)
    result = slots[operation.operation] if len(operation.results) else None
    targets: tuple[tuple[int, tuple[int, ...]], ...] = ()
    successors = [numbers[block] for block in operation.operation.successors]
    if name == "llvm.br":
        targets = ((successors[0], operands),)
        operands = ()
    elif name == "llvm.cond_br":
        _, first, second = operation.attributes["operandSegmentSizes"]
        targets = (successors[0], operands[1 : 1 + first]), (successors[1], operands[1 + first : 1 + first + second])
        operands = operands[:1]
    elif successors:
        raise BuildError(f"host code: {name} is a branch that this fusekit does not know")
    return Instruction(name.removeprefix("llvm."), operands, result, operation.operation, targets)


def _slot(value: Any, slots: dict[Any, int]) -> int:
    # By owner: some values overload ==, and comparing them would write operations into the module.
    ir, owner = dsl.ir(), value.owner
    number: int = ir.BlockArgument(value).arg_number if isinstance(owner, ir.Block) else 0
    return slots[owner] + number
