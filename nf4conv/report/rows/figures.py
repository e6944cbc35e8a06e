"""Names formats, and computes errors and decibels from sums."""

import math


def format_name(quant_type: str, double_quant: bool, blocksize: int) -> str:
    """Returns how a packed weight is stored, in one word.

    Args:
        quant_type: "nf4" or "fp4".
        double_quant: True if its absmax is quantized.
        blocksize: the number of elements that share an absmax.

    Returns:
        "nf4/64", or "nf4+/64" with double quantization.
    """
    plus = "+" if double_quant else ""
    return f"{quant_type}{plus}/{blocksize}"


def relative_error(squared_error: float, squared_weight: float) -> float:
    """Returns ‖W - Ŵ‖ / ‖W‖, given the sums of the squared errors and of the squared elements.

    It is 0 if both sums are 0, and infinite if only the elements' is.
    """
    if squared_weight == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_weight)


def distance(error: float | None) -> float:
    """Returns a number by which relative errors sort: NaN is the farthest, None the nearest."""
    if error is None:
        return -1.0
    if math.isnan(error):
        return math.inf
    return error


def decibels(error: float) -> float:
    """Returns a relative error as signal to noise ratio, in decibels.

    It is infinite for an error of 0, -infinite for an infinite error, and NaN for NaN.
    """
    if math.isnan(error):
        return math.nan
    if error == 0:
        return math.inf
    if math.isinf(error):
        return -math.inf
    return -20 * math.log10(error)
