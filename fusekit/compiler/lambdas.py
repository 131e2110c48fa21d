"""A lambda as data: its text, and the module whose names it uses."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any


def text_of(function: Any) -> str | None:
    """The text of a lambda that has nothing but its arguments and the names of its module; None of any other function,
    and where its source is not to be found.

    Of several lambdas in one line it is the one of the same code.
    """
    code = function.__code__
    if function.__name__ != "<lambda>" or code.co_freevars or function.__defaults__ or function.__kwdefaults__:
        return None
    texts = {text for text in _lambdas(code.co_filename, code.co_firstlineno) if _same(_code(text), code)}
    return texts.pop() if len(texts) == 1 else None


def rebuilt(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The lambda of a text. names: of the module that it is in. Raises ValueError for a text that is none."""
    if not isinstance(ast.parse(text, mode="eval").body, ast.Lambda):
        raise ValueError(f"{text!r} is no lambda")
    function: Callable[..., Any] = eval(text, names)
    return function


def _lambdas(file: str, line: int) -> list[str]:
    return [text for first, text in _all("".join(linecache.getlines(file))) if first == line]


@cache
def _all(source: str) -> tuple[tuple[int, str], ...]:
    """(line, text) of every lambda in a file."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple((node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Lambda))


def _code(text: str) -> CodeType:
    module_code = compile(text, "<lambda>", "eval")
    return next(const for const in module_code.co_consts if isinstance(const, CodeType))


def _same(a: CodeType, b: CodeType) -> bool:
    """Whether two pieces of code do the same, wherever they are."""
    facts = ("co_code", "co_names", "co_varnames", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
    flags = (a.co_flags ^ b.co_flags) & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if flags or any(getattr(a, fact) != getattr(b, fact) for fact in facts) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else (type(x), x) == (type(y), y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )
