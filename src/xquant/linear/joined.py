"""Products of one input with several packed weights, as one operator: those of queries, keys and values, and
those that an MLP begins with. A step calls fewer operators, each of which takes microseconds by itself.
"""

from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from .grouped import GROUPED, JOINED, MOST


class Joined(CustomGraphPass):
    """A pass of inductor over the graph of a step."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        found: dict[tuple[Any, int], list[Any]] = {}
        for node in graph.find_nodes(op="call_function", target=GROUPED):
            found.setdefault((_viewed(node.args[0]), node.args[4]), []).append(node)
        for (_, bits), nodes in found.items():
            for start in range(0, len(nodes), MOST):
                some = nodes[start : start + MOST]
                if len(some) > 1:
                    self._join(graph, bits, some)
        graph.lint()

    def _join(self, graph: torch.fx.Graph, bits: int, nodes: list[Any]) -> None:
        # Weights and biases are inputs of the graph, so all is there where the first product is.
        packed, biases, outputs = ([node.args[i] for node in nodes] for i in (1, 2, 3))
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(JOINED, (nodes[0].args[0], packed, biases, outputs, bits))
            joined.meta["val"] = [node.meta["val"] for node in nodes]
            for i, node in enumerate(nodes):
                one = graph.call_function(getitem, (joined, i))
                one.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(one)
        for node in nodes:
            graph.erase_node(node)

    def uuid(self) -> Any:
        """Of the pass, for inductor's cache of graphs."""
        return get_hash_for_files((__file__,))


def _viewed(rows: Any) -> Any:
    """What the rows ``[M, C]`` of a product are a view of: each layer makes its own of one input."""
    while rows.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        rows = rows.args[0]
    return rows
