"""Runs the part of pickle that state dicts are written in, on a machine that can call nothing.

A pickle is a program whose GLOBAL and REDUCE name and call any function of Python. Here GLOBAL only
finds names in a table, and REDUCE only combines what the table says: dicts, tuples and descriptions
of tensors. Whatever else a program asks for is refused by name, so nothing that stands in a file is
ever executed (the opcodes are those of pickletools). torch/_utils.py and torch/_tensor.py
(`_rebuild_*` and `__reduce_ex__`) show what torch writes.

Nor can a short program take long, or much memory: its steps are counted, and its containers are
copied only into what is counted too. Only names and numbers are hashed, compared or printed: a
tuple may hold itself a billion times. torch.load(weights_only=True) takes 2^n time for a key of
tuples nested n times, in a file of 150 bytes.
"""

import pickletools
from typing import IO, Any, Final, NamedTuple

from nf4conv.format.dtypes import DTYPE_BITS, TORCH_NAMES
from nf4conv.sources.header import LARGEST_SIZE, MOST_DIMENSIONS

STORAGE_DTYPES: Final = {
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

DTYPES: Final = {f"torch.{name}": tag for tag, name in TORCH_NAMES.items()}
"""safetensors' dtype tag by torch's dtype."""

TENSOR_CLASSES: Final = frozenset(
    ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
)
"""Classes that `_rebuild_from_type_v2` may be asked for."""

VIEW_WITH_DTYPE: Final = "torch._utils._rebuild_tensor_v3"
VIEW_FUNCTIONS: Final = frozenset(
    ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", VIEW_WITH_DTYPE)
)
"""Functions that make a tensor as a view of a storage."""

DICT: Final = "collections.OrderedDict"
SIZE: Final = "torch.Size"
PARAMETER_FUNCTIONS: Final = frozenset(
    ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
)
"""Functions that wrap a tensor, which is their first argument."""
FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"

FUNCTIONS: Final = VIEW_FUNCTIONS | PARAMETER_FUNCTIONS | {DICT, SIZE, FROM_TYPE}
"""Everything that REDUCE may call."""

KNOWN: Final = FUNCTIONS | TENSOR_CLASSES | STORAGE_DTYPES.keys() | DTYPES.keys()
"""Everything that GLOBAL may name."""

CONSTANT_OPCODES: Final = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    )
)
"""Opcodes that push their argument, a number or a text."""


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
        if found in KNOWN:
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
    if type(storage) is not Name or storage not in STORAGE_DTYPES:
        raise PickleError(f"{shown(storage)} is no storage")
    return Storage(STORAGE_DTYPES[storage], key, _size(elements))


def check_call(function: Any, arguments: Any) -> None:
    """Raises a PickleError unless a function is known and can have so many arguments."""
    if type(function) is not Name or function not in FUNCTIONS:
        raise PickleError(f"calls {shown(function)}")
    if type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
        raise PickleError(f"calls {function} with other arguments than it takes")


def call(function: Name, arguments: tuple[Any, ...]) -> Any:
    """Returns what a function makes of arguments, both of which `check_call` has let pass. Whatever
    it raises says that they make no sense.
    """
    if function in VIEW_FUNCTIONS:
        return _view(function, arguments)
    if function in PARAMETER_FUNCTIONS:
        return arguments[0]
    if function == DICT:
        return _dict(*arguments)
    if function == SIZE:
        return _sizes(*arguments)
    return _of_class(*arguments)


def _view(function: Name, arguments: Any) -> StoredTensor:
    """Returns a view of a storage: (storage, offset, shape, strides, …)."""
    storage, offset, shape, stride, *others = arguments
    dtype = None
    if isinstance(storage, Storage):
        dtype = storage.dtype
        if function == VIEW_WITH_DTYPE:
            _requires_grad, _hooks, named = others[:3]
            dtype = DTYPES[named] if type(named) is Name else None
    if dtype is None:
        raise PickleError("a tensor without a dtype, or without a storage")
    return StoredTensor(storage, dtype, _size(offset), _sizes(shape), _sizes(stride))


def _of_class(rebuild: Any, kind: Any, arguments: Any, _state: Any) -> StoredTensor:
    """Returns a tensor of one of the known classes, whatever its attributes."""
    if type(kind) is not Name or kind not in TENSOR_CLASSES:
        raise PickleError(f"needs {shown(kind)}")
    is_view = type(rebuild) is Name and rebuild in VIEW_FUNCTIONS
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


_MOST_STEPS: Final = 2**21  # opcodes, and values copied by them; a tensor takes about thirty
_DEEPEST: Final = 100  # containers that are open at a time
_MOST_BITS: Final = 128  # of a number


def run_pickle(file: IO[bytes]) -> Any:
    """Returns the value that a pickle describes: dicts, lists, tuples, texts, numbers and
    StoredTensors. The file stands at the first opcode, and then behind the last one.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.step(opcode.name, argument)
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
    """Holds a stack, the stacks that MARK put aside, and the memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0

    def result(self) -> Any:
        return self._stack.pop()

    def step(self, opcode: str, argument: Any) -> None:
        """Carries out an opcode; raises a PickleError if it is not one of those that are known."""
        self._count(1)
        if type(argument) is int and argument.bit_length() > _MOST_BITS:
            raise PickleError(f"a number of more than {_MOST_BITS} bits")
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._mark()
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case _ if opcode in CONSTANT_OPCODES:
                self._stack.append(argument)
            case _:
                made = self._made(opcode, argument)  # which may put another stack in place
                self._stack.append(made)

    def _made(self, opcode: str, argument: Any) -> Any:
        """Returns what an opcode pushes, made of what it takes from the stack."""
        match opcode:
            case "NONE":
                return None
            case "NEWTRUE":
                return True
            case "NEWFALSE":
                return False
            case "GLOBAL":
                module, name = argument.split(" ", 1)
                return name_of(module, name)
            case "STACK_GLOBAL":
                module, name = self._take(2)
                return name_of(module, name)
            case "BINPERSID":
                return storage_of(self._stack.pop())
            case "REDUCE":
                function, arguments = self._take(2)
                return self._called(function, arguments)
            case _:
                return self._new_container(opcode)

    def _new_container(self, opcode: str) -> Any:
        """Returns the container that an opcode makes."""
        match opcode:
            case "EMPTY_TUPLE":
                return ()
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple(self._take(int(opcode.removeprefix("TUPLE"))))
            case "TUPLE":
                return tuple(self._take_marked())
            case "EMPTY_LIST":
                return []
            case "LIST":
                return self._take_marked()
            case "EMPTY_DICT":
                return {}
            case "DICT":
                return updated({}, self._take_marked())
            case _:
                return self._grown_container(opcode)

    def _grown_container(self, opcode: str) -> Any:
        """Returns the container that an opcode adds to."""
        match opcode:
            case "APPEND":
                target, item = self._take(2)
                return extended(target, [item])
            case "APPENDS":
                items = self._take_marked()
                return extended(self._stack.pop(), items)
            case "SETITEM":
                target, key, value = self._take(3)
                return updated(target, [key, value])
            case "SETITEMS":
                items = self._take_marked()
                return updated(self._stack.pop(), items)
            case "BUILD":
                # gives an OrderedDict attributes, such as the `_metadata` of a state dict, which
                # nothing here needs
                target, _attributes = self._take(2)
                return updated(target, [])
            case _:
                raise PickleError(f"needs the opcode {opcode}")

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise PickleError(
                f"a program of more than {_MOST_STEPS:,} steps, which no state dict takes"
            )

    def _mark(self) -> None:
        """Puts the stack aside and begins a new one."""
        if len(self._marks) == _DEEPEST:
            raise PickleError(f"containers in containers, more than {_DEEPEST} times")
        self._marks.append(self._stack)
        self._stack = []

    def _take_marked(self) -> list[Any]:
        """Takes everything from the stack since the last mark."""
        taken = self._stack
        self._stack = self._marks.pop()
        return taken

    def _take(self, count: int) -> list[Any]:
        """Takes so many values from the stack, the lowest first."""
        taken = [self._stack.pop() for _ in range(count)]
        taken.reverse()
        return taken

    def _called(self, function: Any, arguments: Any) -> Any:
        check_call(function, arguments)
        for argument in arguments:
            if isinstance(argument, (tuple, list, dict)):
                self._count(len(argument))
        return call(function, arguments)
