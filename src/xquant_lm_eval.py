"""Adds the model type ``xquant`` to lm-evaluation-harness, which has no plug-in point for models.

`xquant_lm_eval.pth` imports this whenever Python starts, so it does next to nothing: it waits until
`lm_eval.models` has been imported, and then names our model type in lm-eval's registry. Nothing of xquant
is imported before ``--model xquant`` asks for it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not from typing, whose import takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

WATCHED = "lm_eval.models"
MODEL_TYPE = "xquant"
TARGET = "xquant.evals.harness:XQuantLM"


class Watcher:
    """A finder that leaves finding to the others, and runs `register` after what they find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                register()

            loader.exec_module = exec_module
        return spec


def register() -> None:
    """Name the model type in lm-eval's registry, if this lm-eval has one that takes names."""
    from lm_eval.api import registry

    models = getattr(registry, "model_registry", None)
    if models is not None and MODEL_TYPE not in models:
        models.register(MODEL_TYPE, target=TARGET)


if WATCHED in sys.modules:
    register()
else:
    sys.meta_path.insert(0, Watcher())
