"""The exception tree.

Every error of fusekit is a `FusekitError`. Its text is one message that states the value, the rule it breaks and the
remedy; `exit_code` is what the command line exits with. Attributes beyond the message are keyword arguments with
defaults, so that every error survives pickling on its way out of a worker process.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from operator import index
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar


def install(extra: str, option: str = "") -> str:
    """The command that installs the packages of `extra`, each by its name: "fusekit" is another project's on PyPI."""
    from importlib import metadata

    try:
        listed = [text.partition(";") for text in metadata.requires("fusekit") or ()]
    except metadata.PackageNotFoundError:
        listed = []

    def packages(name: str) -> Iterator[str]:
        for requirement, _, marker in listed:
            if re.search(rf"extra == ['\"]{name}['\"]", marker):
                inner = re.match(r"fusekit\[([\w,-]+)\]", requirement)
                yield from (each for part in inner[1].split(",") for each in packages(part)) if inner else [requirement]

    needs = " ".join(f"'{package.strip()}'" for package in dict.fromkeys(packages(extra))) or f"'.[{extra}]'"
    return f"pip install {option} {needs}".replace("  ", " ")


class FusekitError(Exception):
    """Base of every error; exit code 1: what was asked failed."""

    exit_code: ClassVar[int] = 1
    one_line: bool = True

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable() or not self.one_line:
            return text
        # A document or a path that somebody else made must not write lines of its own.
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class UsageError(FusekitError):
    """A command line or a call that cannot be meant: unknown name, malformed option."""

    exit_code = 2


class SpecError(FusekitError):
    """A spec that cannot be built.

    problems: one line for every problem found, each with its table, key and value; empty where there is just the
    message.
    """

    exit_code = 2
    one_line = False

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class SpecWarning(UserWarning):
    """Something in a spec file that was passed over: a combination of a sweep that cannot be built."""


class NotBuiltError(FusekitError):
    """A kernel that no root of the store holds.

    name: what was asked for. command: the `fusekit build ...` line that would put it there.
    """

    exit_code = 3

    def __init__(self, message: str, *, name: str = "", command: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.command = command

    @classmethod
    def of(cls, name: str, arch: str | None = None, detail: str = "", absent: tuple[str, ...] = ()) -> "NotBuiltError":
        """The error for `name` (of `arch`, where it was asked for), with the line that builds it. absent: why roots of
        FUSEKIT_STORES are no stores, as `Store.absent` says it.
        """
        wanted = f"'{name}' for {arch}" if arch is not None else f"'{name}'"
        detail = f" ({detail})" if detail else ""
        command, remedy = how_to_build(name, arch)
        mount = f"; {'; '.join(absent)}: check FUSEKIT_STORES, and that its file systems are mounted" if absent else ""
        return cls(f"{wanted} is not in the store{detail}; {remedy}{mount}", name=name, command=command)


def how_to_build(name: str, arch: str | None = None) -> tuple[str, str]:
    """(the `fusekit build` line that makes `name`, what to tell who lacks it); no line where none can make it.

    Packaged spec files are searched for the words that would have to stand in them. Of a kernel of somebody's own only
    he knows where its file is.
    """
    # Whether there is such a variant only its spec knows: all of its kernel are built.
    wanted, variant = (name, "") if is_glob(name) else name.partition("@")[::2]
    stem, _, kernel = wanted.partition("@")[0].partition("/")
    texts = _packaged_texts(stem)
    words = {f'"{kernel}"', f'"{kernel.partition(".")[0]}"'}  # its own name, or that of the layer that it is a part of
    with_kernel = [text for text in texts if is_glob(kernel) or not kernel or any(word in text for word in words)]
    if with_kernel and arch is not None and not any(f'"{arch}"' in text for text in with_kernel):
        return "", f"the packaged spec of it is not for {arch}, so it cannot be had for that"
    if with_kernel:
        target, tell = wanted, "build its variants with" if variant else "build it with"
    else:
        target = f"{stem}.toml{wanted[len(stem) :]}"
        tell = f"no packaged spec has it; build it from its spec file{f', if that names {arch}' if arch else ''}"
    command = f"fusekit build '{target}'" if is_glob(target) or " " in target else f"fusekit build {target}"
    command += f" --arch {arch}" if arch is not None else ""
    return command, f"{tell}: {command}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` of `names`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def whole(value: Any) -> int | None:
    """`value` as an int, also where it is an integer of NumPy or the like; None for a truth value, and what is none."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _packaged_texts(stem: str) -> list[str]:
    """The packaged spec files of that stem, a glob too: inside an installed package, beside the package in a checkout.

    None where they cannot be read: a remedy must not hide the error that it is for.
    """
    package = Path(__file__).parent
    try:
        folder = package / "kernel_specs"
        files = (folder if folder.is_dir() else package.parent / "kernel_specs").glob("*.toml")
        return [path.read_text(encoding="utf-8") for path in sorted(files) if fnmatchcase(path.stem, stem)]
    except OSError:
        return []


def is_glob(text: str) -> bool:
    """Whether `text` has a wildcard, so that it may match any number of names."""
    return any(character in text for character in "*?[")


class StoreError(FusekitError):
    """A store that cannot be read or written. path: the file or folder concerned."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NoStoreError(StoreError):
    """A folder that is no store, or a store of a later format: nothing is written or removed there."""

    exit_code = 2


class IntegrityError(FusekitError):
    """Stored bytes that are not what their digest says. key: the entry concerned, where it is known."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class OtherSchemaError(IntegrityError):
    """A whole document that another version of fusekit wrote, and this one cannot read. A build makes its own."""


class SignatureError(IntegrityError):
    """Bytes that no trusted key vouches for: unsigned, changed after they were signed, or signed by another key."""


class BuildError(FusekitError):
    """A kernel that could not be compiled. name: the kernel, where it is known."""

    one_line = False  # it has the compiler's own text

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ProofError(BuildError):
    """The launch record and the DSL's own host code disagree. parameter: the one that differs."""

    def __init__(self, message: str, *, name: str = "", parameter: str = "") -> None:
        super().__init__(message, name=name)
        self.parameter = parameter


class ToolchainError(BuildError):
    """The compiler is missing or is not the one that is needed."""


class ArgumentError(FusekitError):
    """An argument, most often of a launch, that does not fit. argument: its name."""

    exit_code = 2

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument

    @classmethod
    def unless(cls, kind: type | UnionType, argument: str, value: Any, rule: str) -> None:
        """Raises this error unless `value` is of `kind`."""
        if not isinstance(value, kind):
            raise cls(f"{argument} = {repr(value)[:80]}; it must be {rule}", argument=argument)

    @classmethod
    def integer(cls, argument: str, value: Any, rule: str, least: int | None = None) -> int:
        """`value` as `whole` gives it. Raises this error unless it is a whole number, `least` or more."""
        number = whole(value)
        if number is None or (least is not None and number < least):
            raise cls(f"{argument} = {repr(value)[:80]}; it must be {rule}", argument=argument)
        return number


class DriverError(FusekitError):
    """The CUDA driver is absent, too old, or refused. name, text: CUDA's own, such as CUDA_ERROR_INVALID_VALUE."""

    exit_code = 4

    def __init__(self, message: str, *, name: str = "", text: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.text = text


class PeerTimeoutError(FusekitError):
    """A launch that gave up waiting for another rank. rank: the one that did not come."""

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CapacityError(FusekitError):
    """A pass of a layer over ranks had more rows than it has room for, and left choices out. rows: for how many."""

    def __init__(self, message: str, *, rows: int = 0) -> None:
        super().__init__(message)
        self.rows = rows


class ArchMismatchError(FusekitError):
    """A cubin for another architecture than the device's. expected: the cubin's; found: the device's."""

    exit_code = 4

    def __init__(self, message: str, *, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class CheckFailedError(FusekitError):
    """A result that is further from the reference than the agreed error."""
