"""Runs the part of pickle that state dicts are written in, on a machine that can call nothing.

A pickle is a program whose GLOBAL and REDUCE name and call any function of Python. Here GLOBAL only
finds names in a table, and REDUCE only combines what the table says: dicts, tuples and descriptions
of tensors. Whatever else a program asks for is refused by name, so nothing that stands in a file is
ever executed (the opcodes are those of pickletools).

Nor can a short program take long, or much memory: its steps are counted, and its containers are
copied only into what is counted too.
"""

import pickletools
from typing import IO, Any, Final

from nf4conv.sources.pickles.names import CONSTANT_OPCODES
from nf4conv.sources.pickles.values import (
    PickleError,
    call,
    check_call,
    extended,
    name_of,
    storage_of,
    updated,
)

_MOST_STEPS: Final = 2**21  # opcodes, and values copied by them; a tensor takes about thirty
_DEEPEST: Final = 100  # containers that are open at a time
_MOST_BITS: Final = 128  # of a number


def run_pickle(file: IO[bytes]) -> Any:
    """Returns the value that a pickle describes.

    Args:
        file: a file that stands at the first opcode; afterwards it stands behind the last one.

    Returns:
        Dicts, lists, tuples, texts, numbers and StoredTensors.

    Raises:
        PickleError: the pickle is malformed, or needs anything else.
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
