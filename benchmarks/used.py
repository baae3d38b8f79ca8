"""Rivals, our own methods and transformers' caches as they are used: prompts in passes, then token by token.

    python benchmarks/used.py --wikitext FILE --c4 FILE --json results.json

The full cache continues 20 prompts greedily, and an end of a text does not end them. Each other cache then
reads the same prompts in passes of 64 tokens, which attend to each other exactly, and the full cache's
continuation one token at a time, or in passes that come to the same (`passes_of`). What it predicts before
each of these tokens is compared with what the full cache predicts there: the divergence, and whether the most
likely token is the same.

With ``--turns`` each cache holds a conversation: prompts in the form of the model's chat, each followed by
the full cache's answer.

That also says how long the method's own greedy text is the full cache's, without another run. As long as its
most likely token is the one that the full cache went on with, it would have been fed the same token. So the
first place where they differ is the number of tokens until the first other one.

With ``--texts`` each cache writes its own greedy text where it would differ, and ``edit_distance`` has how
many tokens must be put in, left out or replaced to make the full cache's text of it. nltk counts them
(`pip install './lab[eval]'`).

``A>B`` reads the prompts into a cache of method A, which is converted to B before the first token after
them: a prompt at rest, as it is meant to be used. What follows at once was predicted with A.

Half of the prompts are of C4, a quarter of WikiText-2, a quarter of Python source, from places spread evenly
over each text. All have one length, so they are one batch, without padding.

transformers' `QuantizedCache` has its defaults, 128 recent tokens in full among them. With hqq its axis is 1,
as hqq's guide advises: its groups are then 64 channels of one token, as quanto's are. Scales have the dtype
of the model, here fp32.

``bits_per_value`` is that of codes, ranges and sinks at the end. ``cache_ratio`` is of all that is held, with
the tokens in full, over the fp16 cache: the mean over the steps.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable, Iterator
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

import click
import torch
from rivals import METHODS
from texts import C4, SOURCE, WIKITEXT, source_versions, texts, with_c4, with_wikitext
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from xquant import KVCache, Method, load_model, own_calibration, parse_method
from xquant.results import stamp, write_json
from xquant.runs import Runs, identity
from xquant.text import cut_windows
from xquant_lab.bench.contenders import head_sizes
from xquant_lab.bench.peers import held_bytes
from xquant_lab.evals.reading import passes_of

OWN = *METHODS, "tc-cl-1bit:tail=128"
BACKENDS = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
PEER = re.compile(r"QuantizedCache-(\w+)-(\d)bit")
PASS = 64
"""Tokens of a prompt that are read at a time."""
FIRST = 64
"""Steps in the first range of positions."""


class Sizes(NamedTuple):
    """Of a cache as it is now."""

    bits_per_value: float
    cache_ratio: float


class Entry(NamedTuple):
    """One of the caches."""

    make: Callable[[], Any]
    """An empty one."""
    name: str
    """And all that it depends on."""
    method: Method | None = None
    """What it compresses by after the prompts; None for transformers' own."""
    after: Callable[[Any], Any] = lambda cache: cache
    """What goes on with it after the first prompts."""


class Reference(NamedTuple):
    """What the full cache does after each of the prompts."""

    tokens: Tensor  # [B, turns, N], its greedy continuations
    predicted: Tensor  # [B, turns, N, V], log-probabilities before each of them


@click.command()
@with_wikitext
@with_c4
@click.option("--context", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=512, show_default=True, help="Tokens after it.")
@click.option("--prompts", "count", default=20, show_default=True)
@click.option("--turns", default=1, show_default=True, help="Prompts of a conversation.")
@click.option("--texts", "writes", is_flag=True, help="Have each cache write its own text, too.")
@click.option("--method", "specs", multiple=True, help="By default all that are installed.")
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(
    wikitext: str,
    c4: str,
    context: int,
    tokens: int,
    count: int,
    turns: int,
    writes: bool,
    specs: tuple[str, ...],
    resume: str | None,
    target: str,
) -> None:
    model, tokenizer = load_model("smollm2")
    whole, quarter = texts(c4, wikitext), count // 4
    shares = {C4: count - 2 * quarter, WIKITEXT: quarter, SOURCE: quarter}
    cut = [spread(model, tokenizer, whole[name], context, n, turns) for name, n in shares.items() if n]
    prompts = list(torch.cat(cut).unbind(1))
    if turns > 1:
        prompts = as_chat(tokenizer, prompts)
    said = str([prompt.tolist() for prompt in prompts])
    subject = {"tokens": tokens, "pass": PASS, "writes": writes, **identity(model, said, [])}
    runs, reference = Runs(resume, subject), None
    rows: list[dict[str, Any]] = []
    for spec in specs or (*OWN, *peers()):
        entry = entry_of(model, tokenizer, spec)
        held = runs.load(entry.name)
        if held is None:
            if reference is None:
                reference = continued(model, prompts, tokens)
                click.echo("the full cache's continuation is there")
            held = [{"method": spec, **measured(model, prompts, reference, entry)}]
            if writes:
                held[0]["edit_distance"] = edit_distances(model, prompts, reference, entry, held[0])
            runs.save(entry.name, held)
        rows += held
        click.echo("{method:26} KL {kl:.4f}, same for {median_first_difference} tokens".format(**held[0]))
    packages = {PACKAGES[found[1]] for row in rows if (found := PEER.fullmatch(row["method"]))}
    where = {name: importlib.metadata.version(name) for name in sorted(packages)}
    of = {"model": "smollm2", "dtype": "float32", "prompts": shares, "context": context, "turns": turns}
    write_json(target, stamp(rows, **of, tokens=tokens, source_of=source_versions(), packages=where))


def peers() -> list[str]:
    """transformers' own caches whose packages are installed."""
    return [
        f"QuantizedCache-{backend}-{bits}bit"
        for backend, installed in BACKENDS.items()
        for bits in (4, 2)
        if installed()
    ]


def spread(model: Any, tokenizer: Any, text: str, context: int, count: int, turns: int) -> Tensor:
    """``[count, turns, context]`` tokens from places spread evenly over a text."""
    whole = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) // context
    windows = cut_windows(model, tokenizer, text, context, whole)
    places = [i * whole // (count * turns) for i in range(count * turns)]
    return windows[places].unflatten(0, (count, turns))


def as_chat(tokenizer: Any, prompts: list[Tensor]) -> list[Tensor]:
    """Prompts ``[B, T]`` as the user's part of one conversation, each up to where the model answers."""
    marks = "first@", "answer@", "second@"
    roles = "user", "assistant", "user"
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, rest = whole.split(marks[0])
    between, after = rest.split(marks[1])[1].split(marks[2])

    def ids(text: str) -> Tensor:
        found = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return found.expand(len(prompts[0]), -1)

    opening, later, closing = map(ids, (before, between, after))
    return [torch.cat([later if i else opening, one, closing], 1) for i, one in enumerate(prompts)]


def entry_of(model: Any, tokenizer: Any, spec: str) -> Entry:
    """What a spec names: a cache of transformers, a method, or two of them."""
    if found := PEER.fullmatch(spec):
        backend, bits = found[1], int(found[2])
        version = importlib.metadata.version(PACKAGES[backend])
        return Entry(lambda: quantized(model, backend, bits), f"{spec} {version}")
    methods = [parse_method(part) for part in spec.split(">")]
    made = [own_calibration(model, tokenizer, m) if m.needs_calibration else None for m in methods]
    name = " ".join([spec, *(found.digest for found in made if found is not None)])

    def make() -> KVCache:
        return KVCache(model, methods[0], calibration=made[0])

    def after(cache: KVCache) -> KVCache:
        for method, calibration in zip(methods[1:], made[1:], strict=True):
            cache = cache.converted(method, calibration)
        return cache

    return Entry(make, name, methods[-1], after)


def quantized(model: Any, backend: str, bits: int) -> QuantizedCache:
    """transformers' cache, with the axis of the groups that its backend advises."""
    axis = {"quanto": 0, "hqq": 1}[backend]
    return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis, axis_value=axis)


@torch.inference_mode()
def read(model: Any, cache: Any, ids: Tensor, sizes: int | list[int] = PASS) -> Iterator[Tensor]:
    """Logits ``[B, T, V]`` of each pass in which ``cache`` reads tokens ``[B, T]``."""
    for part in ids.split(sizes, 1):
        yield model(part, past_key_values=cache, use_cache=True).logits


@torch.inference_mode()
def asked(model: Any, cache: Any, prompt: Tensor) -> Tensor:
    """Logits ``[B, 1, V]`` after a prompt."""
    *_, last = read(model, cache, prompt)
    return last[:, -1:].float()


@torch.inference_mode()
def greedy(model: Any, prompts: list[Tensor], tokens: int, entry: Entry) -> Iterator[tuple[int, int, Tensor]]:
    """Each place of the greedy continuations with an empty cache, its turn first, and the logits ``[B, V]``
    there."""
    cache = entry.make()
    for turn, prompt in enumerate(prompts):
        logits = asked(model, cache, prompt)
        if not turn:
            cache = entry.after(cache)
        for i in range(tokens):
            yield turn, i, logits[:, -1]
            if (turn, i) != (len(prompts) - 1, tokens - 1):  # nothing asks what follows
                (logits,) = read(model, cache, logits[:, -1:].argmax(-1))


def continued(model: Any, prompts: list[Tensor], tokens: int, cache: Any = None) -> Reference:
    """The greedy continuations with an empty cache, by default transformers' full one."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    batch, turns = len(prompts[0]), len(prompts)
    found = prompts[0].new_empty(batch, turns, tokens)
    predicted = torch.empty(batch, turns, tokens, model.config.vocab_size)
    for turn, i, logits in greedy(model, prompts, tokens, Entry(lambda: cache, "")):
        predicted[:, turn, i] = logits.float().log_softmax(-1)
        found[:, turn, i] = logits.argmax(-1)
    return Reference(found, predicted)


def edit_distances(
    model: Any, prompts: list[Tensor], reference: Reference, entry: Entry, row: dict[str, Any]
) -> list[int]:
    """Of each prompt, between the greedy text with a cache and the full cache's, in tokens. ``row``: what
    `measured` found of the cache."""
    from nltk.metrics import edit_distance

    wanted = reference.tokens.flatten(1)
    tokens = reference.tokens.shape[2]
    differs = torch.tensor(row["first_difference"]).view(len(wanted), -1).lt(tokens).any(1)
    found = wanted.clone()
    if differs.any():
        steps = greedy(model, [prompt[differs] for prompt in prompts], tokens, entry)
        found[differs] = torch.stack([logits.argmax(-1) for _, _, logits in steps], 1)
    pairs = zip(found.tolist(), wanted.tolist(), strict=True)
    return [edit_distance(own, other) for own, other in pairs]


@torch.inference_mode()
def measured(model: Any, prompts: list[Tensor], reference: Reference, entry: Entry) -> dict[str, Any]:
    """A cache along the full cache's continuations."""
    started, cache = time.perf_counter(), entry.make()
    batch, turns, tokens = reference.tokens.shape
    chosen, kl = torch.empty_like(reference.tokens), torch.empty(turns, tokens)
    total = 0.0
    for turn, prompt in enumerate(prompts):
        logits = asked(model, cache, prompt)
        if not turn:
            cache = entry.after(cache)
        given = reference.tokens[:, turn]
        # Transformers' own caches are read as they are used.
        steps = (
            [1] * tokens if entry.method is None else passes_of(entry.method, cache.get_seq_length(), tokens)
        )
        place, ratio = 0, sizes(model, cache, batch).cache_ratio
        for size, each in zip([1, *steps], chain([logits], read(model, cache, given, steps)), strict=True):
            here = min(size, tokens - place)  # what follows the last token of all is not asked
            for i in range(here):
                own, wanted = each[:, i].float().log_softmax(-1), reference.predicted[:, turn, place + i]
                kl[turn, place + i] = F.kl_div(own, wanted, reduction="batchmean", log_target=True)
                chosen[:, turn, place + i] = own.argmax(-1)
            before, ratio = ratio, sizes(model, cache, batch).cache_ratio
            total += sum(ratios(before, ratio, cache.get_seq_length() - size, size)[:here])
            place += here
    same = first_differences(chosen.flatten(0, 1), reference.tokens.flatten(0, 1))
    by_place = kl.mean(0)
    return {
        # Rounding can leave a divergence of next to nothing below zero.
        "kl": max(kl.mean().item(), 0.0),
        "kl_by_position": {
            name: max(by_place[where].mean().item(), 0.0) for name, where in ranges(tokens).items()
        },
        "kl_by_turn": [max(each.mean().item(), 0.0) for each in kl],
        "same_token": (chosen == reference.tokens).float().mean().item(),
        "first_difference": same,
        "median_first_difference": median(same),
        "mean_first_difference": fmean(same),
        "never_differs": same.count(tokens),
        "bits_per_value": sizes(model, cache, batch).bits_per_value,
        "cache_ratio": total / (turns * tokens),
        "seconds": time.perf_counter() - started,
    }


def ratios(before: float, after: float, start: int, size: int) -> list[float]:
    """The bytes of a cache over those of an fp16 cache after each token of a pass: each adds as many, as it
    would if it were read by itself.

    Args:
        before, after: the ratio before and after the pass.
        start: tokens that were held before it.
        size: tokens of the pass.
    """
    first, last = before * start, after * (start + size)
    return [(first + (last - first) * i / size) / (start + i) for i in range(1, size + 1)]


def ranges(tokens: int) -> dict[str, slice]:
    """Positions 0-63, 64-127, 128-255 and so on: each range is as long as all before it."""
    found, start = {}, 0
    while start < tokens:
        end = min(max(2 * start, FIRST), tokens)
        found[f"{start}-{end - 1}"] = slice(start, end)
        start = end
    return found


def first_differences(chosen: Tensor, wanted: Tensor) -> list[int]:
    """Of each row of ``[B, N]`` the tokens before the first that differs, ``N`` where none does."""
    return (chosen == wanted).long().cumprod(1).sum(1).tolist()


def sizes(model: Any, cache: Any, batch: int) -> Sizes:
    if isinstance(cache, KVCache):
        report = cache.report()
        return Sizes(report.bits_per_value, report.cache_ratio)
    _, heads, size = head_sizes(model)
    of_token = 2 * heads * size * batch
    codes = every = coded = values = 0
    for layer in cache.layers:
        recent = layer.keys.shape[2] if layer.keys.dim() == 4 else 0
        values += of_token * layer.get_seq_length()
        coded += of_token * (layer.get_seq_length() - recent)
        codes += held_bytes([layer._quantized_keys, layer._quantized_values])
        every += held_bytes(layer.__dict__)
    return Sizes(8 * codes / coded, every / (2 * values))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
