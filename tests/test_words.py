"""The words of the project are its field's: phrases and names of its own that were replaced do not come back."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", ".github", "cli", "docs", "examples", "fusekit", "kernel_specs", "tests")
TEXT = {"", ".c", ".cpp", ".cu", ".h", ".hpp", ".js", ".md", ".py", ".toml", ".yml"}
FILES = [
    path
    for pattern in ("*.md", "mkdocs.yml", "pyproject.toml", *(f"{folder}/**/*" for folder in FOLDERS))
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in TEXT and path.is_file() and "__pycache__" not in path.parts and path != Path(__file__)
]
# What is not written; what a text has that has it, which is found sooner; what is written instead.
PHRASES = {
    r"(?-i:\bVerbs:)": ("verbs:", "Commands:"),
    r"\bmade[- ]up\b": ("made", "random (inputs), forged (files), or made for the test"),
    r"\b8-bit factors?\b": ("8-bit", "FP8 operands"),
    r"\b([48]-bit|fp8|mx) codes\b|\bas codes\b|\b(mx|y|dz|dispatch|permute)[-_]codes\b": (
        "codes",
        "FP8 values, FP8 output",
    ),
    r"\bis no JSON\b": ("no json", "is not valid JSON"),
    r"\bmoved on\b": ("moved on", "now point to new builds"),
    r"\bleft to you\b": ("left to", "not covered"),
    r"\b(held|holds?) back\b": (" back", "reserved (SMs)"),
    r"(?<![a-z])mend(s|ed|ing)?(?![a-z])": ("mend", "fix"),
}
NAMES = {"told", "made", "mine"}  # of variables, parameters, attributes, functions: what they hold or do
SYMBOLS = {
    "AGAIN": "recompute",
    "THROUGH": "dgrad",
    "WEIGHTS": "wgrad",
    "Aside": "a launch on the side stream",
    "Late": "a launch that joins the side stream",
}


# A file without these has nothing that `names` gives: most have none, and a walk takes long.
SUSPECT = re.compile(rf"\b_*({'|'.join((*NAMES, *SYMBOLS))})_*\b|[\"']\s*Of ")


def phrases(text):
    """(line, what is there, what to write) of each phrase in a file."""
    small = text.lower()
    for pattern, (part, instead) in PHRASES.items():
        for match in re.finditer(pattern, text, re.IGNORECASE) if part in small else ():
            yield text.count("\n", 0, match.start()) + 1, match[0], instead


def names(text):
    """(line, what is there, what to write) of each name that Python code gives to something, and each docstring."""
    for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                given = [name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                given = [name]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                given = [alias.asname or alias.name for alias in aliases]
            case _:
                given = []
        for name in given:
            if name.strip("_") in NAMES:
                yield node.lineno, name, "the name of what it holds"
            elif name in SYMBOLS:
                yield node.lineno, name, SYMBOLS[name]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (ast.get_docstring(node) or "").startswith(
            "Of "
        ):
            yield node.body[0].lineno, '"""Of', "what it is"


def offences(path):
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    lines = sorted((*phrases(text), *(names(text) if path.suffix == ".py" else ())))
    return [f"{name}:{line}: {there!r}; write: {instead}" for line, there, instead in lines]


def test_no_word_comes_back():
    assert {ROOT / "fusekit" / "library.py", ROOT / "docs" / "index.md", ROOT / ".ci" / "run"} <= set(FILES)
    there = [line for path in FILES for line in offences(path)]
    assert not there, "\n".join(there)


def test_every_word_is_seen():
    text = "Verbs: made-up, made up, 8-bit factors, is no JSON, moved on, left to you, held back, hold back, mends"
    assert [there for _, there, _ in phrases(text)] == [
        "Verbs:", "made-up", "made up", "8-bit factors", "is no JSON", "moved on", "left to you", "held back",
        "hold back", "mends",
    ]  # fmt: skip
    assert not list(phrases("recommends, amended, cuStreamEndCapture"))
    for code in (
        "told = 1", "a, made = 1, 2", "self._mine = 1", "def f(told): ...", "def made(): ...", "lambda *mine: 0",
        "from a import Aside", "import a as Late", "class Aside: ...", "AGAIN = 1", "THROUGH: int = 2", "WEIGHTS += 1",
        'def f():\n    """Of a CTA."""', '"""Of rows."""', 'class A:\n    """Of rows."""',
    ):  # fmt: skip
        assert len(list(names(code))) == 1, code
    assert not list(names('made.told\nf(mine=1)\ndef f():\n    """Offsets of rows."""'))
