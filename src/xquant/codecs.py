"""Codecs of one model, kept for its caches until its weights change."""

import hashlib
from collections.abc import Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from . import calibration_store
from .calibration import Calibration
from .methods import LayerCodec, Method
from .models import AttentionView
from .models.weights import numbers


def fingerprint(views: Sequence[AttentionView]) -> str:
    """SHA-256 over the key and value projections and key norms of the layers, as bfloat16 holds them; where
    these are not known, over all of the attention.

    So a model is the same one whether loaded in fp32 or in bf16.
    """
    digest = hashlib.sha256()
    for view in views:
        if view.unknown_keys or view.unknown_values:
            read: list[Tensor | None] = [*numbers(view.module)]
        else:
            norm = [] if view.key_norm is None else numbers(view.key_norm)
            key, value = view.stored_weights
            read = [key, view.key_bias, value, view.value_bias, *norm]
        for tensor in read:
            if tensor is not None:
                rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
                digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


class Codecs:
    """What methods have built for the layers of a model. Threads may ask at the same time."""

    def __init__(self, views: Sequence[AttentionView]) -> None:
        self._views = views
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[tuple[Method, Calibration | None], list[LayerCodec]] = {}
        self._state: list[Any] = []
        self._contents: list[int] | None = None
        self._fingerprint: str | None = None
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """The layers alone: a model that is saved or copied leaves behind what can be built again."""
        return {"_views": self._views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._views = state["_views"]
        self._forget()

    def of(
        self, method: Method, calibration: Calibration | None = None, thoroughly: bool = False
    ) -> list[LayerCodec]:
        """The method's codecs, bottom up: the same ones until projections or key norms change.

        Args:
            thoroughly: read the weights, too. Writing through ``.data`` leaves no other trace.

        Raises:
            ValueError: a calibration that is missing, or made for another method or model; options
                that the model does not allow.
        """
        with self._lock, torch.no_grad():
            self._look(thoroughly and method.built_from_weights)
            made = method, calibration
            if made not in self._kept:
                if self._contents is None and method.built_from_weights:
                    self._contents = self._read()
                if calibration is not None:
                    calibration.check(method.calibrated_as, self.model_id())
                elif method.calibrates_itself:
                    wanted = method.expected(self._views)
                    calibration = calibration_store.find(method.calibrated_as, self.model_id(), wanted)
                if calibration is None and method.needs_calibration:
                    raise ValueError(method.how_to_calibrate)
                self._kept[made] = codecs = method.codecs(self._views, calibration)
                if calibration is not None:
                    for codec in codecs:
                        codec.calibrated = calibration.digest
            return self._kept[made]

    def _look(self, thoroughly: bool) -> None:
        """Forget all that was built of weights that are no more."""
        state = [view.weights_state for view in self._views]
        contents = self._read() if thoroughly else self._contents
        if state == self._state and contents == self._contents:
            return
        self._kept.clear()
        self._fingerprint = None
        for view in self._views:
            view.forget_offline()
        self._state, self._contents = state, contents if thoroughly else None

    def _read(self) -> list[int]:
        """Sums over all weights; one question to the device."""
        home = self._views[0].device
        sums = [number.to(home) for view in self._views for number in view.weights_sums()]
        found: list[int] = torch.stack(sums).tolist()
        return found

    def model_id(self) -> str:
        """The model's `fingerprint`, taken when a calibration first asks for it."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._views)
        return self._fingerprint
