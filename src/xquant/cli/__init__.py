"""The command ``xquant``: one verb a file. `main` turns every expected failure into one line."""

import os
import sys
import warnings
from collections.abc import Sequence

from .messages import EXTRAS, NOTHING_KEPT

BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 (bad input) or 130 (stopped by Ctrl-C or
    SIGTERM), the last two with one line on stderr."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        # Ours, which says why it is slow on this machine.
        warnings.filterwarnings("default", "xquant: ", RuntimeWarning)
        warnings.showwarning = _show
    try:
        from .app import run

        run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or NOTHING_KEPT, INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; Python must not try to flush to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            return _fail(f"{package} is missing: in a clone, pip install '{EXTRAS[package]}'")
        if error.name is not None:  # without a name it is load_model's own advice
            raise
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    return 0


def _show(message: Warning | str, *_: object, **__: object) -> None:
    print(message, file=sys.stderr)


def _fail(message: str, status: int = BAD_INPUT) -> int:
    print("xquant:", " ".join(message.split()), file=sys.stderr)
    return status
