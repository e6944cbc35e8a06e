"""The launches that pack weights and absmax, for what is on the device already.

Weights come with a table, in a worker's input behind what has been read, so that a launch serves many.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.pipeline.without_torch.reading import Reading, Row, starts
from nf4conv.pipeline.without_torch.worker import Kernels, Launch

MEAN_ROOM: Final = 4 * 2**16
"""Bytes that the mean of a long vector needs for the sums of its parts."""


def quantize(reading: Reading, kernels: Kernels, rows: Sequence[Row]) -> list[Launch]:
    """What packs weights.

    Args:
        reading: whose input has room for tables.
        kernels: of their format.
        rows: of each the addresses of the weight, of its codes and of its absmax, and its elements.
    """
    chosen: dict[str, list[Row]] = {"quantize_aligned": [], "quantize_any": []}
    for row in rows:
        is_aligned = row[3] % kernels.numbers["slot"] == 0 and row[1] % 4 == 0
        chosen["quantize_aligned" if is_aligned else "quantize_any"].append(row)
    launches: list[Launch] = []
    for name, of_kind in chosen.items():
        if of_kind:
            table, tiles = reading.tiled_table(of_kind, kernels.numbers["tile"])
            launches.append((kernels.functions[name], tiles, (table, 0, kernels.tables["codes"], len(of_kind))))
    return launches


def absmax_starts(blocks: Sequence[int]) -> list[int]:
    """Where the absmax of each of some weights begin, in floats: torch's mean begins at a multiple of 16 bytes."""
    return starts(count + -count % 4 for count in blocks)


def compress(reading: Reading, kernels: Kernels, rows: Sequence[Row], means: int, room: int) -> list[Launch]:
    """What quantizes absmax.

    Args:
        reading: whose input has room for tables.
        kernels: of their format.
        rows: of each weight the addresses of absmax, of its codes and of nested_absmax, and its blocks.
        means: address of as many floats, which become the offsets.
        room: address of MEAN_ROOM bytes.
    """
    averaging = average(reading, kernels, [(row[0], row[3]) for row in rows], means, room)
    return [*averaging, compress_with(reading, kernels, rows, means)]


def compress_with(reading: Reading, kernels: Kernels, rows: Sequence[Row], means: int) -> Launch:
    """The same with the offsets known."""
    table, tiles = reading.tiled_table(rows, kernels.numbers["nested_tile"])
    return kernels.functions["compress"], tiles, (table, means, kernels.tables["middles"], len(rows))


def average(
    reading: Reading, kernels: Kernels, vectors: Sequence[tuple[int, int]], means: int, room: int
) -> list[Launch]:
    """The mean of each absmax vector; long ones each take two launches, one after the other in one scratch region."""
    addresses, counts = zip(*vectors, strict=True)
    table = reading.table([addresses, counts, [threads(count) for count in counts]])
    functions = kernels.functions
    launches: list[Launch] = [(functions["mean"], len(counts), (table, means, len(counts)))]
    for index, (values, count) in enumerate(vectors):
        if count > TORCH_BLOCK:
            blocks = thread_blocks(count, kernels.numbers["resident_blocks"])
            launches.append((functions["mean_part"], blocks, (values, room, count, blocks)))
            launches.append((functions["mean_total"], 1, (room, means + 4 * index, blocks, count)))
    return launches


def large_chunks(room: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(start, count) of blocks whose scales, plain or nested, are to fit into so many bytes."""
    step = room // 8 // NESTED_BLOCKSIZE * NESTED_BLOCKSIZE
    return ((start, min(step, blocks - start)) for start in range(0, blocks, step))
