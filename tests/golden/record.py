"""Record what bitsandbytes CUDA makes of the weights in helpers/weights.py. The only writer of the
files beside it.

Needs a GPU, bitsandbytes and the folder tests on the path:
    PYTHONPATH=.:tests/helpers python tests/golden/record.py tests/golden

    {bf16,f16,f32}.safetensors    case/weight, and for nf4 and fp4: case/nf4/packed, /absmax,
                                  /codes, /nested_absmax, /offset, and /dequantized from the
                                  nested state; cases are named blocksize-elements or
                                  special-blocksize (no nested parts: infinities make them NaN)
                                  or ties-quant_type or short_kind
    means.json                    bits of torch.mean on the GPU for spread_values(count)
"""

import json
import sys
from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes import functional
from safetensors.torch import save_file
from weights import DTYPES, random_weight, short_weight, special_weight, spread_values, tie_weight

SIZES = ((32, 295), (64, 801), (128, 384), (1024, 1024 + 511), (4096, 4096 + 1000))
MEAN_COUNTS = (
    1, 2, 3, 5, 31, 33, 64, 100, 127, 128, 129, 130, 131, 255, 1000, 2047, 2048, 2049, 4099, 65_536,
    100_000, 130_557, 130_560, 130_561, 131_072, 131_075, 200_000, 1_000_000, 1_000_003, 4_000_000,
    4_325_377, 5_000_000, 20_000_001,
)  # fmt: skip


SHORT_KINDS = ("odd", "integers", "few", "twelfths")


def main(folder: Path) -> None:
    versions = {
        "bitsandbytes": bitsandbytes.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    for name, dtype in DTYPES.items():
        tensors: dict[str, torch.Tensor] = {}
        for blocksize, elements in SIZES:
            record(
                tensors,
                f"{blocksize}-{elements}",
                random_weight(elements, dtype),
                blocksize,
                ("nf4", "fp4"),
                True,
            )
        weight = special_weight(dtype, 32, "all-nan")
        record(tensors, "special-32", weight, 32, ("nf4", "fp4"), False)
        for quant_type in ("nf4", "fp4"):
            record(
                tensors,
                f"ties-{quant_type}",
                tie_weight(dtype, 64, quant_type),
                64,
                (quant_type,),
                False,
            )
        for kind in SHORT_KINDS:
            record(
                tensors, f"short_{kind}", short_weight(8192, dtype, kind), 64, ("nf4", "fp4"), True
            )
        save_file(tensors, folder / f"{name}.safetensors", metadata=versions)
    means = {str(count): bits_of_mean(count) for count in MEAN_COUNTS}
    (folder / "means.json").write_text(
        json.dumps({"versions": versions, "means": means}, indent=1) + "\n"
    )


def record(
    tensors: dict[str, torch.Tensor],
    case: str,
    weight: torch.Tensor,
    blocksize: int,
    quant_types: tuple[str, ...],
    nested: bool,
) -> None:
    tensors[f"{case}/weight"] = weight
    for quant_type in quant_types:
        key = f"{case}/{quant_type}"
        packed, state = quantize(weight, quant_type, blocksize, False)
        tensors[f"{key}/packed"] = packed.cpu().view(-1)
        tensors[f"{key}/absmax"] = state.absmax.cpu()
        if nested:
            packed, state = quantize(weight, quant_type, blocksize, True)
            tensors[f"{key}/codes"] = state.absmax.cpu()
            tensors[f"{key}/nested_absmax"] = state.state2.absmax.cpu()
            tensors[f"{key}/offset"] = state.offset.cpu()
        tensors[f"{key}/dequantized"] = functional.dequantize_4bit(packed, state).cpu()


def quantize(
    weight: torch.Tensor, quant_type: str, blocksize: int, nested: bool
) -> tuple[torch.Tensor, functional.QuantState]:
    result: tuple[torch.Tensor, functional.QuantState] = functional.quantize_4bit(
        weight.cuda(), blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    return result


def bits_of_mean(count: int) -> str:
    mean = spread_values(count).cuda().mean()
    return f"{mean.cpu().view(torch.int32).item() & 0xFFFFFFFF:08x}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
