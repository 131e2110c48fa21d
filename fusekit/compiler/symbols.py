"""The symbols of kernels, which profilers show: fusekit_grouped_bf16_swiglu_128x192_c2x1_dyn_<digest>_cutlass_0."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_LONGEST = 60  # characters before the digest
_SIZES = {"experts": "e", "topk": "k", "ranks": "r", "warps": "w"}


def symbol_of(spec: Any) -> str:
    """What the symbols of a kernel begin with: an identifier, made of what decides the cubin alone."""
    facts = spec.device_spec()
    words = (word for word in [spec.op.removesuffix("-gemm"), *_words(facts)] if word not in (None, "none", "identity"))
    name = re.sub(r"[^0-9A-Za-z]+", "_", "-".join(["fusekit", *words]))[:_LONGEST].rstrip("_")
    digest = hashlib.sha256(json.dumps([spec.op, facts], sort_keys=True).encode()).hexdigest()
    return f"{name}_{digest[:8]}"


def _words(facts: Mapping[str, Any]) -> list[str | None]:
    match facts:
        case {"activation": {"kind": kind}, "quant": str(quant), "tile": [m, n], "cluster": [across, down], **more}:
            operands = re.match(r"in=(\S+)", quant)
            return [
                operands[1] if operands else more["dtype"],
                kind,
                "nmajor" if more["b_major"] == "n" else None,
                f"{m}x{n}-c{across}x{down}",
                "coop" if more["mainloop"] == "cooperative" else None,
                "dyn" if more["schedule"] == "dynamic" else None,
            ]
    texts = [facts[field] for field in ("out", "dtype") if isinstance(facts.get(field), str)]
    return texts + [f"{letter}{facts[field]}" for field, letter in _SIZES.items() if facts.get(field)]
