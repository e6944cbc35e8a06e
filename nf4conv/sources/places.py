"""Reads how users name a model on the Hub: org/name, the address of its page, or hf://org/name."""

import os
import re
from dataclasses import replace
from typing import Final
from urllib.parse import unquote, urlsplit

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions

_SCHEMES: Final = ("hf", "http", "https")
_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_repo_id(text: str) -> bool:
    """Returns True if a source that is no path may be a repository on the Hub."""
    return _REPO_ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def prefix_of(where: SourceOptions) -> str:
    """Returns what the names of files begin with that are in the subfolder; empty without one."""
    return f"{where.subfolder.strip('/')}/" if where.subfolder else ""


def from_address(source: str, where: SourceOptions) -> tuple[str, SourceOptions]:
    """Returns the name of a repository, and what to take of it, given the address of a page.

    Such are "https://huggingface.co/org/name/tree/main/subfolder" and "hf://org/name@revision".
    Anything that is no address is returned as it is. An address may name the revision and the
    subfolder, if `where` names none.
    """
    scheme, separator, rest = source.partition("://")
    if not separator or scheme not in _SCHEMES:
        return source, where
    if scheme == "hf":
        parts = [part for part in rest.split("/") if part]
    else:
        parts = _path_of(source)
    if parts[:1] == ["models"]:
        del parts[0]
    if len(parts) < 2 or parts[0] in ("datasets", "spaces"):
        raise _no_model(source)
    organisation, name = parts[0], parts[1]
    name, _, revision = name.partition("@")
    inside = parts[2:]
    if inside and scheme != "hf":
        # .../tree/REVISION/FOLDER is a folder, .../blob/REVISION/FILE a file in one
        if inside[0] not in ("tree", "blob", "resolve") or len(inside) < 2:
            raise _no_model(source)
        is_file = inside[0] != "tree"
        if is_file and inside[-1].endswith(".gguf"):
            where = replace(where, gguf_file=where.gguf_file or inside[-1])
        revision = inside[1]
        inside = inside[2:-1] if is_file else inside[2:]
    if not _NAME.fullmatch(organisation) or not _NAME.fullmatch(name):
        raise _no_model(source)
    found = replace(
        where,
        revision=where.revision or revision or None,
        subfolder=where.subfolder or "/".join(inside) or None,
    )
    return f"{organisation}/{name}", found


def _path_of(address: str) -> list[str]:
    """Returns the parts of the path of an address on the Hub."""
    split = urlsplit(address)
    own = urlsplit(os.environ.get("HF_ENDPOINT", ""))
    if split.hostname not in (*_HOSTS, own.hostname):
        raise SourceError(
            f"{address}: not an address on the Hub; download the model, and give its folder"
        )
    return [unquote(part) for part in split.path.split("/") if part]


def _no_model(address: str) -> SourceError:
    return SourceError(f"{address}: not the address of a model on the Hub; give org/name")
