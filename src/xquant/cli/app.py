"""The verbs together, and click's usage errors as the ValueErrors that `main` reports."""

import sys
from collections.abc import Sequence

import click

from .. import __version__
from . import (
    bench,
    calibrate,
    compare,
    generate,
    inspect,
    methods,
    perplexity,
    plan,
    prompt,
    reproduce,
)
from .common import how_to_go_on
from .eval import evaluate
from .lm_eval import lm_eval


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="xquant %(version)s")
def xquant() -> None:
    """Compress the KV cache of language models, and measure what that costs."""


for _verb in (
    methods.methods,
    generate.generate,
    prompt.prompt,
    inspect.inspect,
    perplexity.perplexity,
    compare.compare,
    calibrate.calibrate,
    bench.bench,
    plan.plan,
    reproduce.reproduce,
    evaluate,
    lm_eval,
):
    # Given as such, click writes it whole. What it takes of a docstring itself is cut off with dots.
    _verb.short_help = " ".join((_verb.help or "").partition("\n\n")[0].split()).rstrip(".")
    xquant.add_command(_verb)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; by default that of the process.

    Raises:
        ValueError: unknown verb or option, or a value of the wrong kind; further errors as the verbs.
        KeyboardInterrupt: it was stopped; the message says how to go on.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Not xquant.main(): it has words of its own for an interrupt.
    try:
        with xquant.make_context("xquant", words) as context:
            try:
                xquant.invoke(context)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(how_to_go_on(context)) from None
    except click.exceptions.Exit:
        pass  # --help and --version have said what they have to say
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "xquant"
        raise ValueError(f"{error.format_message()} See '{where} --help'.") from error
