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
        """The layered store of this command line."""
        from fusekit.store import Store

        for index, root in enumerate(self.config.roots):
            self.detail(f"{'read-only layer' if index else 'store'}: {root}")
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


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that all have; its function takes a `Session` as its first argument."""
    decorators = (
        click.option(
            "--store",
            metavar="DIR",
            type=click.Path(),
            expose_value=False,
            callback=_set,
            help="Writable store (default: FUSEKIT_STORE, else the user's cache folder).",
        ),
        click.option(
            "--json", is_flag=True, expose_value=False, callback=_set, help="One JSON document on stdout, nothing else."
        ),
        click.option(
            "-q", "--quiet", is_flag=True, expose_value=False, callback=_set, help="Only errors on stderr, no progress."
        ),
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            expose_value=False,
            callback=_set,
            help="Each step on stderr, and why.",
        ),
        click.option(
            "--debug", is_flag=True, expose_value=False, callback=_set, help="Show a traceback where an error is met."
        ),
    )
    function = click.make_pass_decorator(Session, ensure=True)(function)
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def namespaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb --namespace, which its function takes as an argument."""
    return click.option(
        "--namespace",
        metavar="TEXT",
        help="Begin every name with it, TEXT.FILE/KERNEL, in place of what the spec files say.",
    )(function)


def signing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb --sign, which its session's configuration takes in."""
    return click.option(
        "--sign",
        metavar="KEY_FILE",
        type=click.Path(),
        expose_value=False,
        callback=_set,
        help="Private key that signs what this makes (default: FUSEKIT_SIGNING_KEY, else none).",
    )(function)


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
