"""The kernels whose keys are looked at, and the sources as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fusekit
from fusekit.compiler.identity import Identity, roots_of
from fusekit.compiler.sources import Sources
from fusekit.spec import find
from fusekit.store import key_of
from tests.soak import sample

SPEC = find(["quickstart/linear"])[0]
PACKAGE = Path(fusekit.__file__).parent
SOURCES = Sources()  # as they are; tests that change one have a copy


def one_of_each() -> list[Any]:
    """A kernel of every planner, and of every epilogue."""
    result: dict[Any, Any] = {}
    for spec in find([]):
        if spec.op != "extern":
            result.setdefault((roots_of(spec)[0], getattr(spec, "epilogue", "")), spec)
    return list(result.values())


# Without --soak an operation on tokens, and the GEMM with the most sources.
CORE = [spec for spec in one_of_each() if getattr(spec, "epilogue", "") in ("", "backward")][:2]
EACH = pytest.mark.parametrize("spec", sample(one_of_each(), *CORE), ids=lambda spec: spec.full_name)


def key(spec: Any = SPEC) -> str:
    return key_of(Identity(sources=SOURCES).key_fields(spec))
