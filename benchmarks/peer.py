"""Quantizes as users do today: loads the whole model with transformers and bitsandbytes, and saves
it.

Usage: python -m benchmarks.peer SOURCE OUT DEVICE
"""

import json
import resource
import sys
import time

STARTED = time.perf_counter()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402


def main() -> None:
    imported = time.perf_counter()
    source, out, device = sys.argv[1:]
    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=options, dtype=torch.bfloat16, device_map={"": device}
    )
    loaded = time.perf_counter()
    model.save_pretrained(out)
    saved = time.perf_counter()
    print(
        json.dumps(
            {
                "import_seconds": imported - STARTED,
                "load_seconds": loaded - imported,
                "save_seconds": saved - loaded,
                "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "device_peak_bytes": torch.cuda.max_memory_reserved()
                if torch.cuda.is_available()
                else 0,
            }
        )
    )


if __name__ == "__main__":
    main()
