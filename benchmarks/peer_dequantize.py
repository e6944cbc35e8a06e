"""Decodes a 4-bit checkpoint in the two ways that users have today.

transformers    loads the 4-bit model, dequantizes it and saves its tensors one by one, because
                save_pretrained of transformers 5 raises NotImplementedError for such a model
bitsandbytes    runs a script over the safetensors files: dequantize_4bit of each weight, one
                output file for each input file

Usage: python -m benchmarks.peer_dequantize transformers|bitsandbytes SOURCE OUT DEVICE
"""

import json
import resource
import sys
import time
from pathlib import Path

STARTED = time.perf_counter()

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SHARD = 5 * 10**9


def with_transformers(source: Path, out: Path, device: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, device_map={"": device})
    model = model.dequantize()
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, tensor in model.state_dict().items():
        shard[name] = tensor.cpu().contiguous()
        size += shard[name].nbytes
        if size > SHARD:
            number += 1
            save_file(shard, out / f"part-{number}.safetensors")
            shard, size = {}, 0
    save_file(shard, out / "part-last.safetensors")


def with_bitsandbytes(source: Path, out: Path, device: str) -> None:
    import bitsandbytes.functional as bnb

    for path in sorted(source.glob("*.safetensors")):
        decoded: dict[str, torch.Tensor] = {}
        with safe_open(path, "pt", device=device) as file:
            names = set(file.keys())
            for name in sorted(names):
                parts = {
                    key: file.get_tensor(key)
                    for key in (f"{name}.{suffix}" for suffix in SUFFIXES)
                    if key in names
                }
                if parts:
                    state = bnb.QuantState.from_dict(parts, torch.device(device))
                    decoded[name] = bnb.dequantize_4bit(file.get_tensor(name), state).cpu()
                elif not name.endswith(SUFFIXES):
                    decoded[name] = file.get_tensor(name).cpu()
        save_file(decoded, out / path.name)


SUFFIXES = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"),
)


def main() -> None:
    method, source, out, device = sys.argv[1:]
    Path(out).mkdir(parents=True)
    (with_transformers if method == "transformers" else with_bitsandbytes)(
        Path(source), Path(out), device
    )
    figures = {
        "seconds": time.perf_counter() - STARTED,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
