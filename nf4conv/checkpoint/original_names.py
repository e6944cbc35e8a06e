"""Denoisers under the names of the files that their authors published, as image tools read them."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from nf4conv.checkpoint.source import Source
from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions

_BUNDLED: Final = "model.diffusion_model."
"""Before the names of a denoiser that is in one file with text encoders and a VAE."""

_BLOCKS: Final = (
    "double_blocks.*",
    "single_blocks.*",
    "joint_blocks.*",
    "input_blocks.*.transformer_blocks.*",
    "middle_block.*.transformer_blocks.*",
    "output_blocks.*.transformer_blocks.*",
)
"""Of Flux, of Stable Diffusion 3, and of the UNets. By layers outside of them tools recognise which model a file is."""

_TELLING: Final = "*.transformer_blocks.0.attn2.to_k.weight"
"""By whose width they recognise a UNet."""


def within_blocks(source: Source, options: QuantizeOptions) -> QuantizeOptions:
    """Options that pack the linear layers in the blocks of a denoiser, unless they include others, into one file.

    Raises:
        PlanError: the source has other names.
    """
    prefix = _BUNDLED if any(tensor.name.startswith(_BUNDLED) for tensor in source.tensors) else ""
    globs = tuple(f"{prefix}{block}.weight" for block in _BLOCKS)
    if not any(fnmatchcase(tensor.name, glob) for tensor in source.tensors for glob in globs):
        raise PlanError(
            f"{source}: --single-file keeps names, and these are not those that image tools read; give the file that "
            "the authors of Flux or Stable Diffusion published, not a component of diffusers"
        )
    exclude = (*options.exclude, _TELLING)
    return replace(options, include=options.include or globs, exclude=exclude, max_shard_size=2**63)
