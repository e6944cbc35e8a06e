"""Run by a Python with transformers 4: does it load our outputs, and to the bytes of its own quantization?

    python load_with_transformers_4.py FOLDER

FOLDER holds one folder for each architecture, named after its class, with "source" and "out" in it. Prints a JSON
object: architecture → "ok", "unknown to it", "cannot read the source either", or what went wrong.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tiny import tiny_inputs
from transformers import BitsAndBytesConfig


def check(folder: Path) -> str:
    model_class = getattr(transformers, folder.name, None)
    if model_class is None:
        return "unknown to it"
    try:
        torch.manual_seed(3)  # for what a release does not find under the names that another gave it
        ours = model_class.from_pretrained(folder / "out", dtype=torch.bfloat16)
        method = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=ours.config.quantization_config.llm_int8_skip_modules,
        )
        torch.manual_seed(3)
        theirs = model_class.from_pretrained(folder / "source", quantization_config=method, dtype=torch.bfloat16)
    except Exception as error:  # noqa: BLE001 whatever it is, the table shows it
        message = f"{type(error).__name__}: {str(error)[:200]}"
        return message if can_read(model_class, folder / "source") else "cannot read the source either"
    return compare(ours, theirs)


def can_read(model_class: type, source: Path) -> bool:
    try:
        # with a device map, as every quantized model is loaded
        _, found = model_class.from_pretrained(source, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True)
    except Exception:  # noqa: BLE001
        return False
    return not found["missing_keys"] and not found["mismatched_keys"]


def compare(ours: "transformers.PreTrainedModel", theirs: "transformers.PreTrainedModel") -> str:
    packed = packed_weights(ours)
    if not packed or packed.keys() != packed_weights(theirs).keys():
        return f"modules differ: {sorted(packed.keys() ^ packed_weights(theirs).keys())[:4]}"
    for path, weight in packed_weights(theirs).items():
        if not torch.equal(weight, packed[path]):
            return f"bytes differ: {path}"
    try:
        expected = first_output(theirs)
    except Exception:  # noqa: BLE001 the sweep has no inputs for this model
        return "ok"
    return "ok" if torch.equal(expected, first_output(ours)) else "outputs differ"


def packed_weights(model: "transformers.PreTrainedModel") -> dict[str, torch.Tensor]:
    return {
        path: module.weight.data.view(-1)
        for path, module in model.named_modules()
        if type(module).__name__ == "Linear4bit" and module.weight.quant_state is not None
    }


def first_output(model: "transformers.PreTrainedModel") -> torch.Tensor:
    inputs = tiny_inputs(model.eval())
    torch.manual_seed(2)
    with torch.no_grad():
        outputs = model(**inputs, return_dict=True)
    return next(value for value in outputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point())


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    results = {folder.name: check(folder) for folder in sorted(Path(sys.argv[1]).iterdir())}
    print(json.dumps(results))
