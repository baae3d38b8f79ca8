"""Writes what the command line knows of methods without importing torch: `src/xquant/catalogue.json`."""

import json
from dataclasses import asdict

from xquant.catalogue import FILE
from xquant.methods import METHODS

if __name__ == "__main__":
    lines = [json.dumps(asdict(method.entry())) for method in METHODS.values()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
