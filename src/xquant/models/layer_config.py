"""The configuration of a model as its attention layers read it."""

from typing import Any


class LayerConfig:
    """What attention layers read in place of their configuration: the same, except for the name of the
    attention function.

    What the configuration itself says is read by others: engines that batch continuously, functions that make
    masks, users.

    Args:
        names: what is read in place of a name.
    """

    def __init__(self, config: Any, names: dict[str, str]) -> None:
        self.__dict__.update(_given=config, _names=names)

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = self._given._attn_implementation
        return self._names.get(name, name)

    @_attn_implementation.setter
    def _attn_implementation(self, name: str) -> None:
        self._given._attn_implementation = name

    def __getattr__(self, name: str) -> Any:
        if name in ("_given", "_names"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(LayerConfig, name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self._given, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerConfig, (self._given, self._names)
