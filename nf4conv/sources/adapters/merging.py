"""A source as it is once adapters are merged: tensors in the place of others, and tensors to which
something is added.

What an adapter names are modules of the model in memory; they are found again under the names on
disk. Nothing is computed here: a tensor that changes gets an encoding, and is merged a piece at a
time when it is read.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.models.config import architecture_of
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import TEXT_CONFIGS, TIED_HEADS, ModuleNames, module_of
from nf4conv.models.name_patterns import is_embedding
from nf4conv.options import SourceOptions
from nf4conv.sources.adapters.adapter import TOKENS, Adapter, Targeted, open_adapter
from nf4conv.sources.source import Source, open_source, stamp_of
from nf4conv.sources.tensors import (
    Delta,
    LowRankDelta,
    Merged,
    RowsDelta,
    Strided,
    TensorInfo,
    VectorDelta,
)

_FUSED: Final = ("gate_up_proj", "down_proj")
"""Parameters of fused experts, in the order in which PEFT wraps them: the last one is the
outermost.
"""

_SINGLE: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What a single expert's matrices are called on disk: gate, up, down."""


def open_merged(source: str | Path, where: SourceOptions | None, lora: Sequence[str]) -> Source:
    """Open a checkpoint, and merge adapters, one after the other, into what is read of it.

    A SourceError if something cannot be read, an adapter changes what the checkpoint lacks, or
    shapes disagree; a PlanError for adapters of a diffusers pipeline.
    """
    try:
        opened = open_source(source, where)
    except DiffusersFolderError as error:
        if not lora:
            raise
        raise PlanError(
            f"{source}: --lora is for one part of a diffusers pipeline: --subfolder transformer"
        ) from error
    adapters = [open_adapter(place, where) for place in lora]
    return _Merging(opened).merged(adapters) if adapters else opened


class _Place(NamedTuple):
    """Where a parameter that may stack experts is on disk."""

    tensor: TensorInfo  # that holds it, or a part of it
    expert: int | None = None  # which one the tensor is; None if it holds all
    share: int = 0  # which part of the expert's rows it is
    shares: int = 1  # how many such parts there are


class _Merging:
    """A source while adapters are merged into it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._config: Mapping[str, Any] = source.config or {}
        self._tensors = {tensor.name: tensor for tensor in source.tensors}
        self._deltas: dict[str, list[Delta]] = {}
        self._replaced: dict[str, str] = {}
        self._names = ModuleNames.of(self._config)
        # by name in a model the one on disk; later ones win, which are the more certain
        split = [(name, *name.rpartition(".")[::2]) for name in self._tensors]
        spelled = (
            (name, f"{path}.{leaf}")
            for name, module, leaf in split
            for path in self._names.spellings(module)
        )
        self._aliases = {spelling: name for name, spelling in spelled}
        self._aliases |= {name: name for name in self._tensors}
        first = Counter(name.partition(".")[0] for name in self._tensors).most_common(1)
        self._base = first[0][0] if first and 2 * first[0][1] > len(self._tensors) else ""
        self._notes: list[str] = []

    def _find(self, name: str) -> TensorInfo | None:
        """The tensor on disk that becomes the one of this name in a model.

        With a head a model has the name of its base in front of everything else, without one it has
        not.
        """
        prefix, _, rest = name.partition(".")
        spellings = [name, f"{self._base}.{name}", *([] if prefix == self._base else [rest])]
        found = next(
            (self._aliases[spelling] for spelling in spellings if spelling in self._aliases), None
        )
        return None if found is None else self._tensors[found]

    def _add(self, adapter: Adapter) -> None:
        adapter, untied = self._untie(adapter)
        for name, tensor in adapter.replaced.items():
            self._replace(adapter, name, tensor)
        modules: dict[str, list[Targeted]] = {}
        for part in adapter.targeted:
            modules.setdefault(part.module, []).append(part)
        for module, parts in modules.items():
            for found, delta in self._deltas_of(adapter, module, parts):
                self._deltas.setdefault(found.name, []).append(delta)
        what = f"{len(modules):,} modules changed, {len(adapter.replaced):,} tensors replaced"
        self._notes.append(f"{adapter} merged: {what}{untied}")
        base = str(adapter.config.get("base_model_name_or_path") or "")
        if PurePosixPath(base).name not in (
            "",
            PurePosixPath(str(self._source).partition("@")[0]).name,
        ):
            self._notes.append(
                f"{adapter}: was trained on {base}, and is merged into {self._source}"
            )

    def _replace(self, adapter: Adapter, name: str, tensor: TensorInfo) -> None:
        found = self._find(name)
        if found is None:
            raise self._lacking(adapter, name)
        if found.shape != tensor.shape:
            why = "an adapter of a resized vocabulary needs a base that is resized alike"
            raise SourceError(f"{_misfit(adapter, tensor, found)}; {why}")
        other = self._replaced.setdefault(found.name, adapter.place)
        if other != adapter.place:
            raise SourceError(
                f"{adapter.place}: {name}: {other} has one in its place too, and only one of them "
                f"can"
            )
        self._tensors[found.name] = _in_dtype(tensor, found)

    def _lacking(self, adapter: Adapter, name: str) -> SourceError:
        return SourceError(
            f"{adapter.place}: {name}: {self._source} has nothing that the adapter could change "
            f"there"
        )

    def _deltas_of(
        self, adapter: Adapter, module: str, parts: Sequence[Targeted]
    ) -> Iterator[tuple[TensorInfo, Delta]]:
        """What is to be added to which tensors for a module, whose outermost wrapper comes first."""
        found = self._find(f"{module}.weight")
        if found is not None and len(parts) == 1:
            yield from self._of_module(adapter, parts[0], found)
            return
        leaves = {
            leaf
            for leaf in (target.rpartition(".")[2] for target in adapter.target_parameters)
            if adapter.targets(f"{module}.{leaf}") and self._of_parameter(module, leaf)
        }
        if len(leaves) != len(parts):
            raise self._lacking(adapter, module)
        order = sorted(
            leaves, key=lambda leaf: (_FUSED.index(leaf) if leaf in _FUSED else len(_FUSED), leaf)
        )
        for part, leaf in zip(parts, reversed(order), strict=True):
            yield from self._of_experts(adapter, part, leaf)

    def _of_module(
        self, adapter: Adapter, part: Targeted, found: TensorInfo
    ) -> Iterator[tuple[TensorInfo, Delta]]:
        roles = dict(part.tensors)
        rows = roles.pop(TOKENS, None)
        if rows is not None:
            indices = adapter.token_indices(part.module)
            if (
                rows.shape != (len(indices), *found.shape[1:])
                or max(indices, default=0) >= found.shape[0]
            ):
                raise _misfit(adapter, rows, found)
            for tensor in self._with_head(found):
                yield tensor, RowsDelta(rows, indices)
        if not roles:
            return
        weight = f"{part.module}.weight"
        path = weight if adapter.targets(weight) else part.module
        bias = roles.pop("lora_B.bias", None)
        if bias is not None:
            target = self._find(f"{part.module}.bias")
            if target is None:
                raise self._lacking(adapter, f"{part.module}.bias")
            if target.shape != bias.shape:
                raise _misfit(adapter, bias, target)
            yield target, VectorDelta(bias, adapter.scale(path))
        up, down = _factors(adapter, part)
        transposed = self._is_product_transposed(adapter, up, down, found)
        if down.shape[0] != adapter.rank(path) or up.shape[1] != down.shape[0]:
            raise _misfit(
                adapter, down, up, f", nor with the rank {adapter.rank(path)} of its config"
            )
        magnitude = roles.get("lora_magnitude_vector")
        if magnitude is not None and magnitude.elements != up.shape[0]:
            raise _misfit(adapter, magnitude, found)
        yield found, LowRankDelta(up, down, adapter.scale(path), transposed, magnitude)

    def _is_product_transposed(
        self, adapter: Adapter, up: TensorInfo, down: TensorInfo, found: TensorInfo
    ) -> bool:
        """Whether a matrix on disk is the product of its factors transposed."""
        if len(up.shape) == len(down.shape) == len(found.shape) == 2:
            made, must = (up.shape[0], down.shape[1]), up.name.endswith("lora_embedding_B")
            prefers = must or is_transposed(module_of(found.name), self._names.families)
            for transposed in (True,) if must else (prefers, not prefers):
                if found.shape == (made[::-1] if transposed else made):
                    return transposed
        raise _misfit(adapter, up, found, f" by way of {list(down.shape)}")

    def _of_parameter(self, module: str, leaf: str) -> list[_Place]:
        """All that a parameter is on disk."""
        found = self._find(f"{module}.{leaf}")
        if found is not None:
            return [_Place(found)]
        for gate, up, down in _SINGLE:
            shares = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(leaf, ())
            if shares and self._find(f"{module}.0.{down}.weight") is not None:
                return [
                    _Place(single, expert, share, len(shares))
                    for share, name in enumerate(shares)
                    for expert, single in enumerate(self._single_experts(module, name))
                ]
        return []

    def _single_experts(self, module: str, name: str) -> Iterator[TensorInfo]:
        for expert in count():
            found = self._find(f"{module}.{expert}.{name}.weight")
            if found is None:
                return
            yield found

    def _of_experts(
        self, adapter: Adapter, part: Targeted, leaf: str
    ) -> Iterator[tuple[TensorInfo, Delta]]:
        """What is to be added to the experts that a parameter stacks (PEFT: ParamWrapper)."""
        path = f"{part.module}.{leaf}"
        up, down = _factors(adapter, part)
        if len(part.tensors) != 2:
            raise SourceError(
                f"{adapter.file}: {path}: LoRA of a parameter has lora_A and lora_B, and nothing "
                f"else"
            )
        places = self._of_parameter(part.module, leaf)
        first = places[0]
        experts = first.tensor.shape[0] if first.expert is None else len(places) // first.shares
        rank = adapter.rank(path)
        if first.expert is None and len(first.tensor.shape) != 3:
            raise _misfit(adapter, up, first.tensor)
        if down.shape[0] != rank * experts or up.shape[1] != rank * experts:
            raise _misfit(
                adapter,
                down,
                first.tensor,
                f" for {experts} experts and the rank {rank} of its config",
            )
        for place in places:
            height = up.shape[0] // place.shares
            made = (height, down.shape[1])
            if place.tensor.shape[-2:] not in (made, made[::-1]):
                raise _misfit(adapter, up, place.tensor, f" by way of {list(down.shape)}")
            is_square = made == made[::-1]
            transposed = place.tensor.shape[-2:] != made or (
                is_square and self._is_stacked_transposed(part.module)
            )
            rows = None if place.shares == 1 else (place.share * height, (place.share + 1) * height)
            delta = LowRankDelta(
                up,
                down,
                adapter.scale(path),
                transposed,
                rows=rows,
                experts=experts,
                expert=place.expert,
            )
            yield place.tensor, delta

    def _is_stacked_transposed(self, module: str) -> bool:
        """Whether experts are stacked as [in, out]: the square ones of GPT-OSS do not tell."""
        both, down = (self._find(f"{module}.{leaf}") for leaf in _FUSED)
        return (
            both is not None
            and down is not None
            and both.shape[1:] == (down.shape[2], 2 * down.shape[1])
        )

    def _with_head(self, embedding: TensorInfo) -> Iterator[TensorInfo]:
        """An embedding, and the head that is stored beside it although it is the same."""
        yield embedding
        head = self._find("lm_head.weight")
        is_said_to_be = self._config.get("tie_word_embeddings") is True
        if (
            is_said_to_be
            and head is not None
            and head != embedding
            and head.shape == embedding.shape
        ):
            yield head

    def _untie(self, adapter: Adapter) -> tuple[Adapter, str]:
        """Give a head that is the embedding a tensor of its own, if the adapter was trained to make
        them differ.

        PEFT's merge unties them for modules_to_save. LoRA of either it adds to both, with a
        warning: the adapter was not trained for that. Given back are the adapter, without a head
        that is to remain the embedding, and what to tell the user.
        """
        made = {f"{part.module}.weight": _shape_made(adapter, part) for part in adapter.targeted}
        made |= {name: tensor.shape for name, tensor in adapter.replaced.items()}
        made = {name: shape for name, shape in made.items() if shape}
        heads = [name for name in made if _leaf(name) in TIED_HEADS]
        embedding = next(
            (name for name in made if is_embedding(_leaf(name)) and self._find(name)), None
        )
        has_two = architecture_of(self._config).endswith(
            ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        )
        has_two = has_two and not self._config.get(
            "is_encoder_decoder"
        )  # which scales a tied head, and no other
        is_tied = self._config.get("tie_word_embeddings", True) is not False
        if not is_tied or not (heads or (embedding and has_two)):
            return adapter, ""
        if adapter.config.get("ensure_weight_tying"):
            heads = [name for name in heads if self._find(name) is None]
            modules = [module_of(name) for name in heads]
            targeted = tuple(part for part in adapter.targeted if part.module not in modules)
            replaced = {
                name: tensor for name, tensor in adapter.replaced.items() if name not in heads
            }
            return replace(
                adapter, targeted=targeted, replaced=replaced
            ), ", the output head tied to the embedding"
        head = heads[0] if heads else "lm_head.weight"
        if self._find(head) is None:
            shape = made.get(head) or made.get(embedding or "")
            found = [tensor for name, tensor in self._tensors.items() if is_embedding(_leaf(name))]
            found = [tensor for tensor in found if tensor.shape == shape and has_two]
            if len(found) != 1:
                raise self._lacking(adapter, head)
            self._tensors[head] = found[0]._replace(name=head)
            self._aliases[head] = head
        nested = {
            key: self._config[key]
            for key in TEXT_CONFIGS
            if isinstance(self._config.get(key), Mapping)
        }
        edited = {key: dict(part) | {"tie_word_embeddings": False} for key, part in nested.items()}
        self._config = {**self._config, **edited, "tie_word_embeddings": False}
        return adapter, ", the output head untied from the embedding"

    def merged(self, adapters: Sequence[Adapter]) -> Source:
        for adapter in adapters:
            self._add(adapter)
        for name, deltas in self._deltas.items():
            base = self._tensors[name]
            self._tensors[name] = base._replace(encoding=Merged(base, tuple(deltas)))
        local = [adapter.file for adapter in adapters if adapter.origin is None]
        return replace(
            self._source,
            files=(*self._source.files, *(adapter.file for adapter in adapters)),
            tensors=tuple(self._tensors.values()),
            config=None if self._source.config is None else self._config,
            notes=(*self._source.notes, *self._notes),
            adapters=tuple(adapters),
            stamps=dict(self._source.stamps) | {file: stamp_of(file) for file in local},
        )


def _factors(adapter: Adapter, part: Targeted) -> tuple[TensorInfo, TensorInfo]:
    """(B, A) of a module."""
    names = ("lora_embedding_B", "lora_embedding_A"), ("lora_B.weight", "lora_A.weight")
    for up, down in names:
        if up in part.tensors and down in part.tensors:
            if len(part.tensors[up].shape) < 2 or len(part.tensors[down].shape) < 2:
                raise _misfit(adapter, part.tensors[up], part.tensors[down])
            return part.tensors[up], part.tensors[down]
    raise SourceError(f"{adapter.file}: {part.module}: has one of lora_A and lora_B, but not both")


def _shape_made(adapter: Adapter, part: Targeted) -> tuple[int, ...]:
    """The shape of the weight that a module's factors are made for; none for trainable tokens."""
    if {*part.tensors} == {TOKENS}:
        return ()
    up, down = _factors(adapter, part)
    made = (up.shape[0], down.shape[1])
    return made[::-1] if up.name.endswith("lora_embedding_B") else made


def _leaf(name: str) -> str:
    return module_of(name).rpartition(".")[2]


def _in_dtype(tensor: TensorInfo, found: TensorInfo) -> TensorInfo:
    """A tensor in the place of another, seen in its dtype."""
    if tensor.dtype == found.dtype or tensor.encoding is not None:
        return tensor._replace(name=found.name, dtype=found.dtype)
    stored = tensor._replace(shape=(tensor.elements,))
    strides = tuple(math.prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape)))
    return tensor._replace(name=found.name, dtype=found.dtype, encoding=Strided(stored, strides))


def _misfit(adapter: Adapter, tensor: TensorInfo, found: TensorInfo, more: str = "") -> SourceError:
    return SourceError(
        f"{adapter.place}: {tensor.name} {list(tensor.shape)} does not go with {found.name} "
        f"{list(found.shape)}{more}"
    )
