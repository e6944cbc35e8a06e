"""Takes the bytes of blocks apart.

All functions take and return [n, k] tensors: a row for each block.
"""

import torch


def parts(block: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Divides blocks into their parts, by the bytes that each part has."""
    return list(torch.split(block, list(sizes), dim=1))


def fields(block: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Takes fields of a few bits out of bytes.

    A run of bytes holds the lowest field of each byte first, then the second field of each byte,
    and so on; runs follow each other.

    Args:
        block: [n, k] uint8.
        bits: of a field: 1, 2 or 4.
        run: bytes of a run, of which k is a multiple.

    Returns:
        [n, k * 8 / bits] uint8.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=block.device)
    runs = block.reshape(len(block), -1, 1, run)
    shifted = runs >> shifts.view(-1, 1)
    mask = 2**bits - 1
    found: torch.Tensor = shifted & mask
    return found.flatten(1)


def bits_of_words(words: torch.Tensor, bits: int, step: int, count: int) -> torch.Tensor:
    """Takes fields out of words, those of a word one after the other, the lowest first.

    Args:
        words: [n, k] int32 or int64, not negative.
        bits: of a field.
        step: bits from one field to the next.
        count: fields of a word.

    Returns:
        [n, k * count] in the words' dtype.
    """
    stop = step * count
    shifts = torch.arange(0, stop, step, device=words.device)
    shifted = words.unsqueeze(2) >> shifts
    mask = 2**bits - 1
    found: torch.Tensor = shifted & mask
    return found.flatten(1)


def halves(block: torch.Tensor) -> torch.Tensor:
    """Returns numbers in half precision as float32: [n, 2k] uint8 → [n, k]."""
    return block.contiguous().view(torch.float16).float()


def signed(block: torch.Tensor) -> torch.Tensor:
    """Returns int8 numbers as float32: [n, k] uint8 → [n, k]."""
    return block.contiguous().view(torch.int8).float()


def words_16(block: torch.Tensor) -> torch.Tensor:
    """Returns little-endian words of 16 bits: [n, 2k] uint8 → [n, k] int32."""
    pairs = block.reshape(len(block), -1, 2).int()
    low, high = pairs.unbind(2)
    return low | high << 8


def words_32(block: torch.Tensor) -> torch.Tensor:
    """Returns little-endian words of 32 bits: [n, 4k] uint8 → [n, k] int64."""
    words = words_16(block).long()
    pairs = words.reshape(len(block), -1, 2)
    low, high = pairs.unbind(2)
    return low | high << 16


def signs(bits: torch.Tensor) -> torch.Tensor:
    """Returns 1 for bits that are 0, and -1 for bits that are 1, in float32."""
    minuses = bits.float()
    return 1 - 2 * minuses
