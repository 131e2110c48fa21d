"""Whole layers from a store: their buffers, and the launches of their passes.

    layer = library.layer("gpt-oss-120b/moe")
    sizes = layer.sizes(tokens=24576)
    forward = layer.bind_forward(x=x, router=wr, w1=w1, w2=w2, y=y, kept=kept, scratch=scratch)
    forward(stream)

No framework is imported. Memory is the caller's, tensors and streams are taken by protocol, and no count of rows is
copied to the host. A pass may be captured in a CUDA graph.
"""

from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError
from fusekit.layers.layer import Layer
from fusekit.layers.passes import Pass, Sizes
from fusekit.layers.stored import layers_of, options_of, records_of

if TYPE_CHECKING:
    from fusekit.layers.ranked import RankedLayer
    from fusekit.library import Library

__all__ = ["Layer", "Pass", "Sizes", "layers_of", "open_layer"]


def open_layer(
    library: "Library", name: str, arch: str | None, device: int | None, **over: Any
) -> "Layer | RankedLayer":
    """The layer `name`. over: ranks, tokens and rows of a layer over ranks; None where they are not given."""
    records = records_of(library, name)  # once: a build may come between two looks
    options = options_of(library, name, records)
    if options.ranks > 1:
        from fusekit.layers.ranked import RankedLayer

        return RankedLayer(library, name, options, arch, device, records=records, **over)
    for key, value in over.items():
        if value is not None:
            raise ArgumentError(
                f"{name} is a layer of one GPU, which takes no {key}; set ranks = R in its table, and build it again",
                argument=key,
            )
    return Layer(library, name, arch, device, options, records)
