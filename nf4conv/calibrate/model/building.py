"""Builds a model without weights from the installed transformers, and finds its blocks.

A parameter without weights is on torch's meta device, or, where code has to run, one NaN that is
repeated: neither takes memory. Buffers, such as the frequencies of rotary embeddings, are real:
nothing on disk holds them. No code comes from the checkpoint.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nf4conv.errors import Nf4convError, PlanError, first_line
from nf4conv.models.config import architecture_of, without_quantization
from nf4conv.models.parsing import parse_config


@dataclass(frozen=True)
class BlockList:
    """Names the list of a model's blocks.

    Attributes:
        path: where it stands in the model, such as "model.layers".
        blocks: the blocks in their order.
    """

    path: str
    blocks: tuple[nn.Module, ...]

    def number_of(self, parameter: str) -> int | None:
        """Returns the block that a parameter is in; None if it is in none."""
        if not parameter.startswith(f"{self.path}."):
            return None
        number = parameter[len(self.path) + 1 :].partition(".")[0]
        return int(number) if number.isdecimal() else None


@contextmanager
def planning_error(message: str) -> Iterator[None]:
    """Turns what the code of transformers raises, which may be anything, into a PlanError."""
    try:
        yield
    except (Nf4convError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise PlanError(f"{message}: {first_line(error)}") from error


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint."""
    import transformers

    advice = "give token ids instead: --calibrate ids.npy"
    with planning_error(f"{folder}: transformers finds no tokenizer that it can load; {advice}"):
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )


def build_model(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Builds the model of a config.json, all parameters of which are on the meta device."""
    import transformers

    release = f"transformers {transformers.__version__}"
    architecture = architecture_of(config)
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not hasattr(model_class, "_from_config"):
        raise PlanError(
            f"--calibrate: {release} has no {architecture or 'architecture'}; "
            f"without --calibrate the model can be quantized all the same"
        )
    for attention in ("sdpa", "eager"):
        try:
            parsed = _parse(config, model_class)
            with _without_weights():
                model: nn.Module = model_class._from_config(
                    parsed, dtype=dtype, attn_implementation=attention
                )
            return model.eval().requires_grad_(False)
        except Exception as error:  # noqa: BLE001 - transformers raises anything
            failure = error
    raise PlanError(
        f"--calibrate: {release} cannot build {architecture}: {first_line(failure)}"
    ) from failure


def _parse(config: Mapping[str, Any], model_class: Any) -> Any:
    """Parses a config; the experts of the model compute in plain torch."""
    parsed = parse_config(without_quantization(config), model_class.config_class)
    for part in (parsed, parsed.get_text_config()):
        part.use_cache = False
        part._experts_implementation = "eager"
    return parsed


@contextmanager
def _without_weights() -> Iterator[None]:
    """Moves every parameter to the meta device as soon as a module has it.

    So its initialization takes no time.
    """
    register = nn.Module.register_parameter

    def register_without_weight(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_without_weight  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_blocks(model: nn.Module, packed: Collection[str]) -> BlockList:
    """Returns the list of modules that holds most of the weights that are to be packed."""
    best: tuple[int, BlockList] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        count = sum(1 for name in packed if name.startswith(f"{path}."))
        if count and (best is None or count > best[0]):
            best = count, BlockList(path, tuple(module))
    if best is None:
        raise PlanError(
            f"--calibrate: {type(model).__name__} has no list of blocks with weights to pack"
        )
    return best[1]
