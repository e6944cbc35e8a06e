"""Records what another project's converter makes of MXFP4. The only writer of fp8.safetensors.

    python tests/golden/record_fp8.py SCRIPT COMMIT tests/golden/fp8.safetensors

SCRIPT is tools/convert_mxfp4_to_fp8.py of github.com/radixark/miles at COMMIT, which has
cast_e2m1fn_to_e4m3fn of DeepSeek-V4-Flash-0731's inference/convert.py. It is run, not copied.
"""

import runpy
import sys

import torch
from safetensors.torch import save_file

BLOCK, GROUP = 128, 32
# the largest scale of each block as a byte of E8M0: of usual weights, the largest there is, and the
# smallest whose block has a scale
LARGEST = (124, 254, 6)
SPREAD = 14  # up to this many powers of two below it, all codes are exact


def main(script: str, commit: str, place: str) -> None:
    generator = torch.Generator().manual_seed(48)
    columns = len(LARGEST) * BLOCK
    values = torch.randint(0, 256, (BLOCK, columns // 2), dtype=torch.uint8, generator=generator)
    shape = (BLOCK, columns // GROUP)
    below = torch.randint(0, SPREAD + 1, shape, dtype=torch.int64, generator=generator)
    below[0] = 0  # each block has its largest scale
    largest = torch.tensor(LARGEST).repeat_interleave(BLOCK // GROUP)
    scale = (largest - below).clamp(min=0).to(torch.uint8).view(torch.float8_e8m0fnu)
    cast = runpy.run_path(script)["cast_e2m1fn_to_e4m3fn"]
    weight, scales = cast(values.view(torch.int8), scale)
    tensors = {"mxfp4": values, "mxfp4 scale": scale, "fp8": weight, "fp8 scale": scales}
    save_file(tensors, place, {"script": script, "commit": commit, "torch": torch.__version__})


if __name__ == "__main__":
    main(*sys.argv[1:])
