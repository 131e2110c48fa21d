"""PTX in line."""

from cutlass import cute


def inline(result, text: str, *arguments):
    """What `text` makes of the arguments, which it calls {$r0}, {$r1}, ...

    result: type of what it gives, which it calls {$w0}; a list of types for several; None for nothing.
    """
    if result is None:
        return cute.arch.inline_ptx(text, read_only_args=[*arguments])
    types = result if isinstance(result, list) else [result]
    return cute.arch.inline_ptx(text, write_only_types=types, read_only_args=[*arguments])
