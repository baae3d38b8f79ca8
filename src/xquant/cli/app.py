"""The verbs together, and click's usage errors as the ValueErrors that `main` reports."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from threading import current_thread, main_thread

import click
from click.shell_completion import shell_complete

from .. import __version__
from ..catalogue import LABORATORY
from . import cache as kept
from . import calibrate, generate, inspect, methods, plan, prompt
from .common import IN_FILE, how_to_go_on

OWN = (
    methods.methods,
    generate.generate,
    prompt.prompt,
    inspect.inspect,
    calibrate.calibrate,
    plan.plan,
    kept.cache,
)
COMPLETE = "_XQUANT_COMPLETE"
"""The environment variable by which shells ask how a command goes on; what a shell runs to be able to is what
``_XQUANT_COMPLETE=bash_source xquant`` prints."""
VERBS = "xquant.verbs"
"""The group of entry points by which other distributions add verbs."""


def _load(context: click.Context, option: click.Parameter, files: Sequence[str]) -> None:
    if files:
        from ..methods import load_file  # not at once: it imports torch

        for file in files:
            load_file(file)


def _plugin_option() -> click.Option:
    """``--plugin``, which is looked at before specs are."""
    return click.Option(
        ["--plugin"],
        metavar="FILE",
        type=IN_FILE,
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="Python file that registers methods of yours; may be given several times.",
    )


@cache
def _added() -> dict[str, EntryPoint]:
    """The verbs that other distributions add; to find them, all that is installed is looked through."""
    return {each.name: each for each in entry_points(group=VERBS)}


class Verbs(click.Group):
    """Our own verbs, and those that other distributions add. What is not asked for is not imported."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*self.commands, *_added()})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        verb = self.commands.get(name)
        if verb is None and name in _added():
            verb = _added()[name].load()
        if verb is not None:
            # Given as such, click writes it whole. What it takes of a docstring itself is cut off with dots.
            verb.short_help = " ".join((verb.help or "").partition("\n\n")[0].split()).rstrip(".")
            if verb.add_help_option and all(each.name != "plugin" for each in verb.params):
                verb.params.append(_plugin_option())
        elif not _added():
            raise ValueError(
                f"No such command '{name}'. The laboratory, xquant-lab, has more: in a clone, {LABORATORY}"
            )
        return verb


@click.group(
    cls=Verbs,
    commands=OWN,
    params=[_plugin_option()],
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="xquant %(version)s")
def xquant() -> None:
    """Compress the KV cache of language models, and measure what that costs."""


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, by which schedulers and time limits end a process, stops the command as Ctrl-C does."""
    if current_thread() is not main_thread():  # which alone may say what signals do
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; by default that of the process.

    Raises:
        ValueError: unknown verb or option, or a value of the wrong kind; further errors as the verbs.
        KeyboardInterrupt: it was stopped; the message says how to go on.
    """
    if find_spec("rich") is None:  # bars of progress are made of it, once a model is loaded
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    if asked := os.environ.get(COMPLETE):
        shell_complete(xquant, {}, "xquant", COMPLETE, asked)
        return
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Not xquant.main(): it has words of its own for an interrupt.
    try:
        with _ended_as_by_ctrl_c(), xquant.make_context("xquant", words) as context:
            try:
                xquant.invoke(context)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(how_to_go_on(context)) from None
    except click.exceptions.Exit:
        pass  # --help and --version have said what they have to say
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "xquant"
        raise ValueError(f"{error.format_message()} See '{where} --help'.") from error
