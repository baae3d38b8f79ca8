"""Every model class of transformers that generates text, by hand: which caches serve it, and what is said of
the others.

    python tests/upstream/every_class.py            # all, a few minutes
    python tests/upstream/every_class.py Gemma Glm  # those whose names hold one of these
    python tests/upstream/every_class.py --json benchmarks/results/classes.json

Each class is built tiny. A prefill and four tokens go through caches that keep everything exactly, and
must give the logits that DynamicCache gives, or be refused by one line that names the class. A class that
cannot be built tiny is built without weights from its own defaults, which shows whether it is refused.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).parents[1]))

from upstream.tiny import build, configs, outline
from xquant import KVCache, detach
from xquant.models import view_model
from xquant.results import stamp, write_json

SPECS = ("kivi-16bit:group=8,rope=post", "kivi-16bit:group=8", "xquant-16bit:group=8")
PREFILL, STEPS = 20, 4
TOLERANCE = 1e-3
RIGHT = "right"
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)


def class_names() -> list[str]:
    """Names of all classes that transformers maps to generating text, or speech as text."""
    found = [names for mapping in MAPPINGS for names in mapping.values()]
    flat = [n for names in found for n in ((names,) if isinstance(names, str) else names)]
    return [name for name in dict.fromkeys(flat) if hasattr(transformers, name)]


@torch.no_grad()
def logits(model: Any, cache: Any) -> torch.Tensor:
    """Of a prefill and single tokens, ``[1, PREFILL + STEPS, vocabulary]``."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 100, (1, PREFILL + STEPS), generator=generator)
    parts = ids.split([PREFILL] + [1] * STEPS, 1)
    outputs = [model(input_ids=part, past_key_values=cache, use_cache=True) for part in parts]
    return torch.cat([output.logits for output in outputs], 1)


def own_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")[:200]


def refusal(model: Any, error: Exception) -> str:
    """How ``error`` reads to who made a cache for ``model``."""
    line = str(error)
    clear = type(error) in (ValueError, TypeError) and type(model).__name__ in line
    return f"refused: {line}" if clear and "\n" not in line else f"CRASH {said(error)}"


def made(model_class: Any) -> tuple[Any, torch.Tensor | None, str]:
    """A tiny model, its logits with DynamicCache where they can be had, and what stood in the way."""
    first, reasons = None, []
    for config in configs(model_class.config_class):
        try:
            model = build(model_class, config())
            first = model if first is None else first
            if model.config.is_encoder_decoder:
                return model, None, "an encoder-decoder model"
            return model, logits(model, own_cache(model)), ""
        except Exception as error:  # whatever a model says of a configuration or of text alone
            reasons.append(said(error))
    return first, None, reasons[0] if first is None else reasons[-1]


def with_cache(model: Any, spec: str, want: torch.Tensor | None, why: str) -> str:
    try:
        cache = KVCache(model, spec)
        if want is None:
            return f"accepted, not run ({why})"
        error = float((logits(model, cache) - want).norm() / want.norm())
        return RIGHT if error < TOLERANCE else f"WRONG by {error:.2g}"
    except Exception as error:  # what is looked for
        return refusal(model, error)
    finally:
        detach(model)


def without_weights(model_class: Any, why: str) -> str:
    """Whether a model of the default configuration would be refused."""
    try:
        model = outline(model_class, model_class.config_class())
    except Exception as error:  # see `made`
        return f"not built ({said(error)})"
    try:
        view_model(model)
    except Exception as error:  # what is looked for
        return refusal(model, error)
    return f"accepted, not run ({why})"


def outcomes(name: str) -> dict[str, str]:
    """What each of `SPECS` does for a class: `RIGHT`, or a line that begins with ``refused``, ``WRONG``,
    ``CRASH``, ``accepted`` or ``not built``."""
    model_class = getattr(transformers, name)
    model, want, why = made(model_class)
    if model is None:
        return dict.fromkeys(SPECS, without_weights(model_class, why))
    return {spec: with_cache(model, spec, want, why) for spec in SPECS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; by default all classes")
    parser.add_argument("--json", help="a results file to write")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    classes: dict[str, dict[str, str]] = {}
    for name in class_names():
        if arguments.names and not any(part in name for part in arguments.names):
            continue
        found = outcomes(name)
        classes[name] = found
        counts.update(outcome.split(" ", 1)[0].rstrip(":") for outcome in found.values())
        for outcome in dict.fromkeys(found.values()):
            which = [spec for spec in SPECS if found[spec] == outcome]
            print(
                f"{name:48}",
                "all" if len(which) == len(SPECS) else ", ".join(which),
                outcome,
                sep="  ",
            )
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    if arguments.json:
        write_json(arguments.json, stamp([{"classes": classes}]))


if __name__ == "__main__":
    main()
