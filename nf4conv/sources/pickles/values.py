"""Checks and combines what a pickle of a state dict describes: dicts, storages and tensors.

Only names and numbers are hashed, compared or printed: a tuple may hold itself a billion times.
"""

from typing import Any, Final, NamedTuple

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.header import LARGEST_SIZE, MOST_DIMENSIONS
from nf4conv.sources.pickles import names

MOST_ARGUMENTS: Final = 16  # of a function; those that are known take up to nine

_LONGEST_SHOWN: Final = 100  # characters of a text in an error


class PickleError(Exception):
    """A pickle that is malformed, or that holds more than tensors, dicts and numbers."""


class Storage(NamedTuple):
    """Memory that tensors are views of."""

    dtype: str | None  # safetensors' tag; None if only the tensors know it
    key: str  # the name of its bytes in the file
    elements: int  # of that dtype; bytes if there is none

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            return self.elements
        return self.elements * DTYPE_BITS[self.dtype] // 8


class StoredTensor(NamedTuple):
    """A view of a storage; offset, shape and strides count elements."""

    storage: Storage  # whose memory it is
    dtype: str  # safetensors' tag
    offset: int  # of its first element
    shape: tuple[int, ...]  # sizes, outermost first
    stride: tuple[int, ...]  # elements from one index to the next, for each dimension


class Name(str):
    """A name with that of its module, as GLOBAL puts it on the stack; it is no text."""

    __slots__ = ()


def shown(value: object) -> str:
    """Returns a value as an error shows it: of a container only its type."""
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, str):
        return repr(value[:_LONGEST_SHOWN])
    if isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def name_of(module: Any, name: Any) -> Name:
    """Returns the name that GLOBAL finds; raises a PickleError unless it is known."""
    if isinstance(module, str) and isinstance(name, str):
        found = f"{module[:_LONGEST_SHOWN]}.{name[:_LONGEST_SHOWN]}"
        if found in names.KNOWN:
            return Name(found)
        raise PickleError(f"needs {found}")
    module_shown = module[:_LONGEST_SHOWN] if isinstance(module, str) else "?"
    name_shown = name[:_LONGEST_SHOWN] if isinstance(name, str) else "?"
    raise PickleError(f"needs {module_shown}.{name_shown}")


def updated(target: Any, items: list[Any]) -> Any:
    """Adds keys and values, which take turns, to a dict, and returns it."""
    if type(target) is not dict:
        raise PickleError(f"adds items to a {type(target).__name__}")
    keys = items[::2]
    values = items[1::2]
    target.update(_dict(list(zip(keys, values, strict=True))))
    return target


def extended(target: Any, items: list[Any]) -> Any:
    """Adds items to a list, and returns it."""
    if type(target) is not list:
        raise PickleError(f"adds items to a {type(target).__name__}")
    target.extend(items)
    return target


def storage_of(identity: Any) -> Storage:
    """Returns the storage that a persistent id describes.

    It is the only kind of object that torch refers to by an identity of its own:
    ("storage", class, key, location, elements), in old files with a view, which is None.
    """
    if type(identity) is not tuple or not 5 <= len(identity) <= 6:
        raise PickleError(f"needs the object {shown(identity)}, not a plain storage")
    kind, storage, key, _location, elements, *view = identity
    is_storage = type(kind) is str and kind == "storage" and type(key) is str
    if not is_storage or any(part is not None for part in view):
        raise PickleError(f"needs an object of the kind {shown(kind)}, not of a plain storage")
    if type(storage) is not Name or storage not in names.STORAGE_DTYPES:
        raise PickleError(f"{shown(storage)} is no storage")
    return Storage(names.STORAGE_DTYPES[storage], key, _size(elements))


def check_call(function: Any, arguments: Any) -> None:
    """Raises a PickleError unless a function is known and can have so many arguments."""
    if type(function) is not Name or function not in names.FUNCTIONS:
        raise PickleError(f"calls {shown(function)}")
    if type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
        raise PickleError(f"calls {function} with other arguments than it takes")


def call(function: Name, arguments: tuple[Any, ...]) -> Any:
    """Returns what a function makes of arguments, both of which `check_call` has let pass.

    Raises:
        PickleError: the arguments make no sense.
        TypeError, ValueError, LookupError: there are too few arguments, or too many.
    """
    if function in names.VIEW_FUNCTIONS:
        return _view(function, arguments)
    if function in names.PARAMETER_FUNCTIONS:
        return arguments[0]
    if function == names.DICT:
        return _dict(*arguments)
    if function == names.SIZE:
        return _sizes(*arguments)
    return _of_class(*arguments)


def _view(function: Name, arguments: Any) -> StoredTensor:
    """Returns a view of a storage: (storage, offset, shape, strides, …)."""
    storage, offset, shape, stride, *others = arguments
    dtype = None
    if isinstance(storage, Storage):
        dtype = storage.dtype
        if function == names.VIEW_WITH_DTYPE:
            _requires_grad, _hooks, named = others[:3]
            dtype = names.DTYPES[named] if type(named) is Name else None
    if dtype is None:
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, dtype, _size(offset), _sizes(shape), _sizes(stride))


def _of_class(rebuild: Any, kind: Any, arguments: Any, _state: Any) -> StoredTensor:
    """Returns a tensor of one of the known classes, whatever its attributes."""
    if type(kind) is not Name or kind not in names.TENSOR_CLASSES:
        raise PickleError(f"needs {shown(kind)}")
    is_view = type(rebuild) is Name and rebuild in names.VIEW_FUNCTIONS
    if not is_view or len(arguments) > MOST_ARGUMENTS:
        raise PickleError(f"calls {shown(rebuild)}")
    return _view(rebuild, arguments)


def _dict(pairs: Any = ()) -> dict[str | int, Any]:
    """Returns a dict of pairs, or of another dict; raises a TypeError unless all keys are names."""
    if isinstance(pairs, dict):
        pairs = pairs.items()
    found: dict[str | int, Any] = {}
    for key, value in pairs:
        if type(key) not in (str, int):
            raise TypeError(f"{shown(key)} is a key, where names are expected")
        found[key] = value
    return found


def _sizes(values: Any) -> tuple[int, ...]:
    """Returns a shape, or strides."""
    if type(values) not in (tuple, list) or len(values) > MOST_DIMENSIONS:
        raise PickleError(f"{shown(values)} is no shape, nor are they strides")
    return tuple(_size(value) for value in values)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_SIZE:
        raise PickleError(f"{shown(value)} is no size; such numbers make no tensor")
    return value
