"""The exception tree.

Every error of fusekit is a `FusekitError`. Its text is one message that states the value, the rule it breaks and the
remedy; `exit_code` is what the command line exits with. Attributes beyond the message are keyword arguments with
defaults, so that every error survives pickling on its way out of a worker process.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from operator import index
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar


def install(extra: str, option: str = "") -> str:
    """The command that installs the packages of `extra`, each by its name: on PyPI, "fusekit" is another project."""
    from importlib import metadata

    try:
        listed = [text.partition(";") for text in metadata.requires("fusekit") or ()]
    except metadata.PackageNotFoundError:
        listed = []

    def packages(name: str) -> Iterator[str]:
        for requirement, _, marker in listed:
            if re.search(rf"extra == ['\"]{name}['\"]", marker):
                inner = re.match(r"fusekit\[([\w,-]+)\]", requirement)
                yield from (name for part in inner[1].split(",") for name in packages(part)) if inner else [requirement]

    needs = " ".join(f"'{package.strip()}'" for package in dict.fromkeys(packages(extra))) or f"'.[{extra}]'"
    return f"pip install {option} {needs}".replace("  ", " ")


class FusekitError(Exception):
    """Base of every error. Exit code 1: the operation failed."""

    exit_code: ClassVar[int] = 1
    one_line: bool = True

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable() or not self.one_line:
            return text
        # Text from a document or a path must not add lines.
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class UsageError(FusekitError):
    """An invalid command line or call: unknown name, malformed option."""

    exit_code = 2


class SpecError(FusekitError):
    """A spec that cannot be built.

    problems: one line for each problem, with its table, key and value; empty if there is only the message.
    """

    exit_code = 2
    one_line = False

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class SpecWarning(UserWarning):
    """A part of a spec file that was skipped: a combination of a sweep that cannot be built."""


class NotBuiltError(FusekitError):
    """A kernel that no root of the store holds.

    name: the requested one. command: the `fusekit build ...` line that builds it.
    """

    exit_code = 3

    def __init__(self, message: str, *, name: str = "", command: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.command = command

    @classmethod
    def of(
        cls, name: str, arch: str | None = None, detail: str = "", absent: tuple[str, ...] = (),
        stored: Iterable[str] = (),
    ) -> "NotBuiltError":  # fmt: skip
        """The error for `name` (for `arch`, if given), with the command that builds it. absent: why roots of
        FUSEKIT_STORES are not stores, from `Store.absent`. stored: names that the store has, of which the nearest is
        suggested.
        """
        wanted = f"'{name}' for {arch}" if arch is not None else f"'{name}'"
        detail = f" ({detail})" if detail else ""
        command, remedy = how_to_build(name, arch, stored)
        mount = f"; {'; '.join(absent)}: check FUSEKIT_STORES, and that its file systems are mounted" if absent else ""
        return cls(f"{wanted} is not in the store{detail}; {remedy}{mount}", name=name, command=command)


def how_to_build(name: str, arch: str | None = None, stored: Iterable[str] = ()) -> tuple[str, str]:
    """(the `fusekit build` command for `name`, the remedy as text); the command is empty if none can build it.

    Packaged spec files are searched for the words that they must have. The spec file of another kernel is not known.
    stored: as for `NotBuiltError.of`.
    """
    # Only the spec knows whether the variant exists: all variants of its kernel are built.
    wanted, variant = (name, "") if is_glob(name) else name.partition("@")[::2]
    stem, _, kernel = wanted.partition("@")[0].partition("/")
    if remedy := _of_program(stem, kernel, variant):
        return "", remedy
    texts = [text for file, text in _packaged_texts().items() if fnmatchcase(file, stem)]
    words = {f'"{kernel}"', f'"{kernel.partition(".")[0]}"'}  # its name, or that of its layer
    with_kernel = [text for text in texts if is_glob(kernel) or not kernel or any(word in text for word in words)]
    if with_kernel and arch is not None and not any(f'"{arch}"' in text for text in with_kernel):
        return "", f"its packaged spec is not for {arch}, so it cannot be built for that"
    if with_kernel:
        command = _build_command(wanted, arch)
        return command, f"{'build its variants with' if variant else 'build it with'}: {command}"
    near, is_stored = ("", False) if is_glob(name) else _nearest(wanted, stored)
    command, remedies = "", []
    if near and is_stored:
        remedies = [f"did you mean '{near}'?"]
    elif near:
        command = _build_command(near, arch)
        remedies = [f"did you mean '{near}'? Build that with: {command}"]
    is_file = Path(f"{stem}.toml").is_file()
    if is_file or (not texts and (not near or near.startswith(f"{stem}/"))):
        command = _build_command(f"{stem}.toml{wanted[len(stem) :]}", arch)
        remedies.append(f"build it from its spec file{f', if that names {arch}' if arch else ''}: {command}")
    elif texts and not near:
        remedies.append(f"{stem} has {some([name for text in texts for name in _NAMES.findall(text)])}")
    return command, "; ".join(["no packaged spec has it", *remedies])


_ALIKE = 0.7  # fc1 and fc2 are less alike
_HOST_DIGITS = re.compile("[0-9a-f]{16}")  # of a key, in the name of what `fusekit exec` stored
_NAMES = re.compile(r'^name = "([^"]+)"', re.MULTILINE)  # of kernels, in the text of a packaged spec file


def _of_program(stem: str, kernel: str, variant: str) -> str:
    """The remedy for a name that `fusekit exec` or `fusekit adopt` gives; empty for another."""
    if stem == "carried":
        package = kernel if kernel and not is_glob(kernel) else "PACKAGE"
        return f"a program that compiles it puts it there: fusekit exec --with {package} -- CMD"
    if stem == "adopted":
        file, _, function = kernel.partition(".")
        if not function or is_glob(kernel):
            return "a program that compiles it puts it there: fusekit exec --records -- CMD"
        of = f"{file}/{function}{f'@{variant}' if variant else ''}"
        return f"adopt it: fusekit adopt {of}; or run the program that compiles it: fusekit exec --records -- CMD"
    if _HOST_DIGITS.fullmatch(variant):
        return "a program that compiles it puts it there: fusekit exec -- CMD"
    return ""


def _build_command(target: str, arch: str | None) -> str:
    command = f"fusekit build '{target}'" if is_glob(target) or " " in target else f"fusekit build {target}"
    return f"{command} --arch {arch}" if arch is not None else command


def _nearest(wanted: str, stored: Iterable[str]) -> tuple[str, bool]:
    """The kernel or layer whose name is nearest to `wanted`, empty if none is near, and whether it is stored."""
    from difflib import SequenceMatcher

    def alike(name: str) -> float:
        pairs = zip(fold(name), fold(wanted), strict=False)
        return min(SequenceMatcher(None, part, other).ratio() for part, other in pairs)

    def fold(name: str) -> list[str]:
        return name.lower().replace("_", "-").split("/", 1)

    kernels = {name.partition("@")[0] for name in stored}
    packaged = {f"{file}/{kernel}" for file, text in _packaged_texts().items() for kernel in _NAMES.findall(text)}
    near = max(sorted(packaged | kernels), key=alike, default="")
    return (near, near in kernels) if near and "/" in wanted and alike(near) > _ALIKE else ("", False)


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` of `names`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def whole(value: Any) -> int | None:
    """`value` as an int, if it is an integer, also of NumPy; None for a bool and other types."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _packaged_texts() -> dict[str, str]:
    """The packaged spec files, stem to text: inside an installed package, or next to it in a checkout.

    Empty if they cannot be read: a remedy must not hide its error.
    """
    package = Path(__file__).parent
    try:
        folder = package / "kernel_specs"
        files = (folder if folder.is_dir() else package.parent / "kernel_specs").glob("*.toml")
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(files)}
    except OSError:
        return {}


def is_glob(text: str) -> bool:
    """Whether `text` has a wildcard, so that it may match any number of names."""
    return any(character in text for character in "*?[")


class StoreError(FusekitError):
    """A store that cannot be read or written. path: the file or folder concerned."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NoStoreError(StoreError):
    """A folder that is not a store, or a store of a later format: nothing is written or removed there."""

    exit_code = 2


class IntegrityError(FusekitError):
    """Stored bytes that do not match their digest. key: of the entry, if it is known."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class OtherSchemaError(IntegrityError):
    """A valid document of another version of fusekit, which this one cannot read. A build writes a new one."""


class SignatureError(IntegrityError):
    """Bytes without the signature of a trusted key: unsigned, changed after signing, or signed by another key."""


class BuildError(FusekitError):
    """A kernel that could not be compiled. name: the kernel, if it is known."""

    one_line = False  # it has the text of the compiler

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ProofError(BuildError):
    """The launch record and the DSL's host code disagree. parameter: the one that differs."""

    def __init__(self, message: str, *, name: str = "", parameter: str = "") -> None:
        super().__init__(message, name=name)
        self.parameter = parameter


class ToolchainError(BuildError):
    """The compiler is missing, or of the wrong version."""


class ArgumentError(FusekitError):
    """An invalid argument, most often of a launch. argument: its name."""

    exit_code = 2

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument

    @classmethod
    def unless(cls, kind: type | UnionType, argument: str, value: Any, rule: str) -> None:
        """Raise this error unless `value` is of `kind`."""
        if not isinstance(value, kind):
            raise cls(f"{argument} = {repr(value)[:80]}; it must be {rule}", argument=argument)

    @classmethod
    def integer(cls, argument: str, value: Any, rule: str, least: int | None = None) -> int:
        """`value` as an int. Raises this error unless it is an integer, `least` or more."""
        number = whole(value)
        if number is None or (least is not None and number < least):
            raise cls(f"{argument} = {repr(value)[:80]}; it must be {rule}", argument=argument)
        return number


class DriverError(FusekitError):
    """The CUDA driver is missing, too old, or returned an error. name, text: of CUDA, such as
    CUDA_ERROR_INVALID_VALUE.
    """

    exit_code = 4

    def __init__(self, message: str, *, name: str = "", text: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.text = text


class PeerTimeoutError(FusekitError):
    """A launch that timed out waiting for another rank. rank: the one that is missing."""

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CapacityError(FusekitError):
    """A pass of a layer over ranks received more rows than it was opened for, and dropped some. rows: the limit."""

    def __init__(self, message: str, *, rows: int = 0) -> None:
        super().__init__(message)
        self.rows = rows


class ArchMismatchError(FusekitError):
    """A cubin for another architecture than the device. expected: that of the cubin. found: that of the device."""

    exit_code = 4

    def __init__(self, message: str, *, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class CheckFailedError(FusekitError):
    """A result that differs from the reference by more than the allowed error."""
