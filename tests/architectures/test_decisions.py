"""The decisions about tiny checkpoints of 766 architectures stay those of commit cd7b292.

decisions.json.xz holds by architecture the config and the tensors as transformers 5.24 saves them,
and what that commit decided for each of MOE. It is never made anew.
"""

import json
import math
from pathlib import Path

from cases import STAY
from tiny import RECORDED

from nf4conv.choose.decisions import Pack
from nf4conv.choose.selection import select
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

MOE = (None, "packed", "portable")

FLOAT32_SINCE = {"BailingHybrid": "conv1d", "Voxtral": "embed_positions"}
"""What has stayed in float32 since that commit, by the begin of an architecture."""


def tensors_of(case):
    tensors = []
    for name, dtype, shape in case["tensors"]:
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        tensors.append(TensorInfo(name, dtype, tuple(shape), Path("model.safetensors"), 0, size))
    return tensors


def decided(case, moe):
    """One letter a tensor, and the weights that a packed one becomes if it is not simply packed."""
    tensors = tensors_of(case)
    try:
        selection = select(tensors, case["config"], QuantizeOptions(moe=moe))
    except PlanError:
        return "refused"
    kinds = ""
    others = {}
    for tensor in tensors:
        decision = selection.decisions[tensor.name]
        if not isinstance(decision, Pack):
            kinds += "kflm"[2 * decision.is_linear + decision.keep_dtype]
            continue
        kinds += "P"
        matrices = [list(matrix) for matrix in decision.matrices]
        plain = [tensor.name, list(tensor.shape), False, None, None, None, 1]
        if json.loads(json.dumps(matrices)) != [plain]:
            others[tensor.name] = matrices
    found = {"kinds": kinds, "matrices": others, "skip_modules": selection.skip_modules}
    return json.loads(json.dumps(found))


def expected_of(architecture, case, moe):
    expected = case["decided"]["portable" if architecture in STAY else str(moe)]
    for begin, module in FLOAT32_SINCE.items():
        if architecture.startswith(begin):
            names = [name for name, _, _ in case["tensors"]]
            pairs = zip(names, expected["kinds"], strict=True)
            kinds = ["f" if f"{module}." in name else kind for name, kind in pairs]
            expected = expected | {"kinds": "".join(kinds)}
    return expected


def test_decisions_are_those_of_cd7b292():
    for architecture, case in RECORDED.items():
        for moe in MOE:
            expected = expected_of(architecture, case, moe)
            assert decided(case, moe) == expected, (architecture, moe)
