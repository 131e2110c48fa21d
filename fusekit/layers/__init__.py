"""Whole layers from a store: their buffers, and the launches of their passes.

    layer = library.layer("gpt-oss-120b/moe")
    sizes = layer.sizes(tokens=24576)
    forward = layer.bind_forward(x=x, router=wr, w1=w1, w2=w2, y=y, kept=kept, scratch=scratch)
    forward(stream)

No framework is imported: memory is the caller's, tensors and streams are taken by protocol, and the host learns no
count. A pass may be captured in a CUDA graph.
"""

from fusekit.layers.layer import Layer, Pass, Sizes, layers_of

__all__ = ["Layer", "Pass", "Sizes", "layers_of"]
