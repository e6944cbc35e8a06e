"""Opens a reader of a source, wherever its files are."""

from nf4conv.sources.reader import Reader
from nf4conv.sources.source import Source


def open_reader(source: Source | None) -> Reader:
    """Opens a reader of local files, and of those of a source that are still on the Hub.

    The latter are read by ranges. Use it as a context manager.

    Args:
        source: the checkpoint; None if all that is read is here.
    """
    fetched = None if source is None else source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.sources.remote.stream import (
        RemoteReader,  # importing huggingface_hub takes a while
    )

    return RemoteReader(fetched.repository, fetched.absent)
