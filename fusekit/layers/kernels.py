"""The kernels of a layer: which variant of a part is loaded, and that it is of the table the layer was opened with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusekit.errors import DriverError, NotBuiltError, UsageError
from fusekit.plan.layer import Options, stored_options
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime.recent import Recent

if TYPE_CHECKING:
    from fusekit.layers.pass_plan import PassPlan
    from fusekit.library import Library
    from fusekit.runtime import Kernel
    from fusekit.store import NameRecord

_PLANS_KEPT = 64  # token counts differ from step to step
_BY_TILE = ("dprob",)  # operands that sum a row tile by tile; all others add up in an order that no tile changes


class LayerKernels:
    """The kernels of the layer `name`, each loaded once.

    records: of the names of its kernels, by (name, arch), as they were when the layer was opened: a build meanwhile
    changes no kernel of a layer that is open. plans: of passes, by pass, tokens and outputs. Equal layers of one
    library share all of it (`Library.layer_kernels`), until one of them sets a variant of its own.
    """

    def __init__(
        self, library: Library, name: str, arch: str | None, device: int | None, options: Options,
        records: dict[tuple[str, str], NameRecord],
    ) -> None:  # fmt: skip
        self._library, self._layer_name, self._arch, self._device = library, name, arch, device
        self._options, self._records = options, records
        self._variants: dict[str, str] = {}
        self._choosers: dict[str, Callable[[Mapping[str, int]], NameRecord]] = {}
        self._loaded: dict[str, Kernel] = {}
        self.plans: Recent[Any, PassPlan] = Recent(_PLANS_KEPT)

    def with_variant(self, part: str, variant: str) -> LayerKernels:
        """These kernels with another variant of a part, and without plans."""
        changed = copy(self)
        changed._variants = self._variants | {part: variant}
        changed.plans = Recent(_PLANS_KEPT)
        return changed

    def name(self, part: str, keys: Mapping[str, Any], dims: Mapping[str, int]) -> str:
        """The full name of the kernel of a part. keys: the part's table. dims: T and M of the problem."""
        if part in self._variants:
            return f"{self._layer_name}.{part}@{self._variants[part]}"
        operation = OPERATIONS[keys["op"]]
        problem = {"T": dims["T"]}
        if operation.gemm:
            problem = {**keys["problem"], "M": dims["M"] if operation.ragged else dims["T"]}
        if (choose := self._choosers.get(part)) is None:
            where = f"{self._layer_name}.{part}", self._arch, self._device
            try:
                choose = self._choosers[part] = self._library.chooser(*where)
            except DriverError:
                return self._library.find(*where, problem).name
        return choose(problem).name

    def loaded(self, name: str) -> Kernel | None:
        """The kernel with this full name, if it is loaded."""
        return self._loaded.get(name)

    def load(self, name: str) -> Kernel:
        """The kernel with this full name. Raises UsageError if it was built again, and what loading a kernel raises."""
        if name not in self._loaded:
            now = self._library.find(name, self._arch, self._device)
            record = self._records.get((now.name, now.arch), now)
            self._refuse_another_table(record)
            try:
                self._loaded[name] = self._library.load_record(record, self._device)
            except NotBuiltError as error:
                if record.key == now.key:
                    raise
                raise UsageError(
                    f"{name} was built again since {self._layer_name} was opened, and its kernel of before is gone;"
                    " open the layer again, and bind its passes again"
                ) from error
        return self._loaded[name]

    def _refuse_another_table(self, record: NameRecord) -> None:
        """Raises UsageError for a kernel that was built from another table since the layer was opened."""
        ours, theirs = self._options, stored_options(self._layer_name, {record.name: record.spec})
        ours = replace(ours, tokens=theirs.tokens) if theirs else ours  # `tokens` only chooses variants
        if theirs != ours:
            stored = theirs.canonical() if theirs else {}
            differ = [key for key, value in ours.canonical().items() if stored.get(key) != value]
            raise UsageError(
                f"{record.name} was built from another table since {self._layer_name} was opened (other"
                f" {', '.join(differ)}); open the layer again, and bind its passes again"
            )


def pinned(keys: Mapping[str, Any]) -> bool:
    """Whether the bits of a row's results depend on the variant. keys: of a kernel's table."""
    return any(keys.get(name) for name in _BY_TILE)
