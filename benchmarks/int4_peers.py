"""How other formats of about four bits round weights, restated from their definitions.

    gptq      INT4, groups of 128, asymmetric, columns in the order of the activations' energy
    awq       INT4, groups of 128, asymmetric, inputs scaled by a power of their mean magnitude
    hqq       INT4, groups of 64, zero points by half-quadratic splitting; needs no activations
    q4_k      GGUF's Q4_K as llama.cpp fits it without an importance matrix; the `gguf` package
              decodes the bytes

Each function takes weights [out, in] float32 with the same inputs, and returns the decoded ones.
"""

from collections.abc import Sequence

import numpy as np
import torch

BITS = {"gptq": 4 + 20 / 128, "awq": 4 + 20 / 128, "hqq": 4 + 32 / 64, "q4_k": 4.5}
"""Bits a weight: scales in float16, zero points in 4 bits (HQQ: float16 as well)."""

_AWQ_POWERS = [step / 20 for step in range(21)]


def grid(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scale and zero point of groups, [..., size], for 16 steps over their range."""
    least = groups.amin(-1, keepdim=True).clamp_max(0)
    largest = groups.amax(-1, keepdim=True).clamp_min(0)
    scale = ((largest - least) / 15).clamp_min(1e-9).half().float()
    return scale, (-least / scale).round().clamp(0, 15)


def to_grid(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((values / scale + zero).round().clamp(0, 15) - zero) * scale


def gptq(
    weights: Sequence[torch.Tensor], moments: torch.Tensor, damping: float = 0.01, size: int = 128
) -> list[torch.Tensor]:
    """GPTQ with act-order: groups are made of columns that follow each other in that order."""
    weight = torch.cat(list(weights))
    energy = moments.diagonal()
    order = energy.argsort(descending=True)
    damped = moments[order][:, order].double()
    damped += torch.eye(len(damped), dtype=torch.float64) * (damping * energy.double().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    left = weight[:, order].clone()
    found = torch.empty_like(left)
    for start in range(0, left.shape[1], size):
        stop = min(start + size, left.shape[1])
        scale, zero = grid(left[:, start:stop])
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            values = left[:, column]
            rounded = to_grid(values, scale[:, 0], zero[:, 0])
            error = (values - rounded) / upper[column, column]
            found[:, column] = rounded
            errors[:, column - start] = error
            left[:, column + 1 : stop] -= error[:, None] * upper[column, column + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    found = found[:, order.argsort()]
    return list(found.split([len(one) for one in weights]))


def awq(
    weights: Sequence[torch.Tensor], moments: torch.Tensor, magnitude: torch.Tensor, size: int = 128
) -> list[torch.Tensor]:
    """Scales inputs by magnitude^power before rounding; the power with the least error of outputs.

    Args:
        weights: with the same inputs.
        moments: [in, in], mean second moments of the inputs.
        magnitude: [in], mean magnitude of each input.
        size: of a group.
    """
    weight = torch.cat(list(weights))
    best, least = weight, float("inf")
    for power in _AWQ_POWERS:
        scales = magnitude.clamp_min(1e-4) ** power
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        groups = (weight * scales).view(len(weight), -1, size)
        found = to_grid(groups, *grid(groups)).view_as(weight) / scales
        error = weight - found
        cost = float(((error @ moments) * error).sum())
        if cost < least:
            best, least = found, cost
    return list(best.split([len(one) for one in weights]))


def hqq(weight: torch.Tensor, size: int = 64, steps: int = 20) -> torch.Tensor:
    """Half-quadratic quantization: a zero point for which the errors are sparse (p = 0.7)."""
    groups = weight.view(-1, size)
    least, largest = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    inverse = (15 / (largest - least)).clamp_max(2e4)
    zero = -least * inverse
    strength, best = 10.0, float("inf")
    for _ in range(steps):
        codes = (groups * inverse + zero).round().clamp(0, 15)
        found = (codes - zero) / inverse
        error = groups - found
        shrunk = error.abs() - error.abs().clamp_min(1e-8) ** -0.3 / strength
        sparse = error.sign() * shrunk.clamp_min(0)
        zero = (codes - (groups - sparse) * inverse).mean(1, keepdim=True)
        strength *= 1.01
        mean = float(error.abs().mean())
        if mean >= best:
            break
        best = mean
    scale, zero = (1 / inverse).half().float(), zero.half().float()
    codes = (groups / scale + zero).round().clamp(0, 15)
    return ((codes - zero) * scale).view_as(weight)


def q4_k(weight: torch.Tensor) -> torch.Tensor:
    """Q4_K: blocks of 256, of which eight parts of 32 have a scale and a minimum in 6 bits.

    Blocks run over the ends of rows here, where llama.cpp would take another type for models whose
    rows are no multiple of 256. So this is its best case.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = weight.numpy().reshape(-1)
    padded = np.pad(values, (0, -len(values) % 256)).reshape(-1, 256)
    packed = q4_k_bytes(padded.astype(np.float32))
    found = dequantize(packed, GGMLQuantizationType.Q4_K).reshape(-1)[: len(values)]
    return torch.from_numpy(found.reshape(weight.shape).copy())


def q4_k_bytes(blocks: np.ndarray) -> np.ndarray:
    """Returns [blocks, 144] uint8: scale, minimum, twelve bytes of the parts, codes."""
    parts = blocks.reshape(-1, 8, 32)
    scales, minima = _fit_parts(parts)
    whole_scale = scales.max(1, keepdims=True) / 63
    whole_minimum = minima.max(1, keepdims=True) / 63
    scale_codes = _codes(scales, whole_scale, 63)
    minimum_codes = _codes(minima, whole_minimum, 63)
    halves = np.concatenate([whole_scale, whole_minimum], 1).astype(np.float16)
    scale = halves[:, :1].astype(np.float32) * scale_codes
    minimum = halves[:, 1:].astype(np.float32) * minimum_codes
    codes = _codes(parts + minimum[:, :, None], scale[:, :, None], 15)
    return np.concatenate(
        [halves.view(np.uint8), _six_bits(scale_codes, minimum_codes), _nibbles(codes)], 1
    )


def _codes(values: np.ndarray, step: np.ndarray, most: int) -> np.ndarray:
    safe = np.where(step > 0, step, 1)
    return np.where(step > 0, np.clip(np.rint(values / safe), 0, most), 0).astype(np.uint8)


def _fit_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and minus minimum of each part, by 21 starts and a weighted line through each.

    A weight counts the more the larger it is: by the root mean square of its part plus |x|.
    """
    weights = np.sqrt((x**2).mean(-1, keepdims=True)) + np.abs(x)
    least = np.minimum(x.min(-1, keepdims=True), 0)
    largest = x.max(-1, keepdims=True)
    width = np.where(largest > least, largest - least, 1)
    total = weights.sum(-1, keepdims=True)
    total_x = (weights * x).sum(-1, keepdims=True)
    scale, minimum = width / 15, least
    codes = np.clip(np.rint((x - least) / scale), 0, 15)
    error = (weights * (scale * codes + minimum - x) ** 2).sum(-1, keepdims=True)
    for step in range(21):
        codes = np.clip(np.rint((14 + 0.1 * step) / width * (x - least)), 0, 15)
        first = (weights * codes).sum(-1, keepdims=True)
        second = (weights * codes**2).sum(-1, keepdims=True)
        mixed = (weights * codes * x).sum(-1, keepdims=True)
        spread = total * second - first**2
        safe = np.where(spread > 0, spread, 1)
        found_scale = (total * mixed - total_x * first) / safe
        found_minimum = (second * total_x - first * mixed) / safe
        above = found_minimum > 0
        found_scale = np.where(above, mixed / np.where(second > 0, second, 1), found_scale)
        found_minimum = np.where(above, 0, found_minimum)
        found = found_scale * codes + found_minimum - x
        found_error = (weights * found**2).sum(-1, keepdims=True)
        better = (spread > 0) & (found_error < error)
        error = np.where(better, found_error, error)
        scale = np.where(better, found_scale, scale)
        minimum = np.where(better, found_minimum, minimum)
    scale = np.where(largest > least, scale, 0)
    return scale[..., 0], -minimum[..., 0]


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Packs eight scales and eight minima of 6 bits into 12 bytes."""
    packed = np.zeros((len(scales), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    packed[:, 8:] = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return packed


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Packs two parts of 32 codes into 32 bytes: one part low, the next one high."""
    pairs = codes.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(codes), 128)
