"""Adds the repository's address to a distribution while it is built.

In the repository, README.md links to its neighbours by relative paths. The package index shows the
README without its neighbours, so hatchling calls this plugin to make those links absolute. The
address is written once, in pyproject.toml: `[tool.hatch.metadata.hooks.custom] repository`.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A Markdown link or picture whose target is a path: no scheme, and no anchor of the same page.
RELATIVE_LINK = re.compile(r"(?P<text>(?P<picture>!?)\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)\s]+)\)")


def with_absolute_links(readme: str, repository: str) -> str:
    """Returns the README with its relative links pointing into the repository's main branch."""

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["picture"] else "blob"
        return f"{link['text']}({repository}/{view}/main/{link['path']})"

    return RELATIVE_LINK.sub(absolute, readme)


class RepositoryLinks(MetadataHookInterface):
    """Supplies the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets both fields in the metadata of the project."""
        repository = self.config["repository"]
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(readme, repository),
        }
        metadata["urls"] = {
            "Homepage": repository,
            "Documentation": f"{repository}/tree/main/docs",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
