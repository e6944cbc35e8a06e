"""Experts of a mixture: which of them a stacked parameter holds, and what goes into each.

transformers 5 holds the experts of a layer as one parameter of three dimensions, which no module of
its own multiplies with. So the products of torch are watched: the memory of the factor tells the
expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nf4conv.calibrate.model.names import Filling

_PRODUCTS: Final = ("linear", "matmul", "mm", "bmm", "__matmul__", "addmm", "baddbmm")


def experts_of(filling: Filling, parameter: nn.Parameter) -> Mapping[str, int]:
    """Returns the expert that each tensor of a filling becomes, by the tensor's name.

    It is empty unless matrices are joined to a parameter of [experts, …].
    """
    if filling.convert is None or len(filling.parameters) != 1:
        return {}
    if parameter.dim() != 3:
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


@dataclass
class ExpertWatch(TorchFunctionMode):
    """Tells of products with the matrices of stacked parameters.

    Attributes:
        parameters: the parameters, [experts, …] each, by any key.
        note: a function that is called with the key, the expert and its inputs,
            [tokens, in_features].
    """

    parameters: Mapping[Any, torch.Tensor]
    note: Callable[[Any, int, torch.Tensor], None]
    _ranges: list[tuple[int, int, int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        for key, parameter in self.parameters.items():
            start = parameter.data_ptr()
            step = parameter.stride(0) * parameter.element_size()
            stop = start + step * parameter.shape[0]
            self._ranges.append((start, stop, step, key))

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
        for place, factor in enumerate(factors):
            address = factor.data_ptr()
            for start, stop, step, key in self._ranges:
                is_inside = start <= address < stop
                if place == 0 or not is_inside:
                    continue
                inputs = factors[place - 1]
                if factor.dim() == 3:
                    for expert, of_expert in enumerate(inputs):
                        self.note(key, expert, _used(of_expert))
                else:
                    expert = (address - start) // step
                    rows = inputs.reshape(-1, inputs.shape[-1])
                    self.note(key, expert, rows)
                return


def _used(inputs: torch.Tensor) -> torch.Tensor:
    """Returns the tokens that an expert gets, where those of others are zeros."""
    return inputs[(inputs != 0).any(dim=-1)]
