"""Products of the same x that become one in a graph: which do, and that nothing else changes."""

import pytest
import torch
from products import packed_weight
from torch._dynamo.backends.common import aot_autograd

import nf4conv
from nf4conv.inference import linear_joining, linear_op


class Projections(torch.nn.Module):
    """Products of x with some weights, in float32."""

    def __init__(self, rows: tuple[int, ...], bias: bool = False, nested: bool = True) -> None:
        super().__init__()
        self.weights = [packed_weight(n, 128, nested=nested) for n in rows]
        self.biases = [torch.randn(n) if bias else None for n in rows]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x * 2
        return [
            nf4conv.linear_4bit(x, *weight, bias)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]


def joined_and_left(model: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Compiles a model, checks its results, and returns how many joined products its graph has, and
    how many that were left alone.
    """
    counts = []

    def join(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        linear_joining.join_products(module.graph)
        module.graph.lint()
        module.recompile()
        targets = [node.target for node in module.graph.nodes]
        counts.append((targets.count(linear_op.group_op), targets.count(linear_op.linear_op)))
        return module

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=join))
    with torch.no_grad():
        for found, expected in zip(compiled(x), model(x), strict=True):
            assert torch.equal(found, expected)
    (count,) = counts
    return count


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [((24,), (0, 1)), ((24, 8), (1, 0)), ((24, 8, 8), (1, 0)), ((8, 8, 8, 8), (2, 0))],
    ids=str,
)
def test_products_of_the_same_x_become_one(
    rows: tuple[int, ...], expected: tuple[int, int], bias: bool, nested: bool
) -> None:
    model = Projections(rows, bias, nested)
    assert joined_and_left(model, torch.randn(2, 3, 128)) == expected


def test_many_rows_are_multiplied_one_by_one() -> None:
    assert joined_and_left(Projections((8, 8)), torch.randn(33, 128)) == (0, 2)


class Chain(torch.nn.Module):
    """Products of different x, and one whose weight is worked out."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [packed_weight(128, 128) for _ in range(3)]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = nf4conv.linear_4bit(x, *self.weights[0])
        second = nf4conv.linear_4bit(first, *self.weights[1])
        packed, state = self.weights[2]
        return [first, second, nf4conv.linear_4bit(x, packed ^ 1, state)]


def test_other_products_are_left_alone() -> None:
    assert joined_and_left(Chain(), torch.randn(2, 128)) == (0, 3)


def test_views_that_weights_share_stand_before_the_products() -> None:
    graph = torch.fx.Graph()
    x, packed, shared, absmax = map(graph.placeholder, ("x", "packed", "shared", "absmax"))
    x.meta["val"] = torch.randn(2, 128)

    def product(weight: torch.fx.Node) -> torch.fx.Node:
        arguments = (x, None, weight, absmax, None, None, None, 8, "nf4", 64)
        node = graph.call_function(linear_op.linear_op, arguments)
        node.meta["val"] = torch.empty(2, 8)
        return node

    first = product(packed)
    flat = graph.call_function(torch.ops.aten.view.default, (shared, [-1]))
    column = graph.call_function(torch.ops.aten.view.default, (flat, [-1, 1]))
    graph.output([first, product(column), product(flat)])
    assert linear_joining.join_products(graph) == 1
    graph.lint()  # nothing is used before it is there


def test_training_is_left_alone() -> None:
    model = Projections((8, 8))
    seen = []

    def look(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append(linear_joining.join_products(module.graph))
        return module

    torch._dynamo.reset()
    x = torch.randn(2, 128, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=look))
    sum(one.sum() for one in compiled(x)).backward()
    assert set(seen) == {0}
    assert x.grad is not None


def test_custom_op_is_registered_correctly() -> None:
    weights = [packed_weight(n, 128) for n in (24, 8)]
    tensors = [[packed for packed, _ in weights], [state.absmax for _, state in weights]]
    tensors += [
        [state.state2.absmax for _, state in weights],
        [state.state2.code for _, state in weights],
        [state.offset for _, state in weights],
    ]
    arguments = (torch.randn(2, 128), [], *tensors, [24, 8], "nf4", 64)
    torch.library.opcheck(linear_op.group_op, arguments)


def test_what_was_asked_for_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config, "post_grad_custom_pre_pass", None)
    linear_joining.join_when_compiling()
    ours = config.post_grad_custom_pre_pass
    assert ours is not None
    linear_joining.join_when_compiling()
    assert config.post_grad_custom_pre_pass is ours
