"""What the router kernels are traced with."""

from dataclasses import dataclass

from fusekit.kernels.lanes import WARP


@dataclass(frozen=True)
class RouterConfig:
    """The keys of a router spec that decide the device code; `fusekit.spec.router` documents each."""

    experts: int
    topk: int
    dtype: str
    out_dtype: str
    grad_dtype: str
    score_function: str
    pre_softmax: bool
    expert_bias: bool
    num_groups: int
    group_topk: int
    outputs: str
    routing_map: str
    addend: bool
    scalars: str
    warps: int

    @property
    def normalised(self) -> bool:
        """Whether the scores of chosen experts are divided by their sum: sigmoid and sqrtsoftplus, several chosen."""
        return self.score_function != "softmax" and self.topk > 1

    @property
    def dense(self) -> bool:
        """Whether choices are a [T, experts] map and probabilities, not [T, topk] indices and weights."""
        return self.outputs == "dense"

    @property
    def on_device(self) -> bool:
        """Whether the loss takes its scalars from device memory."""
        return self.scalars == "device"

    @property
    def map_words(self) -> int:
        """32-bit words of one token's bit-packed routing map."""
        return -(-self.experts // 32)


def vector_elements(experts: int, element_bytes: int) -> int:
    """Neighbouring experts that a lane holds: 16 bytes of the widest tensor where rows stay aligned and lanes busy."""
    vector = 16 // element_bytes
    while experts % vector or (vector > 1 and vector * WARP > experts):
        vector //= 2
    return vector


class Row:
    """How a token's experts lie in its lanes: chunk c, lane l, place v hold expert (c * lanes + l) * vector + v."""

    def __init__(self, experts: int, vector: int, lanes: int = WARP) -> None:
        self.experts, self.vector, self.lanes = experts, vector, lanes
        self.chunks = -(-experts // (lanes * vector))
        self.size = self.chunks * vector  # experts of one lane, those past the end included

    def first(self, chunk: int, lane):
        """The first expert that a lane holds in the chunk."""
        return (lane + chunk * self.lanes) * self.vector

    def valid(self, chunk: int, lane):
        """Whether the lane's experts in the chunk exist; None where all lanes' do."""
        full = (chunk + 1) * self.lanes * self.vector <= self.experts
        return None if full else self.first(chunk, lane) < self.experts
