"""What the verbs that measure a model are asked alike, and how they end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from xquant.cli.common import finish, load
from xquant.results import STDOUT

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """The model that a verb measures, and the files beside it. Each field is an option of the verb."""

    model: str
    """Its folder or its name."""
    dtype: str
    """Of the weights."""
    device: str | None
    """None for cuda, where there is one."""
    artifacts: Sequence[str]
    """Files that ``xquant calibrate`` wrote."""
    resume: str | None
    """The folder that keeps what is finished. None keeps nothing."""
    weights_bits: int | None = None
    """As of `pack_weights`."""

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer.

        Raises:
            ValueError: no such device or model, or a damaged one.
        """
        return load(self.model, self.dtype, self.device, self.weights_bits)


def end(
    rows: Rows,
    subject: Mapping[str, Any],
    json_file: str | None,
    show: Callable[[Rows], None],
) -> None:
    """Write the rows where ``--json`` says, stamped with what they were measured on. Then ``show`` prints
    them, unless standard output has the JSON."""
    finish(rows, json_file, **subject)
    if json_file != STDOUT:
        show(rows)


def attend_option(what: str) -> Callable[..., Any]:
    """``--attend`` of a verb; ``what`` is read, and how, is what it says."""
    return click.option(
        "--attend",
        type=click.Choice(("store", "chunk")),
        default="store",
        show_default=True,
        help=f"{what}: every token through the packed store, or a part at a time, whose tokens see each"
        " other exactly, as in generate().",
    )
