"""Patterns of the user that match nothing: a slip of the pen, which nobody would notice otherwise."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from nf4conv.checkpoint.module_names import ModuleNames, module_of
from nf4conv.checkpoint.skip_list import transformers_4, transformers_5
from nf4conv.checkpoint.source import Source
from nf4conv.options import CompareOptions, DequantizeOptions, QuantizeOptions

Parts = Sequence[tuple[str, Source]]
"""The submodels of a diffusers pipeline by name, or one checkpoint without one."""


def unmatched(options: QuantizeOptions | DequantizeOptions | CompareOptions, parts: Parts) -> Iterator[str]:
    """A line for each pattern that matches no tensor, or no module, of any part."""
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            meant = _meant(pattern, parts)
            if not any(fnmatchcase(tensor.name, rest) for source, rest in meant for tensor in source.tensors):
                yield f"{option} {pattern!r} matches no tensor"
    for name in options.skip_modules if isinstance(options, QuantizeOptions) else ():
        if not any(_has_module(source, rest) for source, rest in _meant(name, parts)):
            yield f"--skip-modules {name!r} matches no module"


def _meant(pattern: str, parts: Parts) -> Iterator[tuple[Source, str]]:
    """The parts that a pattern is about, and the pattern without their name."""
    owner, _, rest = pattern.rpartition("/")
    return ((source, rest) for name, source in parts if not owner or fnmatchcase(name, owner))


def _has_module(source: Source, name: str) -> bool:
    names, rules = ModuleNames.of(source.config or {}), (transformers_4([name]), transformers_5([name]))
    modules = (path for tensor in source.tensors for path in names.spellings(module_of(tensor.name)))
    return any(rule(path) for path in modules for rule in rules)
