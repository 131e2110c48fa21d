"""`fusekit report` and `fusekit diff` over a store of test entries."""

import base64
import hashlib
import json
import shutil
import subprocess
import zlib
from html.parser import HTMLParser

import pytest

from fusekit.config import Config
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit.store.keys import sha256
from fusekit.store.signature import generate
from fusekit_cli.report_page import html
from tests.cli.conftest import NAMES, SPEC
from tests.store.samples import build_entry, cut

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "</script><script>alert(1)</script><!--\" onload='alert(2)' \u202e \x1b[31m"


class Page(HTMLParser):
    """What a browser makes of a page: what it would load, run, and show."""

    def __init__(self, text):
        super().__init__()
        self.policy, self._in, self._cell = "", "", False
        self.loads, self.handlers, self.styles = [], [], []
        self.scripts = []  # [attributes, text]
        self.rows = []  # texts of cells
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._in = tag
        named = {name: value or "" for name, value in attributes}
        self.handlers += [name for name in named if name.startswith("on") or name == "style"]
        self.loads += [tag] if tag in ("link", "img", "iframe", "object", "embed", "base") else []
        self.loads += [url for name, url in named.items() if name in ("src", "href", "xlink:href") and url[:1] != "#"]
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]
        if tag == "script":
            self.scripts.append([named, ""])
        if tag == "tr" and "data-index" in named:
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
            self._cell = True

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1][1] += data
        elif self._in == "style":
            self.styles.append(data)
        elif self._cell:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self._in = "" if tag in ("script", "style") else self._in
        self._cell = self._cell and tag != "td"


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check(text):
    """The page in `text`, which loads nothing and runs one script alone; and its data."""
    page = Page(text)
    assert not page.loads
    assert not page.handlers
    (kind, data), (attributes, script) = page.scripts
    assert (kind, attributes) == ({"type": "application/json", "id": "data"}, {})
    assert page.policy == (
        f"default-src 'none'; style-src {digest(''.join(page.styles))}; script-src {digest(script)}; base-uri 'none'"
    )
    assert not any(word in script for word in ("innerHTML", "eval", "fetch", "outerHTML", "insertAdjacentHTML"))
    return page, json.loads(data)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "page.html"


def names(page):
    return [row[0] for row in page.rows]


def test_a_page_of_a_store(store, fusekit, out):
    document = fusekit("report", str(out), "--json").json
    assert document == {"file": str(out), "bytes": out.stat().st_size, "kernels": 3, "left_out": []}
    page, data = check(out.read_text())
    assert names(page) == [name.partition("/")[2] for name in NAMES]
    assert page.rows[0][1:] == [
        "grouped-gemm",
        "168",
        "0",
        "1.0 KiB",
        "32",
        "19%",
        "8",
        f"{len(build_entry()[1]) / 1024:.1f} KiB",
    ]
    assert [kernel["name"] for kernel in data] == [*NAMES]
    assert "12 CTAs of 32 threads on a multiprocessor: 12 of 64 warps, limited by registers" in data[0]["about"]
    sections = dict(data[0]["sections"])
    assert build_entry()[0].key in sections["Entry"]
    assert "block" in sections["Launch"]
    before = out.read_bytes()
    fusekit("report", str(out))
    assert out.read_bytes() == before


def test_where_a_kernel_ran(store, fusekit, out):
    (listed,) = store.names(NAMES[0])
    store.note_run(listed.record.key, "NVIDIA H200")
    fusekit("report", str(out))
    page, _ = check(out.read_text())
    assert "H200" in page.rows[0] and "H200" not in page.rows[1]


def test_names_choose_and_what_is_missing_is_an_error(store, fusekit, out, tmp_path):
    fusekit("report", str(out), "quickstart/moe-fc1")
    assert names(check(out.read_text())[0]) == [name.partition("/")[2] for name in NAMES[1:]]
    assert "not in the store" in fusekit("report", str(out), "nothing", code=3).err
    assert "there is no kernel in" in fusekit("report", str(out), code=3, FUSEKIT_STORE=str(tmp_path / "none")).err
    assert "make it first" in fusekit("report", str(tmp_path / "none" / "page.html"), code=2).err
    cut(store.roots[0].entry_path(build_entry(0)[0].key))
    assert "left out:" in fusekit("report", str(out), code=1).err
    assert len(check(out.read_text())[0].rows) == 2


def test_bundles_wheels_and_remotes(store, fusekit, out, tmp_path):
    bundle, remote = tmp_path / "kernels.tar", tmp_path / "remote"
    fusekit("export", str(bundle))
    wheel = fusekit("export", "--wheel", "my-kernels-1.0", "-o", str(tmp_path), "--json").json["file"]
    fusekit("push", str(remote))
    empty = {"FUSEKIT_STORE": str(tmp_path / "none")}
    for source in (bundle, wheel, remote):
        assert fusekit("report", str(out), "--from", str(source), "--json", **empty).json["kernels"] == 3
        text = out.read_text()
        assert len(check(text)[0].rows) == 3
        assert f"<h1>{source}</h1>" in text
    assert [row["name"] for row in fusekit("ls", "--from", wheel, "--json", **empty).json] == [*NAMES]
    assert fusekit("verify", "--from", wheel, "--full", "--json", **empty).json["bad"] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("host-object", "fusekit adopt package/function@1"), ("carried", "fusekit exec --with PACKAGE --")],
)
def test_what_programs_compiled_is_not_of_a_kernel(store, fusekit, out, kind, remedy):
    fields = {"arch": "sm_90a", "kind": kind}
    entry = Entry(key_of(fields), fields, sha256(b"code"), 4, {kind: {}}, {}, {}, {}, 0.0)
    store.publish(entry, b"code")
    store.publish_name(NameRecord("package/function@1", "sm_90a", entry.key, {kind: {}}, {}), entry)
    fusekit("report", str(out))
    assert len(check(out.read_text())[0].rows) == len(NAMES)
    for command in (("diff", NAMES[0], "package/function"), ("report", str(out), "package")):
        assert remedy in fusekit(*command, code=2).err
    assert "package/function@1  sm_90a  " in fusekit("explain", "package/function").out


def test_what_a_spec_says_is_text(store, fusekit, out):
    entry, cubin = build_entry(7)
    store.publish(entry, cubin)
    store.publish_name(NameRecord("quickstart/odd@v", "sm_90a", entry.key, SPEC | {"op": NASTY, "summary": NASTY}, {}))
    fusekit("report", str(out))
    page, data = check(out.read_text())
    shown = "</script><script>alert(1)</script><!--\" onload='alert(2)' \\u202e \\x1b[31m"
    assert page.rows[-1][1] == shown
    assert shown in dict(data[-1]["sections"])["Spec"]
    assert data[-1]["about"].startswith(NASTY[:20])


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_runs_the_script_and_nothing_else(store, fusekit, out, tmp_path):
    entry, cubin = build_entry(7)
    store.publish(entry, cubin)
    nasty = NASTY.replace("alert(1)", "document.title=1").replace("alert(2)", "document.title=1")
    store.publish_name(NameRecord("quickstart/odd@v", "sm_90a", entry.key, SPEC | {"op": nasty, "summary": nasty}, {}))
    fusekit("report", str(out))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    url = f"{out.as_uri()}#quickstart/odd@v.sm_90a"
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout
    assert '<h2 id="kernel">quickstart/odd@v</h2>' in shown
    assert '<div class="tools scripted">' in shown, "the script has run to its end"
    assert f"<title>{store.root}: fusekit report</title>" in shown
    assert shown.count("<script") == 2


def test_a_nasty_name_is_text():
    kernel = dict.fromkeys(("op", "spills", "shared", "threads", "occupancy", "proved", "ran"))
    kernel |= {"name": NASTY, "model": NASTY, "arch": NASTY, "registers": 1, "cubin": 1, "signed": NASTY}
    kernel |= {"about": NASTY, "search": NASTY, "sections": [(NASTY, NASTY)]}
    page, data = check(html(NASTY, [kernel], {NASTY: NASTY}, [NASTY]))
    assert data[0]["name"] == NASTY
    assert len(page.rows) == 1


def test_signers(store, fusekit, out, tmp_path):
    generate(tmp_path / "key", "release")
    signing = Store.open(Config(store=store.root, signing_key=tmp_path / "key"))
    key_id = signing.signer.public.id
    fusekit("key", "sign", "--sign", str(tmp_path / "key"))
    fusekit("report", str(out))
    assert {row[-1] for row in check(out.read_text())[0].rows} == {key_id}
    assert "which are not checked" in out.read_text()
    fusekit("report", str(out), FUSEKIT_TRUSTED_KEYS=str(tmp_path / "key.pub"))
    assert {row[-1] for row in check(out.read_text())[0].rows} == {"release"}
    assert "Signatures are checked" in out.read_text()


@pytest.fixture
def nvdisasm(tmp_path):
    """PATH with a disassembler for which one of the cubins has an instruction more."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for opcodes in (["NOP", "STL.64"], ["NOP", "STL.64", "STL"]):
        kernel = {"function-name": "kernel", "sass-instructions": [{"opcode": opcode} for opcode in opcodes]}
        (folder / str(len(opcodes))).write_text(json.dumps([{}, [kernel]]))
    tool = folder / "nvdisasm"
    tool.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --print-code ]; then echo "HGMMA <R24>"\n'
        f'elif grep -q "cubin 1" "$2"; then cat {folder}/3\n'
        f"else cat {folder}/2; fi\n"
    )
    tool.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_machine_code_is_there_if_it_is_asked_for(store, fusekit, out, nvdisasm):
    fusekit("report", str(out), "--sass", **nvdisasm)
    _, data = check(out.read_text())
    code = [dict(kernel["sections"])["SASS"]["deflated"] for kernel in data]
    assert {zlib.decompress(base64.b64decode(text)) for text in code} == {b"HGMMA <R24>\n"}


def test_diff(store, fusekit, nvdisasm):
    document = fusekit("diff", NAMES[0], NAMES[2], "--json", **nvdisasm).json
    assert (document["a"]["name"], document["b"]["name"]) == (NAMES[0], NAMES[2])
    assert document["spec"] == [{"name": "tile", "a": [128, 128], "b": [128, 192]}]
    assert document["launch"] == []
    assert document["instructions"] == []
    same = fusekit("diff", NAMES[0], NAMES[0], **nvdisasm).out
    assert "the cubins are the same" in same
    document = fusekit("diff", NAMES[0], NAMES[1], "--json", **nvdisasm).json
    assert document["instructions"] == [{"name": "STL", "a": 1, "b": 2}, {"name": "all", "a": 2, "b": 3}]
    lines = fusekit("diff", NAMES[0], NAMES[1], **nvdisasm).out.splitlines()
    assert ["instructions", "STL", "1", "2"] in [line.split() for line in lines]
    assert f"name one: {NAMES[0]}" in fusekit("diff", "quickstart", NAMES[0], code=2, **nvdisasm).err
    assert "not in the store" in fusekit("diff", NAMES[0], "quickstart/none", code=3).err
