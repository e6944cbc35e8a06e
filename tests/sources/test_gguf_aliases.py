"""Every class that llama.cpp's converter writes as an architecture that is read has been judged.

The converter writes several models of transformers as one architecture. Reading one of them as
another would be wrong without a word. Each such class is listed here, with how it is kept apart; a
class of a newer converter makes the test fail (`make test-others`).
"""

import json
import os
import subprocess
import sys

from gguf_families import CONVERTER, NEEDS_CONVERTER

from nf4conv.sources.gguf.families import architectures, families_of

pytestmark = NEEDS_CONVERTER

SAME = "same"  # another head, or the text model of one that sees or hears: tensors are the same
TOLD = "told"  # read as itself, told by the metadata, the tensors or the config
REFUSED = "refused"
NEVER = "never"  # its files have another architecture than its class names, or it writes none

JUDGED = {
    "bert": {
        "BertForMaskedLM": SAME,
        "BertForSequenceClassification": REFUSED,  # cls has no name
        "CamembertModel": TOLD,
        "DistilBertForMaskedLM": SAME,
        "DistilBertForSequenceClassification": REFUSED,
        "RobertaForSequenceClassification": REFUSED,
        "RobertaModel": REFUSED,  # lacks the first rows of its position embeddings
        "XLMRobertaModel": REFUSED,
        "XLMRobertaForSequenceClassification": REFUSED,
        "NomicBertModel": NEVER,
    },
    "chatglm": {
        "ChatGLMForConditionalGeneration": REFUSED,  # attn_qkv has no name
        "ChatGLMModel": REFUSED,
    },
    "deepseek2": {
        "DeepseekOCRForCausalLM": NEVER,
        "UnlimitedOCRForCausalLM": NEVER,
        "KimiVLForConditionalGeneration": SAME,
        "KimiK25ForConditionalGeneration": SAME,
        "YoutuVLForConditionalGeneration": SAME,
        "Glm4MoeLiteForCausalLM": SAME,  # computes as DeepSeek-V3
        "MistralMoeModel": REFUSED,
    },
    "ernie4_5": {"Ernie4_5_ForCausalLM": SAME},
    "eurobert": {"JinaEmbeddingsV5Model": SAME},
    "exaone-moe": {"ExaoneMoEForCausalLM": SAME},
    "exaone4": {"Exaone4_5_ForConditionalGeneration": SAME},
    "gemma3": {"Gemma3ForConditionalGeneration": SAME},
    "gemma3n": {"Gemma3nForConditionalGeneration": SAME},
    "gemma4": {
        "Gemma4ForConditionalGeneration": SAME,
        "Gemma4UnifiedForConditionalGeneration": SAME,
    },
    "glm4": {"Glm4vForConditionalGeneration": REFUSED, "GlmOcrForConditionalGeneration": REFUSED},
    "glm4moe": {"Glm4vMoeForConditionalGeneration": SAME},
    "gpt2": {"RuGPT3XLForCausalLM": SAME},  # llama.cpp computes it as GPT-2
    "granite_swa": {"GraniteMoeSWAForCausalLM": REFUSED},  # ffn_down_exps has no name
    "lfm2": {
        "LFM2ForCausalLM": SAME,
        "Lfm2Model": SAME,  # dense_2 of a ColBERT has no name
        "Lfm2BidirectionalModel": REFUSED,  # attention.causal
        "Lfm25AudioTokenizer": REFUSED,
    },
    "llama": {
        "LLaMAForCausalLM": SAME,
        "MistralForCausalLM": SAME,
        "VLlama3ForCausalLM": SAME,
        "LlavaForConditionalGeneration": SAME,
        "VoxtralForConditionalGeneration": SAME,
        "JanusForConditionalGeneration": SAME,
        "Sarashina2VisionForCausalLM": SAME,
        "LlamaModel": SAME,
        "IQuestCoderForCausalLM": SAME,
        "InternLM3ForCausalLM": SAME,
        "MistralModel": SAME,  # of Mistral's own files, whose rows lie as llama.cpp wants them
        "UltravoxModel": NEVER,
        "LlamaForCausalLMEagle3": NEVER,
        "Eagle3LlamaForCausalLM": NEVER,
        "Eagle3Speculator": NEVER,
        "Eagle3DraftModel": NEVER,
    },
    "llama4": {"Llama4ForConditionalGeneration": SAME},
    "mamba": {"MambaLMHeadModel": SAME},
    "mistral3": {
        "Mistral3ForConditionalGeneration": TOLD,
        "Ministral3Model": TOLD,
        "MistralModel": TOLD,
    },
    "modern-bert": {"ModernBertForMaskedLM": SAME, "ModernBertForSequenceClassification": REFUSED},
    "mpt": {"MPTForCausalLM": SAME},
    "nemotron_h_moe": {"NemotronHPuzzleForCausalLM": REFUSED},
    "olmo": {"OLMoForCausalLM": SAME},
    "phi3": {"Phi4ForCausalLMV": SAME},
    "phimoe": {"PhiMoEForCausalLM": SAME},
    "qwen2": {
        "Qwen2Model": SAME,
        "Qwen2AudioForConditionalGeneration": SAME,
        "AudioFlamingo3ForConditionalGeneration": SAME,
        "DotsOCRForCausalLM": SAME,
        "KORMoForCausalLM": TOLD,
    },
    "qwen2vl": {
        "Qwen2VLModel": SAME,
        "Qwen2VLForConditionalGeneration": SAME,
        "Qwen2_5_VLForConditionalGeneration": SAME,
        "Qwen2_5OmniModel": SAME,
    },
    "qwen3": {"Qwen3Model": SAME, "StepVLForConditionalGeneration": SAME},
    "qwen35": {
        "Qwen3_5ForConditionalGeneration": SAME,
        "MiniCPMV4_6ForConditionalGeneration": SAME,
    },
    "qwen35moe": {"Qwen3_5MoeForConditionalGeneration": SAME},
    "qwen3vl": {
        "Qwen3VLForConditionalGeneration": SAME,
        "Qwen3ASRForConditionalGeneration": SAME,
    },
    "qwen3vlmoe": {
        "Qwen3VLMoeForConditionalGeneration": SAME,
        "Qwen3OmniMoeForConditionalGeneration": SAME,
    },
    "stablelm": {"StableLMEpochForCausalLM": SAME, "LlavaStableLMEpochForCausalLM": SAME},
    "t5": {
        "UMT5Model": SAME,
        "MT5ForConditionalGeneration": SAME,  # computes as gated T5
        "T5WithLMHeadModel": SAME,
    },
}
"""By the architecture: the class in config.json, or in the converter if it registers none."""

# Prints for each architecture of the converter which classes name it: their own, or in their code.
_PROGRAM = """
import inspect, json, logging, re, sys
sys.path.insert(0, sys.argv[1])
import conversion, gguf
logging.disable()
conversion.load_all_models()
import conversion.mistral  # registers nothing
base = conversion.ModelBase
registered = {}
for name, kind in base._model_classes[conversion.ModelType.TEXT].items():
    registered.setdefault(kind, []).append(name)
found = {}
waiting, seen = [conversion.TextModel], set()
while waiting:
    kind = waiting.pop()
    waiting += [inner for inner in vars(kind).values() if inspect.isclass(inner)]
    waiting += kind.__subclasses__()
    if kind in seen or not issubclass(kind, base):
        continue
    seen.add(kind)
    words = set(re.findall(r"(?:model_arch|arch) = (?:gguf[.])MODEL_ARCH[.](\\w+)",
                           inspect.getsource(kind)))
    words |= set(re.findall(r"else gguf[.]MODEL_ARCH[.](\\w+)", inspect.getsource(kind)))
    own = getattr(kind, "model_arch", None)
    names = {gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[word]] for word in words}
    names |= {gguf.MODEL_ARCH_NAMES[own]} if own is not None else set()
    for name in names:
        found.setdefault(name, []).extend(registered.get(kind, [kind.__name__]))
print(json.dumps(found))
"""

# classes of the converter that are there to be inherited from
_ABSTRACT = {"TextModel", "_LinearAttentionVReorderBase"}


def classes_of_the_converter() -> dict[str, list[str]]:
    command = [sys.executable, "-c", _PROGRAM, str(CONVERTER.parent)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_class_of_the_converter_is_judged():
    found = classes_of_the_converter()
    assert len(found) > 100
    wanted: dict[str, list[str]] = {}
    for architecture in architectures():
        own = {family.architecture for family in families_of(architecture)}
        judged = JUDGED.get(architecture, {})
        others = {*found.get(architecture, ())} - own - {*judged} - _ABSTRACT
        if others:
            wanted[architecture] = sorted(others)
    assert not wanted, "decide how each of these classes is kept apart"
    stale = {
        f"{architecture}: {name}"
        for architecture, judged in JUDGED.items()
        for name in judged
        if name not in found.get(architecture, ())
    }
    assert not stale
