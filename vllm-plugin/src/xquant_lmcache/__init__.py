"""The methods of xquant as a serde of LMCache: what its second tier keeps of a chunk is packed.

LMCache imports this module where an adapter of the second tier is one of its class `FSAdapter`::

    {"type": "plugin", "module_path": "xquant_lmcache", "class_name": "FSAdapter",
     "adapter_params": {"base_path": FOLDER},
     "serde": {"type": "xquant", "model": CHECKPOINT, "method": SPEC}}
"""

from typing import Any

from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

from .serde import register


class FSAdapter(FSL2Adapter):
    """LMCache's own adapter of a folder, in a module whose import registers the serde.

    ``adapter_params`` are those of its type ``fs``.
    """

    def __init__(self, config: FSL2AdapterConfig, **more: Any) -> None:
        super().__init__(config)


FSAdapterConfig = FSL2AdapterConfig
"""LMCache finds it by this name."""

register()
