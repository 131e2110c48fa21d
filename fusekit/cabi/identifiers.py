"""Names that C and C++ both accept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fusekit.errors import UsageError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of C11 and C++17; those that no argument is likely to have are here all the same.
_KEYWORDS = frozenset({
    "alignas", "alignof", "and", "asm", "auto", "bitand", "bitor", "bool", "break", "case", "catch", "char", "class",
    "compl", "const", "constexpr", "continue", "decltype", "default", "delete", "do", "double", "else", "enum",
    "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int", "long",
    "mutable", "namespace", "new", "noexcept", "not", "nullptr", "operator", "or", "private", "protected", "public",
    "register", "reinterpret_cast", "restrict", "return", "short", "signed", "sizeof", "static", "struct", "switch",
    "template", "this", "throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using",
    "virtual", "void", "volatile", "while", "xor",
})  # fmt: skip
# Of the headers that the source includes, and of compilers for Unix.
_MACROS = frozenset({"EOF", "INFINITY", "NAN", "NULL", "errno", "linux", "unix"})
# PREFIX.h must not come before a header that this one, or the program around it, includes.
_HEADERS = frozenset({
    "assert", "complex", "ctype", "cuda", "dlfcn", "errno", "fcntl", "fenv", "inttypes", "limits", "locale", "math",
    "pthread", "sched", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef", "stdint", "stdio",
    "stdlib", "stdnoreturn", "string", "tgmath", "threads", "time", "uchar", "unistd", "wchar", "wctype",
})  # fmt: skip
_STRIDE = re.compile(r"_stride[0-9]+$")  # the members next to a tensor's
# Members that every structure of arguments has.
COMMON = ("cluster_margin", "has_priority", "priority")


def check_prefix(prefix: str) -> None:
    """Raises UsageError unless names may begin with `prefix`."""
    if not _IDENTIFIER.fullmatch(prefix) or prefix in _KEYWORDS or prefix.startswith("_"):
        rule = "a prefix is letters, digits and _, begins with a letter, and is no keyword of C or C++"
        raise UsageError(f"prefix {prefix!r}; {rule}; choose another one")
    if prefix in _HEADERS:
        raise UsageError(
            f"prefix {prefix!r}: {prefix}.h is a header of the system, and would hide it; choose another one"
        )
    if prefix == "fk":
        raise UsageError("prefix 'fk' is used inside the launcher; choose another one")


def kernel_identifiers(names: Sequence[str]) -> list[str]:
    """One identifier for each kernel name: file and kernel, and the variant too where two would be the same."""
    short = [re.sub(r"[^A-Za-z0-9]+", "_", name.partition("@")[0]) for name in names]
    identifiers = [
        re.sub(r"[^A-Za-z0-9]+", "_", name) if short.count(brief) > 1 else brief
        for name, brief in zip(names, short, strict=True)
    ]
    for index, identifier in enumerate(identifiers):
        if identifier in identifiers[:index]:
            raise UsageError(
                f"{names[index]} and {names[identifiers.index(identifier)]} would both be called {identifier}; export "
                "one of them apart, with another --prefix"
            )
    return identifiers


def members(dims: Iterable[str], arguments: Iterable[str]) -> dict[str, str]:
    """Member names, no two alike: arguments keep theirs where C has no use for them, dims are in lower case (complex.h
    makes I a macro).
    """
    named: dict[str, str] = {}
    taken = {*_KEYWORDS, *_MACROS, *COMMON}

    def free(name: str) -> str:
        while name in taken or _STRIDE.search(name):
            name += "_"
        taken.add(name)
        return name

    names = [*arguments]
    for argument in sorted(names, key=lambda name: name in taken):  # first those that may keep theirs
        named[argument] = free(argument)
    for dim in dims:
        lower = dim.lower()
        named[f"dim {dim}"] = free(lower if lower not in taken else f"dim_{lower}")
    return named
