"""Applies what the user asked for by names: --include and --exclude."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from nf4conv.options import DequantizeOptions, QuantizeOptions
from nf4conv.sources.source import Source

NamedSources = Sequence[tuple[str, Source]]
"""The submodels of a diffusers pipeline by name; a checkpoint of its own has the name ""."""


def why_unwanted(name: str, options: QuantizeOptions) -> str | None:
    """Returns why the user does not want a tensor to be packed; None if nothing is against it."""
    if _matches(name, options.exclude):
        return "excluded by the user"
    if options.include and not _matches(name, options.include):
        return "not included by the user"
    return None


def is_wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Returns True if the globs let a tensor pass; no include glob at all includes everything."""
    is_included = not include or _matches(name, include)
    return is_included and not _matches(name, exclude)


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Returns True if a name matches one of the globs."""
    # most runs have no globs, and a checkpoint may have 100,000 tensors
    return bool(globs) and any(fnmatchcase(name, glob) for glob in globs)


def unmatched(options: QuantizeOptions | DequantizeOptions, sources: NamedSources) -> Iterator[str]:
    """Yields a line for each pattern of the user that matches nothing, which is likely a typo.

    A pattern such as "transformer/*.attn.*" is about one submodel.
    """
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not _matches_any_tensor(pattern, sources):
                yield f"{option} {pattern!r} matches no tensor"


def _matches_any_tensor(pattern: str, sources: NamedSources) -> bool:
    owner, _, glob = pattern.rpartition("/")
    for name, source in sources:
        if owner and not fnmatchcase(name, owner):
            continue
        if any(fnmatchcase(tensor.name, glob) for tensor in source.tensors):
            return True
    return False
