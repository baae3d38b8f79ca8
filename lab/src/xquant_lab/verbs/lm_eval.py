"""``xquant lm-eval``: the command of lm-evaluation-harness, with our model type in its registry.

lm-eval has no way to add a model type from outside, so its command is started from here.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import click

from xquant.cli.messages import EXTRAS

COMMAND = "lm-eval"
MODEL_TYPE = "xquant"
TARGET = "xquant_lab.evals.harness:XQuantLM"


@click.command(
    COMMAND,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def lm_eval(words: Sequence[str]) -> None:
    """Run lm-evaluation-harness with the model type 'xquant'.

    All words are lm-eval's own: xquant lm-eval --model xquant --model_args pretrained=MODEL,method=SPEC
    --tasks NAME
    """
    asks_help = not words or "-h" in words or "--help" in words
    if asks_help and find_spec("lm_eval") is None:
        click.echo(click.get_current_context().get_help())
        click.echo(
            f"\nIts options are listed once it is installed: in a clone, pip install '{EXTRAS['lm_eval']}'"
        )
        return
    from lm_eval.__main__ import cli_evaluate

    register()
    before = sys.argv
    sys.argv = [COMMAND, *(words or ("--help",))]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def register() -> None:
    """Name the model type in lm-eval's registry. Nothing of it is imported before it is asked for."""
    from lm_eval.api.registry import model_registry

    # First lm-eval's own types: it takes a registry with one type for one that has them all.
    import_module("lm_eval.models")
    if MODEL_TYPE not in model_registry:
        model_registry.register(MODEL_TYPE, target=TARGET)
