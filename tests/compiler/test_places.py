"""Lines of sources in errors."""

import sys
from functools import partial

import pytest

from fusekit.compiler.places import with_places
from fusekit.compiler.source_call import call_source
from fusekit.errors import BuildError, ProofError

SOURCE = """@one
@two(
    3
)
def kernel():
    pass


def plain():
    call(2)
"""


@pytest.mark.parametrize(("line", "shown"), [(1, 5), (2, 5), (3, 5), (5, 5), (6, 6), (9, 9), (10, 10), (99, 99)])
def test_the_line_of_a_decorator_becomes_that_of_its_def(tmp_path, line, shown):
    path = tmp_path / "a (copy).py"
    path.write_text(SOURCE)
    error = with_places(ProofError(f"host code: a call ({path}, line {line}); say it otherwise", parameter="x"))
    assert str(error) == f"host code: a call ({path}, line {shown}); say it otherwise"
    assert (type(error), error.parameter) == (ProofError, "x")


@pytest.mark.parametrize("text", ["a call (/nowhere.py, line 1)", "a call", "(<unknown>, line 3)"])
def test_what_cannot_be_looked_up_stays_as_it_is(text):
    assert str(with_places(BuildError(text))) == text


def test_what_python_raised_has_the_line_of_the_source(tmp_path):
    """Not that of the function of fusekit in which it came about."""
    path, namespace = tmp_path / "mine.py", {}
    path.write_text("def host(call):\n    return call()\n")
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with pytest.raises(BuildError) as caught:
        try:
            namespace["host"](partial(with_places, None))
        except AttributeError as error:
            raise BuildError("the CuTe DSL refuses the kernel: x") from error
    assert str(with_places(caught.value)) == f"the CuTe DSL refuses the kernel: x ({path}, line 2)"


def test_a_module_that_cannot_be_parsed_says_its_line_itself(tmp_path, monkeypatch):
    (tmp_path / "unparsed.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BuildError) as caught:
        call_source("unparsed:f", {}, "sm_90a")
    assert str(with_places(caught.value)).endswith(": SyntaxError: invalid syntax (unparsed.py, line 1)")


def test_a_file_that_is_no_source_stays_as_it_is(tmp_path):
    (tmp_path / "a.py").write_bytes(b"\0(")
    assert str(with_places(BuildError(f"a call ({tmp_path}/a.py, line 1)"))) == f"a call ({tmp_path}/a.py, line 1)"


def test_a_module_that_needs_a_gpu_at_import(tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "tensors_of.py").write_text("def zeros():\n    raise RuntimeError('No CUDA GPUs are available')\n")
    (tmp_path / "needs_gpu.py").write_text("import tensors_of\n\nX = tensors_of.zeros()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(package), *sys.path])
    with pytest.raises(BuildError) as raised:
        call_source("needs_gpu:arguments", {}, "sm_90a")
    message = str(with_places(raised.value))
    assert message.startswith("source needs_gpu:arguments: importing needs_gpu failed: RuntimeError: No CUDA GPUs")
    assert (
        f"({tmp_path / 'needs_gpu.py'}, line 3); a build sees no GPU: make the arguments of make_fake_tensor" in message
    )
