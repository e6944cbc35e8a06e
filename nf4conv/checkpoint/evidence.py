"""What names, shapes and the config tell of a tensor: embedding, head, router, tower, … or a plain `nn.Linear`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.checkpoint.families import Family, families_of
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.module_names import is_multimodal

_EMBEDDING: Final = re.compile(
    r"^(embed|embeddings?|embed_(?!out|.*proj).*|.*(_|^)(emb|embed|embeds|embedding|embeddings)|wte|wpe|shared|codebook"
    r"|tokens_embed|positions_embed|positions|pos_embed.*|relative_attention_bias|.*position_bias.*|rel_embeddings)$"
)
_HEAD: Final = re.compile(
    r"(^|\.)(lm_head\w*|embed_out|output_projection|generator_lm_head|generator_predictions|discriminator_predictions"
    r"|predictions|cls|score|scores|classifier\w*|\w*classification_head|qa_outputs|vocab_\w+|mlm_head|lm_loss"
    r"|pred_layer|proj_out|final_proj|head|\w*_heads?|output|unembed|logits_proj)(\.|$)"
)
_ROUTER: Final = re.compile(r"(^|\.)(gate|router|wg|shared_expert_gate|gate_weight|switch|router\.(classifier|layer))$")
_EXPERT: Final = re.compile(r"(^|\.)experts?\.(\w+_)?\d+\.")
_TOWER: Final = re.compile(
    r"^(vision|visual|vit|audio|image|video|speech|sound|acoustic|semantic_tok|pixel|sam|vq|embed_vision|embed_audio"
    r"|merger|connector|multi_modal|multimodal|mm_|modality_proj|\w*projector|resampler|perceiver|q_?former|aligner|abstractor"
    r"|patch_|codec|talker|token2wav|code2wav)"
)
_FLOAT32: Final = re.compile(
    r"e_score_correction_bias|expert_bias|moe_statics|A_log$|\.D$|dt_bias|sinks$|router.*bias$"
)
_SSM_RAW: Final = ("x_proj", "dt_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A checkpoint seen as a whole.

    Attributes:
        shapes: of every tensor, by name.
        families: listed deviations that apply.
        vocab_sizes: every vocabulary size that the config names.
        multimodal: whether encoders of other inputs stand beside a language model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    families: tuple[Family, ...]
    vocab_sizes: frozenset[int]
    multimodal: bool

    @classmethod
    def gather(cls, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> "Evidence":
        return cls(
            shapes={tensor.name: tensor.shape for tensor in tensors},
            families=families_of(config),
            vocab_sizes=frozenset(_vocab_sizes(config)),
            multimodal=is_multimodal(config),
        )

    def why_not_a_matrix(self, tensor: TensorInfo) -> str | None:
        if len(tensor.shape) < 2:
            return "a vector"
        if len(tensor.shape) > 2:
            return "a convolution or stacked experts"
        if not tensor.name.endswith(".weight"):
            return "a bare parameter, not a module's weight"
        return None

    def why_not_linear(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Why a matrix is certainly no `nn.Linear`; None when it may be one."""
        if self._is_linear_by_family(module):
            return None
        leaf = module.rpartition(".")[2]
        if _EMBEDDING.match(leaf):
            return "an embedding"
        if not _in_layer(module) and shape[0] in self.vocab_sizes and not _HEAD.search(module):
            return "as many rows as the vocabulary: an embedding or an output head"
        return None

    def why_kept(self, module: str, shape: tuple[int, ...], *, towers: bool, experts: bool) -> str | None:
        """Why a matrix that may be an `nn.Linear` is not packed; None when it is."""
        for family in self.families:
            for pattern, reason in family.keep:
                if re.search(pattern, module):
                    return reason
        if self.multimodal and not towers and self._in_tower(module):
            return "in a vision or audio part (--quantize-towers packs it)"
        if not _in_layer(module) and (_HEAD.search(module) or shape[0] in self.vocab_sizes):
            return "an output head"
        if _ROUTER.search(module):
            return "a router"
        if not experts and _EXPERT.search(module):
            return "an expert, which transformers 5 loads in 16 bits only (--moe per-expert packs it)"
        parent, _, leaf = module.rpartition(".")
        if leaf in _SSM_RAW and f"{parent}.D" in self.shapes:
            return "state-space kernels read this weight directly"
        return None

    def why_unsure(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Why a matrix that looks like an `nn.Linear` may be none."""
        bias = self.shapes.get(f"{module}.bias")
        if bias == (shape[0],) or self._is_linear_by_family(module) or self.is_transposed(module):
            return None
        if bias is not None:
            return f"unsure: its bias has shape {list(bias)}"
        if not _in_layer(module):
            return "unsure: outside the layers and without a bias"
        return None

    def is_transposed(self, module: str) -> bool:
        return any(family.transposed and re.search(family.transposed, module) for family in self.families)

    def is_float32_by_design(self, tensor: TensorInfo) -> bool:
        return tensor.dtype == "F32" and _FLOAT32.search(tensor.name) is not None

    def _is_linear_by_family(self, module: str) -> bool:
        return any(family.linear and re.search(family.linear, module) for family in self.families)

    def _in_tower(self, module: str) -> bool:
        outside = re.split(r"\.\d+\.", module)[0].split(".")
        return any(_TOWER.match(part) for part in outside)


def _in_layer(module: str) -> bool:
    return re.search(r"\.\d+\.", module) is not None


def _vocab_sizes(config: Mapping[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _vocab_sizes(value)
        elif key.endswith("vocab_size") and isinstance(value, int):
            yield value
