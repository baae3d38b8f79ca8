"""Tables of quality: perplexity, passkeys, tasks, families of models, transformers' own tests."""

from collections import Counter
from collections.abc import Callable
from statistics import fmean

from xquant import parse_method
from xquant.catalogue import RECOMMENDED

from .common import Row, by_method, code, error, markdown, rows, table


def quality_rows(file: str, with_tail: bool) -> str:
    """Methods of a results file of `xquant perplexity`: those that keep recent tokens full, or the others."""
    head = ["method", "perplexity", "of full", "±", "KL", "same token"]
    head += ["bits per value", "in codes", "of fp16 cache"]
    return markdown(
        head,
        (
            [
                code(method),
                f"{row['perplexity']:.2f}",
                f"{row['ratio']:.3f}",
                error(row),
                f"{row['kl']:.3f}",
                f"{row['agreement']:.1%}",
                f"{row['bits_per_value']:.2f}",
                f"{row['code_bits']:.2f}",
                f"{row['cache_ratio']:.1%}",
            ]
            for method, row in by_method(file).items()
            if (parse_method(method).tail > 0) == with_tail
        ),
    )


@table
def which_method() -> str:
    """What each recommended method costs: SmolLM2 on WikiText-2, decoding after 8,192 tokens on 2 threads."""
    quality = by_method("wikitext2-smollm2") | by_method("own-wikitext2-smollm2")
    generating = by_method("generate-wikitext2-smollm2")
    speed = by_method("bench-tc-smollm2-8k") | by_method("bench-smollm2-8k")

    def pace(method: str) -> str:
        times = speed[method]["speedup_vs_full"]
        return f"{times:.2g} times" if times > 1 else f"1/{1 / times:.0f}"

    body = []
    for each in RECOMMENDED:
        row = quality[each.spec]
        when = " (convert it first)" if each.at_rest else ""
        body.append(
            [
                each.wish,
                code(each.spec),
                f"{row['cache_ratio']:.1%}",
                f"{generating[each.spec]['ratio'] - 1:+.1%}",
                f"{row['ratio'] - 1:+.1%}",
                pace(each.spec) + when if each.spec in speed else "not timed",
            ]
        )
    return markdown(["you want", "take", "bytes", "perplexity", "from codes", "speed"], body)


@table
def calibration() -> str:
    """Quality with the texts that calibrated `tc` before, all English or code, and with those of today."""
    body = []
    for name, text in {"wikitext2": "WikiText-2", "c4": "C4", "code": "source code"}.items():
        runs = [by_method(f"{kind}-{name}-smollm2") for kind in ("tc", "own-english", "own")]
        for method in runs[-1]:
            each = [run[method] for run in runs]
            cells = [f"{row['ratio']:.4f} ± {error(row)} (KL {row['kl']:.4f})" for row in each]
            body.append([text, code(method), *cells])
    kinds = "40 English texts of 512 tokens", "32 English of 256", "60 of 256, 12 of another kind"
    return markdown(["text", "method", *kinds], body)


LANGUAGES = {
    "de": "German",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "nl": "Dutch",
    "ru": "Russian",
    "zh-cn": "Chinese",
}
"""Of Debian's FAQ."""


@table
def languages() -> str:
    """KL in other languages, and how many times that of WikiText-2 it is at most."""
    measured = rows("languages-smollm2")
    texts = list(dict.fromkeys(row["text"] for row in measured))
    names = [LANGUAGES.get(text, text) for text in texts]
    body = []
    for method in dict.fromkeys(row["method"] for row in measured):
        found = [row["kl"] for row in measured if row["method"] == method]
        body.append([code(method), *[f"{kl:.4f}" for kl in found], f"{max(found) / found[0]:.2f}"])
    return markdown(["method", *names, "at most"], body)


@table
def quality() -> str:
    return quality_rows("wikitext2-smollm2", with_tail=False)


@table
def quality_tail() -> str:
    return quality_rows("wikitext2-smollm2", with_tail=True)


@table
def quality_mha() -> str:
    return markdown(
        ["method", "perplexity", "of full", "bits per value", "of fp16 cache"],
        (
            [
                code(method),
                f"{row['perplexity']:.2f}",
                f"{row['ratio']:.3f}",
                f"{row['bits_per_value']:.2f}",
                f"{row['cache_ratio']:.1%}",
            ]
            for method, row in by_method("wikitext2-smollm2-mha").items()
        ),
    )


def texts(**files: str) -> str:
    """Results of `xquant perplexity` side by side, each under its name: the methods of the last file."""
    found = {name: by_method(file) for name, file in files.items()}
    head = ["method", "bits per value"]
    for name in found:
        head += [f"{name}, of full", "±", "KL", "same token"]
    body = []
    for method in list(found.values())[-1]:
        own = [of_text[method] for of_text in found.values()]
        # The number of outliers depends on the text.
        bits = dict.fromkeys(f"{row['bits_per_value']:.2f}" for row in own)
        cells = [code(method), ", ".join(bits)]
        for row in own:
            cells += [
                f"{row['ratio']:.3f}",
                error(row),
                f"{row['kl']:.3f}",
                f"{row['agreement']:.1%}",
            ]
        body.append(cells)
    return markdown(head, body)


@table
def evaluation_texts() -> str:
    return texts(**{"WikiText-2": "wikitext2-smollm2", "C4": "c4-smollm2"})


def passkeys(found: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """A line a method, a column a context, in which ``cell`` says what was found."""
    contexts = sorted({row["context"] for row in found})
    body = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = [row for row in found if row["method"] == method]
        cells = (cell([row for row in own if row["context"] == context]) for context in contexts)
        body.append([code(method), *cells])
    return markdown(["method", *(f"{context:,}" for context in contexts)], body)


def counted(own: list[Row]) -> str:
    """Numbers found, of those asked for."""
    return f"{sum(row['found'] for row in own)} of {sum(row['samples'] for row in own)}"


def counted_and_lost(own: list[Row]) -> str:
    """Numbers found, and the depths at which some were not."""
    lost = ", ".join(f"{row['depth']:g}" for row in own if row["found"] < row["samples"])
    return counted(own) + (f" (lost at {lost})" if lost else "")


def counted_and_likely(own: list[Row]) -> str:
    """Numbers found, and the mean logarithm of the probability of the right ones' digits."""
    return f"{counted(own)} ({fmean(row['likelihood'] for row in own):.2f})"


@table
def evaluation_passkey() -> str:
    return passkeys(rows("passkey-smollm2"), counted_and_lost)


@table
def evaluation_passkey_exact() -> str:
    found = rows("passkey-exact-smollm2") + rows("passkey-exact-8k-smollm2")
    return passkeys(found, counted_and_likely)


@table
def passkey_errors() -> str:
    """Of each method and calibration: numbers found in both ways of reading, and in brackets the mean
    logarithm of the probability of the right ones' digits; then squared errors over squared norms, of the
    number's digits and of the median token. Errors were measured with the first calibration alone."""
    asked: dict[tuple[str, str], dict[str, list[Row]]] = {}
    errors: dict[str, dict[str, list[Row]]] = {}
    for row in rows("passkey-errors-smollm2"):
        if row["part"] == "asked":
            by_way = asked.setdefault((row["method"], row["calibrated_on"]), {})
            by_way.setdefault(row["attend"], []).append(row)
        else:
            errors.setdefault(row["method"], {}).setdefault(row["states"], []).append(row)
    body = []
    for (method, text), ways in asked.items():
        cells = [code(method), text if parse_method(method).needs_calibration else ""]
        for attend in ("chunk", "store"):
            cells.append(counted_and_likely(ways[attend]))
        own = errors.pop(method, {})
        for states in ("keys", "values"):
            for of in ("digits", "median"):
                cells.append(f"{fmean(row[of] for row in own[states]):.2%}" if own else "")
        body.append(cells)
    head = ["method", "calibrated on", "read exactly", "through the store"]
    head += ["keys: digits", "all", "values: digits", "all"]
    return markdown(head, body)


@table
def pyramid() -> str:
    """`pyramid` beside methods of about the same bytes."""
    return markdown(
        ["method", "of fp16 cache", "perplexity", "of full", "±", "KL"],
        (
            [
                code(method),
                f"{row['cache_ratio']:.1%}",
                f"{row['perplexity']:.2f}",
                f"{row['ratio']:.3f}",
                error(row),
                f"{row['kl']:.3f}",
            ]
            for method, row in by_method("pyramid-smollm2").items()
        ),
    )


def tasks(*files: str) -> str:
    """Scores of results files of `xquant eval`: a line a method, a column a task and metric; then how many
    rows were answered as with the full cache. Of the metrics of TruthfulQA those of BLEU."""
    found = [row for file in files for row in rows(file)]
    columns: dict[str, dict[str, str]] = {}
    same: dict[str, dict[str, str]] = {}
    for row in found:
        # LongBench names its score twice.
        if row["metric"].startswith("rouge") or row["metric"].endswith(("_diff", "_score")):
            continue
        made_to = f" {row['context']:,}" if row["context"] else ""
        value = f"{row['value']:.3f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.3f}")
        metric = "" if row["metric"] == str(row["context"]) else f", {row['metric']}"
        columns.setdefault(f"{row['task']}{made_to}{metric}", {})[row["method"]] = value
        if row["agreement"] is not None:
            same.setdefault(f"{row['task']}{made_to}, as full", {})[row["method"]] = (
                f"{row['agreement']} of {row['n']}"
            )
    columns |= same
    methods = dict.fromkeys(row["method"] for row in found)
    return markdown(
        ["method", *columns],
        ([code(m), *(cells.get(m, "") for cells in columns.values())] for m in methods),
    )


@table
def evaluation_truthfulqa() -> str:
    return tasks("truthfulqa-smollm2")


@table
def evaluation_gsm8k() -> str:
    return tasks("gsm8k-smollm2")


@table
def evaluation_ruler() -> str:
    return tasks("ruler-smollm2", "ruler-2048-smollm2", "ruler-4096-smollm2")


@table
def evaluation_longbench() -> str:
    return tasks("longbench-smollm2")


@table
def classes() -> str:
    """Every class of transformers that writes text: what three kinds of methods do for it."""
    (row,) = rows("classes")
    specs = ("kivi-16bit:group=8,rope=post", "kivi-16bit:group=8", "xquant-16bit:group=8")
    head = ("class", "keys after RoPE", "keys before RoPE", "layer inputs", "why not")
    body = []
    for name, outcomes in sorted(row["classes"].items()):
        found = [outcomes[spec] for spec in specs]
        marks = ["yes" if each == "right" else "" for each in found]
        reasons = dict.fromkeys(each for each in found if each != "right")
        body.append([name, *marks, "; ".join(_reason(name, each) for each in reasons)])
    return markdown(head, body)


@table
def classes_counted() -> str:
    """Of all these classes, how many are served in which way."""
    (row,) = rows("classes")
    counts: Counter[str] = Counter()
    for outcomes in row["classes"].values():
        right = sum(each == "right" for each in outcomes.values())
        kinds = {each.split(" ", 1)[0].rstrip(":,") for each in outcomes.values()}
        if right == len(outcomes):
            counts["served by every method"] += 1
        elif right:
            counts["served by methods that keep keys and values"] += 1
        elif kinds == {"refused"}:
            counts["refused, with the reason"] += 1
        elif kinds <= {"accepted", "not", "refused"}:
            counts["not run: no tiny model could be built, or it wants more than text"] += 1
        else:
            counts["wrong, or an error without a reason"] += 1
    return markdown(("classes", "number"), ([kind, str(n)] for kind, n in counts.most_common()))


def _reason(name: str, outcome: str) -> str:
    """What a run says of a class, for a cell."""
    kind, _, rest = outcome.partition(" ")
    if kind != "refused:":
        return "not run: " + rest.partition("(")[2].rstrip(")")[:90].replace("|", " ")
    rest = rest.removeprefix(f"{name} is not supported: ").removeprefix(f"{name}: ")
    return rest.partition(": use a method")[0].replace("|", " ")


@table
def upstream() -> str:
    """Of transformers' own generation tests, by family: passed of all in which the cache was used."""
    found = rows("upstream")
    methods = list(dict.fromkeys(row["method"] for row in found))
    by_family: dict[str, dict[str, tuple[int, int]]] = {}
    for row in found:
        for family in (row["family"], "all"):
            own = by_family.setdefault(family, {})
            right, total = own.get(row["method"], (0, 0))
            own[row["method"]] = right + row["passed"], total + row["tests"]
    order = [*(family for family in by_family if family != "all"), "all"]
    body = ([family, *("{} of {}".format(*by_family[family][m]) for m in methods)] for family in order)
    return markdown(["family", *map(code, methods)], body)
