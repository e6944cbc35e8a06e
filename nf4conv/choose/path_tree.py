"""Holds paths of modules by their parts, and finds those that a name in a skip list hits."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

_MOST_NEWEST: Final = 1000
_NONE: "Final[dict[str, Node]]" = {}  # leaves share it


class Node:
    """One part of paths that begin alike."""

    __slots__ = ("_in_order", "children", "is_path", "parent", "part")

    def __init__(self, part: str, parent: "Node | None") -> None:
        self.part = part
        self.parent = parent
        self.is_path = False  # True if a path ends here
        self.children = _NONE
        self._in_order: list[str] | None = None

    @property
    def path(self) -> str:
        """Returns the whole path of a part."""
        if self.parent is None or self.parent.parent is None:
            return self.part
        return f"{self.parent.path}.{self.part}"

    def paths(self) -> Iterator[str]:
        """Yields the paths that end here or below."""
        if self.is_path:
            yield self.path
        for child in self.children.values():
            yield from child.paths()

    def begun_by(self, name: str) -> Iterator["Node"]:
        """Yields the nodes below at which a path begins with a name, whose dots are any character.

        The name may end inside the part of a node.
        """
        for part in self._beginning_with(name.partition(".")[0]):
            child = self.children[part]
            size = len(part)
            if not are_alike(name[:size], part[: len(name)]):
                continue
            if len(name) <= size:
                yield child
            elif name[size] == ".":
                yield from child.begun_by(name[size + 1 :])

    def _beginning_with(self, text: str) -> Iterator[str]:
        """Yields the parts of children that begin with a text."""
        if self._in_order is None:
            self._in_order = sorted(self.children)
        for place in range(bisect_left(self._in_order, text), len(self._in_order)):
            if not self._in_order[place].startswith(text):
                return
            yield self._in_order[place]

    def ends_in(self, path: str, start: int = 0) -> Iterator[int]:
        """Yields where the paths below end in a path that begins with them from `start` on.

        To them, and not to that path, a dot is any character.
        """
        for size in {len(part) for part in self.children}:
            child = self.children.get(path[start : start + size])
            if child is None:
                continue
            stop = start + size
            if child.is_path:
                yield stop
            if stop < len(path) and child.children:
                yield from child.ends_in(path, stop + 1)


def are_alike(name: str, text: str) -> bool:
    """Returns True if a text is a name of its length, in which a dot is any character."""
    if name == text:
        return True
    return "." in name and all(mine in (".", its) for mine, its in zip(name, text, strict=True))


class PathTree:
    """Holds paths, of which a checkpoint of experts may have several 100,000.

    Attributes:
        root: the node above the first parts of all paths.
        sizes: how many paths begin with each first part.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.root = Node("", None)
        self.sizes: Counter[str] = Counter()
        # by their own part and by that of the node above
        self._nodes: dict[str, dict[str, list[Node]]] = {}
        self._newest: dict[str, Node] = {}  # by path: modules come in groups
        for path in paths:
            node = self._node(path)
            if not node.is_path:
                node.is_path = True
                self.sizes[path.partition(".")[0]] += 1

    def _node(self, path: str) -> Node:
        """Returns the node of a path, which is made if there is none."""
        parent, dot, part = path.rpartition(".")
        above = self.root
        if dot:
            found = self._newest.get(parent)
            if found is None:
                found = self._node(parent)
                if len(self._newest) > _MOST_NEWEST:
                    self._newest.clear()
                self._newest[parent] = found
            above = found
        node = above.children.get(part)
        if node is None:
            alike = self._nodes.setdefault(part, {}).setdefault(above.part, [])
            # the part of another node, so that memory holds it once
            node = Node(alike[0].part if alike else part, above)
            alike.append(node)
            if above.children is _NONE:
                above.children = {}
            above.children[node.part] = node
        return node

    def hit_by(self, name: str) -> Iterator[Node]:
        """Yields the nodes at and below which at least one loader would skip every path.

        Two rules are enough. Whatever transformers 5.21 skips by a beginning, 5.0 skips too; and
        what vLLM skips, transformers 4 skips by an end of the path above, or 5.0 by a beginning.
        """
        yield from self._ending_with(name)
        yield from self.root.begun_by(name)

    def _ending_with(self, name: str) -> Iterator[Node]:
        """Yields the nodes whose path ends with a name, which may begin inside of a part."""
        first, *others = name.split(".")
        if not others:
            for part, groups in self._nodes.items():
                if part.endswith(first):
                    for nodes in groups.values():
                        yield from nodes
            return
        *between, last = others
        groups = self._nodes.get(last, {})
        if between:
            for node in groups.get(between[-1], ()):
                if _is_below(node, first, between):
                    yield node
            return
        for above, nodes in groups.items():
            if above.endswith(first):
                yield from (node for node in nodes if node.parent is not self.root)


def _is_below(node: Node, first: str, between: list[str]) -> bool:
    """Returns True if a node is below such parts, of which the first may be an end of a part."""
    above = node.parent
    for part in reversed(between):
        if above is None or above.parent is None or above.part != part:
            return False
        above = above.parent
    return above is not None and above.parent is not None and above.part.endswith(first)
