"""`fusekit export --lang c` over a store of test kernels."""

import pytest

from tests.runtime.samples import publish


@pytest.fixture
def stocked(fusekit):
    publish(fusekit.root)
    publish(fusekit.root, "sample/fc2@128x160-c2x1")
    return fusekit


def test_it_writes_two_files_and_says_so(stocked, tmp_path):
    result = stocked("export", "--lang", "c", "out/c", "sample/*", "--prefix", "moe", "--json")
    assert result.json == {
        "files": ["out/c/moe.h", "out/c/moe.c"],
        "kernels": ["sample/fc1@128x160-c2x1", "sample/fc2@128x160-c2x1"],
        "layers": [],
        "prefix": "moe",
    }
    folder = tmp_path / "out" / "c"
    assert "moe_status moe_sample_fc2_launch(" in (folder / "moe.h").read_text()
    assert '#include "moe.h"' in (folder / "moe.c").read_text()


def test_a_name_that_is_not_built(stocked):
    result = stocked("export", "--lang", "c", "out", "sample/fc3", code=3)
    assert "fusekit build" in result.err


def test_a_prefix_that_is_none(stocked):
    assert "prefix '9'" in stocked("export", "--lang", "c", "out", "sample/fc1", "--prefix", "9", code=2).err


def test_a_folder_that_cannot_be_made(stocked, tmp_path):
    (tmp_path / "out").write_text("")
    stocked("export", "--lang", "c", "out/c", "sample/fc1", code=1)


def test_the_loader_is_the_same_for_every_kernel(fusekit, stocked, tmp_path):
    result = stocked("export", "--lang", "c", "--loader", "out", "--prefix", "moe", "--json")
    assert result.json == {"files": ["out/moe.h", "out/moe.c"], "kernels": [], "layers": [], "prefix": "moe"}
    assert "moe_status moe_bundle_open(" in (tmp_path / "out" / "moe.h").read_text()
    first = (tmp_path / "out" / "moe.c").read_bytes()
    fusekit("--store", str(tmp_path / "none"), "export", "--lang", "c", "--loader", "out", "--prefix", "moe")
    assert (tmp_path / "out" / "moe.c").read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--loader", "out"), "give --lang c"),
        (("--lang", "c", "--loader", "out", "sample/fc1"), "fusekit export kernels.tar NAME"),
        (("--lang", "c", "--loader", "out", "--arch", "sm_90a"), "takes no NAME"),
        (("--lang", "c", "out", "sample/fc1", "--sign", "key"), "leave --sign out"),
        (("--prefix", "moe", "kernels.tar"), "give --lang c"),
    ],
)
def test_options_that_make_no_sense_together(stocked, arguments, text):
    assert text in stocked("export", *arguments, code=2).err
