"""A layer of a store in a server: which one, and its inference pass, as a server's MoE layer calls it.

Without a framework: what the doors to servers share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from logging import Logger
from typing import TYPE_CHECKING, Any

from fusekit.errors import FusekitError
from fusekit.interop.experts import KEEPS, Experts
from fusekit.library import Library, open_library

if TYPE_CHECKING:
    from fusekit.layers import Layer

_SIZES_KEPT = 256
_TOKENS = ("x", "indices", "weights")


class Served:
    """A layer's inference pass, as a server's MoE layer calls it. Warns and fails as `Layer.forward` does."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._parameters = tuple(name for name in layer.inputs("inference") if name not in _TOKENS)
        self.scratch_bytes: Callable[[int], int] = lru_cache(_SIZES_KEPT)(self._scratch_bytes)

    def _scratch_bytes(self, tokens: int) -> int:
        return self.layer.record.scratch("inference", ("y",), self.layer.dims(tokens), ("y",))[1]

    def __call__(
        self, y: Any, x: Any, indices: Any, weights: Any, parameters: Mapping[str, Any], scratch: Any,
        stream: int | None,
    ) -> None:  # fmt: skip
        """Queues y = the experts of x.

        Parameters
        ----------
        y, x : tensor
            [T, H], of the layer's dtype. y must not overlap the others.
        indices, weights : tensor
            [T, K]. An index outside the experts, such as -1, adds nothing.
        parameters : mapping
            Tensors as the layer reads them: w1, w2, biases b1, b2 and scales w1_s, w2_s where it has such.
        scratch : tensor
            Of at least `scratch_bytes(T)` bytes.
        stream : int, optional
            None on the CPU.
        """
        given = {name: parameters[name] for name in self._parameters}
        self.layer.forward(
            x=x, indices=indices.int(), weights=weights.float(), **given, y=y, scratch=scratch, stream=stream
        )


class Chooser:
    """Finds a layer for the experts of a server's modules, and logs once for each kind of them which one, or why none.

    library: default is that of the environment, opened at the first search. layers: a glob of names. logger: where it
    is said.
    """

    def __init__(self, library: Library | None, layers: str, logger: Logger) -> None:
        self._library, self._layers, self._logger = library, layers, logger
        self._chosen: dict[tuple[Experts, bool], Served | None] = {}
        self._refused: set[str] = set()
        self._choosing = threading.Lock()

    def refuse(self, why: str) -> None:
        """Logs once why experts are left to the server's own kernels."""
        with self._choosing:
            if why not in self._refused:
                self._refused.add(why)
                self._logger.warning("fusekit: %s; the server's own kernels run", why)

    def served(self, experts: Experts, tokens: int, cpu: bool = False) -> Served | None:
        """The layer for these experts, loaded for 1, 2, 4, ... `tokens`, or None. cpu: by its definition."""
        key = experts, cpu
        with self._choosing:
            if key not in self._chosen:
                self._chosen[key] = self._search(experts, tokens, cpu)
            return self._chosen[key]

    def _search(self, experts: Experts, tokens: int, cpu: bool) -> Served | None:
        why = ""
        try:
            if self._library is None:
                self._library = open_library()
            known = self._library.layers()
        except FusekitError as error:
            self._logger.warning("fusekit: %s; the server's own kernels run", error)
            return None
        fitting = [name for name, options in known.items() if fnmatchcase(name, self._layers) and experts.fits(options)]
        for name in sorted(fitting, key=lambda name: (-KEEPS.index(known[name].keep), name)):
            try:
                layer = self._library.layer(name, device="cpu") if cpu else self._library.layer(name)
                for power in range(tokens.bit_length()):
                    layer.load(1 << power)
            except FusekitError as error:  # such as of another architecture
                why = f"{name}: {error}"
                continue
            self._logger.info("fusekit: the layer %s runs %s", name, experts.size())
            return Served(layer)
        if not why:
            table = experts.table(inference=True)
            why = f"no layer of the store computes {experts.size()}; save this and run fusekit build FILE:\n{table}"
        self._logger.warning("fusekit: the server's own kernels run, since %s", why)
        return None
