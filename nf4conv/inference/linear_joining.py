"""Joins products of the same x in graphs that torch.compile makes: q, k and v; gate and up.

In a graph it is certain what the same x is: the same node. So nothing is kept between calls, and
models need not be known. Inductor, torch's compiler, asks for such a change in its setting
`post_grad_custom_pre_pass`.
"""

import operator
from typing import Any

import torch

from nf4conv.inference.linear_op import group_op, linear_op

MOST_ROWS = 32
"""Products of more rows of x are computed one by one."""

_MOST_PRODUCTS = 3

Key = tuple[Any, ...]


def join_when_compiling() -> None:
    """Lets Inductor join products, unless another change of graphs was asked for before."""
    try:
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:  # a torch that cannot be asked
        return
    if getattr(config, "post_grad_custom_pre_pass", ...) is not None:
        return

    class JoinProducts(CustomGraphPass):
        """`join_products`, as Inductor calls it."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            join_products(graph)

        def uuid(self) -> str:
            """Returns what stands for this in the names of compiled graphs."""
            return "nf4conv joins products, 1"

    config.post_grad_custom_pre_pass = JoinProducts()


def join_products(graph: torch.fx.Graph) -> int:
    """Joins products of the same x with weights of one form, two or three at a time.

    A joined product takes the place of the first. What the others need is computed before it, so
    products are left alone whose weights come from other computations.

    Returns:
        The number of joined products.
    """
    groups: dict[Key, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is linear_op and _may_join(node):
            groups.setdefault(_key(node), []).append(node)
    joined = 0
    for nodes in groups.values():
        while len(nodes) > 1:
            # four as two and two
            count = 2 if len(nodes) in (2, 4) else _MOST_PRODUCTS
            _join(graph, nodes[:count])
            del nodes[:count]
            joined += 1
    return joined


def _may_join(node: torch.fx.Node) -> bool:
    """Returns True for a product of few rows whose weight is an input of the graph."""
    x = node.args[0]
    shape = x.meta["val"].shape if isinstance(x, torch.fx.Node) and "val" in x.meta else ()
    rows = 1
    for size in shape[:-1]:
        if not isinstance(size, int):
            return False
        rows *= size
    others = [one for one in node.args[1:] if isinstance(one, torch.fx.Node)]
    return len(shape) > 0 and rows <= MOST_ROWS and all(map(_is_given, others)) and not node.kwargs


def _is_given(node: torch.fx.Node) -> bool:
    """Returns True for an input of the graph, and for what is made of inputs alone."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return (
        node.op == "call_function"
        and node.target in _VIEWS
        and all(map(_is_given, node.all_input_nodes))
    )


_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
)


def _key(node: torch.fx.Node) -> Key:
    """Returns what products have in common that may be joined."""
    x, bias, _, _, nested_absmax, _, _, _, quant_type, blocksize = node.args
    return x, bias is None, nested_absmax is None, quant_type, blocksize


def _join(graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
    """Replaces products by one."""
    first = nodes[0]
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes[1:]:
        for needed in node.all_input_nodes:
            if needed is not first.args[0]:
                _move_before(needed, first, place)
    x, quant_type, blocksize = first.args[0], *first.args[8:]
    columns = list(zip(*(node.args[1:8] for node in nodes), strict=True))
    lists = [list(one) if one[0] is not None else [] for one in columns]
    biases, packed, absmax, nested_absmax, code, offset, rows = lists
    with graph.inserting_before(first):
        joined = graph.call_function(
            group_op,
            (x, biases, packed, absmax, nested_absmax, code, offset, rows, quant_type, blocksize),
        )
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        for i, node in enumerate(nodes):
            result = graph.call_function(operator.getitem, (joined, i))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in nodes:
        graph.erase_node(node)


def _move_before(
    node: torch.fx.Node, first: torch.fx.Node, place: dict[torch.fx.Node, int]
) -> None:
    """Moves what stands behind `first`, and what that is made of, before it."""
    if place[node] < place[first]:
        return
    for needed in node.all_input_nodes:
        _move_before(needed, first, place)
    first.prepend(node)
    place[node] = place[first] - 1  # moved once more, it would stand behind what is made of it
