"""What the pages say can be typed: the first example, commands and their options, extras, variables, links."""

import ast
import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import fusekit
from fusekit import config
from fusekit.spec import parse_text
from fusekit_cli.main import COMMANDS, cli
from tests.benchmarks.run import NAMES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(path for folder in ("docs", "examples", "tests/benchmarks") for path in (ROOT / folder).glob("**/*.md")),
)
CODE = re.compile(r"```sh\n(.*?)```|`([^`\n]+)`", re.DOTALL)


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request):
    return request.param


def commands(text):
    """Each command of a page, as its words: from blocks of the shell and from code in a line."""
    for block, inline in CODE.findall(text):
        for line in (block or inline).splitlines():
            for part in re.split(r"&&|\||;|\s#\s", line):
                words = re.sub(r"(?<!\w)\[|[\]`)(,\"]", " ", part).split()
                if "fusekit" in words:
                    yield words[words.index("fusekit") + 1 :]


@cache
def options(*verbs):
    """Every option of a command, and the help's own; None where there is no such command."""
    command = cli
    for verb in verbs:
        command = command.get_command(click.Context(command), verb) if isinstance(command, click.Group) else None
        if command is None:
            return None
    named = (option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    return {"--help", "-h", *named}


def test_every_example_is_linked():
    """A reader of the site gets a file by a link alone."""
    links = ((page, link) for page in PAGES for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text()))
    linked = {(page.parent / link).resolve() for page, link in links}
    files = {path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files - set(PAGES) <= linked


@pytest.mark.parametrize(("page", "example"), [(README, "train.py"), (ROOT / "docs" / "start.md", "first.py")])
def test_a_page_shows_its_example(page, example):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert (ROOT / "examples" / example).read_text() in blocks


def test_the_readme_is_short_and_has_the_words_that_people_look_for():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    words = ["AOT", "JIT", "FP8", "cubin", "batch-invariant", "torch.compile", "SwiGLU", "Hopper", "PyTorch", "JAX",
             "Transformers", "Megatron", "CuTe DSL", "CUDA graph", "grouped GEMM", "expert parallel"]  # fmt: skip
    missing = [word for word in words if word.lower() not in text.lower()]
    assert not missing
    assert "pip install '.[build]' && fusekit build quickstart\n" in text
    assert "pip install '.[test]' && pytest\n" in text


def test_commands_and_their_options_exist(page):
    for words in commands(page.read_text()):
        if not words or not re.fullmatch("[a-z]+", words[0]):
            continue  # the program alone, its options, or the package of that name
        verbs = tuple(words[:2]) if words[0] == "key" and len(words) > 1 else (words[0],)
        known = options(*verbs)
        assert known is not None, f"fusekit {' '.join(verbs)}"
        named = {word.partition("=")[0] for word in words if re.match("--?[a-zA-Z]", word)}
        assert named <= known, f"fusekit {' '.join(words)}"


def test_every_command_is_there():
    page = ROOT / "docs" / "commands.md"
    assert {words[0] for words in commands(page.read_text()) if words} >= set(COMMANDS)


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page for page in PAGES if page != ROOT / "docs" / "index.md"}
    linked = {(ROOT / "docs" / path).resolve() for path in re.findall(r"\]\(([^)#]*)", index)}
    assert pages - linked == {ROOT / "tests" / "benchmarks" / "README.md"}


def test_modules_that_are_run_exist(page):
    for module in re.findall(r"python -m (fusekit[\w.]*)", page.read_text()):
        assert find_spec(module), module


def test_benchmarks_that_are_run_exist(page):
    for name in re.findall(r"tests/benchmarks/run\.py (\w+)", page.read_text()):
        assert name == "NAME" or name in NAMES, name


def test_every_benchmark_is_on_the_page():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "tests" / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    assert rows == NAMES


def snippets(page):
    """The blocks of Python on a page, parsed."""
    for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        yield ast.parse(text.replace(", ...", ""))  # what a reader fills in


def defined(module):
    """The names that the source of a module defines or imports: some modules need a framework to be imported."""
    spec = find_spec(module)
    assert spec, module
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                yield from (alias.asname or alias.name for alias in names)


def test_names_of_fusekit_in_snippets_exist(page):
    """What snippets import from fusekit or take of it, and that they are Python."""
    for tree in snippets(page):
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=module, names=names) if module and module.startswith("fusekit"):
                    missing = {alias.name for alias in names} - set(defined(module))
                    assert all(find_spec(f"{module}.{name}") for name in missing), f"{module}: {missing}"
                case ast.Import(names=names):
                    assert all(find_spec(each.name) for each in names if each.name.startswith("fusekit."))
                case ast.Attribute(value=ast.Name(id="fusekit"), attr=attribute) if attribute != "interop":
                    assert hasattr(fusekit, attribute), attribute


def test_extras_that_are_installed_exist(page):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[([a-z0-9,]+)\]", page.read_text())
    assert {extra for each in named for extra in each.split(",")} <= set(known)


def test_nobody_is_sent_to_the_package_fusekit_of_pypi(page):
    """It is another project's."""
    assert not re.search(r"pip install[^\n;&]*[ '\"]fusekit(?![\w/-])|fusekit\[", page.read_text())


def test_environment_variables_are_those_of_the_configuration(page):
    variables = set(re.findall(r"\bFUSEKIT_[A-Z]+(?:_[A-Z]+)*\b", page.read_text()))
    assert variables <= set(re.findall(r"`(FUSEKIT_\w+)`", config.__doc__))


def test_spec_files_can_be_read(page):
    """Blocks that are whole files: a reader copies them."""
    for text in re.findall(r"```toml\n(schema = 1\n.*?)```", page.read_text(), re.DOTALL):
        if "[[kernel]]" in text:
            assert parse_text(text, "page")


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path in re.findall(r'\bsrc(?:set)?="([^"]*)"', prose):
        assert (page.parent / path).is_file(), path
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
