"""The architectures of the sweep, by the names of their classes in transformers; all are built
small by tiny.py.
"""

from pathlib import Path

from tiny import RECORDED


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _of_table(loads: str) -> set[str]:
    """The architectures of which table.md says that they load so in transformers 5."""
    lines = Path(__file__).with_name("table.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    return {row[0].removeprefix("| ") for row in rows if len(row) > 3 and row[3] == loads}


FAST = _names("""
    BartForConditionalGeneration BertForMaskedLM BloomForCausalLM DeepseekV3ForCausalLM
    DistilBertForMaskedLM GPT2LMHeadModel GPTNeoXForCausalLM Gemma2ForCausalLM
    Gemma3ForConditionalGeneration GptOssForCausalLM GraniteMoeForCausalLM LlamaForCausalLM
    LlavaForConditionalGeneration MambaForCausalLM MixtralForCausalLM NomicBertForMaskedLM
    OPTForCausalLM Phi3ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3VLForConditionalGeneration SiglipForImageClassification T5ForConditionalGeneration
    ViTForImageClassification WhisperForCausalLM
""")
"""What CI runs."""

FORWARD_UNKNOWN = _of_table("bytes")
"""Models that the sweep has no inputs for, or whose random weights give no finite output: bytes are
compared only.
"""

NOTHING_PACKED = [
    name for name, case in RECORDED.items() if "P" not in case["decided"]["portable"]["kinds"]
]
"""Models that have no linear layer that loaders quantize: refused."""

EVERY = sorted(set(RECORDED) - {*NOTHING_PACKED, "Llama4ForCausalLM"})
"""What is quantized; Llama 4 has tests of its own."""

EXPERTS_ONE_BY_ONE = _names("""
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM Dots1ForCausalLM Ernie4_5_MoeForCausalLM
    FlexOlmoForCausalLM Glm4MoeForCausalLM Glm4vMoeForConditionalGeneration HunYuanMoEV1ForCausalLM
    JambaForCausalLM LongcatFlashForCausalLM MiniMaxForCausalLM MixtralForCausalLM OlmoeForCausalLM
    PhimoeForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeThinkerForConditionalGeneration
""")
"""Mixtures of experts that transformers 4 stores expert by expert, and loads so in 4 bits."""

STAY = ("DbrxForCausalLM", "JetMoeForCausalLM", "JetMoeForSequenceClassification")
"""Mixtures whose experts cd7b292 packed, and which are kept in 16 bits since."""

MIXTURES = [
    name
    for name, case in RECORDED.items()
    if case["decided"]["packed"] != case["decided"]["portable"] and name not in STAY
]
"""Mixtures of experts that the sweep loads with their experts in 4 bits."""

MIXTURE_EXCEPTIONS = {
    "OpenAIPrivacyFilterModel": "computes experts in float32, for which packed ones are decoded "
    "without rounding to bfloat16 first; outputs differ by such a rounding",
}
"""Mixtures that do not compute with packed experts, to the last bit, what they compute with decoded
ones.
"""

GENERATE_UNKNOWN = _names("""
    BailingHybridForCausalLM DiffusionGemmaForBlockDiffusion JambaForCausalLM KimiLinearForCausalLM
    Qwen3NextForCausalLM Qwen3OmniMoeThinkerForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen4ExpForCausalLM
""")
"""Mixtures that compute, but write no words when they are so small: without a layer of full
attention, or without the token that begins a picture. DiffusionGemma writes in another way.
"""
