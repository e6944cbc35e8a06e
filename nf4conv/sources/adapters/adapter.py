"""Reads a LoRA adapter as PEFT saves it: its config, and the headers of its tensors.

    P.lora_A.weight [rank, in] and P.lora_B.weight [out, rank]
        added to P.weight: scale · B · A
    P.lora_magnitude_vector [out]
        DoRA: the norms that the rows then get
    P.lora_embedding_A [rank, n] and P.lora_embedding_B [width, rank]
        added to P.weight: scale · (B · A), transposed
    P.base_layer.lora_A.weight …
        changes one more parameter of P (target_parameters)
    everything else
        replaces the tensor of that name

P is a path in the model as it is loaded, behind "base_model.model." (PEFT 0.21.2:
tuners/lora/layer.py, utils/save_and_load.py).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import FLOAT_DTYPES
from nf4conv.options import SourceOptions
from nf4conv.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, require_own
from nf4conv.sources.header import read_header
from nf4conv.sources.pickle_header import read_pickle_header
from nf4conv.sources.places import is_repo_id
from nf4conv.sources.reader import read_json
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Origin

_ROLE: Final = re.compile(
    r"(?P<module>.+?)(?P<nested>(\.base_layer)*)\."
    r"(?P<role>lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?=(\.weight)?$))(\.weight)?"
)
"""The name of a LoRA tensor behind "base_model.model.": the module, the wrappers around it, and
what the tensor is to the module (its role).
"""

_OTHER_ARITHMETIC: Final = {
    "use_qalora": "QA-LoRA",
    "alora_invocation_tokens": "aLoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron's parallel layers",
    "trainable_token_indices": "trainable tokens",
    "lora_bias": "biases of lora_B",
    "ensure_weight_tying": "a head that is kept tied",
}
"""Keys of adapter_config.json that stand for another arithmetic than LoRA's, and its name."""

_OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights for which PEFT changes the base when it makes the adapter."""

_DEFAULT: Final = 8  # of PEFT, both for the rank and for lora_alpha

_LONGEST_PATTERN: Final = 1000  # characters


class Targeted(NamedTuple):
    """The LoRA tensors of one module, or of one parameter of it."""

    module: str  # its path in the model
    tensors: Mapping[str, TensorInfo]  # by role


@dataclass(frozen=True)
class Adapter:
    """An adapter that can be merged.

    Attributes:
        place: the adapter as the user gave it.
        file: the file with its weights.
        config: the content of adapter_config.json.
        origin: where it came from on the Hub; None for a folder.
        targeted: the modules with LoRA tensors; outer wrappers of a module come first.
        replaced: tensors that are put in the place of others, by the name of those in the model.
    """

    place: str
    file: Path
    config: Mapping[str, Any]
    origin: "Origin | None" = None
    targeted: tuple[Targeted, ...] = ()
    replaced: Mapping[str, TensorInfo] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.place if self.origin is None else str(self.origin)

    def rank(self, path: str) -> int:
        """Returns the rank of a module's factors, by the path of the module or parameter."""
        rank = self._value("r", "rank_pattern", path)
        if type(rank) is not int or rank <= 0:
            raise SourceError(f"{self.place}/{ADAPTER_CONFIG}: {path}: {rank!r} is no rank")
        return rank

    def scale(self, path: str) -> float:
        """Returns what the product of a module's factors is multiplied by, as `rank` does."""
        rank = self.rank(path)
        alpha = self._value("lora_alpha", "alpha_pattern", path)
        if type(alpha) not in (int, float) or not abs(alpha) < 2**31:
            raise SourceError(f"{self.place}/{ADAPTER_CONFIG}: {path}: {alpha!r} is no lora_alpha")
        if self.config.get("use_rslora"):
            return float(alpha / math.sqrt(rank))
        return float(alpha / rank)

    def _value(self, key: str, patterns: str, path: str) -> Any:
        """Returns the config's value for a module: under `patterns` that of the first one that fits
        its path, or else that under `key`.
        """
        for pattern, value in self._patterns[patterns]:
            if pattern.match(path):
                return value
        return self.config.get(key, _DEFAULT)

    @cached_property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], Any]]]:
        """The patterns of modules and what they stand for, by their key in the config.

        They fit a whole path, or its end behind a dot (PEFT: get_pattern_key).
        """
        found = {}
        for key in ("rank_pattern", "alpha_pattern"):
            place = f"{self.place}/{ADAPTER_CONFIG}: {key}"
            try:
                values = dict(self.config.get(key) or {})
                if any(len(pattern) > _LONGEST_PATTERN for pattern in values):
                    raise ValueError("a key is longer")
                found[key] = [
                    (re.compile(rf"(.*\.)?({pattern})$"), value)
                    for pattern, value in values.items()
                ]
            except (re.error, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise SourceError(
                    f"{place}: expected a JSON object with regular expressions of up to "
                    f"{_LONGEST_PATTERN:,} characters as keys: {error}"
                ) from error
        return found

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """Returns ends of the names of parameters that are no module's weight."""
        names = self.config.get("target_parameters") or []
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
        raise SourceError(
            f"{self.place}/{ADAPTER_CONFIG}: target_parameters: not a list of names: {names!r:.80}"
        )

    def targets(self, parameter: str) -> bool:
        """Returns True if a parameter is one of target_parameters."""
        return any(f".{parameter}".endswith(f".{target}") for target in self.target_parameters)


def open_adapter(place: str, where: SourceOptions | None = None) -> Adapter:
    """Reads what an adapter consists of: a folder, or "org/name" on the Hub, with "@revision" or
    without. Raises a SourceError that names the arithmetic if that is not LoRA's.
    """
    folder = Path(place)
    origin = None
    if not folder.is_dir():
        folder, origin = _fetched(place, where or SourceOptions())
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


def _fetched(place: str, where: SourceOptions) -> "tuple[Path, Origin]":
    """Fetches an adapter from the Hub; returns its folder in the cache and where it came from."""
    repo, _, revision = place.partition("@")
    if Path(place).exists() or not is_repo_id(repo):
        raise SourceError(
            f"{place}: no such folder; --lora takes the folder that PEFT saved, with its "
            f"{ADAPTER_CONFIG}, or the name of an adapter on the Hub"
        )
    from nf4conv.sources.remote.hub import fetch_adapter  # huggingface_hub takes long to import

    of_adapter = replace(where, revision=revision or None, subfolder=None, variant=None)
    return fetch_adapter(repo, of_adapter)


def _check_kind(place: str, config: Mapping[str, Any]) -> None:
    """Raises a SourceError if an adapter cannot be merged by LoRA's arithmetic."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise SourceError(
            f"{place}: an adapter of the kind {kind}; only LoRA, with or without DoRA, can be "
            f"merged"
        )
    for key, name in _OTHER_ARITHMETIC.items():
        if config.get(key):
            raise SourceError(
                f"{place}: {name} ({key}), which cannot be merged by LoRA's arithmetic"
            )
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(_OTHER_BASES):
        raise SourceError(
            f"{place}: made with init_lora_weights {init}, which changed the base's weights; save "
            f"it as plain LoRA: PEFT's save_pretrained(…, "
            f"path_initial_model_for_weight_conversion=…)"
        )


def _sorted(adapter: Adapter, tensors: tuple[TensorInfo, ...]) -> Adapter:
    """Returns an adapter with its tensors, divided by what they do."""
    # by path, and by how many other wrappers are around it: wrappers of several parameters of a
    # module are nested
    modules: dict[tuple[str, int], dict[str, TensorInfo]] = {}
    replaced: dict[str, TensorInfo] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix("base_model.model.")
        found = _ROLE.fullmatch(name)
        if found is not None:
            if tensor.dtype not in FLOAT_DTYPES:
                raise SourceError(
                    f"{adapter.file}: {tensor.name} is {tensor.dtype}, and LoRA adds floats"
                )
            depth = found["nested"].count(".")
            modules.setdefault((found["module"], depth), {})[found["role"]] = tensor
        elif re.search(r"\.lora_\w+(\.|$)|_adapter\.", name):
            raise SourceError.about(
                adapter.file, tensor.name, "not a tensor of LoRA as PEFT merges it"
            )
        else:
            replaced[name.replace(".base_layer.", ".")] = tensor
    targeted = tuple(Targeted(module, roles) for (module, _), roles in sorted(modules.items()))
    return replace(adapter, targeted=targeted, replaced=replaced)
