"""A LoRA adapter as PEFT saves it: what its config says, and what its tensors do. Only headers are
read.

    P.lora_A.weight [rank, in], P.lora_B.weight [out, rank]       added to P.weight: scale · B · A
    P.lora_B.bias                                                 added to P.bias: scale · it
    P.lora_magnitude_vector [out]                                 DoRA: the norms that the rows then get
    P.lora_embedding_A [rank, n], P.lora_embedding_B [width, rank]     added to P.weight: scale · (B · A) transposed
    P.token_adapter.trainable_tokens_delta                        rows in the place of those of P.weight
    P.base_layer.lora_A.weight …                                  of one more parameter of P (target_parameters)
    everything else                                               in the place of the tensor of that name

P is a path in the model as it is loaded, behind "base_model.model." (PEFT 0.21.2:
tuners/lora/layer.py, utils/save_and_load.py).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.header import read_header
from nf4conv.sources.own_files import require_own
from nf4conv.sources.pickles.header import read_pickle_header
from nf4conv.sources.source import AdapterFiles, is_repo_id, read_json
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_ROLE: Final = re.compile(
    r"(?P<module>.+?)(?P<nested>(\.base_layer)*)\.(token_adapter\.)?(?P<role>lora_A\.weight|lora_B\.weight|lora_B\.bias"
    r"|lora_embedding_A|lora_embedding_B|lora_magnitude_vector(?=(\.weight)?$)|trainable_tokens_delta)(\.weight)?"
)
TOKENS: Final = "trainable_tokens_delta"
_OTHER: Final = json.loads(Path(__file__).with_suffix(".json").read_bytes())
"""By key of the config what needs another arithmetic than LoRA's, and the values of
init_lora_weights for which PEFT changes the base's weights when the adapter is made.
"""


class Targeted(NamedTuple):
    """The LoRA tensors of one module, or of one parameter of it."""

    module: str  # its path in the model
    tensors: Mapping[str, TensorInfo]  # by role


@dataclass(frozen=True)
class Adapter(AdapterFiles):
    """An adapter that can be merged."""

    targeted: tuple[
        Targeted, ...
    ] = ()  # modules with LoRA tensors, outer wrappers of a module first
    # tensors in the place of others, by the name of those in the model
    replaced: Mapping[str, TensorInfo] = field(default_factory=dict)

    def rank(self, path: str) -> int:
        """The rank of a module's factors; `path` is that of the parameter for one of
        target_parameters.
        """
        rank = self._value("r", "rank_pattern", path)
        if type(rank) is not int or rank <= 0:
            raise SourceError(f"{self.place}/{ADAPTER_CONFIG}: {path}: {rank!r} is no rank")
        return rank

    def scale(self, path: str) -> float:
        """What the product of a module's factors is multiplied by."""
        rank, alpha = self.rank(path), self._value("lora_alpha", "alpha_pattern", path)
        if type(alpha) not in (int, float) or not abs(alpha) < 2**31:
            raise SourceError(f"{self.place}/{ADAPTER_CONFIG}: {path}: {alpha!r} is no lora_alpha")
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _value(self, key: str, patterns: str, path: str) -> Any:
        default = self.config.get(key, 8)  # 8 is PEFT's default of both
        try:
            special = (self.config.get(patterns) or {}).items()
            return next(
                (value for pattern, value in special if re.match(rf"(.*\.)?({pattern})$", path)),
                default,
            )
        except (AttributeError, re.error, OverflowError, RecursionError) as error:
            where = f"{self.place}/{ADAPTER_CONFIG}: {patterns}"
            raise SourceError(
                f"{where}: not a JSON object with regular expressions as keys: {error}"
            ) from error

    def token_indices(self, module: str) -> tuple[int, ...]:
        """The rows of an embedding that trainable tokens take the place of."""
        indices = (
            self.config.get("trainable_token_indices") or self.config.get("token_indices") or ()
        )
        if isinstance(indices, Mapping):
            indices = next(
                (value for key, value in indices.items() if f".{module}".endswith(f".{key}")), ()
            )
        if not isinstance(indices, list) or not all(
            type(index) is int and index >= 0 for index in indices
        ):
            raise SourceError(
                f"{self.place}/{ADAPTER_CONFIG}: {module}: no list of trainable_token_indices"
            )
        return tuple(indices)

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """Ends of the names of parameters that are no module's weight."""
        return tuple(self.config.get("target_parameters") or ())

    def targets(self, parameter: str) -> bool:
        """Whether a parameter is one of target_parameters."""
        return any(f".{parameter}".endswith(f".{target}") for target in self.target_parameters)


def open_adapter(place: str, where: SourceOptions | None = None) -> Adapter:
    """Read what an adapter consists of: a folder, or "org/name" on the Hub, with "@revision" or
    without.

    A SourceError if there is none, or one whose arithmetic is not that of LoRA; the message says
    which.
    """
    folder, origin = Path(place), None
    if not folder.is_dir():
        repo, _, revision = place.partition("@")
        if folder.exists() or not is_repo_id(repo):
            raise SourceError(
                f"{place}: no such folder; an adapter is a folder, or a name on the Hub"
            )
        from nf4conv.sources.remote.hub import (
            fetch_adapter,  # importing huggingface_hub takes a while
        )

        where = replace(
            where or SourceOptions(), revision=revision or None, subfolder=None, variant=None
        )
        folder, origin = fetch_adapter(repo, where)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise SourceError(f"{place}: no {ADAPTER_CONFIG} in it, so this is no adapter of PEFT")
    config = read_json(require_own(folder / ADAPTER_CONFIG, folder))
    _check_kind(place, config)
    file = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise SourceError(f"{place}: neither {' nor '.join(ADAPTER_WEIGHTS)} in it")
    require_own(file, folder)
    tensors = read_header(file) if file.suffix == ".safetensors" else read_pickle_header(file)
    return _sorted(Adapter(place, file, config, origin=origin), tensors)


def _check_kind(place: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        raise SourceError(
            f"{place}: an adapter of the kind {kind}; only LoRA, with or without DoRA, can be "
            f"merged"
        )
    for key, name in _OTHER["arithmetic"].items():
        if config.get(key):
            raise SourceError(
                f"{place}: {name} ({key}), which cannot be merged by LoRA's arithmetic"
            )
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(tuple(_OTHER["bases"])):
        raise SourceError(
            f"{place}: made with init_lora_weights {init}, which changed the base's weights; save "
            f"it as plain LoRA: "
            "PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )


def _sorted(adapter: Adapter, tensors: tuple[TensorInfo, ...]) -> Adapter:
    """An adapter with its tensors by what they do."""
    # by path, and by how many other wrappers are around it: those of several parameters are nested
    modules: dict[tuple[str, int], dict[str, TensorInfo]] = {}
    replaced: dict[str, TensorInfo] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix("base_model.model.")
        found = _ROLE.fullmatch(name)
        if found is not None:
            depth = found["nested"].count(".")
            modules.setdefault((found["module"], depth), {})[found["role"]] = tensor
        elif re.search(r"\.lora_\w+(\.|$)|_adapter\.", name):
            raise SourceError(
                f"{adapter.file}: {tensor.name}: not a tensor of LoRA as PEFT merges it"
            )
        else:
            replaced[name.replace(".base_layer.", ".")] = tensor
    targeted = tuple(Targeted(module, roles) for (module, _), roles in sorted(modules.items()))
    return replace(adapter, targeted=targeted, replaced=replaced)
