"""Rows of results as the verbs write them, with made-up figures."""

from typing import Any

ENVIRONMENT = {
    "command": "xquant compare m --method 'a<b>'",
    "xquant": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "python": "3.11.7",
    "commit": "c0ffee",
    "cpu": "a processor",
    "threads": 2,
    "gpu": None,
}


def compared(method: str, ratio: float, cache_ratio: float, **more: Any) -> dict[str, Any]:
    """A row of `xquant compare`. KL is what the ratio loses, where nothing else is said."""
    return {
        "method": method,
        "perplexity": 10 * ratio,
        "full_perplexity": 10.0,
        "ratio": ratio,
        "standard_error": 0.1,
        "difference": ratio - 1,
        "difference_error": 0.001,
        "kl": ratio - 1,
        "agreement": 0.95,
        "bits_per_value": 16 * cache_ratio,
        "code_bits": 15 * cache_ratio,
        "cache_ratio": cache_ratio,
        "cache_bytes": int(1e6 * cache_ratio),
        "full_cache_bytes": 1_000_000,
        "tokens": 4094,
        "windows": 2,
        "context": 2048,
        "seconds": 1.5,
        "window_nll": [2.3, 2.5],
        "model": "m",
        "text": "t.txt",
        "dtype": "float32",
        "device": "cpu",
        "calibrations": {},
        "schema": 1,
        "environment": ENVIRONMENT,
        **more,
    }


def benched(method: str, context: int, speedup: float, **more: Any) -> dict[str, Any]:
    """A row of `xquant bench`."""
    return {
        "method": method,
        "context": context,
        "batch": 2,
        "dtype": "float32",
        "kernel": "avx512",
        "ms_per_token": 40.0 / speedup,
        "measured": "decode",
        "cache_bytes": 5_000_000,
        "speedup_vs_full": speedup,
        "speedup_min_max": [speedup / 2, 2 * speedup],
        "model": "m",
        "device": "cpu",
        "schema": 1,
        "environment": ENVIRONMENT,
        **more,
    }


def scored(method: str, task: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of `xquant eval`."""
    return {
        "method": method,
        "task": task,
        "metric": "exact_match",
        "value": value,
        "n": 50,
        "stderr": 0.02,
        "agreement": 40,
        "kl": None,
        "same_tokens": None,
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "schema": 1,
        "environment": ENVIRONMENT,
        **more,
    }
