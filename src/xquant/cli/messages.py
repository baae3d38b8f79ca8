"""What the command says in more than one place."""

EXTRAS = {
    **dict.fromkeys(("click", "rich"), ".[cli]"),
    "sklearn": ".[calibrate]",
    **dict.fromkeys(("accelerate", "gguf"), ".[smollm2]"),
    **dict.fromkeys(("matplotlib", "jinja2", "markupsafe"), "./lab[plots]"),
    **dict.fromkeys(("lm_eval", "datasets"), "./lab[eval]"),
}
"""What brings a package, for pip in a clone."""
NOTHING_KEPT = "stopped; nothing was kept"
