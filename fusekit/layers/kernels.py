"""The kernels of a layer, each loaded once."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import NotBuiltError, UsageError
from fusekit.runtime.recent import Recent

if TYPE_CHECKING:
    from fusekit.layers.fitting import CallClasses
    from fusekit.layers.pass_plan import PassPlan
    from fusekit.library import Library
    from fusekit.runtime import Kernel

_PLANS_KEPT = 64  # token counts differ from step to step


class LayerKernels:
    """The kernels that the record of a layer names: a build meanwhile changes none of a layer that is open.

    plans: of passes, by pass, tokens and outputs. classes: compiled passes. Equal layers of one library share all of it
    (`Library.layer_kernels`), until one of them sets a variant of its own.
    """

    def __init__(self, library: Library, record: LayerRecord, device: int | None) -> None:
        self._library, self._record, self._device = library, record, device
        self._variants: dict[str, str] = {}
        self._loaded: dict[str, Kernel] = {}
        self.plans: Recent[Any, PassPlan] = Recent(_PLANS_KEPT)
        self.classes: CallClasses | None = None

    def with_variant(self, part: str, variant: str) -> LayerKernels:
        """These kernels with another variant of a part, and without plans and compiled passes."""
        changed = copy(self)
        changed._variants = self._variants | {part: variant}
        changed.plans, changed.classes = Recent(_PLANS_KEPT), None
        return changed

    def name(self, part: str, tokens: int) -> str:
        """The full name of the kernel of a part for so many tokens; "": it is not launched."""
        key = self._record.kernel(part, tokens)
        if key is None:
            return ""
        if part in self._variants:
            return f"{self._record.name}.{part}@{self._variants[part]}"
        return self._record.kernels[key].name

    def loaded(self, part: str, tokens: int) -> Kernel | None:
        """The kernel of a part, if it is loaded."""
        return self._loaded.get(self.name(part, tokens))

    def load(self, part: str, tokens: int) -> Kernel | None:
        """The kernel of a part for so many tokens; None: it is not launched. Raises what loading a kernel raises."""
        name, key = self.name(part, tokens), self._record.kernel(part, tokens)
        if key is None:
            return None
        if name not in self._loaded:
            if part in self._variants:
                self._loaded[name] = self._library.load(name, self._record.arch, self._device)
            else:
                self._loaded[name] = self._load(key)
        return self._loaded[name]

    def _load(self, key: str) -> Kernel:
        kernel = self._record.kernels[key]
        try:
            return self._library.load_key(kernel, key, self._record.arch, self._device)
        except NotBuiltError as error:
            raise UsageError(
                f"{self._record.name} names entry {key} for {kernel.name}, which no root of the store holds: it was"
                " removed, or built again since the layer was opened; build the layer again if it is missing, open it"
                " again, and bind its passes again"
            ) from error
