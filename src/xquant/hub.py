"""Where the name of a model leads, found out without torch: a folder, a packaged model or the hub."""

from pathlib import Path

PACKAGED = ("smollm2", "smollm2-mha")


def check_model(name: str, enough: str = "") -> None:
    """Raise ValueError where ``name`` is a folder that is not there, or that holds no model; ``enough`` ends
    the message with what a folder need hold no more than."""
    folder = Path(name)
    if name in PACKAGED:
        return
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"'{name}' is not a model folder: it has no config.json{enough}")
    if not folder.exists() and (name.startswith((".", "/")) or name.count("/") > 1):
        raise ValueError(f"there is no model folder '{name}'")


def hub_answers() -> bool:
    """Whether the hub can be reached, asked once.

    The hub's own client asks for a file six times, in 23 seconds, before it gives up. A hub that is slow or
    breaks off counts as reached: how long to try is then for that client to say.
    """
    from huggingface_hub import constants, get_session
    from transformers.utils.hub import httpx  # the one that this huggingface_hub works with

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (
        httpx.ConnectError,
        httpx.ProxyError,
        ConnectionError,
    ):  # the last where it is told to stay offline
        return False
    except httpx.HTTPError:
        pass
    return True
