"""Reads how users name a model on the Hub: org/name, the address of its page, or hf://org/name."""

import os
import re
from dataclasses import replace
from typing import Final
from urllib.parse import unquote, urlsplit

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions

_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_NO_MODELS: Final = ("datasets", "spaces")
_MODEL: Final = r"(?:models/)?(?P<organisation>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)"
_ADDRESS: Final = re.compile(
    rf"hf://(?P<host>)(?P<kind>){_MODEL}(?:@(?P<revision>[^/]+))?(?:/(?P<inside>.*))?"
)
_PAGE: Final = re.compile(
    rf"https?://(?P<host>[^/]+)/{_MODEL}"
    r"(?:/(?P<kind>tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?P<inside>[^?#]*))?)?/?(?:[?#].*)?"
)
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
    if not source.startswith(("hf://", "http://", "https://")):
        return source, where
    found = _ADDRESS.fullmatch(source) or _PAGE.fullmatch(source)
    own = urlsplit(os.environ.get("HF_ENDPOINT", ""))
    hosts = ("", *_HOSTS, own.netloc)
    if found is None or found["host"] not in hosts or found["organisation"] in _NO_MODELS:
        raise SourceError(f"{source}: not the address of a model on the Hub; give org/name")
    inside = unquote(found["inside"] or "").strip("/")
    gguf_file = where.gguf_file
    if found["kind"] in ("blob", "resolve"):
        inside, _, file = inside.rpartition("/")
        if file.endswith(".gguf"):
            gguf_file = gguf_file or file
    asked = replace(
        where,
        revision=where.revision or unquote(found["revision"] or "") or None,
        subfolder=where.subfolder or inside or None,
        gguf_file=gguf_file,
    )
    return f"{found['organisation']}/{found['name']}", asked
