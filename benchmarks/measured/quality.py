"""Tables of quality: perplexity, passkeys, tasks, families of models, transformers' own tests."""

from collections import Counter

from xquant import parse_method
from xquant.catalogue import RECOMMENDED

from .common import by_method, code, error, markdown, rows, table


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
    quality = by_method("wikitext2-smollm2") | by_method("tc-wikitext2-smollm2")
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
    """Quality with a calibration of the default's size, and with one of longer texts."""
    body = []
    for name, text in {"wikitext2": "WikiText-2", "c4": "C4", "code": "source code"}.items():
        longer, default = (by_method(f"{kind}-{name}-smollm2") for kind in ("own-512", "tc"))
        for method in ("tc-2bit", "tc-cl-2bit", "tc-cl-1bit"):
            each = default[method], longer[method]
            cells = [f"{row['ratio']:.4f} ± {error(row)} (KL {row['kl']:.4f})" for row in each]
            body.append([text, code(method), *cells])
    return markdown(["text", "method", "60 texts of 256 tokens (default)", "40 of 512"], body)


LANGUAGES = {
    "de": "German",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "nl": "Dutch",
    "pt": "Portuguese",
    "ru": "Russian",
    "zh-cn": "Chinese",
}
"""Of Debian's FAQ."""


@table
def languages() -> str:
    """KL in other languages, how many times that of WikiText-2 it is at most, and of joined documents."""
    measured = rows("languages-smollm2")
    texts = list(dict.fromkeys(row["text"] for row in measured))
    names = [LANGUAGES.get(text, text) for text in texts]
    body = []
    for method in dict.fromkeys(row["method"] for row in measured):
        *found, joined = (row["kl"] for row in measured if row["method"] == method)
        cells = [f"{kl:.4f}" for kl in found]
        body.append([code(method), *cells, f"{max(found) / found[0]:.2f}", f"{joined:.4f}"])
    return markdown(["method", *names[:-1], "at most", "joined documents"], body)


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
