"""The part of pickle that state dicts are written in, run by a machine that can call nothing.

A pickle is a program whose GLOBAL and REDUCE name and call any function of Python. Here GLOBAL only
finds names in a table, and REDUCE only combines what the table says: dicts, tuples and descriptions
of tensors. Whatever else a program asks for is refused by name, so nothing that stands in a file is
ever executed (the opcodes are those of pickletools; what torch writes is in torch/_utils.py and
torch/_tensor.py, `_rebuild_*` and `__reduce_ex__`).

Nor does a short program take long or much: its steps are counted, its containers copied only into
what is counted too, and none of its values hashed, compared or printed but names and numbers, since
a tuple may hold itself a billion times.
"""

import json
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from nf4conv.sources.header import LARGEST_SIZE, MOST_DIMENSIONS
from nf4conv.sources.tensors import DTYPE_BITS

_MOST_STEPS: Final = 2**21  # opcodes, and values copied by them; a tensor takes about thirty
_DEEPEST: Final = 100  # containers that are open at a time
_MOST_ARGUMENTS: Final = 16


class PickleError(Exception):
    """A pickle that is malformed, or that holds more than tensors, dicts and numbers."""


class Storage(NamedTuple):
    """Memory that tensors are views of."""

    dtype: str | None  # safetensors' tag; None when the storage does not know it
    key: str  # under which its bytes are in the file
    elements: int  # of that dtype, or bytes

    @property
    def nbytes(self) -> int:
        return self.elements * (1 if self.dtype is None else DTYPE_BITS[self.dtype] // 8)


class StoredTensor(NamedTuple):
    """A view of a storage; offset, shape and strides count elements."""

    storage: Storage  # whose memory it is
    dtype: str  # safetensors' tag
    offset: int  # of its first element
    shape: tuple[int, ...]  # sizes, outermost first
    stride: tuple[int, ...]  # elements from one index to the next, for each dimension


class _Name(str):
    """What GLOBAL puts on the stack: a name with that of its module, which is no text."""


_TABLES: Final = json.loads(Path(__file__).with_name("pickle_names.json").read_bytes())
_STORAGES: Final[Mapping[str, str | None]] = _TABLES["storages"]
_DTYPES: Final[Mapping[str, str]] = _TABLES["dtypes"]


def _shown(value: object) -> str:
    """A value in an error: of a container only what it is."""
    if isinstance(value, _Name):
        return str(value)
    text = value[:100] if isinstance(value, str) else value
    return repr(text) if isinstance(text, (str, int, float)) else f"a {type(value).__name__}"


def _key(key: object) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{_shown(key)} is a key, where names are expected")
    return key  # type: ignore[return-value]


def _dict(pairs: Any = ()) -> dict[str | int, Any]:
    return {
        _key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)
    }


def _updated(target: Any, items: list[Any]) -> Any:
    """A dict, with keys and values that take turns."""
    if type(target) is not dict:
        raise PickleError(f"adds items to a {type(target).__name__}")
    target.update(_dict(zip(items[::2], items[1::2], strict=True)))
    return target


def _extended(target: Any, items: list[Any]) -> Any:
    if type(target) is not list:
        raise PickleError(f"adds items to a {type(target).__name__}")
    target.extend(items)
    return target


def _sizes(values: Any) -> tuple[int, ...]:
    """A shape, or strides."""
    if type(values) not in (tuple, list) or len(values) > MOST_DIMENSIONS:
        raise PickleError(f"{_shown(values)} is no shape, nor are they strides")
    return tuple(map(_size, values))


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_SIZE:
        raise PickleError(f"{_shown(value)} is no size; such numbers make no tensor")
    return value


def _view(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, storage.dtype, _size(offset), _sizes(shape), _sizes(stride))


def _view_as(storage: Any, offset: Any, shape: Any, stride: Any, *others: Any) -> StoredTensor:
    _requires_grad, _hooks, dtype = others[:3]
    if not isinstance(storage, Storage) or type(dtype) is not _Name:
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, _DTYPES[dtype], _size(offset), _sizes(shape), _sizes(stride))


def _of_class(rebuild: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    if type(kind) is not _Name or kind not in _TABLES["classes"]:
        raise PickleError(f"needs {_shown(kind)}")
    if type(rebuild) is not _Name or rebuild not in _VIEWS or len(arguments) > _MOST_ARGUMENTS:
        raise PickleError(f"calls {_shown(rebuild)}")
    return _VIEWS[rebuild](*arguments)


_VIEWS: Final[dict[str, Callable[..., Any]]] = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_as,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **_VIEWS,
    "collections.OrderedDict": _dict,
    "torch.Size": _sizes,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": _of_class,
}
_KNOWN: Final = frozenset((*_STORAGES, *_DTYPES, *_TABLES["classes"], *_FUNCTIONS))


def _name(module: Any, name: Any) -> _Name:
    parts = [part if isinstance(part, str) else None for part in (module, name)]
    found = ".".join("?" if part is None else part[:100] for part in parts)
    if None in parts or found not in _KNOWN:
        raise PickleError(f"needs {found}")
    return _Name(found)


def _storage(identity: Any) -> Storage:
    """The only kind of object that torch refers to by an identity of its own."""
    if type(identity) is not tuple or not 5 <= len(identity) <= 6:
        raise PickleError(f"needs the object {_shown(identity)}, not a plain storage")
    kind, storage, key, _location, elements, *view = identity
    if (
        type(kind) is not str
        or kind != "storage"
        or type(key) is not str
        or any(part is not None for part in view)
    ):
        raise PickleError(f"needs an object of the kind {_shown(kind)}, not of a plain storage")
    if type(storage) is not _Name or storage not in _STORAGES:
        raise PickleError(f"{_shown(storage)} is no storage")
    return Storage(_STORAGES[storage], key, _size(elements))


_PUSHED: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(_TABLES["constants"], lambda argument: argument),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), lambda *items: items),
    "TUPLE": tuple,
    "EMPTY_LIST": list,
    "LIST": list,
    "EMPTY_DICT": dict,
    "DICT": lambda items: _updated({}, items),
    "APPEND": lambda target, item: _extended(target, [item]),
    "APPENDS": _extended,
    "SETITEM": lambda target, key, value: _updated(target, [key, value]),
    "SETITEMS": _updated,
    # attributes of an OrderedDict, such as the `_metadata` of a state dict, which nothing here
    # needs
    "BUILD": lambda target, _: _updated(target, []),
    "GLOBAL": lambda argument: _name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _name,
    "BINPERSID": _storage,
}
"""What opcodes push, made of their argument or of what they take from the stack, where items after
a mark are a list.

BUILD and those that add items take what they add to, too, and push it again."""


def run_pickle(file: IO[bytes]) -> Any:
    """The value that a pickle describes: dicts, lists, tuples, strings, numbers and StoredTensors.

    The file is at the first opcode, and is left after the last. A PickleError if it is malformed,
    or needs anything else.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.step(opcode, argument)
        return machine.result()
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        AssertionError,
        RecursionError,
    ) as error:
        raise PickleError(
            f"not a pickle of a state dict ({type(error).__name__}: {str(error)[:200]})"
        ) from error


class _Machine:
    """A stack, the stacks that MARK put aside, and the memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0

    def result(self) -> Any:
        return self._stack.pop()

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        self._count(1)
        if type(argument) is int and argument.bit_length() > 128:
            raise PickleError("a number of more than 128 bits")
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                if len(self._marks) == _DEEPEST:
                    raise PickleError(f"containers in containers, more than {_DEEPEST} times")
                self._marks.append(self._stack)
                self._stack = []
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case "REDUCE":
                self._stack.append(self._reduced(*self._taken(opcode)))
            case name if name in _PUSHED:
                taken = self._taken(opcode) if argument is None else [argument]
                self._stack.append(_PUSHED[name](*taken))
            case name:
                raise PickleError(f"needs the opcode {name}")

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise PickleError(
                f"a program of more than {_MOST_STEPS:,} steps, which no state dict takes"
            )

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[Any]:
        """What an opcode takes from the stack, the lowest first."""
        taken = []
        for kind in reversed(opcode.stack_before):
            if kind is pickletools.stackslice:
                taken.append(self._stack)
                self._stack = self._marks.pop()
            elif kind is not pickletools.markobject:
                taken.append(self._stack.pop())
        return taken[::-1]

    def _reduced(self, function: Any, arguments: Any) -> Any:
        if type(function) is not _Name or function not in _FUNCTIONS:
            raise PickleError(f"calls {_shown(function)}")
        if type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise PickleError(f"calls {function} with other arguments than it takes")
        self._count(
            sum(
                len(argument) for argument in arguments if isinstance(argument, (tuple, list, dict))
            )
        )
        return _FUNCTIONS[function](*arguments)
