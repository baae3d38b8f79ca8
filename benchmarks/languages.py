"""Methods on texts that their calibrations have little or nothing of: other languages, and data.

    python benchmarks/languages.py --wikitext FILE --faq FOLDER --json results.json

The texts are Debian's FAQ in every language of which the folder has it, as Debian 12's packages
``debian-faq-LANGUAGE`` unpack to, from an eighth on, where front matter is over; and the JSON schemas that
the package `check-jsonschema` brings, 6,000 characters of each. WikiText-2 stands for what calibrations know,
and once more as documents of 64 tokens, joined: with the token between documents in place of every 64th.
Every token reads the store. Calibrations are of the model's own writing.
"""

import gzip
import importlib.metadata
import re
from pathlib import Path

import click
import torch
from texts import WIKITEXT, folder_of, with_wikitext

from xquant import load_model, own_calibration, parse_method
from xquant.results import stamp, write_json
from xquant.runs import Runs
from xquant.text import cut_windows, read_text
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.perplexity import measure

METHODS = "kivi-4bit", "tc-2bit", "tc-cl-2bit", "tc-cl-1bit"
SCHEMAS = "check-jsonschema"
BETWEEN = "<|endoftext|>"
"""What stands between the documents that SmolLM2 learned from."""
DOCUMENT = 64
"""Tokens of each of the joined documents, with the one between them."""


def faqs(folder: Path) -> dict[str, str]:
    """By language, what of the FAQ follows its front matter."""
    found = {}
    for file in sorted(folder.rglob("debian-faq.*.txt.gz")):
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        text = re.sub("\n{3,}", "\n\n", "\n".join(line.strip() for line in lines))
        found[file.name.split(".")[1]] = text[len(text) // 8 :]
    return found


def schemas() -> str:
    """The beginnings of JSON schemas of many projects."""
    folder = folder_of("check_jsonschema") / "builtin_schemas" / "vendor"
    return "\n".join(file.read_text()[:6000] for file in sorted(folder.rglob("*.json")))


@click.command()
@with_wikitext
@click.option("--faq", required=True, help="A folder with unpacked packages.")
@click.option("--context", default=2048, show_default=True)
@click.option("--windows", default=2, show_default=True)
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(wikitext: str, faq: str, context: int, windows: int, resume: str | None, target: str) -> None:
    model, tokenizer = load_model("smollm2")
    methods = [parse_method(spec) for spec in METHODS]
    made = [own_calibration(model, tokenizer, method) for method in methods if method.needs_calibration]
    texts = {WIKITEXT: read_text(wikitext), **faqs(Path(faq)), "JSON": schemas()}
    cut = {name: cut_windows(model, tokenizer, text, context, windows) for name, text in texts.items()}
    cut["joined"] = joined = cut[WIKITEXT].clone()
    joined[:, DOCUMENT - 1 :: DOCUMENT] = tokenizer.convert_tokens_to_ids(BETWEEN)
    rows = []
    for name, ids in cut.items():
        place = None if resume is None else Path(resume) / f"{name}.json"
        journal = Journal(Runs(place, {"text": name, "windows": windows}))
        for found in measure(model, ids, methods, made, journal):
            rows.append({**found.to_dict(), "text": name})
            click.echo(f"{name:10} {found.method:12} KL {found.kl:.4f}")
    schemas_of = f"{SCHEMAS} {importlib.metadata.version(SCHEMAS)}"
    write_json(target, stamp(rows, model="smollm2", dtype="float32", schemas_of=schemas_of))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
