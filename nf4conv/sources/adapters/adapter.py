"""Reads a LoRA adapter as PEFT saves it: its config, and the headers of its tensors.

    P.lora_A.weight [rank, in] and P.lora_B.weight [out, rank]
        added to P.weight: scale · B · A
    P.lora_B.bias
        added to P.bias: scale · it
    P.lora_magnitude_vector [out]
        DoRA: the norms that the rows then get
    P.lora_embedding_A [rank, n] and P.lora_embedding_B [width, rank]
        added to P.weight: scale · (B · A), transposed
    P.token_adapter.trainable_tokens_delta
        rows that replace those of P.weight
    P.base_layer.lora_A.weight …
        changes one more parameter of P (target_parameters)
    everything else
        replaces the tensor of that name

P is a path in the model as it is loaded, behind "base_model.model." (PEFT 0.21.2:
tuners/lora/layer.py, utils/save_and_load.py).
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
from nf4conv.sources.source import AdapterFiles
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Origin

_ROLE: Final = re.compile(
    r"(?P<module>.+?)(?P<nested>(\.base_layer)*)\.(token_adapter\.)?"
    r"(?P<role>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?=(\.weight)?$)|trainable_tokens_delta)(\.weight)?"
)
"""The name of a LoRA tensor behind "base_model.model.": the module, the wrappers around it, and
what the tensor is to the module (its role).
"""

TOKENS: Final = "trainable_tokens_delta"
"""The role of rows that are put in the place of those of an embedding."""

_OTHER_ARITHMETIC: Final = {
    "use_qalora": "QA-LoRA",
    "alora_invocation_tokens": "aLoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron's parallel layers",
}
"""Keys of adapter_config.json that stand for another arithmetic than LoRA's, and its name."""

_OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights for which PEFT changes the base when it makes the adapter."""

_DEFAULT: Final = 8  # of PEFT, both for the rank and for lora_alpha


_SECONDS: Final = 20  # for matching patterns

_MATCHING: Final = """
import json, re, sys
patterns, paths = json.load(sys.stdin)
compiled = [(pattern, re.compile(rf"(.*\\.)?({pattern})$")) for pattern in patterns]
found = {}
for path in paths:
    for pattern, one in compiled:
        if one.match(path):
            found[path] = pattern
            break
json.dump(found, sys.stdout)
"""
"""A program that finds the first pattern that fits each path."""


class Targeted(NamedTuple):
    """The LoRA tensors of one module, or of one parameter of it."""

    module: str  # its path in the model
    tensors: Mapping[str, TensorInfo]  # by role


@dataclass(frozen=True)
class Adapter(AdapterFiles):
    """An adapter that can be merged.

    Attributes:
        targeted: the modules with LoRA tensors; outer wrappers of a module come first.
        replaced: tensors that are put in the place of others, by the name of those in the model.
    """

    targeted: tuple[Targeted, ...] = ()
    replaced: Mapping[str, TensorInfo] = field(default_factory=dict)

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
        return self._values[patterns].get(path, self.config.get(key, _DEFAULT))

    @cached_property
    def _values(self) -> dict[str, dict[str, Any]]:
        """The values of modules and parameters by path, by the key of their patterns."""
        paths = []
        for part in self.targeted:
            paths.append(part.module)
            leaves = {target.rpartition(".")[2] for target in self.target_parameters}
            paths += [f"{part.module}.{leaf}" for leaf in leaves]
        found = {}
        for key in ("rank_pattern", "alpha_pattern"):
            place = f"{self.place}/{ADAPTER_CONFIG}: {key}"
            found[key] = values_by_path(self.config.get(key) or {}, paths, place)
        return found

    def token_indices(self, module: str) -> tuple[int, ...]:
        """Returns the rows of an embedding that trainable tokens take the place of."""
        indices = self.config.get("trainable_token_indices") or self.config.get("token_indices")
        if isinstance(indices, Mapping):
            indices = _of_module(indices, module)
        if isinstance(indices, list) and all(type(n) is int and n >= 0 for n in indices):
            return tuple(indices)
        raise SourceError(
            f"{self.place}/{ADAPTER_CONFIG}: {module}: no list of trainable_token_indices"
        )

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


def _of_module(values: Mapping[str, Any], module: str) -> Any:
    """Returns the first value whose key is the end of a module's path; None if there is none."""
    for key, value in values.items():
        if f".{module}".endswith(f".{key}"):
            return value
    return None


def values_by_path(patterns: object, paths: Sequence[str], place: str) -> dict[str, Any]:
    """Returns what the first pattern stands for that fits a path, for each path that one fits.

    Patterns are regular expressions, which fit a whole path, or its end behind a dot (PEFT:
    get_pattern_key). A hostile one may take for ever, which only the end of its process stops.
    `place` names them in errors.
    """
    if not patterns:
        return {}
    if not isinstance(patterns, Mapping):
        raise SourceError(
            f"{place}: not a JSON object with regular expressions as keys: {patterns!r:.80}"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHING],
            input=json.dumps([list(patterns), list(paths)]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().rpartition("\n")[2]
        raise SourceError(f"{place}: keys are no regular expressions: {why:.200}") from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"{place}: takes more than {_SECONDS} seconds to match; write the paths of modules "
            f"instead of patterns"
        ) from error
    found: dict[str, str] = json.loads(done.stdout)
    return {path: patterns[pattern] for path, pattern in found.items()}


def open_adapter(place: str, where: SourceOptions | None = None) -> Adapter:
    """Reads what an adapter consists of: a folder, or "org/name" on the Hub, with "@revision" or
    without. Raises a SourceError that names the arithmetic if that is not LoRA's.
    """
    if not place.strip():
        raise SourceError("--lora: empty; give a folder, or the name of an adapter on the Hub")
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
    if Path(place).is_file():
        raise SourceError(
            f"{place}: a file; give the folder that PEFT saved, with its {ADAPTER_CONFIG}"
        )
    if Path(place).exists() or not is_repo_id(repo):
        raise SourceError(f"{place}: no such folder; an adapter is a folder, or a name on the Hub")
    from nf4conv.sources.remote.hub import fetch_adapter  # huggingface_hub takes long to import

    of_adapter = replace(where, revision=revision or None, subfolder=None, variant=None)
    return fetch_adapter(repo, of_adapter)


def _check_kind(place: str, config: Mapping[str, Any]) -> None:
    """Raises a SourceError if an adapter cannot be merged by LoRA's arithmetic."""
    kind = config.get("peft_type")
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
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
