"""The recipes of examples/deploy: what each runs is run here, as far as a machine without their services can.

`--soak` installs what the Dockerfile installs, into a new environment for each of its images.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.compiler.build import build
from fusekit.config import Config

ROOT = Path(__file__).parents[1]
HERE = ROOT / "examples" / "deploy"
KERNELS = "quickstart/moe-fc1@128x128-c2x1"
SCRIPTS = sorted((HERE / "slurm").glob("*.sbatch"))
NO_GPU = 4


@pytest.fixture
def run(tmp_path):
    """Runs a command with nothing of the user's environment."""

    def runner(*command, code=(0,), path=(), cwd=tmp_path, **environment):
        search = os.pathsep.join([*map(str, path), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        base = {"PATH": search, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        base |= {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
        done = subprocess.run(command, env=base | environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode in code, (command, done.stdout, done.stderr)
        return done

    return runner


def stub(folder, name, text):
    """A program that stands in for a service's."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return folder


# Installs the wheels among its arguments, as pip does: into the folder after --target, or one on Python's path.
PIP = """to=$SITE
while [ $# -gt 0 ]; do
  case "$1" in
    --target) to=$2; shift;;
    *.whl) python3 -m zipfile -e "$1" "$to" || exit;;
  esac
  shift
done"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store with what the recipes build, which finds it there."""
    folder = tmp_path_factory.mktemp("built") / "store"
    assert build([KERNELS], config=Config(store=folder)).ok
    return folder


# -- Docker -----------------------------------------------------------------------------------------------------------


def stages():
    """The Dockerfile's images: name -> its instructions."""
    text = re.sub(r"\\\n", " ", (HERE / "Dockerfile").read_text())
    got = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            got[rest.rpartition(" ")[2]] = current = []
        elif got:
            current.append((instruction, rest.strip()))
    return got


def test_images(run, soak, tmp_path, built):
    tools = stub(tmp_path / "tools", "useradd", ":")
    source = tmp_path / "source"
    if soak:
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*cache__"))
    else:
        source.mkdir()
        shutil.copytree(built, tmp_path / "build" / "kernels")
    for name, instructions in stages().items():
        kernels, wheels, path = tmp_path / name / "kernels", tmp_path / name / "wheels", [tools]
        if soak:
            run(sys.executable, "-m", "venv", str(tmp_path / name / "venv"))
            path.append(tmp_path / name / "venv" / "bin")
        else:
            stub(tools, "pip", PIP)
        site = str(tmp_path / name / "site")
        variables = {"HOME": str(tmp_path / name), "SITE": site, "PYTHONPATH": site}
        (tmp_path / name).mkdir(exist_ok=True)
        for instruction, rest in instructions:
            here = re.sub(r"(?<=[ =])/(?=kernels|wheels)", f"{tmp_path / name}/", f" {rest}").strip()
            if instruction in ("ARG", "ENV"):
                key, _, value = here.partition("=")
                variables[key] = KERNELS if key == "KERNELS" else value
            elif instruction == "RUN":
                run("sh", "-c", here, path=path, cwd=source, **variables)
            elif rest.startswith("--from="):
                folder = {"--from=build /kernels /kernels": kernels, "--from=build /wheels /wheels": wheels}[rest]
                shutil.copytree(tmp_path / "build" / folder.name, folder)
        if name != "build":
            assert KERNELS in run("fusekit", "ls", path=path, **variables).stdout
            run("fusekit", "run", KERNELS, path=path, code=(0, NO_GPU), **variables)
        if name == "launch-wheel":
            (job,) = re.findall(
                r"image: .*/fusekit-(.*):.*\n +args: \[(.*)\]", (HERE / "kubernetes-wheel.yaml").read_text()
            )
            assert job[0] == name
            run("fusekit", *job[1].split(", "), path=path, code=(0, NO_GPU), **variables)
    if soak:
        missing = run("fusekit", "build", "quickstart", path=path, code=(1,), **variables)
        assert "pip install 'llvmlite" in missing.stderr


# -- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(run, tmp_path):
    """Runs a job's script where `srun` starts one task."""
    stub(tmp_path / "tools", "pip", PIP)
    tools = stub(tmp_path / "tools", "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    job |= {"PROJECT": str(tmp_path / "project"), "LOCAL": str(tmp_path / "local")}
    write_project(tmp_path / "project")
    return lambda *line, **options: run("bash", *map(str, line), path=[tools], **job, **options)


def write_project(folder, text='[targets]\nspecs = ["quickstart"]\n[remotes]\ncluster = "remote"\n'):
    """A project file with one kernel of what `text` has."""
    folder.mkdir(exist_ok=True)
    (folder / "fusekit.toml").write_text(text.replace('"quickstart"', f'"{KERNELS}"'))


def test_slurm_builds_and_launches(slurm, tmp_path):
    slurm(HERE / "slurm" / "build.sbatch", WHEEL="team-kernels-1.0")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "of-another").write_text("")
    slurm(HERE / "slurm" / "launch.sbatch", code=(0, NO_GPU))
    command = "fusekit ls && echo $FUSEKIT_STORES && cat $FUSEKIT_LOCK"
    printed = slurm(HERE / "slurm" / "launch.sbatch", "sh", "-c", command).stdout
    assert '"serial": 1' in printed
    assert KERNELS in printed
    assert str(tmp_path / "local" / "kernels-7") in printed
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["of-another"]  # its own copy alone is removed

    wheel = "wheels/team_kernels-1.0-py3-none-any.whl"
    assert f"KERNELS={wheel} sbatch" in (HERE / "README.md").read_text()
    command, empty = "fusekit ls && echo at $FUSEKIT_STORES in $PYTHONPATH", str(tmp_path / "none")
    launch = (HERE / "slurm" / "launch.sbatch", "sh", "-c", command)
    printed = slurm(*launch, KERNELS=wheel, FUSEKIT_STORE=empty).stdout
    assert KERNELS in printed
    assert f"at in {tmp_path / 'local' / 'kernels-7'}" in printed
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["of-another"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(run, script):
    run("bash", "-n", str(script))
    if shutil.which("shellcheck"):
        run("shellcheck", str(script))


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def documents(file="kubernetes.yaml"):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((HERE / file).read_text()))


def test_kubernetes_documents_are_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in (*documents(), *documents("kubernetes-wheel.yaml")):
        validate.validate(document, validate.latest_version(), strict=True)


def test_kubernetes_builds_and_launches(run, tmp_path, built):
    config, claim, *jobs = documents()
    folders = {f"/{name}": tmp_path / name for name in ("project", "shared", "local")}
    for folder in folders.values():
        folder.mkdir()
    write_project(folders["/project"], config["data"]["fusekit.toml"])
    shutil.copytree(built, folders["/shared"] / "store")
    codes = []
    for job in jobs:
        spec = job["spec"]["template"]["spec"]
        named = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in spec["volumes"]}
        assert named["shared"] == claim["metadata"]["name"]
        maps = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
        assert maps <= {config["metadata"]["name"]}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= named.keys()
            variables = {each["name"]: each["value"] for each in container["env"]}
            here = {}
            for key, value in variables.items():
                mount = re.match(r"/\w+", value)
                assert mount is None or mount[0] in mounted
                here[key] = value if mount is None else f"{folders[mount[0]]}{value[mount.end() :]}"
            done = run(*container["command"], *container["args"], code=(0, NO_GPU), **here)
            codes.append((container["name"], done.returncode))
    assert codes[:2] == [("build", 0), ("sync", 0)]
