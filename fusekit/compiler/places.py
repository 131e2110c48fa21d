"""Lines of sources in errors.

Of a launch the DSL says where its kernel is decorated, and `fusekit.compiler.hostcode` repeats that. Every key covers
hostcode, so what a reader wants is looked up here: another text of an error must not have all kernels built again.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fusekit.errors import FusekitError

_PLACE = re.compile(r"\((/[^\n]+?), line ([0-9]+)\)")


def with_defs(error: FusekitError) -> FusekitError:
    """The error, in whose text the line of a decorator is that of the `def` behind it."""
    error.args = tuple(_PLACE.sub(_of_def, each) if isinstance(each, str) else each for each in error.args)
    return error


def _of_def(place: re.Match[str]) -> str:
    path, line = place[1], int(place[2])
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return place[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                if each.lineno <= line <= (each.end_lineno or each.lineno):
                    return f"({path}, line {node.lineno})"
    return place[0]
