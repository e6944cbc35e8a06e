"""Runs the program of a torch pickle, which describes tensors as views of storages, without torch.

Python's own unpickler runs it, but with the opcodes that torch writes alone, and nothing in the
pickle can be called: a function that it names is a text, and what those of torch would make is made
here. torch.load(weights_only=True) would not do: on a tuple that holds another one twice, n times
over, it takes 2^n steps, and a file of torch before 1.6 it reads as a whole.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Final, NamedTuple

from nf4conv.format.dtypes import DTYPE_BITS, TORCH_NAMES
from nf4conv.sources.header import LARGEST_SIZE, MOST_DIMENSIONS

_STORAGES: Final = {
    "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.ComplexFloatStorage": "C64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.storage.UntypedStorage": None,  # its tensors know their dtype
}
"""safetensors' dtype tag of the elements of a storage, by the storage's class."""

_DTYPES: Final = {f"torch.{name}": tag for tag, name in TORCH_NAMES.items()}
"""safetensors' dtype tag by torch's dtype."""

_CLASSES: Final = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
"""Classes that `_FROM_TYPE` may be asked for."""

_VIEW_WITH_DTYPE: Final = "torch._utils._rebuild_tensor_v3"
_VIEWS: Final = (
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", _VIEW_WITH_DTYPE
)  # fmt: skip
"""Functions that make a tensor as a view of a storage."""

_PARAMETERS: Final = (
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"
)  # fmt: skip
"""Functions that wrap a tensor, which is their first argument."""

_DICT: Final = "collections.OrderedDict"
_SIZE: Final = "torch.Size"
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"

_FUNCTIONS: Final = frozenset((*_VIEWS, *_PARAMETERS, _DICT, _SIZE, _FROM_TYPE))
_KNOWN: Final = frozenset((*_FUNCTIONS, *_CLASSES, *_STORAGES, *_DTYPES))
"""Everything that a pickle may name."""

_OPCODES: Final = (
    "PROTO", "FRAME", "STOP", "MARK", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
    "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL", "STACK_GLOBAL", "BINPERSID",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "EMPTY_DICT",
)  # fmt: skip
"""Opcodes that do what they do in any pickle; `_Unpickler` has others besides."""

_MOST_STEPS: Final = 2**21  # opcodes, and values copied by them; a tensor takes about thirty
_MOST_ARGUMENTS: Final = 16  # of a function; those that are known take up to nine
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


class _Name(str):
    """Names a function or a class with its module, as opposed to a text that the pickle holds."""

    __slots__ = ()


def run_pickle(file: IO[bytes]) -> Any:
    """Returns the value that a pickle describes: dicts, lists, tuples, texts, numbers and
    StoredTensors. The file stands at the first opcode, and then behind the last one.
    """
    try:
        return _Unpickler(file).load()
    except PickleError:
        raise
    except Exception as error:  # an unpickler raises anything for what is no pickle
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise PickleError(f"not a pickle of a state dict ({reason})") from error


class _Unpickler(pickle._Unpickler):
    """Counts what it does, calls nothing, and hashes no key before it has looked at it."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._steps = 0

    def count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise PickleError(
                f"a program of more than {_MOST_STEPS:,} steps, which no state dict takes"
            )

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module[:_LONGEST_SHOWN]}.{name[:_LONGEST_SHOWN]}"
        if found not in _KNOWN:
            raise PickleError(f"needs {found}")
        return _Name(found)

    def persistent_load(self, pid: Any) -> Storage:
        """Returns the storage that an identity describes.

        It is the only kind of object that torch refers to by an identity of its own:
        ("storage", class, key, location, elements), in old files with a view, which is None.
        """
        if type(pid) is not tuple or not 5 <= len(pid) <= 6:
            raise PickleError(f"needs the object {_shown(pid)}, not a plain storage")
        kind, storage, key, _location, elements, *view = pid
        is_storage = type(kind) is str and kind == "storage" and type(key) is str
        if not is_storage or any(part is not None for part in view):
            raise PickleError(f"needs an object of the kind {_shown(kind)}, not of a plain storage")
        if type(storage) is not _Name or storage not in _STORAGES:
            raise PickleError(f"{_shown(storage)} is no storage")
        return Storage(_STORAGES[storage], key, _size(elements))

    def set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _update(self.stack[-1], [(key, value)])

    def set_items(self) -> None:
        pairs = _pairs(self.pop_mark())
        _update(self.stack[-1], pairs)

    def make_dict(self) -> None:
        pairs = _pairs(self.pop_mark())
        self.stack.append(_update({}, pairs))

    def leave_attributes(self) -> None:
        """Takes an object's attributes, such as the `_metadata` of a state dict, and leaves it."""
        self.stack.pop()

    def reduce(self) -> None:
        """Puts what a function makes of arguments in their place."""
        arguments = self.stack.pop()
        function = self.stack.pop()
        if type(function) is not _Name or function not in _FUNCTIONS:
            raise PickleError(f"calls {_shown(function)}")
        if type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise PickleError(f"calls {function} with other arguments than it takes")
        for argument in arguments:
            if isinstance(argument, (tuple, list, dict)):
                self.count(len(argument))
        self.stack.append(_called(function, arguments))


_OWN: Final[Mapping[str, Callable[[_Unpickler], None]]] = {
    "SETITEM": _Unpickler.set_item,
    "SETITEMS": _Unpickler.set_items,
    "DICT": _Unpickler.make_dict,
    "BUILD": _Unpickler.leave_attributes,
    "REDUCE": _Unpickler.reduce,
}


def _counted(step: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(unpickler: _Unpickler) -> None:
        unpickler.count(1)
        step(unpickler)

    return counted


def _steps() -> dict[int, Callable[[Any], None]]:
    """Returns what is done at each opcode that is allowed."""
    steps = {}
    for opcode in (*_OPCODES, *_OWN):
        [code] = getattr(pickle, opcode)
        steps[code] = _counted(_OWN.get(opcode) or pickle._Unpickler.dispatch[code])
    return steps


_Unpickler.dispatch = _steps()


# --- what functions make --------------------------------------------------------------------------


def _called(function: _Name, arguments: tuple[Any, ...]) -> Any:
    """Returns what a function makes of arguments; whatever is raised says that they make no
    sense.
    """
    if function in _VIEWS:
        return _view(function, *arguments)
    if function in _PARAMETERS:
        return arguments[0]
    if function == _SIZE:
        return _sizes(*arguments)
    if function == _DICT:
        [pairs] = arguments or [()]
        return _update({}, pairs.items() if isinstance(pairs, dict) else pairs)
    rebuild, kind, of_view, _state = arguments
    if kind not in _CLASSES or type(rebuild) is not _Name or rebuild not in _VIEWS:
        raise PickleError(f"calls {_shown(rebuild)} for {_shown(kind)}")
    return _view(rebuild, *of_view)


def _view(
    function: _Name, storage: Any, offset: Any, shape: Any, stride: Any, *others: Any
) -> StoredTensor:
    """Returns a view of a storage, which may be told its dtype."""
    dtype = storage.dtype if isinstance(storage, Storage) else None
    if function == _VIEW_WITH_DTYPE and isinstance(storage, Storage):
        _requires_grad, _hooks, named = others[:3]
        dtype = _DTYPES[named] if type(named) is _Name else None
    if dtype is None:
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, dtype, _size(offset), _sizes(shape), _sizes(stride))


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Returns the pairs of keys and values, which take turns."""
    return zip(items[::2], items[1::2], strict=True)


def _update(target: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Adds pairs to a dict, and returns it; refuses keys that are no names or numbers."""
    if type(target) is not dict:
        raise PickleError(f"adds items to a {type(target).__name__}")
    for key, value in pairs:
        if type(key) not in (str, int):
            raise PickleError(f"{_shown(key)} is a key, where names are expected")
        target[key] = value
    return target


def _sizes(values: Any) -> tuple[int, ...]:
    """Returns a shape, or strides."""
    if type(values) not in (tuple, list) or len(values) > MOST_DIMENSIONS:
        raise PickleError(f"{_shown(values)} is no shape, nor are they strides")
    return tuple(_size(value) for value in values)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_SIZE:
        raise PickleError(f"{_shown(value)} is no size; such numbers make no tensor")
    return value


def _shown(value: object) -> str:
    """Returns a value as an error shows it: of a container only its type."""
    if isinstance(value, _Name):
        return str(value)
    if isinstance(value, str):
        return repr(value[:_LONGEST_SHOWN])
    if isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
