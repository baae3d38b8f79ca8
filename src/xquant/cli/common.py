"""What the verbs share: options, checks that come before long work, and the end of a run.

What an option alone tells is checked as it is read, before a verb imports torch.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from .. import catalogue
from ..hub import PACKAGED, check_model
from ..progress import Progress, silent
from ..results import STDOUT, stamp, write_json
from ..text import NAMES
from .messages import NOTHING_KEPT
from .progress import progress, spoken

if TYPE_CHECKING:
    import torch

    from ..calibrations import Calibrations
    from ..methods import Method

DTYPES = ("float32", "bfloat16", "float16")

RESUME = "xquant.resume"
"""Where the context of a command holds the folder of ``--resume``, of the commands that have it."""


def nothing() -> Iterable[str]:
    """No names."""
    return ()


class Checked(click.ParamType):
    """A word that ``check`` takes, or raises ValueError for.

    Shells complete it to one of the ``known`` names, or to a path: ``paths`` is ``file``, ``dir`` or empty.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[str], object],
        known: Callable[[], Iterable[str]] = nothing,
        paths: str = "",
    ) -> None:
        self.name, self.check, self.known, self.paths = name, check, known, paths

    def convert(self, value: str, *where: Any) -> str:
        self.check(value)
        return value

    def shell_complete(self, context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
        """What the word may go on to."""
        found = [CompletionItem(name) for name in self.known() if name.startswith(incomplete)]
        return found + ([CompletionItem(incomplete, self.paths)] if self.paths else [])


def check_file(target: str) -> None:
    """Raise ValueError unless ``target`` (or ``-``) can be written as a file."""
    if target == STDOUT:
        return
    path = Path(target)
    if not target or path.is_dir():
        raise ValueError(f"cannot write '{target}': it is not a file name")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write '{target}': there is no folder '{path.parent}'")
    # A file is made beside it, and takes its place.
    folder = Path(os.path.realpath(path)).parent
    special = path.exists() and not path.is_file()
    if not os.access(path if special else folder, os.W_OK if special else os.W_OK | os.X_OK):
        raise ValueError(f"cannot write '{target}': permission denied")


def check_folder(target: str) -> None:
    """Raise ValueError unless the folder ``target`` can be written to, or made."""
    path = Path(target)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not target or not nearest.is_dir():
        raise ValueError(f"cannot write to '{target}': '{nearest}' is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to '{target}': permission denied")


def known_methods(installed: bool = False) -> Mapping[str, catalogue.Entry]:
    """All methods by name, with those that other distributions bring where they are asked for. The package's
    own are known without torch."""
    if installed or "xquant.methods" in sys.modules:
        from ..spec import entries

        return entries(installed)
    return catalogue.load()


def check_spec(spec: str) -> None:
    """Raise ValueError unless ``spec`` is a method, with options that it has."""
    catalogue.read_spec(spec, known_methods)


def examples() -> Iterable[str]:
    """A spec or more of each method, the recommended ones first."""
    recommended = (each.spec for each in catalogue.RECOMMENDED)
    return dict.fromkeys((*recommended, *(method.example for method in known_methods().values())))


MODEL = Checked("model", check_model, lambda: PACKAGED, "dir")
SPEC = Checked("spec", check_spec, examples)
OUT_FILE = Checked("file", check_file, paths="file")
OUT_FOLDER = Checked("folder", check_folder, paths="dir")
IN_FILE = click.Path(exists=True, dir_okay=False)

json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=OUT_FILE,
    help="Also write the result as a JSON array; '-' writes it to standard output, alone.",
)
methods_option = click.option(
    "--method",
    "specs",
    metavar="SPEC",
    type=SPEC,
    multiple=True,
    help="Method, such as kivi-2bit:sink=1; may be given several times.  [default: the recommended ones]",
)
calibrations_option = click.option(
    "--calibration",
    "artifacts",
    metavar="FILE",
    type=IN_FILE,
    multiple=True,
    help="Artifact of 'xquant calibrate'; may be given several times, one a method.",
)


def shapes(context: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Shapes of known models whose names begin so, for shells."""
    from ..analysis.shapes import SHAPES  # imports torch

    return [name for name in SHAPES if name.startswith(begun)]


def resume_option(kept: str = "what is finished") -> Callable[..., Any]:
    """``--resume``, which keeps ``kept``."""
    return click.option(
        "--resume",
        metavar="DIR",
        type=OUT_FOLDER,
        callback=_remember,
        help=f"Keep {kept} in this folder; the same command, given again, goes on from there.",
    )


def _remember(context: click.Context, option: click.Parameter, folder: str | None) -> str | None:
    context.meta[RESUME] = folder
    return folder


def how_to_go_on(context: click.Context) -> str:
    """What to tell someone who has stopped the command of that context."""
    if RESUME not in context.meta:
        return NOTHING_KEPT
    folder = context.meta[RESUME]
    if folder is None:
        return (
            "stopped, with nothing to go on from; the same command with --resume DIR keeps what it has"
            " finished, and goes on from there when it is given again"
        )
    return f"stopped; the same command goes on from what is finished in '{folder}'"


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, ``--dtype`` and ``--device``."""
    dtype = click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="float32",
        show_default=True,
        help="Of the weights.",
    )
    device = click.option("--device", help="Such as cpu or cuda:1.  [default: cuda where there is one]")
    return click.argument("model", type=MODEL)(dtype(device(command)))


def text_options(
    default: str | None = None,
    context: int | None = 2048,
    windows: int | None = 4,
    help: str = "",
) -> Callable[..., Any]:
    """``--text``, ``--context`` and ``--windows``; the last two None for what the method asks for.

    ``--text`` is required unless it has a default, or a ``help`` that says what happens without it.
    """
    asked = "  [default: what the method asks for]"
    # To click, a default of None is a default.
    otherwise: dict[str, Any] = {"default": default} if default else {"required": not help}
    options = (
        click.option(
            "--text",
            metavar="FILE",
            show_default=True,
            help=help or f'Text file, .jsonl with "text" fields, or one of {", ".join(NAMES)}.',
            **otherwise,
        ),
        click.option(
            "--context",
            type=click.IntRange(1),
            default=context,
            show_default=True,
            help="Tokens of a window." + (asked if context is None else ""),
        ),
        click.option(
            "--windows",
            type=click.IntRange(1),
            default=windows,
            show_default=True,
            help="Windows from the text's start." + (asked if windows is None else ""),
        ),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


weights_bits_option = click.option(
    "--weights-bits",
    type=click.Choice(("4", "8")),
    callback=lambda context, option, given: given and int(given),
    help="Of the model's weights, rounded to the nearest in groups of 32; an output layer has 8 (CPU)."
    " Those of smollm2 have 4 in its file, and stay the same numbers.",
)


def load(model: str, dtype: str, device: str | None, weights_bits: int | None = None) -> tuple[Any, Any]:
    """The model and its tokenizer, with transformers' notes switched off.

    Args:
        weights_bits: as of `pack_weights`; None: the weights as they are.

    Raises:
        ValueError: no such device or model, a damaged one, or ``weights_bits`` on a GPU.
    """
    import torch
    from transformers.utils import logging

    from .. import load_model

    where = find_device(device)
    logging.set_verbosity_error()
    watched, here = sys.stderr.isatty(), model in PACKAGED or Path(model).exists()
    if here or not watched:  # what is downloaded has the hub's bars
        logging.disable_progress_bar()
    with progress("loading") if here and watched else nullcontext(silent) as show:
        show(0, 1, f"loading {model}")
        return load_model(model, getattr(torch, dtype), where, weights_bits or "dense")


def find_device(name: str | None) -> "torch.device":
    """The device of this name; without one, cuda where there is one.

    Raises:
        ValueError: it is not there.
    """
    import torch

    where = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=where, dtype=torch.float32).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device '{where}' here ({str(error).splitlines()[0]})") from error


def load_calibrations(files: Sequence[str]) -> "Calibrations":
    """The artifacts in ``files``.

    Raises:
        ValueError: two are for the same method, or one is none; FileNotFoundError: there is none.
    """
    from ..calibration import Calibration
    from ..calibrations import Calibrations

    found: dict[str, Calibration] = {}
    for file in files:
        made = Calibration.load(file)
        if made.method in found:
            raise ValueError(f"two calibrations are for {made.method}")
        found[made.method] = made
    return Calibrations(found.values())


def calibrations_for(methods: "Sequence[Method]", files: Sequence[str]) -> "Calibrations":
    """The artifacts in ``files``, all of them for one of ``methods``.

    Raises:
        ValueError: one is for none of them, or a method lacks its own; further errors as
            `load_calibrations`.
    """
    calibrations = load_calibrations(files)
    wanted = {method.calibrated_as for method in methods}
    for calibration in calibrations:
        if calibration.method not in wanted:
            raise ValueError(
                f"the calibration is for {calibration.method}, which is not among"
                f" {', '.join(method.spec for method in methods)}"
            )
    for method in methods:
        calibrations.of(method)  # raises where it is missing
    return calibrations


def chosen(specs: Sequence[str], artifacts: Sequence[str], decoding: bool = False) -> tuple[str, ...]:
    """The methods that a verb measures: ``specs``, or where there are none the recommended ones, and those
    that the artifacts are for."""
    if specs:
        return tuple(specs)
    calibrated = (made.method for made in load_calibrations(artifacts)) if artifacts else ()
    return tuple(dict.fromkeys((*catalogue.recommended(decoding), *calibrated)))


def kept_calibrations(model: Any, methods: "Sequence[Method]", given: "Calibrations") -> "Calibrations":
    """``given``, and those that methods which calibrate themselves have made of this model before."""
    from ..calibrations import Calibrations
    from ..calibrators.run import kept_calibration

    kept = (kept_calibration(model, method) for method in given.lacking(methods))
    return Calibrations([*given, *filter(None, kept)])


def own_calibrations(
    model: Any,
    tokenizer: Any,
    methods: "Sequence[Method]",
    given: "Calibrations",
    show: Progress | None = None,
) -> "Calibrations":
    """``given``, and those of the methods that lack one, all of which calibrate themselves. What is made now
    is announced. ``show``: of the work that they are a part of, where there is one."""
    from ..calibrations import Calibrations
    from ..calibrators.run import own_calibration

    kept = kept_calibrations(model, methods, given)
    made = []
    for method in kept.lacking(methods):
        announce(model, method)
        with nullcontext(show) if show else progress(f"calibrating {method.calibrated_as}") as shown:
            made.append(own_calibration(model, tokenizer, method, shown))
    return Calibrations([*kept, *made])


def announce(model: Any, method: "Method") -> None:
    """Say on stderr that a method is calibrated now, why, for how long, and where the result is kept."""
    from .. import calibration_store
    from ..calibrators.run import expected_seconds

    tokens = math.prod(method.calibration_size)
    click.echo(
        f"{method.calibrated_as} must know this model before it can store anything. The model now writes"
        f" {tokens:,} tokens and their statistics are taken: about {spoken(expected_seconds(model, tokens))}."
        f" This is done once a model. It is kept in '{calibration_store.folder()}'; so is what is written so"
        " far, should you stop it.",
        err=True,
    )


def finish(rows: Iterable[Mapping[str, Any]], json_file: str | None, **subject: Any) -> list[dict[str, Any]]:
    """Stamp the rows of a run, write them where ``--json`` says, and return them."""
    stamped = stamp(rows, **subject)
    if json_file is not None:
        write_json(json_file, stamped)
    return stamped
