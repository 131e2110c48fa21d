"""A cluster from nothing: a model's config, a lock, an S3 remote, nodes with and without a compiler, with an older
driver, a newer DSL, a rollback.
"""

import dataclasses
import hashlib
import json
import shutil

import pytest

from fusekit.abi import LaunchRecord
from fusekit.compiler.identity import Identity
from fusekit.compiler.targets import select
from fusekit.errors import IntegrityError
from fusekit.library import Library, open_library
from fusekit.project import read_project
from fusekit.runtime.driver import Driver
from fusekit.store import Store, key_of
from fusekit.store.entries import CUBIN_FORMAT
from fusekit.store.lockfile import read_lock
from tests.runtime.samples import fake_for
from tests.spec.configs import CONFIGS

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
pytest.importorskip("cryptography")
BUCKET = "kernels"
NEWER = {"nvidia-cutlass-dsl": "4.8.9", "nvidia-cutlass-dsl-libs-cu13": "4.8.9"}
KERNEL = "layer.toml/moe.unpermute"  # of the layer, what is compiled fastest
CUDA_12 = 12080


@pytest.fixture(scope="module")
def s3():
    """The environment of a process that reaches a bucket of a server in this one."""
    server = pytest.importorskip("moto.server", reason="moto is not installed: .ci/run has versions that fit s3fs")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    boto3 = pytest.importorskip("boto3")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url, aws_access_key_id="any", aws_secret_access_key="any",
                 region_name="us-east-1").create_bucket(Bucket=BUCKET)  # fmt: skip
    yield keys | {"AWS_ENDPOINT_URL": url}
    running.stop()


def build_with_newer_dsl(store, project):
    """Publishes what a build of the project by a newer DSL with the library of CUDA 13 does."""
    for spec in select(project=project):
        record = store.find_name(spec.full_name, spec.arch)
        entry, cubin = store.load(record.key)
        cubin = cubin[:CUBIN_FORMAT] + b"\x08" + cubin[CUBIN_FORMAT + 1 :]
        fields = Identity(toolchain=NEWER).key_fields(spec)
        built = dataclasses.replace(
            entry, key=key_of(fields), fields=fields, cubin_sha256=hashlib.sha256(cubin).hexdigest(),
            toolchain=entry.toolchain | {"distributions": NEWER}, resources=entry.resources | {"cubin_format": 8},
        )  # fmt: skip
        store.publish(built, cubin)
        store.publish_name(dataclasses.replace(record, key=built.key, summary={}))


def loaded(project, name, driver):
    """The digest of the cubin that a program of the project loads on a machine with a driver of this version."""
    store = open_library(project=project).store
    entry, _ = store.load(store.find_name(name, "sm_90a").key)
    record = LaunchRecord.from_json(dict(entry.launch))
    return Library(store, Driver(fake_for(record, symbol=record.symbol, version=driver))).load(name).digest


def test_a_cluster(fusekit, tmp_path, s3, soak, monkeypatch):
    # A project from a model's config, with a remote and one trusted key.
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    fusekit("init", "config.json")
    project = tmp_path / "fusekit.toml"
    text = project.read_text().replace("# cluster = ", f'cluster = "s3://{BUCKET}/team" # ')
    project.write_text(text.replace("# [trust]", "[trust]").replace("# keys = ", 'keys = ["team.pub"] # '))
    fusekit("key", "new", "team")
    assert len(fusekit("lock", "--check", "--json", code=1).json["changed"]) > 20
    if not soak:  # one kernel of the layer
        (tmp_path / "layer.toml").write_text(fusekit("new", "config.json").out)
        project.write_text(project.read_text().replace('models = ["config.json"]', "").replace(
            "specs = []", f'specs = ["{KERNEL}"]'))  # fmt: skip
    built = fusekit("lock", "--sign", "team", "--json").json
    assert (built["serial"], built["missing"]) == (1, [])
    fusekit("push", "cluster", "--sign", "team", **s3)

    # A second store, from S3 alone; an image has only the files of the project, and builds nothing.
    node = fusekit("sync", "--frozen", "--json", "--store", "node", **s3).json
    assert (node["from"], node["missing"]) == ({"cluster": built["same"] or len(built["changed"])}, [])
    image = tmp_path / "image"
    image.mkdir()
    for path in (project, tmp_path / "team.pub", *tmp_path.glob("fusekit.lock*")):
        shutil.copy(path, image)
    container = {"FUSEKIT_LOCK": str(image / "fusekit.lock"), "FUSEKIT_STORE": str(image / "store")}
    assert fusekit("sync", "--frozen", "--json", **container, **s3).json["from"] == node["from"]
    offline = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    again = fusekit("sync", "--frozen", "--json", **container, **s3 | offline).json
    assert (list(again["from"]), again["problems"]) == (["here"], [])
    shutil.copytree(tmp_path, tmp_path.with_name("first"), ignore=shutil.ignore_patterns("node", "image"))

    # The DSL moves on: the lock lists both builds, and a node takes the one that its driver reads.
    lock = read_lock(tmp_path / "fusekit.lock")
    (name, arch), (first,) = next(iter(lock.kernels.items()))
    build_with_newer_dsl(Store(fusekit.root, signing_key=tmp_path / "team"), read_project(project))
    assert fusekit("lock", "--sign", "team", "--json").json["serial"] == 2
    fusekit("push", "cluster", "--sign", "team", **s3)
    fusekit("sync", "--frozen", "--store", "node", **s3)
    last = next(build for build in read_lock(tmp_path / "fusekit.lock").kernels[name, arch] if build != first)
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "node"))
    assert loaded(project, name, CUDA_12) == first.cubin_sha256
    assert loaded(project, name, 13000) == last.cubin_sha256

    # The lock before that, whole and signed, is refused.
    for path in tmp_path.with_name("first").glob("fusekit.lock*"):
        shutil.copy(path, tmp_path)
    refused = fusekit("sync", "--frozen", "--store", "node", code=1, **s3)
    assert "has serial 1, and serial 2 of it was used here: it is older" in refused.err
    with pytest.raises(IntegrityError, match="it is older"):
        _ = open_library(project=project).store
