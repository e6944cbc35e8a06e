"""Foreign formats: a class each, whose attributes say how a weight is stored.

From them follow what recognises a weight and checks it, what cuts it, what decodes it, and its name
in notes and records. CONTRIBUTING.md shows how a format is added.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.format.integers import WORD, words_of
from nf4conv.models.families import is_transposed
from nf4conv.models.family_table import Family
from nf4conv.models.module_names import module_of
from nf4conv.sources.arranged import cut_columns
from nf4conv.sources.foreign.config import Description
from nf4conv.sources.tensors import Encoding, TensorInfo, cut_rows

FLOATS: Final = "F16 BF16 F32"

_DIMENSION: Final = re.compile(r"(?:(\w+)(?:/(\d+))?|words\((\w+)\))")

Sizes = Mapping[str, int]
"""Rows ("out"), columns ("in"), "groups" and "bits" of a weight, and what else a format names."""


class Dimension(NamedTuple):
    """A dimension of a part: a size of the weight, a fraction of it, or the words of its codes."""

    of: str  # a name of `Sizes`, or a number
    divisor: int = 1
    is_words: bool = False

    def size(self, whole: int, sizes: Sizes) -> int | None:
        """Returns how long it is for a size of the weight; None if that is no multiple."""
        if self.is_words:
            return words_of(whole, sizes["bits"])
        return whole // self.divisor if whole % self.divisor == 0 else None

    def whole(self, size: int, sizes: Sizes) -> int:
        """Returns the largest size of the weight for which it is as long."""
        return size * WORD // sizes["bits"] if self.is_words else size * self.divisor


class Form(NamedTuple):
    """One way to store a part."""

    dtypes: tuple[str, ...]
    dimensions: tuple[Dimension, ...]


class Part(NamedTuple):
    """Says what a format knows of one tensor of a weight."""

    suffixes: tuple[str, ...]  # what its name may have after the stem; none for the values
    forms: tuple[Form, ...]
    is_optional: bool

    def form_of(self, tensor: TensorInfo) -> Form | None:
        """Returns the form that a tensor may have by its dtype and its number of dimensions."""
        for form in self.forms:
            if tensor.dtype in form.dtypes and len(tensor.shape) == len(form.dimensions):
                return form
        return None


def part(suffixes: str, *forms: str, optional: bool = False) -> Part:
    """Describes a part.

    Its name ends with one of the suffixes, the likeliest first, behind the stem of the weight's.
    Its forms are dtypes, a colon and dimensions, such as "I32: words(in) out", "U8 I8: out in/2" or
    "F32:" for a single value.
    """
    found = []
    for form in forms:
        dtypes, _, names = form.partition(":")
        dimensions = []
        for name in names.split():
            match = _DIMENSION.fullmatch(name)
            assert match is not None, name
            whole, divisor, packed = match.groups()
            dimensions.append(Dimension(whole or packed, int(divisor or 1), packed is not None))
        found.append(Form(tuple(dtypes.split()), tuple(dimensions)))
    return Part(tuple(suffixes.split()), tuple(found), optional)


class Solved(NamedTuple):
    """Tells how a weight is read, by the dtypes and the shapes of its parts."""

    shape: tuple[int, ...]  # of the weight
    dtype: str  # the tag that it decodes to
    settings: Mapping[str, Any]  # the fields of its encoding that are no parts


@dataclass(frozen=True)
class SiblingTensors:
    """The tensors of a checkpoint, to find those that belong to one of them."""

    by_name: Mapping[str, TensorInfo]  # all tensors as they are stored
    description: Description  # the quantization, as the config describes it
    dtype: str  # the tag to decode to where the source does not say
    families: tuple[Family, ...]  # the model's families, some of which store weights transposed
    read: Callable[[TensorInfo], bytes]  # reads a small tensor
    # found before: models have few shapes and many weights
    solved: dict[Any, "Solved"] = field(default_factory=dict)

    def part_of(self, stem: str, suffixes: Iterable[str]) -> TensorInfo | None:
        """Returns the first tensor that there is; "~" stands for the module of a weight."""
        for suffix in suffixes:
            name = stem + suffix
            if suffix[0] == "~":
                if not stem.endswith(".weight"):
                    continue
                name = module_of(stem) + suffix[1:]
            if name in self.by_name:
                return self.by_name[name]
        return None

    def is_scale(self, tensor: TensorInfo) -> bool:
        """Returns True if a tensor is the scale of another; a scale may be 8-bit itself."""
        stem, _, ending = tensor.name.rpartition("_scale")
        if not stem or ending not in ("", "_inv", "_2", "s"):
            return False
        return stem in self.by_name or f"{stem}_packed" in self.by_name


class Foreign(Encoding):
    """A weight [out, in] as another quantization stores it; its fields are named by `layout`."""

    __slots__ = ()

    is_quantization: ClassVar[bool] = True
    # quant_method of the configs that it needs, or how words lie by them; none for any config
    configs: ClassVar[tuple[str, ...]] = ()
    stored: ClassVar[str] = ""  # how the name of the values ends
    weight: ClassVar[str] = ""  # how the name of the weight ends instead
    ends: ClassVar[tuple[str, ...]] = ()  # of names that only parts of such weights have
    # "values" and the other parts, by role; tensors in other dtypes are no values
    layout: ClassVar[Mapping[str, Part]]
    decoder: ClassVar[str]  # "module:function", which takes parts, `arguments` and a torch dtype
    has_dtype_of_scales: ClassVar[bool] = False  # True if the weight has, unless it is float32

    is_transposed: bool = False  # True if the decoder makes the transpose

    @property
    def made_from(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns what the decoder takes beside the parts and a dtype."""
        found = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if not isinstance(value, TensorInfo):
                found[each.name] = value
        return found

    @property
    def sizes(self) -> Sizes:
        """Returns what tells how many words codes take."""
        return {}

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        """Returns True if a tensor of the right name holds values of this format."""
        return True

    @classmethod
    def told(
        cls, parts: Mapping[str, TensorInfo], stem: str, siblings: SiblingTensors
    ) -> Sizes | None:
        """Returns the sizes that the data of another tensor name; None if shapes are enough."""
        return None

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> Iterable[Sizes]:
        """Yields the sizes that a weight may have, as far as dimensions do not tell them."""
        return [{}]

    @classmethod
    def settings_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> dict[str, Any]:
        """Returns the fields that are no parts, as far as dtypes and shapes tell them; may refuse
        parts whose shapes fit.
        """
        return {}

    @classmethod
    def made_of(cls, parts: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> "Foreign":
        """Returns the encoding."""
        return cls(**parts, **settings)

    @classmethod
    def shape_of(cls, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        return sizes["out"], sizes["in"]

    @classmethod
    def recognised(cls, tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
        """Returns the weight that a tensor holds the values of; None if it holds no values. Raises
        a SourceError if a part is missing, or does not fit.
        """
        stem = tensor.name.removesuffix(cls.stored)
        has_name = tensor.name == stem + cls.stored and stem != ""
        if not has_name or not cls.holds(tensor, stem, siblings):
            return None
        parts = cls._parts(tensor, stem, siblings)
        solved = cls._solved(tensor, stem, parts, siblings)
        encoding = cls.made_of(parts, solved.settings)
        name = stem + cls.weight
        if is_transposed(module_of(name), siblings.families):
            raise SourceError.about(
                tensor.file,
                tensor.name,
                f"{encoding.name} of a layer whose weight is [in, out], which nf4conv does not "
                f"decode; give the checkpoint that it was made from",
            )
        return TensorInfo(name, solved.dtype, solved.shape, *tensor.file_range, encoding)

    @classmethod
    def _parts(
        cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors
    ) -> dict[str, TensorInfo]:
        """Finds the parts of a weight by their names."""
        parts = {"values": tensor}
        for role, described in cls.layout.items():
            if role == "values":
                continue
            found = siblings.part_of(stem, described.suffixes)
            if found is not None:
                parts[role] = found
            elif not described.is_optional:
                raise lacks(tensor, (stem + described.suffixes[0]).rpartition(".")[2])
        return parts

    @classmethod
    def _solved(
        cls,
        tensor: TensorInfo,
        stem: str,
        parts: Mapping[str, TensorInfo],
        siblings: SiblingTensors,
    ) -> Solved:
        """Finds the sizes with which all parts have the dimensions that the format gives them, and
        what follows from these.
        """
        key = (cls, *[(role, found.dtype, found.shape) for role, found in parts.items()])
        if key in siblings.solved:
            return siblings.solved[key]
        forms = {}
        for role, found in parts.items():
            form = cls.layout[role].form_of(found)
            if form is None or 0 in found.shape:
                raise misfit(tensor, _other(found, parts))
            forms[role] = form
        told = cls.told(parts, stem, siblings)
        wrong = tensor
        for candidate in cls.candidates(parts, told, siblings.description):
            sizes = dict(candidate)
            unfit = _unfit(parts, forms, sizes)
            if unfit is None:
                dtype = siblings.dtype
                if cls.has_dtype_of_scales and parts["scale"].dtype != "F32":
                    dtype = parts["scale"].dtype
                settings = cls.settings_of(parts, sizes, siblings.description)
                solved = Solved(cls.shape_of(sizes), dtype, settings)
                if told is None:
                    siblings.solved[key] = solved
                return solved
            wrong = unfit
        raise misfit(tensor, _other(wrong, parts))

    def rows_together(self, tensor: TensorInfo) -> int | None:
        return None if self.is_transposed else 1

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        """Cuts each part along the dimension that follows the rows; without one, it is shared."""
        cut = {}
        for role, found in self.parts:
            form = self.layout[role].form_of(found) if role in self.layout else None
            for axis, dimension in enumerate(form.dimensions if form else ()):
                if dimension.of == "out":
                    first = dimension.size(start, self.sizes)
                    last = dimension.size(stop, self.sizes)
                    assert first is not None
                    assert last is not None
                    cut[role] = (cut_rows, cut_columns)[axis](found, first, last)
        return replace(self, **cut)  # type: ignore[type-var]


def _unfit(
    parts: Mapping[str, TensorInfo], forms: Mapping[str, Form], sizes: dict[str, int]
) -> TensorInfo | None:
    """Returns a part that has not the dimensions which sizes give it; adds sizes to the known.

    Those that are a dimension by themselves come first.
    """
    for is_whole in (True, False):
        for role, form in forms.items():
            for dimension, size in zip(form.dimensions, parts[role].shape, strict=True):
                if is_whole != (dimension.divisor == 1 and not dimension.is_words):
                    continue
                whole = dimension.whole(size, sizes)
                if dimension.of.isdecimal():
                    whole = int(dimension.of)
                whole = sizes.setdefault(dimension.of, whole)
                if dimension.size(whole, sizes) != size:
                    return parts[role]
    return None


def _other(found: TensorInfo, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """Returns a part beside the values to name in an error: the one found wrong, or the second."""
    if found is not parts["values"] or len(parts) == 1:
        return found
    return list(parts.values())[1]


def lacks(tensor: TensorInfo, part: str) -> SourceError:
    """Returns the error of a weight without one of its parts."""
    return SourceError.about(
        tensor.file, tensor.name, f"lacks its {part}, without which it cannot be decoded"
    )


def misfit(tensor: TensorInfo, other: TensorInfo) -> SourceError:
    """Returns the error of two tensors that belong together by their names and do not fit."""
    return SourceError.about(
        tensor.file,
        tensor.name,
        f"{tensor.dtype} {list(tensor.shape)} does not go with "
        f"{other.name}, {other.dtype} {list(other.shape)}",
    )
