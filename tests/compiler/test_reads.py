"""What a foreign source reads while it is built: refused in words, or listed in its spec and then in its key."""

import json
import subprocess
import sys

import pytest

from fusekit.compiler.foreign import Foreign
from fusekit.compiler.identity import Identity
from fusekit.compiler.options import environment
from fusekit.errors import SpecError
from fusekit.spec import parse_text
from fusekit.store import key_of
from tests.compiler.test_foreign import differing
from tests.soak import sample

# As a compile process does: it listens, imports the module of the source, calls it, and looks at what was read.
PROGRAM = """
import json, sys
from importlib import import_module
source, files, env, sys.path[:] = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]
from fusekit.compiler.foreign import Foreign
from fusekit.compiler.reads import Watch, check
from fusekit.errors import FusekitError
from fusekit.spec import parse_text
text = f'''schema = 1
[[kernel]]
name = "k"
op = "extern"
source = "{source}"
arch = "sm_90a"
files = {json.dumps(files)}
env = {json.dumps(env)}
'''
(spec,) = parse_text(text, "own")
fields = Foreign().fields(spec)
watch = Watch.start()
try:
    module, name = source.split(":")
    getattr(import_module(module), name)()
except OSError:
    pass
try:
    check(watch, spec, fields, Foreign())
except FusekitError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    (place / "n.txt").write_text("3")
    return place


@pytest.fixture
def refused(folder, tmp_path):
    """refused(source, files, env) -> what a build says; nothing where it goes on."""
    scratch = tmp_path / "scratch" / "worker"
    scratch.mkdir(parents=True)

    def run(source="mine:f", files=(), env=()):
        variables = environment(scratch, "sm_90a") | dict.fromkeys(env, "7")
        lists = [json.dumps([*item]) for item in (files, env)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, source, *lists, str(folder), *sys.path], cwd=scratch, env=variables,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def source(folder, body, head=""):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "mine.py").write_text(f"import os, json\nfrom pathlib import Path\nHERE = Path(__file__).parent\n{head}\n"
                                    f"def f():\n{lines or '    pass'}\n")  # fmt: skip


@pytest.mark.parametrize(
    "body",
    sample(
        [
            "(HERE / 'n.txt').read_text()",
            "open(HERE / 'n.txt')",
            "os.read(os.open(str(HERE / 'n.txt'), os.O_RDONLY), 9)",
            "json.load(open(os.fsencode(HERE / 'n.txt'), 'rb'))",
            "try:\n    open(HERE / 'n.txt')\nexcept Exception: pass\n",
            "import numpy\nnumpy.loadtxt(str(HERE / 'n.txt'))",
        ]
    ),
)
def test_a_file_that_a_source_reads_is_refused_unless_it_is_listed(folder, refused, body):
    source(folder, body)
    message = refused()
    assert message == (
        f'mine.py reads {folder}/n.txt while it is built, which is in no key; list it in the spec: files = ["n.txt"]'
    )
    assert refused(files=["n.txt"]) == ""
    source(folder, "", head=body)
    assert "files = [" in refused()  # as well while it is imported


def test_a_file_that_is_not_there_is_refused_too(folder, refused):
    """What the source does without it is another kernel than with it."""
    source(folder, "try:\n    open(HERE / 'absent.txt')\nexcept OSError: pass")
    assert 'files = ["absent.txt"]' in refused()
    assert refused(files=["absent.txt"]) == ""


def test_a_path_from_the_current_folder_and_one_elsewhere_have_another_remedy(folder, refused, tmp_path):
    source(folder, "open('n.txt')")
    assert 'open Path(__file__).with_name("n.txt"), and list it' in refused()
    (tmp_path / "far.txt").write_text("1")
    source(folder, "open(HERE.parent / 'far.txt')")
    assert f'put it into {folder}, or below, and list it in the spec: files = ["far.txt"]' in refused()


@pytest.mark.parametrize(
    "body",
    sample(
        [
            "os.environ['N']",
            "os.environ.get('N')",
            "os.getenv('N')",
            "'N' in os.environ",
            "os.environb.get(b'N')",
            "os.environ.pop('N', None)",
        ]
    ),
)
def test_a_variable_that_a_source_reads_is_refused_unless_it_is_listed(folder, refused, body):
    source(folder, f"try:\n    {body}\nexcept KeyError: pass")
    message = "mine.py reads the environment variable N while it is built, which is in no key; list it in the spec: "
    assert refused() == f'{message}env = ["N"]'
    assert refused(env=["N"]) == ""


@pytest.mark.parametrize(
    "body",
    [
        "import tempfile; tempfile.gettempdir()",
        "open(os.devnull)",
        "Path('own.txt').write_text('1'); Path('own.txt').read_text()",
        "import inspect; inspect.getsource(f)",
        "import helper, shutil; shutil.which('nvcc')",
        "dict(os.environ)",
        "import ctypes.util, decimal, importlib.metadata; importlib.metadata.version('click')",
    ],
)
def test_what_is_no_input_of_the_source_is_not_refused(folder, refused, body):
    (folder / "helper.py").write_text("import json\n")
    source(folder, body)
    assert refused() == ""


def test_what_other_packages_read_while_they_are_imported_is_not_the_sources(folder, refused):
    source(folder, "", head="import numpy, click, yaml" if _has("yaml") else "import numpy, click")
    assert refused() == ""


def test_what_pip_installed_into_a_folder_is_a_package_too(folder, refused, tmp_path, monkeypatch):
    """With `pip install --target`, a folder of any name on the path is one of packages."""
    target = tmp_path / "target"
    information = target / "settings-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: settings\nVersion: 1\n")
    (information / "RECORD").write_text("settings.py,,\nsettings-1.dist-info/METADATA,,\n")
    (target / "settings.py").write_text("import os\nos.environ.get('N')\n")
    monkeypatch.syspath_prepend(str(target))
    source(folder, "", head="import settings")
    assert refused() == ""
    (information / "METADATA").unlink()
    (information / "RECORD").unlink()
    information.rmdir()
    assert 'env = ["N"]' in refused()


def _has(name):
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_a_module_that_no_import_statement_names_is_refused(folder, refused):
    (folder / "late.py").write_text("")
    source(folder, "__import__('la' + 'te')")
    assert refused() == (
        f"the source has loaded the module late from {folder}/late.py, which is in no key, as no import statement names"
        " it; write import late in the module of the source"
    )
    source(folder, "import late")
    assert refused() == ""


def spec_of(**lists):
    (spec,) = parse_text(
        "schema = 1\n[[kernel]]\nname = 'k'\nop = 'extern'\nsource = 'mine:f'\narch = 'sm_90a'\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lists.items()),
        "own",
    )
    return spec


def test_what_the_spec_lists_is_in_the_key(folder, monkeypatch):
    source(folder, "")
    monkeypatch.setenv("N", "1")
    before = Foreign().fields(spec_of(files=["n.txt", "data/m.txt"], env=["N", "UNSET_HERE"]))
    assert before["foreign.env.N"] == '"1"'
    assert before["foreign.env.UNSET_HERE"] == "null"
    assert before["foreign.file.data/m.txt"] == "absent"
    (folder / "n.txt").write_text("4")
    monkeypatch.setenv("N", "2")
    after = Foreign().fields(spec_of(files=["n.txt", "data/m.txt"], env=["N", "UNSET_HERE"]))
    assert differing(before, after) == ["foreign.env.N", "foreign.file.n.txt"]
    keys = {key_of(Identity(toolchain={"x": "1"}).key_fields(spec_of(env=item))) for item in ([], ["N"], ["M"])}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("key", "value"), [("files", "/etc/x"), ("files", "../x"), ("files", ""), ("env", "A B"), ("env", "")]
)
def test_a_list_that_names_nothing_is_refused(key, value):
    with pytest.raises(SpecError, match=key):
        spec_of(**{key: [value]})
