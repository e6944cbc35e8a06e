"""Lists every name that a pickle of a state dict may use.

torch/_utils.py and torch/_tensor.py (`_rebuild_*` and `__reduce_ex__`) show what torch writes.
"""

from typing import Final

from nf4conv.format.dtypes import TORCH_NAMES

STORAGE_DTYPES: Final = {
    "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.ComplexFloatStorage": "C64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.storage.UntypedStorage": None,  # its tensors know their dtype
}
"""safetensors' dtype tag of the elements of a storage, by the storage's class."""

DTYPES: Final = {f"torch.{name}": tag for tag, name in TORCH_NAMES.items()}
"""safetensors' dtype tag by torch's dtype."""

TENSOR_CLASSES: Final = frozenset(
    ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
)
"""Classes that `_rebuild_from_type_v2` may be asked for."""

VIEW_WITH_DTYPE: Final = "torch._utils._rebuild_tensor_v3"
VIEW_FUNCTIONS: Final = frozenset(
    ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", VIEW_WITH_DTYPE)
)
"""Functions that make a tensor as a view of a storage."""

DICT: Final = "collections.OrderedDict"
SIZE: Final = "torch.Size"
PARAMETER_FUNCTIONS: Final = frozenset(
    ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
)
"""Functions that wrap a tensor, which is their first argument."""
FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"

FUNCTIONS: Final = VIEW_FUNCTIONS | PARAMETER_FUNCTIONS | {DICT, SIZE, FROM_TYPE}
"""Everything that REDUCE may call."""

KNOWN: Final = FUNCTIONS | TENSOR_CLASSES | STORAGE_DTYPES.keys() | DTYPES.keys()
"""Everything that GLOBAL may name."""

CONSTANT_OPCODES: Final = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    )
)
"""Opcodes that push their argument, a number or a text."""
