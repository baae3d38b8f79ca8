"""What verbs that measure a model on a text begin with."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xquant.cli.common import calibrations_for, kept_calibrations, own_calibrations
from xquant.progress import Progress

from .asked import Asked

if TYPE_CHECKING:
    from torch import Tensor

    from xquant.calibrations import Calibrations
    from xquant.methods import Method
    from xquant.runs import Runs


@dataclass
class OnText:
    """A model, windows of a text, and the methods to measure on it."""

    network: Any
    tokenizer: Any
    ids: "Tensor"
    """The windows, ``[N, T]``."""
    calibrations: "Calibrations"
    """Those that are there: given, or kept from another day."""
    subject: dict[str, Any]
    """What rows are stamped with."""
    runs: "Runs"
    """Keeps what is finished."""

    @classmethod
    def begin(
        cls,
        asked: Asked,
        methods: "Sequence[Method]",
        text: str,
        words: str,
        context: int,
        windows: int,
    ) -> "OnText":
        """Load the model, and cut the text.

        Args:
            text: what names the text.
            words: the text itself.

        Raises:
            ValueError: a calibration, a model, ``context`` or ``windows`` that do not fit.
        """
        from xquant.runs import Runs, identity
        from xquant.text import cut_windows, text_name

        calibrations = calibrations_for(methods, asked.artifacts)
        network, tokenizer = asked.load()
        calibrations = kept_calibrations(network, methods, calibrations)
        subject = {
            "model": asked.model,
            "text": text_name(text),
            "text_sha256": hashlib.sha256(words.encode()).hexdigest(),
            "dtype": asked.dtype,
            "weights_bits": asked.weights_bits,
            "device": str(network.device),
        }
        facts = {**subject, "context": context, "identity": identity(network, words, [])}
        runs = Runs(asked.resume, facts)
        ids = cut_windows(network, tokenizer, words, context, windows)
        return cls(network, tokenizer, ids, calibrations, subject, runs)

    def calibrate(self, methods: "Sequence[Method]", show: Progress) -> "Calibrations":
        """All calibrations that there are, and the model's own for ``methods`` that have none."""
        self.calibrations = own_calibrations(self.network, self.tokenizer, methods, self.calibrations, show)
        return self.calibrations
