"""What a token's attention is made of: packing its key and value, reading codes, reading outliers.

As KVQuant has it (arXiv 2401.18079, Table 22).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from xquant.methods import KVQuant, Method


def dense(method: Method) -> Method:
    """The method without what it keeps sparsely beside its codes; itself where that is nothing."""
    return replace(method, outliers=0) if isinstance(method, KVQuant) else method


def with_dense(methods: Iterable[Method]) -> list[Method]:
    """The methods, and their dense forms that they are compared with."""
    return list(dict.fromkeys(each for m in methods for each in (m, dense(m))))


def parts_of(row: Mapping[str, Any], dense: Mapping[str, Any], layers: int) -> dict[str, float | None]:
    """Microseconds of one token and layer.

    ``packing`` is storing a token, averaged over a block that is sealed with its last. ``dense`` is the
    attention of the method without outliers, and ``sparse`` what outliers add to it in the same rounds.
    """
    sealing, whole = row.get("sealing") or {}, row["attention_ms_per_layer"]
    packing = codes = None
    if "block" in sealing:
        appended = sealing["append_ms_per_token"] * (sealing["block"] - 1)
        packing = 1e3 * (appended + sealing["seal_ms_per_block"]) / sealing["block"] / layers
    if whole is not None and dense["attention_ms_per_layer"] is not None:
        codes = 1e3 * dense["attention_ms_per_layer"]
    sparse = None if codes is None else 1e3 * whole - codes
    return {"packing_us": packing, "dense_us": codes, "sparse_us": sparse}
