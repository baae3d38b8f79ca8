"""Products of one input with several packed weights, as one operator: those of queries, keys and values, and
those that an MLP begins with. A step calls fewer operators, each of which takes microseconds by itself.
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from .grouped import GROUPED, MOST


class Joined(CustomGraphPass):
    """A pass of inductor over the graph of a step."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        found: dict[tuple[Any, ...], list[Any]] = {}
        for node in graph.find_nodes(op="call_function", target=GROUPED):
            rows, _, biases, _, bits = node.args
            found.setdefault((_viewed(rows), bits, bool(biases)), []).append(node)
        for nodes in found.values():
            for start in range(0, len(nodes), MOST):
                some = nodes[start : start + MOST]
                if len(some) > 1:
                    self._join(graph, some)
        graph.lint()

    def _join(self, graph: torch.fx.Graph, nodes: list[Any]) -> None:
        # Weights and biases are inputs of the graph, so all is there where the first product is.
        packed, biases, outputs = ([each for node in nodes for each in node.args[i]] for i in (1, 2, 3))
        first = nodes[0]
        with graph.inserting_before(first):
            joined = graph.call_function(GROUPED, (first.args[0], packed, biases, outputs, first.args[4]))
            joined.meta["val"] = torch.cat([node.meta["val"] for node in nodes], 1)
            start = 0
            for node, count in zip(nodes, outputs, strict=True):
                cut = (joined, 1, start, start + count)
                one = graph.call_function(torch.ops.aten.slice.Tensor, cut)
                one.meta["val"] = joined.meta["val"][:, start : start + count]
                node.replace_all_uses_with(one)
                start += count
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
