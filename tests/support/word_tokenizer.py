"""A tokenizer of whole words for the tiny models, and a folder that `load_model` can load."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from support.models import VOCABULARY, tiny


def word_tokenizer() -> Any:
    """``w2 .. w130`` are tokens 2 to 130; every other word is ``<unk>``; a full stop ends nothing."""
    words = {"<pad>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", model_max_length=64
    )


def text_of(count: int) -> str:
    """A text of ``count`` tokens of the word tokenizer."""
    return " ".join(f"w{2 + (i * i) % 120}" for i in range(count))


def model_folder(folder: Path) -> Path:
    """Save the tiny llama and the word tokenizer."""
    tiny("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
