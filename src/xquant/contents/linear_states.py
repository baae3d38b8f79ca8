"""States of linear attention, of layers that have both these and compressed keys and values (Falcon-H1)."""

from typing import Any

from transformers import Cache

from .. import compat


class LinearStatesCache(Cache):
    """A cache in which a layer of keys and values may have a state of linear attention, too. Layers that have
    such a state alone are transformers' own.

    What a model asks of states is answered as transformers' own cache does.
    """

    linear_states: dict[int, Any]
    """By number of the layer: transformers' layer of that state."""

    def _forget_states(self, own: list[Any]) -> None:
        """Begin with empty states, beside those of transformers' ``own`` layers that have both."""
        recorded = {i for i, state in getattr(self, "linear_states", {}).items() if state.record_past}
        both = {index: layer for index, layer in enumerate(own) if compat.has_both(layer)}
        if both and not compat.STATES_ARE_ASKED_OF_CACHES:
            raise ValueError(
                f"layer {min(both)} keeps a state beside keys and values: update transformers to 5.24"
            )
        self.linear_states = {index: compat.state_of(layer) for index, layer in both.items()}
        for index in recorded:
            self.linear_states[index].activate_past_recording()

    @property
    def _states(self) -> Any:
        """The states alone, as a cache."""
        return Cache(layers=[self.linear_states.get(i, layer) for i, layer in enumerate(self.layers)])

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._states.get_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._states.get_recurrent_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._states.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._states.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._states.has_previous_state(*args, **kwargs)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        for state in self.linear_states.values():
            state.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        return bool(self._states.is_recording_past(layer_idx))

    @property
    def is_croppable(self) -> bool:
        states = self.linear_states.values()
        return bool(super().is_croppable) and all(state.is_croppable for state in states)
