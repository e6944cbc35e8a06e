"""The architectures of the sweep, by the names of their classes in transformers; all are built
small by tiny.py.
"""

from tiny import RECORDED


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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

FORWARD_UNKNOWN = _names("""
    ASTForAudioClassification AXK2ForCausalLM AXK2ForSequenceClassification Aimv2Model AltCLIPModel
    AudioFlamingo3Encoder BarkModel BartForSequenceClassification
    BigBirdPegasusForSequenceClassification Blip2ForConditionalGeneration Blip2ForImageTextRetrieval
    Blip2QFormerModel BlipModel BltForCausalLM BridgeTowerModel BrosModel CHMv2ForDepthEstimation
    CLIPModel CLIPSegModel CanaryForConditionalGeneration ChameleonForConditionalGeneration
    ChineseCLIPModel ClvpModelForConditionalGeneration CohereAsrForConditionalGeneration
    CohereCompassVisionModel ColQwen2ForRetrieval Cosmos3EdgeVisionModel DFineForObjectDetection
    DPTForDepthEstimation DPTForSemanticSegmentation DabDetrForObjectDetection
    Data2VecVisionForSemanticSegmentation DebertaForMaskedLM DebertaForSequenceClassification
    DebertaModel DecisionTransformerModel DeepseekOcr2ForConditionalGeneration
    Deimv2ForObjectDetection DepthAnythingForDepthEstimation DiaForConditionalGeneration
    EomtDinov3ForUniversalSegmentation EomtForUniversalSegmentation Exaone4_5_VisionModel
    FNetForMaskedLM FNetForSequenceClassification FastSpeech2ConformerModel
    FastSpeech2ConformerWithHifiGan FocalNetForImageClassification FunAsrNanoEncoder
    GPTJForSequenceClassification Gemma3nAudioEncoder Gemma4VisionModel
    Glm46VForConditionalGeneration Glm4vMoeForConditionalGeneration Glm4vMoeTextModel
    Glm4vMoeVisionModel Glm4vTextModel Glm4vVisionModel Glm5NextForConditionalGeneration
    Glm5NextVisionModel GlmImageModel GlmImageTextModel GlmImageVisionModel
    GlmOcrForConditionalGeneration GlmOcrTextModel GlmOcrVisionModel GraniteDoclingVisionModel
    GraniteMoeHybridForCausalLM GraniteSpeech5Encoder GraniteSpeech5ForCTC
    GroundingDinoForObjectDetection GroundingDinoModel HunYuanVLForConditionalGeneration
    HunYuanVLTextModel HunYuanVLVisionTransformer Idefics3VisionTransformer
    IdeficsForVisionText2Text Inkling2ForCausalLM Inkling2ForConditionalGeneration
    Inkling2VisionModel InstructBlipForConditionalGeneration
    InstructBlipVideoForConditionalGeneration Kimi_K25VisionModel Kosmos2ForConditionalGeneration
    KyutaiSpeechToTextForConditionalGeneration LasrEncoder LasrForCTC
    LayoutLMv3ForSequenceClassification LayoutLMv3Model LevitForImageClassification
    Lfm3VlVisionModel LightGlueForKeypointMatching LiltForSequenceClassification LiltModel
    LwDetrForObjectDetection LxmertForPreTraining MBartForSequenceClassification
    MMGroundingDinoForObjectDetection MMGroundingDinoModel MT5ForSequenceClassification
    Mamba2ForCausalLM Mask2FormerForUniversalSegmentation Mask2FormerModel
    MaskFormerForInstanceSegmentation MetaClip2Model MgpstrForSceneTextRecognition
    MiniCPMOcrVisionModel MiniCPMV4_7VisionModel Mistral4ForCausalLM
    Mistral4ForSequenceClassification MraForMaskedLM MraForSequenceClassification
    MuseGlimmerAssistantModel MuseGlimmerVisionModel MuseSparkVisionModel MusicgenForCausalLM
    MusicgenForConditionalGeneration MusicgenMelodyForCausalLM
    MusicgenMelodyForConditionalGeneration MvpForSequenceClassification
    Nemotron3DiarizationAudioModel Nemotron3_5AsrForRNNT Nemotron3_5TranscribeAsrAudioModel
    NemotronAsrStreamingEncoder NemotronAsrStreamingForRNNT NemotronH_Omni_Reasoning_V3
    OneFormerForUniversalSegmentation OwlViTForObjectDetection OwlViTModel Owlv2ForObjectDetection
    Owlv2Model PI0ForConditionalGeneration PLBartForSequenceClassification
    PPDocLayoutV2ForObjectDetection PPDocLayoutV3ForObjectDetection PPDocLayoutV4ForObjectDetection
    PaddleOCRVLForConditionalGeneration ParakeetEncoder ParakeetForCTC ParakeetForRNNT
    ParakeetForTDT PatchTSMixerModel PatchTSTModel Pix2StructForConditionalGeneration
    PocketTTSAudioTokenizerEncoderModel PromptDepthAnythingForDepthEstimation Qwen2VLTextModel
    Qwen2_5OmniForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
    Qwen2_5_VLTextModel Qwen2_5_VisionTransformerPretrainedModel Qwen3ASREncoder
    Qwen3VLMoeVisionModel Qwen3VLVisionModel Qwen3_5ForConditionalGeneration
    Qwen3_5ForSequenceClassification Qwen3_5MoeForConditionalGeneration Qwen3_5MoeVisionModel
    Qwen3_5VisionModel Qwen4ExpForConditionalGeneration Qwen4ExpVisionModel RTDetrForObjectDetection
    RTDetrV2ForObjectDetection ReformerForMaskedLM ReformerModelWithLMHead
    RfDetrForInstanceSegmentation RfDetrForObjectDetection RfDetrModel Sam2Model Sam3LiteTextModel
    Sam3Model Sam3TrackerModel Sam3TrackerVideoModel Sam3VideoModel SamHQModel SamModel
    SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText SegGptModel
    ShieldGemma2ForImageClassification Siglip2ForImageClassification Siglip2Model Siglip2VisionModel
    SiglipModel SmolVLMVisionTransformer Speech2TextForConditionalGeneration
    SpeechEncoderDecoderModel SplinterForPreTraining Step3p7ForConditionalGeneration
    SwiftFormerForImageClassification SwinForImageClassification Swinv2ForImageClassification
    T5ForSequenceClassification TimesFm2_5Model TimesFmModel TimesformerForVideoClassification
    TimesformerModel Tipsv2DptForDepthEstimation Tipsv2DptForSemanticSegmentation
    UMT5ForSequenceClassification UdopForConditionalGeneration VJEPA2ForVideoClassification
    VideoLlama3VisionModel VideoMAEForVideoClassification VideoPrismClipModel
    VideoPrismForVideoClassification VideoPrismVisionModel VideomtForUniversalSegmentation ViltModel
    VisionTextDualEncoderModel VitsModel VivitForVideoClassification VivitModel
    VoxtralRealtimeEncoder VoxtralRealtimeForConditionalGeneration Wav2Vec2BertForCTC
    Wav2Vec2BertForSequenceClassification XCLIPModel XLNetForSequenceClassification XLNetLMHeadModel
    XmodForCausalLM XmodForMaskedLM XmodForSequenceClassification Zamba2ForCausalLM
    ZoeDepthForDepthEstimation
""")
"""Models that the sweep has no inputs for, or whose random weights give no finite output: bytes are
compared only.
"""

NOTHING_PACKED = _names("""
    FalconForCausalLM GlmImageVQVAE IBertForMaskedLM MobileNetV1ForImageClassification
    MobileNetV2ForImageClassification MobileViTV2ForImageClassification
    PPLCNetForImageClassification PPOCRV5MobileRecModel PPOCRV6SmallDetModel PPOCRV6SmallRecModel
    PPOCRV6TinyRecModel PoolFormerForImageClassification RegNetForImageClassification
    ResNetForImageClassification Sam3LiteTextTextModel UVDocModel
""")
"""Models that have no linear layer that loaders quantize: refused."""

EVERY = sorted(set(RECORDED) - {*NOTHING_PACKED, "Llama4ForCausalLM"})
"""What is quantized; Llama 4 has tests of its own."""

"""Those that the README names."""

EXPERTS_ONE_BY_ONE = _names("""
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM Dots1ForCausalLM Ernie4_5_MoeForCausalLM
    FlexOlmoForCausalLM Glm4MoeForCausalLM Glm4vMoeForConditionalGeneration HunYuanMoEV1ForCausalLM
    JambaForCausalLM LongcatFlashForCausalLM MiniMaxForCausalLM MixtralForCausalLM OlmoeForCausalLM
    PhimoeForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeThinkerForConditionalGeneration
""")
"""Mixtures of experts that transformers 4 stores expert by expert, and loads so in 4 bits."""

MIXTURES = _names("""
    AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM AriaTextForCausalLM
    BailingHybridForCausalLM Cohere2MoeForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV4ForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM
    Ernie4_5_MoeForCausalLM ExaoneMoeForCausalLM FlexOlmoForCausalLM Glm4MoeForCausalLM
    Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
    HYV3ForCausalLM HYV4ForCausalLM HunYuanMoEV1ForCausalLM Inkling2ForCausalLM
    InklingForCausalLM JambaForCausalLM KimiLinearForCausalLM
    Kolibri1ForCausalLM LagunaForCausalLM LongcatFlashForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
    MixtralForCausalLM NemotronHForCausalLM OlmoeForCausalLM PhimoeForCausalLM
    Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5MoeForCausalLM
    Qwen4ExpForCausalLM SolarOpenForCausalLM ZayaForCausalLM AXK1ForSequenceClassification
    AXK2ForSequenceClassification DeepseekV2ForSequenceClassification
    DeepseekV3ForSequenceClassification GptOssForSequenceClassification
    HunYuanMoEV1ForSequenceClassification JambaForSequenceClassification
    MiniMaxForSequenceClassification
    Mistral4ForSequenceClassification MixtralForSequenceClassification
    PhimoeForSequenceClassification Qwen2MoeForSequenceClassification
    Qwen3MoeForSequenceClassification Qwen3NextForSequenceClassification
    AriaForConditionalGeneration DeepseekOcr2ForConditionalGeneration
    DiffusionGemmaForBlockDiffusion Ernie4_5_VLMoeForConditionalGeneration
    Glm4vMoeForConditionalGeneration Inkling2ForConditionalGeneration
    InklingForConditionalGeneration Kimi_K25ForConditionalGeneration
    MiniMaxM3SparseForConditionalGeneration Mistral4ForCausalLM
    MistralLarge4ForConditionalGeneration MuseSparkForConditionalGeneration
    NemotronH_Omni_Reasoning_V3 Qwen3OmniMoeThinkerForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForConditionalGeneration UnlimitedOcrForConditionalGeneration DiffusionGemmaModel
    Glm4vMoeTextModel MistralLarge4TextModel OpenAIPrivacyFilterModel Qwen3VLMoeTextModel
""")
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
