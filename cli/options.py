"""The options that all commands have, before or after the name of the command, and the session that holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from fusekit_cli.terminal import message, to_stderr

if TYPE_CHECKING:
    from fusekit.config import Config
    from fusekit.project import Project
    from fusekit.store import Store
    from fusekit.store.lockfile import Lock


@dataclass
class Session:
    """One command line. store: folder given with --store. sign: private key file given with --sign. json: one JSON
    document on stdout. quiet: only errors on stderr. verbose: details on stderr. debug: show tracebacks. warned: the
    warnings about spec files.
    """

    store: str | None = None
    sign: str | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    warned: list[str] = field(default_factory=list)

    @functools.cached_property
    def config(self) -> Config:
        """The configuration: options override the environment, which overrides the project file."""
        from fusekit.config import Config

        return Config.from_environment(store=self.store, signing_key=self.sign, project=self.project)

    @functools.cached_property
    def project(self) -> Project | None:
        """The project of the current folder, or the nearest one above."""
        from fusekit.project import find_project

        project = find_project()
        if project is not None:
            self.detail(f"project: {project.path}")
        return project

    def lock(self, store: Store) -> Lock | None:
        """The lock that FUSEKIT_LOCK names, to which pull, import and verify keep; not that of the project."""
        path = self.config.lock
        if path is None or (self.project is not None and path == self.project.lock):
            return None
        from fusekit.store.lockfile import read_lock

        lock = read_lock(path, store.trust)
        lock.check_current()
        store.remember(lock, make=False)
        return lock

    def remote(self, text: str) -> str:
        """The URL of the project's remote called `text`; `text` itself if it has none of that name."""
        return text if self.project is None else self.project.remotes.get(text, text)

    def open_store(self) -> Store:
        """The store of this command line."""
        from fusekit.store import Store

        store = Store.open(self.config)
        for index, root in enumerate(store.roots):
            self.detail(f"{'read-only root' if index else 'store'}: {root.path}")
        return store

    def note(self, text: str) -> None:
        """Print a line on stderr; not with --quiet."""
        if not self.quiet:
            self.say(text)

    def detail(self, text: str) -> None:
        """Print a line on stderr, with --verbose only."""
        if self.verbose:
            self.say(text)

    def warn(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        """Replaces `warnings.showwarning`: prints each warning once, on stderr."""
        if str(message) not in self.warned:
            self.warned.append(str(message))
            self.note(f"fusekit: warning: {message}")

    def error(self, text: str) -> None:
        """Print the message of a failed command."""
        self.say(f"fusekit: {text}")

    def say(self, text: str) -> None:
        """Print text on stderr."""
        with to_stderr():
            click.echo(message(text), err=True)


def _set(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    # An option that is not given after the command keeps the value from before it.
    if value and option.name is not None:
        session = ctx.ensure_object(Session)
        setattr(session, option.name, value)
        for name, other in (("quiet", "verbose"), ("verbose", "quiet")):
            if option.name == name:  # the last one counts
                setattr(session, other, False)
    elif value == "" and option.name in ("store", "sign"):
        raise click.BadParameter("it is empty, and must be a path; give one or leave the option out", ctx, option)


def _of_session(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option that is stored in the session, and not passed to the function of the command."""
    return click.option(*names, expose_value=False, callback=_set, **settings)


_COMMON = (
    _of_session(
        "--store", metavar="DIR", type=click.Path(),
        help="Writable store (default: FUSEKIT_STORE, else the user's cache folder).",
    ),
    _of_session("--json", is_flag=True, help="One JSON document on stdout, nothing else."),
    _of_session("-q", "--quiet", is_flag=True, help="Only errors on stderr, no progress."),
    _of_session("-v", "--verbose", is_flag=True, help="Each step, with its reason, on stderr."),
    _of_session("--debug", is_flag=True, help="Show the traceback of an error."),
)  # fmt: skip

signing = _of_session(
    "--sign", metavar="KEY_FILE", type=click.Path(),
    help="Private key that signs the output (default: FUSEKIT_SIGNING_KEY, else none).",
)  # fmt: skip
"""Adds --sign to a command; it is part of the session's configuration."""

namespaced = click.option(
    "--namespace", metavar="TEXT",
    help="Begin every name with it, TEXT.FILE/KERNEL, instead of the namespace in the spec files.",
)  # fmt: skip
"""Adds --namespace to a command, as an argument of its function."""

one_arch = click.option("--arch", help="Only this architecture, such as sm_90a.")


def stored_names(_: click.Context, __: click.Parameter, value: Any) -> Any:
    """Callback of a NAME, or of several: `FILE.toml/NAME` names what a build of it has put into the store."""
    if isinstance(value, tuple):
        return tuple(stored_names(_, __, name) for name in value)
    if not isinstance(value, str) or ".toml" not in value:
        return value
    from fusekit.spec.catalog import stored_name

    return stored_name(value)


def given(*names: str) -> list[str]:
    """The options among `names` that the command line has, as --name."""
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in names}
    options = {option.name: option.opts[-1] for option in context.command.params}
    return [str(options[name]) for name in names if sources[name] is click.core.ParameterSource.COMMANDLINE]


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the common options to a command; its function takes a `Session` as its first argument."""
    function = click.make_pass_decorator(Session, ensure=True)(function)
    for option in reversed(_COMMON):
        function = option(function)
    return function
