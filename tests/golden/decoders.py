"""Has the formats' own libraries and scripts decode the checkpoints of decoded/ anew, and says
which tensors have other bytes than those that are recorded.

    python tests/golden/decoders.py [NAME …] [--scripts FOLDER]

Each file is a small checkpoint in the layout of a release, with every code, and with scales at the
edges of their dtype; beside it what the library or script in the file's metadata made of it.
README.md says what must be installed, what FOLDER holds, and which commit has what made the files.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "decoded"
Tensors = dict[str, torch.Tensor]


class Release(NamedTuple):
    """A small checkpoint.

    Attributes:
        config: config.json.
        kept: tensors that the release does not quantize.
        stored: parts of those that it does.
        scripts: where scripts are, for the releases that have no library.
    """

    config: dict[str, Any]
    kept: Tensors
    stored: Tensors
    scripts: Path

    @property
    def quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config.get("text_config", self.config)["quantization_config"]
        return found

    @property
    def modules(self) -> dict[str, Tensors]:
        """The parts of each weight, by its module and by their own names."""
        found: dict[str, Tensors] = defaultdict(dict)
        for name, tensor in self.stored.items():
            module, _, part = name.rpartition(".")
            found[module][part] = tensor
        return found


def compressed_tensors(release: Release) -> Tensors:
    """By the class that the package has for the format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weights = release.quantization["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(release.quantization["format"])
    decoded = {}
    for module, parts in release.modules.items():
        weight = compressor.decompress(dict(parts), scheme)["weight"]
        decoded[f"{module}.weight"] = weight.to(torch.bfloat16)
    return decoded


def deepseek_v32(release: Release) -> Tensors:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    converter = FP8BlockDequantizer(targets=[*release.modules])
    converted = converter.process(release.kept | release.stored)
    return {f"{module}.weight": converted[f"{module}.weight"] for module in release.modules}


def modelopt(release: Release) -> Tensors:
    """In float32."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    decoded = {}
    for module, parts in release.modules.items():
        rows, pairs = parts["weight"].shape
        packed = NVFP4QTensor(torch.Size([rows, 2 * pairs]), torch.bfloat16, parts["weight"])
        scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
        weight = packed.dequantize(torch.float32, **scales, block_sizes={-1: 16})
        decoded[f"{module}.weight"] = weight
    return decoded


def quark(release: Release) -> Tensors:
    """As Quark's own layers decode them, in float32."""
    from quark.torch.export.nn.modules.realquantizer import StaticScaledRealQuantizer
    from quark.torch.quantization.config.config import QTensorConfig

    decoded = {}
    for module, parts in release.modules.items():
        described = release.quantization["layer_quant_config"][module]["weight"]
        layer = StaticScaledRealQuantizer(
            QTensorConfig.from_dict(described), None, reorder=False, real_quantized=True,
            float_dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        layer.scale = parts["weight_scale"]
        layer.zero_point = parts.get("weight_zero_point")
        decoded[f"{module}.weight"] = layer(parts["weight"])
    return decoded


def gptq(release: Release) -> Tensors:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    decoded = {}
    for module, parts in release.modules.items():
        bits = release.quantization["dynamic"][f"+:{module}"]["bits"]
        is_in_order = bool((parts["g_idx"].diff() >= 0).all())
        layer = TorchLinear(
            bits=bits, group_size=32, sym=False, desc_act=not is_in_order,
            in_features=len(parts["g_idx"]), out_features=parts["scales"].shape[1], bias=False,
            register_buffers=True,
        )  # fmt: skip
        layer.load_state_dict(parts, strict=False)
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        decoded[f"{module}.weight"] = layer.dequantize_weight().t().contiguous()
    return decoded


def awq(release: Release) -> Tensors:
    from awq.utils.packing_utils import dequantize_gemm

    decoded = {}
    for module, parts in release.modules.items():
        weight = dequantize_gemm(**parts, bits=4, group_size=32)
        decoded[f"{module}.weight"] = weight.t().contiguous()
    return decoded


def autoround(release: Release) -> Tensors:
    """Its layer can only be asked for products with the identity."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    decoded = {}
    for module, parts in release.modules.items():
        groups, rows = parts["scales"].shape
        bits = release.quantization["extra_config"][module]["bits"]
        layer = QuantLinear(bits, 32, 32 * groups, rows, bias=False)
        layer.load_state_dict(parts)
        decoded[f"{module}.weight"] = layer(torch.eye(32 * groups)).t().half().contiguous()
    return decoded


def gpt_oss(release: Release) -> Tensors:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    decoded = {}
    for name in release.stored:
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            parts = (release.stored[name], release.stored[f"{stack}_scales"])
            decoded[stack] = convert_moe_packed_tensors(*parts).contiguous()
    return decoded


def deepseek_v4(release: Release) -> Tensors:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    decode = Fp8Dequantize(None)._dequantize_one
    return {
        f"{module}.weight": decode(parts["weight"], parts["scale"], torch.bfloat16)
        for module, parts in release.modules.items()
    }


def cast_by_script(scripts: Path, tensors: Tensors) -> Tensors:
    """What fp8_cast_bf16.py makes of a checkpoint, on a GPU."""
    work = scripts / "work"
    work.mkdir(exist_ok=True)
    save_file(tensors, work / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (work / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = ["--input-fp8-hf-path", str(work), "--output-bf16-hf-path", str(work / "out")]
    subprocess.run([sys.executable, scripts / "v3/fp8_cast_bf16.py", *arguments], check=True)
    return load_file(work / "out/model.safetensors")


def deepseek_v32_by_script(release: Release) -> Tensors:
    converted = cast_by_script(release.scripts, release.kept | release.stored)
    return {f"{module}.weight": converted[f"{module}.weight"] for module in release.modules}


def deepseek_v4_by_script(release: Release) -> Tensors:
    """convert.py makes FP8 of experts, without loss if their scales differ by 2^6 at most, and
    bfloat16 of wo_a; fp8_cast_bf16.py decodes that FP8.
    """
    work = release.scripts / "v4-work"
    work.mkdir(exist_ok=True)
    save_file(release.kept | release.stored, work / "model.safetensors")
    command = [sys.executable, str(release.scripts / "v4/convert.py")]
    command += ["--hf-ckpt-path", str(work), "--save-path", str(work / "out"), "--n-experts", "1"]
    command += ["--model-parallel", "1", "--expert-dtype", "fp8"]
    subprocess.run(command, check=True)
    [file] = (work / "out").glob("*.safetensors")
    converted = load_file(file)
    expert, other = "layers.0.ffn.experts.0.w1.weight", "layers.0.attn.wo_a.weight"
    scale = converted[expert.replace("weight", "scale")].float()
    fp8 = {expert: converted[expert], f"{expert}_scale_inv": scale}
    weight = cast_by_script(release.scripts, fp8)[expert].bfloat16()  # which is exact
    return {expert: weight, other: converted[other]}


DECODERS: dict[str, Callable[[Release], Tensors]] = {
    **dict.fromkeys(("kimi_k26", "kimi_k3", "llama_fp8", "llama_nvfp4"), compressed_tensors),
    "deepseek_v32": deepseek_v32,
    "modelopt_nvfp4": modelopt,
    "quark": quark,
    "gptq": gptq,
    "awq": awq,
    "autoround": autoround,
    "gpt_oss": gpt_oss,
    "deepseek_v4": deepseek_v4,
    "deepseek_v41": deepseek_v4,
    "deepseek_v32_by_script": deepseek_v32_by_script,
    "deepseek_v4_by_script": deepseek_v4_by_script,
}


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes are equal; one NaN is as good as another."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    one, other = (found.nan_to_num(7, torch.inf, -torch.inf) for found in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def differing(name: str, scripts: Path) -> tuple[str, list[str]]:
    """Decodes a release.

    Returns:
        What decoded the one that is recorded; which tensors have other bytes than there.
    """
    kinds: dict[str, Tensors] = defaultdict(dict)
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        about = file.metadata()
        for key in file.keys():  # noqa: SIM118 - a file is no dictionary
            kind, _, tensor = key.partition(" ")
            kinds[kind][tensor] = file.get_tensor(key)
    release = Release(json.loads(about["config"]), kinds["kept"], kinds["stored"], scripts)
    found, expected = DECODERS[name](release), kinds["decoded"]
    assert found.keys() == expected.keys()
    return about["by"], [key for key in found if not is_same(found[key], expected[key])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*DECODERS, []])
    parser.add_argument("--scripts", type=Path, default=Path("scripts"))
    arguments = parser.parse_args()
    faults = 0
    for name in arguments.names or DECODERS:
        try:
            by, names = differing(name, arguments.scripts)
        except (ModuleNotFoundError, FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"{name}: not decoded: {error}")
            continue
        faults += len(names)
        print(f"{name}: {f'differing: {names}' if names else 'the same bytes'} as by {by}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
