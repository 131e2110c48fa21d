"""The options that every verb has, before or after its name, and what a verb is given of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from fusekit_cli.terminal import message, to_stderr

if TYPE_CHECKING:
    from fusekit.config import Config
    from fusekit.store import Store


@dataclass
class Session:
    """One command line. store: folder given with --store. sign: private key file given with --sign. json: one JSON
    document on stdout. quiet: nothing but errors on stderr. verbose: details on stderr. debug: show tracebacks. warned:
    what spec files were warned of.
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
        """The configuration: the options over the environment."""
        from fusekit.config import Config

        return Config.from_environment(store=self.store, signing_key=self.sign)

    def open_store(self) -> Store:
        """The store of this command line."""
        from fusekit.store import Store

        for index, root in enumerate(self.config.roots):
            self.detail(f"{'read-only root' if index else 'store'}: {root}")
        return Store.open(self.config)

    def note(self, text: str) -> None:
        """A line on stderr, beside the answer; none with --quiet."""
        if not self.quiet:
            self.say(text)

    def detail(self, text: str) -> None:
        """A line on stderr with --verbose."""
        if self.verbose:
            self.say(text)

    def warn(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        """Stands for `warnings.showwarning`: a line on stderr, each once."""
        if str(message) not in self.warned:
            self.warned.append(str(message))
            self.note(f"fusekit: warning: {message}")

    def error(self, text: str) -> None:
        """The one message of a command that failed."""
        self.say(f"fusekit: {text}")

    def say(self, text: str) -> None:
        """Text on stderr, in any case."""
        with to_stderr():
            click.echo(message(text), err=True)


def _set(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    # Not given here: what was given before the verb stays.
    if value and option.name is not None:
        session = ctx.ensure_object(Session)
        setattr(session, option.name, value)
        for name, other in (("quiet", "verbose"), ("verbose", "quiet")):
            if option.name == name:  # the last one counts
                setattr(session, other, False)
    elif value == "" and option.name in ("store", "sign"):
        raise click.BadParameter("it is empty; it names a path; give that or leave the option out", ctx, option)


def _of_session(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option that the session keeps; the verb's function does not see it."""
    return click.option(*names, expose_value=False, callback=_set, **settings)


_COMMON = (
    _of_session(
        "--store", metavar="DIR", type=click.Path(),
        help="Writable store (default: FUSEKIT_STORE, else the user's cache folder).",
    ),
    _of_session("--json", is_flag=True, help="One JSON document on stdout, nothing else."),
    _of_session("-q", "--quiet", is_flag=True, help="Only errors on stderr, no progress."),
    _of_session("-v", "--verbose", is_flag=True, help="Each step on stderr, and why."),
    _of_session("--debug", is_flag=True, help="Show a traceback where an error is met."),
)  # fmt: skip

signing = _of_session(
    "--sign", metavar="KEY_FILE", type=click.Path(),
    help="Private key that signs what this makes (default: FUSEKIT_SIGNING_KEY, else none).",
)  # fmt: skip
"""Gives a verb --sign, which its session's configuration takes in."""

namespaced = click.option(
    "--namespace", metavar="TEXT",
    help="Begin every name with it, TEXT.FILE/KERNEL, in place of what the spec files say.",
)  # fmt: skip
"""Gives a verb --namespace, which its function takes as an argument."""

one_arch = click.option("--arch", help="Only this architecture, such as sm_90a.")


def given(*names: str) -> list[str]:
    """Those of the verb's options `names`, as --name, that the command line has."""
    context = click.get_current_context()
    said = {name: context.get_parameter_source(name) for name in names}
    options = {option.name: option.opts[-1] for option in context.command.params}
    return [str(options[name]) for name in names if said[name] is click.core.ParameterSource.COMMANDLINE]


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that all have; its function takes a `Session` as its first argument."""
    function = click.make_pass_decorator(Session, ensure=True)(function)
    for option in reversed(_COMMON):
        function = option(function)
    return function
