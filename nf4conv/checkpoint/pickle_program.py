"""The part of pickle that state dicts are written in, run by a machine that can call nothing.

A pickle is a program whose GLOBAL and REDUCE name and call any function of Python. Here GLOBAL only finds names in a
table, and REDUCE only combines what the table says: dicts, tuples and descriptions of tensors. Whatever else a program
asks for is refused by name, so nothing that stands in a file is ever executed (the opcodes are those of pickletools;
what torch writes is in torch/_utils.py and torch/_tensor.py, `_rebuild_*` and `__reduce_ex__`).

Nor does a short program take long or much: its steps are counted, its containers copied only into what is counted too,
and none of its values hashed, compared or printed but names and numbers, since a tuple may hold itself a billion times.
"""

import pickletools
from collections.abc import Callable
from typing import IO, Any, Final, NamedTuple

from nf4conv.checkpoint.header import DTYPE_BITS, LARGEST_SIZE, MOST_DIMENSIONS

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


class _Name(NamedTuple):
    """What GLOBAL puts on the stack."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_STORAGES: Final = {
    _Name("torch", f"{kind}Storage"): tag
    for kind, tag in (
        *(("Float", "F32"), ("Double", "F64"), ("Half", "F16"), ("BFloat16", "BF16"), ("ComplexFloat", "C64")),
        *(("Long", "I64"), ("Int", "I32"), ("Short", "I16"), ("Char", "I8"), ("Byte", "U8"), ("Bool", "BOOL")),
    )
}
_UNTYPED: Final = _Name("torch.storage", "UntypedStorage")
_DTYPES: Final = {
    _Name("torch", name): tag
    for name, tag in (
        *(("float32", "F32"), ("float64", "F64"), ("float16", "F16"), ("bfloat16", "BF16"), ("complex64", "C64")),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8"), ("bool", "BOOL")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0")),
    )
}
_CLASSES: Final = frozenset(
    (_Name("torch", "Tensor"), _Name("torch.nn.parameter", "Parameter"), _Name("torch.nn.parameter", "Buffer"))
)


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
    return {_key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}


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
    if not isinstance(storage, Storage) or not isinstance(dtype, _Name):
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, _DTYPES[dtype], _size(offset), _sizes(shape), _sizes(stride))


def _of_class(rebuild: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    if not isinstance(kind, _Name) or kind not in _CLASSES:
        raise PickleError(f"needs {_shown(kind)}")
    if not isinstance(rebuild, _Name) or rebuild not in _VIEWS or len(arguments) > _MOST_ARGUMENTS:
        raise PickleError(f"calls {_shown(rebuild)}")
    return _VIEWS[rebuild](*arguments)


_VIEWS: Final[dict[_Name, Callable[..., Any]]] = {
    _Name("torch._utils", "_rebuild_tensor"): _view,
    _Name("torch._utils", "_rebuild_tensor_v2"): _view,
    _Name("torch._utils", "_rebuild_tensor_v3"): _view_as,
}
_FUNCTIONS: Final[dict[_Name, Callable[..., Any]]] = {
    **_VIEWS,
    _Name("collections", "OrderedDict"): _dict,
    _Name("torch", "Size"): _sizes,
    _Name("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    _Name("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
    _Name("torch._tensor", "_rebuild_from_type_v2"): _of_class,
}
_KNOWN: Final = frozenset((*_STORAGES, _UNTYPED, *_DTYPES, *_CLASSES, *_FUNCTIONS))

_CONSTANTS: Final = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    )
)
"""Opcodes that push their argument."""
_MADE: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
"""Opcodes without an argument, and what they push."""


def run_pickle(file: IO[bytes]) -> Any:
    """The value that a pickle describes: dicts, lists, tuples, strings, numbers and StoredTensors.

    The file is at the first opcode, and is left after the last. A PickleError if it is malformed, or needs anything
    else.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.step(opcode.name, argument)
        return machine.pop()
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, AssertionError, RecursionError) as error:
        raise PickleError(f"not a pickle of a state dict ({type(error).__name__}: {str(error)[:200]})") from error


class _Machine:
    """A stack, the stacks that MARK put aside, and the memo; a method for each opcode that is known by no table."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0

    def step(self, opcode: str, argument: Any) -> None:
        self._count(1)
        if type(argument) is int and argument.bit_length() > 128:
            raise PickleError("a number of more than 128 bits")
        if opcode in _CONSTANTS or opcode in _MADE:
            self._stack.append(argument if opcode in _CONSTANTS else _MADE[opcode]())
            return
        method = getattr(self, f"_{opcode.lower()}", None)
        if method is None:
            raise PickleError(f"needs the opcode {opcode}")
        method(argument)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise PickleError(f"a program of more than {_MOST_STEPS:,} steps, which no state dict takes")

    def pop(self) -> Any:
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _proto(self, _: int) -> None:
        pass

    _frame = _stop = _proto

    def _mark(self, _: None) -> None:
        if len(self._marks) == _DEEPEST:
            raise PickleError(f"containers in containers, more than {_DEEPEST} times")
        self._marks.append(self._stack)
        self._stack = []

    def _tuple(self, _: None) -> None:
        items = self._pop_to_mark()
        self._stack.append(tuple(items))

    def _tuple1(self, _: None) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def _tuple2(self, _: None) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _tuple3(self, _: None) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _list(self, _: None) -> None:
        items = self._pop_to_mark()
        self._stack.append(items)

    def _append(self, _: None) -> None:
        item = self.pop()
        self._target(list).append(item)

    def _appends(self, _: None) -> None:
        items = self._pop_to_mark()
        self._target(list).extend(items)

    def _dict(self, _: None) -> None:
        items = self._pop_to_mark()
        self._stack.append(_dict(zip(items[::2], items[1::2], strict=True)))

    def _setitem(self, _: None) -> None:
        value = self.pop()
        key = self.pop()
        self._target(dict)[_key(key)] = value

    def _setitems(self, _: None) -> None:
        items = self._pop_to_mark()
        self._target(dict).update(_dict(zip(items[::2], items[1::2], strict=True)))

    def _target(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise PickleError(f"adds items to a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binput(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _put = _long_binput = _binput

    def _binget(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _get = _long_binget = _binget

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_name(_Name(module, name))

    def _stack_global(self, _: None) -> None:
        name = self.pop()
        self._push_name(_Name(self.pop(), name))

    def _push_name(self, name: _Name) -> None:
        if not all(isinstance(part, str) for part in name) or name not in _KNOWN:
            raise PickleError(f"needs {'.'.join(str(part)[:100] if isinstance(part, str) else '?' for part in name)}")
        self._stack.append(name)

    def _binpersid(self, _: None) -> None:
        """A storage, the only kind of object that torch refers to by an identity of its own."""
        identity = self.pop()
        if type(identity) is not tuple or not 5 <= len(identity) <= 6:
            raise PickleError(f"needs the object {_shown(identity)}, not a plain storage")
        kind, storage, key, _location, elements, *view = identity
        if type(kind) is not str or kind != "storage" or type(key) is not str or any(part is not None for part in view):
            raise PickleError(f"needs an object of the kind {_shown(kind)}, not of a plain storage")
        if type(storage) is not _Name or (storage != _UNTYPED and storage not in _STORAGES):
            raise PickleError(f"{_shown(storage)} is no storage")
        self._stack.append(Storage(_STORAGES.get(storage), key, _size(elements)))

    def _reduce(self, _: None) -> None:
        arguments = self.pop()
        function = self.pop()
        if type(function) is not _Name or function not in _FUNCTIONS:
            raise PickleError(f"calls {_shown(function)}")
        if type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise PickleError(f"calls {function} with other arguments than it takes")
        self._count(sum(len(argument) for argument in arguments if isinstance(argument, (tuple, list, dict))))
        self._stack.append(_FUNCTIONS[function](*arguments))

    def _build(self, _: None) -> None:
        """Attributes of an OrderedDict, such as the `_metadata` of a state dict, which nothing here needs."""
        self.pop()
        self._target(dict)
