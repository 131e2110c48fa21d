"""Hooks of MkDocs: files next to docs/ that pages link to are part of the site, under their path in the repository."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r'(\b(?:src|srcset)=")([^":]+)"')
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
FOLDERS = ("examples", "kernel_specs")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "tests/benchmarks/README.md")


def _site(path: str) -> str:
    """The place in the site of a file of the repository; README.md would take that of docs/index.md."""
    return "readme.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Any, config: Any) -> None:
    """Adds the files."""
    inside = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix != ".pyc"]
    for path in (*(ROOT / name for name in FILES), *inside):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, _site(name), abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository, and sources of pictures, into those of the site."""
    path = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def link(match: re.Match[str]) -> str:
        target = normpath(join(dirname(path), match[1]))
        if not (ROOT / target).is_file():
            return match[0]
        return f"]({relpath(_site(target), dirname(page.file.src_uri) or '.')}"

    def picture(match: re.Match[str]) -> str:
        file = files.get_file_from_path(_site(normpath(join(dirname(path), match[2]))))
        return f'{match[1]}{file.url_relative_to(page.file)}"' if file else match[0]

    return PICTURE.sub(picture, LINK.sub(link, markdown))
