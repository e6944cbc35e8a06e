"""Applies what the user asked for by names: --include, --exclude and --skip-modules."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from nf4conv.choose.loader_rules import transformers_4, transformers_5
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.options import CompareOptions, DequantizeOptions, QuantizeOptions
from nf4conv.sources.source import Source

NamedSources = Sequence[tuple[str, Source]]
"""The submodels of a diffusers pipeline by name; a checkpoint of its own has the name ""."""


class Wishes:
    """Knows which tensors of a checkpoint the user does not want to be packed.

    Args:
        options: what the user asked for.
        names: how loaders rename the modules of the checkpoint.
    """

    def __init__(self, options: QuantizeOptions, names: ModuleNames) -> None:
        self._options = options
        self._skipped = _UserSkipList(options.skip_modules, names) if options.skip_modules else None

    def why_unwanted(self, name: str) -> str | None:
        """Returns why the user does not want a tensor to be packed; None if nothing is against it.

        Args:
            name: the name of the tensor.
        """
        if _matches(name, self._options.exclude):
            return "excluded by the user"
        if self._skipped is not None and self._skipped.covers(name):
            return "in a module that the user skips"
        if self._options.include and not _matches(name, self._options.include):
            return "not included by the user"
        return None


class _UserSkipList:
    """Matches modules that the user skips as transformers 4 or 5 would, by any of their names."""

    def __init__(self, modules: Sequence[str], names: ModuleNames) -> None:
        self._names = names
        self._rules = (transformers_4(modules), transformers_5(modules))

    def covers(self, tensor: str) -> bool:
        """Returns True if the module of a tensor is to be skipped, by the tensor's name."""
        for path in self._names.spellings(module_of(tensor)):
            if any(skips(path) for skips in self._rules):
                return True
        return False


def is_wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Returns True if the globs let a tensor pass.

    Args:
        name: the name of the tensor.
        include: globs of which one must match; none at all lets everything pass.
        exclude: globs of which none may match.
    """
    is_included = not include or _matches(name, include)
    return is_included and not _matches(name, exclude)


def _matches(name: str, globs: Sequence[str]) -> bool:
    # most runs have no globs, and a checkpoint may have 100,000 tensors
    return bool(globs) and any(fnmatchcase(name, glob) for glob in globs)


def unmatched(
    options: QuantizeOptions | DequantizeOptions | CompareOptions, sources: NamedSources
) -> Iterator[str]:
    """Yields a line for each pattern of the user that matches nothing, which is likely a typo.

    Args:
        options: the patterns. A pattern such as "transformer/*.attn.*" is about one submodel.
        sources: what they are about.
    """
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not _matches_any_tensor(pattern, sources):
                yield f"{option} {pattern!r} matches no tensor"
    if isinstance(options, QuantizeOptions):
        for name in options.skip_modules:
            if not _matches_any_module(name, sources):
                yield f"--skip-modules {name!r} matches no module"


def _matches_any_tensor(pattern: str, sources: NamedSources) -> bool:
    for source, glob in _meant(pattern, sources):
        if any(fnmatchcase(tensor.name, glob) for tensor in source.tensors):
            return True
    return False


def _matches_any_module(name: str, sources: NamedSources) -> bool:
    for source, module in _meant(name, sources):
        skipped = _UserSkipList([module], ModuleNames.of(source.config or {}))
        if any(skipped.covers(tensor.name) for tensor in source.tensors):
            return True
    return False


def _meant(pattern: str, sources: NamedSources) -> Iterator[tuple[Source, str]]:
    """Yields the sources that a pattern is about, and the pattern without the submodel's name."""
    owner, _, rest = pattern.rpartition("/")
    for name, source in sources:
        if not owner or fnmatchcase(name, owner):
            yield source, rest
