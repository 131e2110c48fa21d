"""`fusekit doctor`: what this machine can do. A failed probe is part of the report, not an error."""

from __future__ import annotations

import contextlib
import platform
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fusekit
from fusekit.errors import FusekitError
from fusekit_cli import output
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.store import Row, Store
    from fusekit.store.listing import Build


@click.command("doctor")
@common
def command(session: Session) -> None:
    """Report what this machine can do: compile, launch, on which GPUs, from which stores, and what is missing.

    Needs neither a compiler nor a driver; what is missing is part of the report and not an error.
    """
    compiler, driver = _compiler(), _driver()
    document = {
        "fusekit": fusekit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "package": _package(),
        "project": None if session.project is None else str(session.project.path),
        "can_build": compiler["ok"],
        "can_run": driver["ok"] and bool(driver["gpus"]),
        "compiler": compiler,
        "driver": {name: value for name, value in driver.items() if name != "gpus"},
        "gpus": driver["gpus"],
        "stores": _stores(session, driver["cuda"]),
        "trust": _trust(session),
        "doors": _doors(session),
    }
    output.answer(session, document, lambda: _print(document))


def _package() -> dict[str, Any]:
    """Whether the package fusekit of another project, which has that name on PyPI, is installed."""
    from importlib import metadata

    installed = {
        str(package.locate_file("")): package.version
        for package in metadata.distributions(name="fusekit")
        if not any(script.value == "fusekit_cli.main:main" for script in package.entry_points)
    }
    problem = None
    if installed:
        (where, version), *_ = installed.items()
        problem = (
            f"another project's package fusekit {version} is installed in {where}; its files may replace those of this"
            " one; `pip uninstall fusekit`, then `pip install .` in the checkout of this one"
        )
    return {"path": str(Path(fusekit.__file__).parent), "problem": problem}


def _compiler() -> dict[str, Any]:
    """The distributions of the toolchain, and whether it builds and proves a kernel."""
    answer: dict[str, Any] = {"ok": False, "toolchain": {}, "problem": None}
    try:
        from fusekit.compiler.self_test import self_test
        from fusekit.compiler.toolchain import distributions

        answer["toolchain"] = distributions()
        self_test()
        answer["ok"] = True
    except Exception as error:
        answer["problem"] = _text(error)
    return answer


def _driver() -> dict[str, Any]:
    """The CUDA driver and the GPUs that this process sees. Creates no context."""
    answer: dict[str, Any] = {"ok": False, "cuda": None, "bindings": None, "problem": None, "gpus": []}
    try:
        from importlib import metadata

        from fusekit.runtime.devices import archs_of, look_at
        from fusekit.runtime.driver import Driver, version_text

        with contextlib.suppress(metadata.PackageNotFoundError):
            answer["bindings"] = metadata.version("cuda-bindings")
        driver = Driver()
        api, check = driver.api, driver.check
        answer.update(ok=True, cuda=version_text(driver.version))
        for index in range(check(api.cuDeviceGetCount(), "cuDeviceGetCount")):
            handle, name, capability, sms = look_at(driver, index)
            memory = int(check(api.cuDeviceTotalMem(handle), "cuDeviceTotalMem"))
            arch = archs_of(capability)[0]
            answer["gpus"].append(
                {"device": index, "name": name, "arch": arch, "sm_count": sms, "memory_bytes": memory}
            )
    except Exception as error:
        answer["problem"] = _text(error)
    return answer


def _stores(session: Session, cuda: str | None) -> list[dict[str, Any]]:
    from fusekit.store import Store
    from fusekit.store.files import exists, is_writable
    from fusekit.store.folders import printable

    answers = []
    for index, root in enumerate(root.path for root in session.open_store().roots):
        answer: dict[str, Any] = {
            "path": str(root),
            "role": "read-only root" if index else "writable",
            "exists": None,
            "writable": None if index else is_writable(root),
            "free_bytes": None,
            "problem": None,
        }
        try:
            answer["exists"] = exists(root) and root.is_dir()
            report = Store(root).verify()
            answer |= {name: getattr(report, name) for name in ("entries", "names", "blobs", "orphans", "temporaries")}
            answer["bad"] = len(report.bad)
            answer["free_bytes"] = _free(root)
            answer["tuning"] = _tuning(root)
            answer["toolchains"], unreadable = _toolchains(Store(root), cuda)
            if report.bad:
                answer["problem"] = f"{len(report.bad)} bad; `fusekit verify` lists them"
            elif index and root in report.absent:
                answer["problem"] = f"{report.absent[root]}; check FUSEKIT_STORES and that its file system is mounted"
            elif answer["exists"] and report.absent.get(root, "").endswith("no store of fusekit"):
                answer["writable"] = None if index else False
                answer["problem"] = f"{report.absent[root]}; nothing is written there; name another folder"
            elif report.open_to_all:
                where = printable(report.open_to_all[0])
                answer["problem"] = (
                    f"every user of this machine may write in {where}, and so add or replace kernels; "
                    f"`chmod -R o-w {shlex.quote(where)}` ends that"
                )
            elif unreadable:
                answer["problem"] = (
                    f"{output.plural(len(unreadable), 'name')}, such as {unreadable[0]}, have no build that this driver"
                    f" (CUDA {cuda}) reads; update the driver, or build them with the CuTe DSL's library of CUDA "
                    f"{cuda.partition('.')[0] if cuda else ''}"
                )
            elif answer["writable"] is False:
                answer["problem"] = "it cannot be written; building needs another --store or FUSEKIT_STORE"
        except Exception as error:
            answer["problem"] = _text(error)
        answers.append(answer)
    return answers


def _toolchains(store: Store, cuda: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """How many names have a build of each toolchain, and the names of which no build is for a driver of `cuda`."""
    counts: Counter[tuple[str, str]] = Counter()
    unreadable = []
    major, _, minor = (cuda or "").partition(".")
    for row in store.overview().rows:
        builds: tuple[Row | Build, ...] = (row, *row.candidates)
        counts.update({(build.toolchain or "", output.driver(build.lowest_driver) or "") for build in builds})
        lowest = [build.lowest_driver for build in builds if build.lowest_driver is not None]
        if cuda and len(lowest) == len(builds) and min(lowest) > int(major) * 1000 + int(minor) * 10:
            unreadable.append(row.name)
    rows = [{"toolchain": label or None, "lowest_driver": lowest or None, "names": count}
            for (label, lowest), count in sorted(counts.items())]  # fmt: skip
    return rows, unreadable


def _tuning(root: Path) -> dict[str, int]:
    """Architecture -> rows of its tuning table. IntegrityError for a table that `load` would skip."""
    from fusekit.choice import tuning

    paths = sorted((root / "tuning").glob("[!.]*.json"))
    return {path.stem: len(tuning.read(path, path.stem).rows) for path in paths}


def _free(root: Path) -> int:
    import shutil

    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def _trust(session: Session) -> dict[str, Any] | None:
    """The trusted keys, of FUSEKIT_TRUSTED_KEYS and the project; None if neither names any: nothing is checked."""
    from fusekit.store.signature import Trust

    trust = Trust.of(session.config)
    if trust is None:
        return None
    try:
        keys = trust.keys
        return {"keys": [{"id": key.id, "comment": key.comment} for key in keys], "problem": None}
    except Exception as error:
        return {"keys": [], "problem": _text(error)}


def _doors(session: Session) -> list[dict[str, Any]]:
    """For each trainer and server its package here, the version that was tried, and the layers that it could use."""
    from importlib import metadata

    from fusekit.library import Library
    from fusekit.spec.doors import DOORS

    layers, problem = {}, None
    try:
        layers = Library(session.open_store()).layers()
    except Exception as error:
        problem = _text(error)
    answers = []
    for name, door in DOORS.items():
        installed = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed = metadata.version(door.package)
        fitting = sorted(layer for layer, options in layers.items() if door.fits(options))
        answers.append(
            {"door": name, "package": door.package, "installed": installed, "tried": door.tried, "layers": fitting,
             "problem": problem}
        )  # fmt: skip
    return answers


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, FusekitError) else f"{type(error).__name__}: {error}"


def _print(document: dict[str, Any]) -> None:
    click.echo(f"fusekit {document['fusekit']}, Python {document['python']}, {document['platform']}")
    if document["package"]["problem"]:
        click.echo(f"        {document['package']['problem']}")
    if document["project"]:
        click.echo(f"\nproject {document['project']}")
    compiler, driver = document["compiler"], document["driver"]
    click.echo(f"\nbuild   {'yes' if compiler['ok'] else 'no: ' + compiler['problem']}")
    for name, version in compiler["toolchain"].items():
        click.echo(f"        {name} {version}")
    click.echo(
        f"\nrun     {'yes' if document['can_run'] else 'no: ' + (driver['problem'] or 'the driver sees no GPU')}"
    )
    if driver["bindings"]:
        cuda = f", driver for CUDA {driver['cuda']}" if driver["cuda"] else ""
        click.echo(f"        cuda-bindings {driver['bindings']}{cuda}")
    for gpu in document["gpus"]:
        memory = output.size(gpu["memory_bytes"])
        click.echo(f"        device {gpu['device']}: {gpu['name']}, {gpu['arch']}, {gpu['sm_count']} SMs, {memory}")
    for store in document["stores"]:
        role = "not writable" if store["writable"] is False else store["role"]
        click.echo(f"\nstore   {store['path']} ({role})")
        if store["problem"]:
            click.echo(f"        {store['problem']}")
        if store["exists"] and "entries" in store:
            held = f"{output.plural(store['names'], 'name')}, {output.plural(store['entries'], 'entry')}"
            click.echo(f"        {held}, {output.size(store['free_bytes'])} free")
            for row in store.get("toolchains", ()):
                built = row["toolchain"] or "an unknown toolchain"
                lowest = f", for drivers of CUDA {row['lowest_driver']} and newer" if row["lowest_driver"] else ""
                click.echo(f"        {output.plural(row['names'], 'name')} built by {built}{lowest}")
            for arch, rows in store.get("tuning", {}).items():
                click.echo(f"        tuning table of {arch}: {output.plural(rows, 'row')}")
        elif store["exists"] is False and store["role"] == "writable":
            click.echo("        it does not exist yet")
    for index, door in enumerate(document["doors"]):
        there = f"{door['package']} {door['installed']}" if door["installed"] else f"no {door['package']}"
        tried = "" if door["installed"] == door["tried"] else f", tried with {door['tried']}"
        found = door["layers"]
        layers = (
            f"{output.plural(len(found), 'layer')}, such as {found[0]}"
            if found
            else (f"no layer; `fusekit new MODEL --for {door['door']}` writes one")
        )
        head = "" if index else "doors"
        click.echo(f"{'' if index else chr(10)}{head:8}{door['door']}: {there}{tried}; {layers}")
    if trust := document["trust"]:
        keys = ", ".join(f"{key['id']} {key['comment']}".rstrip() for key in trust["keys"])
        click.echo(f"\ntrust   {trust['problem'] or 'only what is signed by ' + keys}")
