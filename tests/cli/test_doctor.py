"""fusekit doctor: what this machine can do, and how its stores are."""

import importlib.util
import json
import subprocess

import pytest

from fusekit_cli.main import main
from tests.store.samples import build_entry, cut


def test_doctor_without_a_compiler_a_driver_or_a_store(fusekit):
    document = fusekit("doctor", "--json").json
    assert {"compiler", "driver", "gpus", "stores", "can_build", "can_run"} <= set(document)
    for probe in ("compiler", "driver"):
        assert document[probe]["ok"] or document[probe]["problem"]
    assert document["can_build"] == (importlib.util.find_spec("cutlass") is not None)
    (own,) = document["stores"]
    assert (own["path"], own["exists"], own["writable"], own["problem"]) == (str(fusekit.root), False, True, None)
    assert not fusekit.root.exists()


class Bindings:
    """As much of cuda.bindings.driver as a look at the devices takes."""

    class CUdevice_attribute:  # noqa: N801
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 132

    def __init__(self, version=13000, count=2):
        self.version, self.count = version, count

    def cuDriverGetVersion(self):  # noqa: N802
        return 0, self.version

    def cuInit(self, flags):  # noqa: N802
        return (0,)

    def cuDeviceGetCount(self):  # noqa: N802
        return 0, self.count

    def cuDeviceGet(self, index):  # noqa: N802
        return 0, index

    def cuDeviceGetAttribute(self, kind, device):  # noqa: N802
        return 0, kind

    def cuDeviceGetName(self, length, device):  # noqa: N802
        return 0, b"NVIDIA H200\0\0"

    def cuDeviceTotalMem(self, device):  # noqa: N802
        return 0, 141 << 30


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    def run(bindings):
        monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: bindings)
        monkeypatch.setattr("fusekit_cli.doctor._compiler", lambda: {"ok": True, "toolchain": {}, "problem": None})
        assert main(["doctor", "--json", "--store", str(tmp_path / "store")]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(["doctor", "--store", str(tmp_path / "store")]) == 0
        return document, capsys.readouterr().out

    return run


def test_doctor_looks_at_tuning_tables(doctor, tmp_path):
    path = tmp_path / "store" / "tuning" / "sm_90a.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "arch": "sm_90a", "rows": []}')
    document, text = doctor(Bindings())
    assert document["stores"][0]["tuning"] == {"sm_90a": 0}
    assert "tuning table of sm_90a: 0 rows" in text
    path.write_text("{")
    document, text = doctor(Bindings())
    assert f"{path} is no tuning table of sm_90a" in document["stores"][0]["problem"]
    assert "fusekit bench --sweep" in text


def test_doctor_of_a_store_that_cannot_be_written(doctor, monkeypatch):
    assert "store (writable)" in doctor(Bindings())[1]
    monkeypatch.setattr("fusekit.store.files.is_writable", lambda root: False)
    document, text = doctor(Bindings())
    assert "store (not writable)\n        it cannot be written; building needs another --store" in text
    assert document["stores"][0]["writable"] is False


def test_a_store_that_everybody_may_write_in(store, fusekit, doctor):
    clean = fusekit("verify", "--json")
    assert (clean.json["open_to_all"], clean.err) == ([], "")
    assert doctor(Bindings())[0]["stores"][0]["problem"] is None
    folder = next((store.root / "entries").iterdir())
    for path in (folder, store.root / "names"):
        path.chmod(0o1777)
    result = fusekit("verify", "--json")
    assert result.json["open_to_all"] == [str(folder), str(store.root / "names")]
    assert f"every user of this machine may write in {folder}, {store.root / 'names'}, and so" in result.err
    assert f"may write in {folder}, and so" in doctor(Bindings())[0]["stores"][0]["problem"]
    store.root.chmod(0o777)
    assert fusekit("verify", "--json").json["open_to_all"][0] == str(store.root)
    result = fusekit("verify")
    command = result.err.split("`")[1]
    assert subprocess.run(command, shell=True, check=True)
    assert fusekit("verify", "--json").json["open_to_all"] == []


def test_doctor_notices_the_package_of_that_name_on_pypi(doctor, tmp_path, monkeypatch):
    assert doctor(Bindings())[0]["package"]["problem"] is None
    other = tmp_path / "fusekit-3.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: fusekit\nVersion: 3.1\n")
    (other / "entry_points.txt").write_text("[console_scripts]\nfusekit = fusekit.cli:main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    document, text = doctor(Bindings())
    problem = document["package"]["problem"]
    assert problem in text
    assert f"another project's package fusekit 3.1 is installed in {tmp_path}" in problem
    assert "`pip uninstall fusekit`, then `pip install .`" in problem


def test_doctor_lists_the_gpus(doctor):
    document, text = doctor(Bindings())
    assert document["can_run"]
    assert document["driver"]["cuda"] == "13.0"
    assert [gpu["device"] for gpu in document["gpus"]] == [0, 1]
    gpu = {"device": 1, "name": "NVIDIA H200", "arch": "sm_90a", "sm_count": 132, "memory_bytes": 141 << 30}
    assert document["gpus"][1] == gpu
    assert text.startswith("fusekit ")
    assert "device 1: NVIDIA H200, sm_90a, 132 SMs, 141.0 GiB" in text


def test_doctor_with_an_old_driver_or_no_gpu(doctor):
    document, text = doctor(Bindings(version=11080))
    assert not document["can_run"]
    assert "CUDA 11.8" in document["driver"]["problem"]
    assert "run     no: the NVIDIA driver supports CUDA 11.8" in text
    document, text = doctor(Bindings(count=0))
    assert not document["can_run"]
    assert "sees no GPU" in text


def test_doctor_says_who_is_trusted(fusekit, tmp_path):
    assert fusekit("doctor", "--json").json["trust"] is None
    fusekit("key", "new", str(tmp_path / "farm"), "--comment", "build farm")
    trusting = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "farm.pub")}
    (key,) = fusekit("doctor", "--json", **trusting).json["trust"]["keys"]
    assert f"trust   only what is signed by {key['id']} build farm\n" in fusekit("doctor", **trusting).out
    nobody = fusekit("doctor", FUSEKIT_TRUSTED_KEYS="")
    assert (
        "trust   FUSEKIT_TRUSTED_KEYS is set and names no file; without a trusted key nothing is loaded" in nobody.out
    )


def test_doctor_says_how_the_stores_are(store, fusekit, tmp_path):
    cut(store.roots[0].entry_path(build_entry()[0].key))
    document = fusekit("doctor", "--json", FUSEKIT_STORES=str(tmp_path / "gone")).json
    own, gone = document["stores"]
    assert (own["entries"], own["bad"]) == (3, 1)
    assert "fusekit verify" in own["problem"]
    assert "there is no folder" in gone["problem"]
    assert json.dumps(document)


def test_doctor_lists_trainers_and_servers(doctor, monkeypatch, tmp_path):
    from importlib import metadata

    from fusekit.library import Library
    from fusekit.spec.doors import DOORS
    from tests.plan.test_layer_program import options

    def version(package):
        if package == "torchtitan":
            return "0.2.9"
        raise metadata.PackageNotFoundError(package)

    layer = options(dtype="bf16", topk=2, router={"input": "choices"}, glu_layout="interleaved")
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(Library, "layers", lambda self: {"model/moe": layer})
    document, text = doctor(Bindings())
    doors = {door["door"]: door for door in document["doors"]}
    assert doors.keys() == DOORS.keys()
    assert doors["torchtitan"]["layers"] == ["model/moe"] and doors["megatron"]["layers"] == []
    assert f"torchtitan: torchtitan 0.2.9, tried with {DOORS['torchtitan'].tried}; 1 layer, such as model/moe" in text
    assert "megatron: no megatron-core, tried with" in text
    assert "no layer; `fusekit new MODEL --for megatron` writes one" in text
