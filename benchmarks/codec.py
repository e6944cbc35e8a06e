"""The codec against bitsandbytes: the GPU's table where there is a GPU, else the CPU's. Arguments
go to either.
"""

import torch


def main() -> None:
    # only the one that runs is imported: each needs what the other's machine may lack
    if torch.cuda.is_available():
        from benchmarks import codec_gpu

        codec_gpu.main()
    else:
        from benchmarks import codec_cpu

        codec_cpu.main()


if __name__ == "__main__":
    main()
