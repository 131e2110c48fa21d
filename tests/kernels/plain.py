"""Device code on plain numbers: a module of its own whose jitted functions run as they are written.

The DSL rewrites the code of a jitted function in place when it first compiles it, which other tests of the process may
have made it do; hence the module of its own.
"""

import importlib.util
import inspect
from types import SimpleNamespace

import cutlass

# What device code asks of `cutlass`, of numbers of Python and of NumPy arrays with an element for each lane.
CUTLASS = SimpleNamespace(
    const_expr=bool, min=min, max=max, range_constexpr=range, range=lambda *ends, unroll=0: range(*ends),
    select_=lambda flag, a, b: a if flag else b, Int64=int, Float32=cutlass.Float32, BFloat16=cutlass.BFloat16,
)  # fmt: skip


def plain(module, **names):
    """`module` again, its jitted functions as they are written; names: what its globals of these names are instead."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_plain", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for holder in [copy, *(var for var in vars(copy).values() if inspect.isclass(var))]:
        for name, value in list(vars(holder).items()):
            if inspect.isfunction(value) and hasattr(value, "__wrapped__") and holder_of(value) == copy.__name__:
                setattr(holder, name, value.__wrapped__)
    for name, value in {"cutlass": CUTLASS, "Int32": int, "Boolean": bool, "Float32": float, **names}.items():
        if hasattr(copy, name):
            setattr(copy, name, value)
    return copy


def holder_of(function) -> str:
    """The module that has the function."""
    return function.__wrapped__.__module__
