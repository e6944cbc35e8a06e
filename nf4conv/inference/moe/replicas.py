"""Lets torch's DistributedDataParallel train models with packed experts.

When it is made, it sends all parameters of the first process to the others, flattened. Each process
has loaded the same packed experts, and nothing changes them, so they are left out.
"""

from functools import wraps
from typing import Any, Final

import torch

from nf4conv.inference.moe.tensor import Experts4bit

_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module by which DistributedDataParallel knows what to leave out."""


def install() -> None:
    """Wraps the constructor of DistributedDataParallel; once."""
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    if getattr(parallel, "_nf4conv", False):
        return
    own = parallel.__init__

    @wraps(own)
    def construct(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        leave_out(module)
        own(self, module, *args, **kwargs)

    parallel.__init__ = construct
    parallel._nf4conv = True


def leave_out(module: torch.nn.Module) -> None:
    """Names the packed experts of a model, and their keys, as what is not sent."""
    names = [name for name, part in module.named_parameters() if isinstance(part, Experts4bit)]
    if not names:
        return
    names += [name for name, _ in module.named_buffers() if name.endswith("._nf4conv_key")]
    known = getattr(module, _IGNORED, ())
    setattr(module, _IGNORED, [*known, *names])
