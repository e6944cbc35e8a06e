"""Reads PTX: the instructions of a kernel, its labels and its variables in shared memory."""

import re
from typing import NamedTuple

Words = list[str]  # parts of an operation, such as "ld", "global", "b32", or its operands


def operands(text: str) -> Words:
    """Divides operands at commas that are in no braces and no brackets."""
    return [one.strip() for one in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", text)]


def listed(operand: str) -> Words:
    """Returns the registers of a vector operand, {a, b}, or the only one."""
    return [one.strip() for one in operand.strip("{} ").split(",")]


class Statement(NamedTuple):
    """An instruction: `@predicate operation operands;`."""

    predicate: str
    operation: str
    operands: Words


class Program(NamedTuple):
    """A kernel, parsed.

    Attributes:
        statements: all instructions.
        labels: the number of the statement behind each label.
        places: the address of each variable in shared memory.
    """

    statements: list[Statement]
    labels: dict[str, int]
    places: dict[str, int]


def parse(ptx: str) -> Program:
    body = ptx[ptx.index(".visible .entry") :]
    body = body[body.index("{", body.index(")")) + 1 :].partition(".section")[0]
    body = re.sub(r"//[^\n]*|\.(?:loc|file|pragma)[^\n]*|\.reg [^;]*;", " ", body)
    places: dict[str, int] = {}
    end = 1024  # the first kilobyte is the system's
    for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", body):
        places[name] = -(-end // int(align)) * int(align)
        end = places[name] + int(size)
    if places:
        body = re.sub(r"\.shared \.align[^;]*;", " ", body)
        body = re.sub(r"\.shared [^;]*;", " ", body)
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for text in re.sub(r"(\$L\w+):", r"label \1;", body).split(";"):
        rest = " ".join(text.split()).lstrip("{} ")
        predicate = ""
        if rest.startswith("@"):
            predicate, _, rest = rest[1:].partition(" ")
        operation, _, rest = rest.partition(" ")
        if operation == "label":
            labels[rest] = len(statements)
        elif operation:
            statements.append(Statement(predicate, operation, operands(rest)))
    return Program(statements, labels, places)
