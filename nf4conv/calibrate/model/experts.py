"""Experts of a mixture: which of them a stacked parameter holds, and what goes into each.

transformers 5 holds the experts of a layer as one parameter of three dimensions, which no module of
its own multiplies with. So the products of torch are watched: the memory of the factor tells the
expert.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nf4conv.calibrate.model.filling import Filling

_PRODUCTS: Final = ("linear", "matmul", "mm", "bmm", "__matmul__", "addmm", "baddbmm")


def experts_of(filling: Filling, parameter: nn.Parameter) -> Mapping[str, int]:
    """Returns the expert that each tensor of a filling becomes, by the tensor's name.

    It is empty unless matrices are joined to the parameter, [experts, …].
    """
    if filling.convert is None or len(filling.parameters) != 1:
        return {}
    if any(len(tensor.shape) != 2 for tensor in filling.tensors):
        return {}
    # the conversion itself says where a matrix goes, whatever its size: small ones with numbers
    count = len(filling.tensors)
    small = [torch.full((2, 2), float(number)) for number in range(count)]
    [made] = filling.convert(small).values()
    if made.dim() != 3 or made.shape[0] != parameter.shape[0]:
        return {}
    found: dict[str, int] = {}
    for expert, numbers in enumerate(made.flatten(1).tolist()):
        for number in set(numbers):
            name = filling.tensors[int(number)].name
            if name in found:
                return {}
            found[name] = expert
    return found


class ExpertWatch(TorchFunctionMode):
    """Tells of products with the matrices of stacked parameters.

    Args:
        parameters: the parameters, [experts, …] each, by their paths.
        note: a function that is called with the path, the expert and its inputs,
            [tokens, in_features].
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        note: Callable[[str, int, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._note = note
        self._ranges: list[tuple[int, int, int, str]] = []
        for path, parameter in parameters.items():
            start = parameter.data_ptr()
            step = parameter.stride(0) * parameter.element_size()
            self._ranges.append((start, start + step * parameter.shape[0], step, path))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _PRODUCTS:
            factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self._look_at(factors)
        return function(*args, **(kwargs or {}))

    def _look_at(self, factors: Sequence[torch.Tensor]) -> None:
        """Notes a product if one of its factors lies in the memory of a parameter."""
        for inputs, factor in pairwise(factors):
            address = factor.data_ptr()
            for start, stop, step, path in self._ranges:
                if not start <= address < stop:
                    continue
                if factor.dim() == 3:
                    for expert, rows in enumerate(inputs):
                        # tokens of others are zeros
                        self._note(path, expert, rows[(rows != 0).any(dim=-1)])
                else:
                    self._note(path, (address - start) // step, inputs)
                return
