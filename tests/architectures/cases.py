"""The architectures of the sweep, by the names of their classes in transformers; all are built small by tiny.py."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CASES = {
    "causal language models": _names("""
        AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
        BailingHybridForCausalLM BambaForCausalLM BartForCausalLM BeamForCausalLM BertGenerationDecoder BertLMHeadModel
        BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM
        BlenderbotSmallForCausalLM BloomForCausalLM CTRLLMHeadModel CamembertForCausalLM CodeGenForCausalLM
        Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CpmAntForCausalLM CwmForCausalLM
        Data2VecTextForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
        DogeForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM
        Ernie4_5_MoeForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM
        FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM GPT2LMHeadModel
        GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
        Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM
        Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration
        GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
        GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM HeliumForCausalLM
        HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Inkling2ForCausalLM
        InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM Kolibri1ForCausalLM
        LagunaForCausalLM Lfm2ForCausalLM Lfm3ForCausalLM LlamaForCausalLM MBartForCausalLM MambaForCausalLM
        MarianForCausalLM MegatronBertForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
        MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM
        MistralForCausalLM MixtralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM
        MossTranscribeDiarizeForConditionalGeneration MptForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM
        MvpForCausalLM NanoChatForCausalLM NemotronForCausalLM NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM
        Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM
        PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM ProphetNetForCausalLM
        Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
        Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM RecurrentGemmaForCausalLM RemBertForCausalLM
        RoFormerForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM RwkvForCausalLM SeedOssForCausalLM
        SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM
        VaultGemmaForCausalLM WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
        XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM YoutuForCausalLM xLSTMForCausalLM
    """),
    "encoder-decoders": _names("""
        AudioFlamingo3ForConditionalGeneration EncoderDecoderModel FSMTForConditionalGeneration
        GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
        LEDForConditionalGeneration LongT5ForConditionalGeneration M2M100ForConditionalGeneration
        MT5ForConditionalGeneration MusicFlamingoForConditionalGeneration NllbMoeForConditionalGeneration
        PegasusXForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration
        SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText SwitchTransformersForConditionalGeneration
        T5ForConditionalGeneration T5Gemma2ForConditionalGeneration T5GemmaForConditionalGeneration
        UMT5ForConditionalGeneration VoxtralForConditionalGeneration VoxtralRealtimeForConditionalGeneration
    """),
    "encoders": _names("""
        AlbertForMaskedLM ConvBertForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM
        EsmForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel FunnelForMaskedLM GteForMaskedLM
        JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM LongformerForMaskedLM MPNetForMaskedLM MobileBertForMaskedLM
        ModernBertForMaskedLM ModernVBertForMaskedLM MraForMaskedLM NeoMMEForMaskedLM NomicBertForMaskedLM
        NystromformerForMaskedLM SqueezeBertForMaskedLM TapasForMaskedLM UltraVBertForMaskedLM UltrabertForMaskedLM
        YosoForMaskedLM
    """),
    "models with another head, or none": _names("""
        BertForQuestionAnswering BertForSequenceClassification BertModel DistilBertForSequenceClassification
        GPT2ForSequenceClassification LlamaForSequenceClassification LlamaModel MPNetModel
        ModernBertForSequenceClassification Qwen3ForSequenceClassification Qwen3Model
        RobertaForSequenceClassification T5EncoderModel
        WhisperForConditionalGeneration XLMRobertaForTokenClassification XLMRobertaModel
    """),
    "multimodal models": _names("""
        AriaForConditionalGeneration AyaVisionForConditionalGeneration Blip2ForConditionalGeneration
        BlipForConditionalGeneration Cosmos3OmniForConditionalGeneration DeepseekVLForConditionalGeneration
        DeepseekVLHybridForConditionalGeneration DiffusionGemmaForBlockDiffusion EvollaForProteinText2Text
        Exaone4_5_ForConditionalGeneration Glm46VForConditionalGeneration Glm4vForConditionalGeneration
        Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration GraniteDoclingForConditionalGeneration
        HunYuanVLForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration Idefics2ForConditionalGeneration
        Idefics3ForConditionalGeneration IdeficsForVisionText2Text Inkling2ForConditionalGeneration
        InklingForConditionalGeneration InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration
        InternVLForConditionalGeneration Kimi_K25ForConditionalGeneration Kosmos2ForConditionalGeneration
        Kosmos2_5ForConditionalGeneration Lfm2VlForConditionalGeneration Lfm3VlForConditionalGeneration
        LightOnOcrForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration MiniCPMOcrForConditionalGeneration
        MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
        Mistral3ForConditionalGeneration Mistral4ForCausalLM MistralLarge4ForConditionalGeneration
        Ovis2ForConditionalGeneration PI0ForConditionalGeneration PPFormulaNetForConditionalGeneration
        PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration Pix2StructForConditionalGeneration
        QianfanOCRForConditionalGeneration Qwen2VLForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
        Qwen2_5_VLForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration Qwen3VLForConditionalGeneration
        Qwen3VLMoeForConditionalGeneration SmolVLMForConditionalGeneration Step3p7ForConditionalGeneration
        UdopForConditionalGeneration UnlimitedOcrForConditionalGeneration VideoLlama3ForConditionalGeneration
        VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration VisionEncoderDecoderModel
    """),
    "speech": _names("""
        ASTForAudioClassification CanaryForConditionalGeneration CohereAsrForConditionalGeneration Data2VecAudioForCTC
        GraniteSpeech5ForCTC HubertForCTC LasrForCTC MoonshineForConditionalGeneration ParakeetForCTC
        Pop2PianoForConditionalGeneration SEWDForCTC SEWForCTC Speech2TextForConditionalGeneration
        SpeechEncoderDecoderModel SpeechT5ForSpeechToText UniSpeechForCTC UniSpeechSatForCTC Wav2Vec2BertForCTC
        Wav2Vec2ConformerForCTC Wav2Vec2ForCTC WavLMForCTC
    """),
    "vision": _names("""
        AltCLIPModel BeitForImageClassification CLIPForImageClassification CLIPSegModel ChineseCLIPModel
        ConvNextForImageClassification ConvNextV2ForImageClassification Data2VecVisionForImageClassification
        DeiTForImageClassification Dinov2ForImageClassification Dinov2WithRegistersForImageClassification
        FocalNetForImageClassification HieraForImageClassification IJepaForImageClassification
        ImageGPTForImageClassification MetaClip2ForImageClassification MobileViTForImageClassification
        SegformerForImageClassification Siglip2ForImageClassification SiglipForImageClassification
        SwiftFormerForImageClassification SwinForImageClassification Tipsv2Model ViTForImageClassification
        ViTMSNForImageClassification VideoPrismClipModel
    """),
    "other models": _names("""
        Aimv2Model Aimv2VisionModel AudioFlamingo3Encoder Blip2QFormerModel BridgeTowerModel BrosModel CLIPVisionModel
        CanineModel ChineseCLIPVisionModel ClvpModelForConditionalGeneration CohereCompassVisionModel
        ColModernVBertForRetrieval ColPaliForRetrieval ColQwen2ForRetrieval Cosmos3EdgeVisionModel DINOv3ConvNextModel
        DINOv3ViTModel DPRQuestionEncoder DPTModel DecisionTransformerModel EmbeddingGemma2Model
        EmbeddingGemma2TextModel Exaone4_5_VisionModel FastSpeech2ConformerModel FlavaForPreTraining FunAsrNanoEncoder
        Gemma3nAudioEncoder Gemma4AudioModel Gemma4VisionModel Glm4vMoeTextModel Glm4vMoeVisionModel Glm4vTextModel
        Glm4vVisionModel Glm5NextVisionModel GlmAsrEncoder GlmImageModel GlmImageTextModel GlmImageVisionModel
        GlmOcrTextModel GlmOcrVisionModel GraniteDoclingTextModel GraniteDoclingVisionModel GraniteSpeech5Encoder
        GroundingDinoModel HunYuanVLTextModel HunYuanVLVisionTransformer Idefics3VisionTransformer Inkling2VisionModel
        InternVLVisionModel Kimi_K25VisionModel LasrEncoder LayoutLMv3Model Lfm3VlVisionModel
        LightGlueForKeypointMatching LiltModel LxmertForPreTraining MLCDVisionModel MMGroundingDinoModel MarkupLMModel
        Mask2FormerModel MgpstrForSceneTextRecognition MiniCPMOcrVisionModel MiniCPMV4_7VisionModel
        MistralLarge4TextModel MossTranscribeDiarizeAudioModel MuseGlimmerAssistantModel MuseGlimmerTextModel
        MuseGlimmerVisionModel MuseSparkVisionModel Nemotron3DiarizationAudioModel Nemotron3_5AsrForRNNT
        Nemotron3_5TranscribeAsrAudioModel NemotronAsrStreamingEncoder NemotronAsrStreamingForRNNT
        OpenAIPrivacyFilterModel OwlViTModel Owlv2Model ParakeetEncoder ParakeetForRNNT ParakeetForTDT PatchTSMixerModel
        PatchTSTModel PixioModel PixtralVisionModel PocketTTSAudioTokenizerEncoderModel QianfanOCRVisionModel
        Qwen2AudioEncoder Qwen2VLTextModel Qwen2_5_VLTextModel Qwen2_5_VisionTransformerPretrainedModel Qwen3ASREncoder
        Qwen3VLMoeTextModel Qwen3VLMoeVisionModel Qwen3VLTextModel Qwen3VLVisionModel Qwen3_5MoeVisionModel
        Qwen3_5VisionModel Qwen4ExpVisionModel RadioModel RfDetrModel Sam3LiteTextModel Sam3Model Sam3ViTModel
        Sam3VisionModel SamHQVisionModel SamVisionModel Sapiens2Model SegGptModel Siglip2VisionModel SiglipVisionModel
        SmolVLMVisionTransformer SplinterForPreTraining TimesFm2_5Model TimesFmModel TimesformerModel Tipsv2VisionModel
        ViTMAEForPreTraining VideoLlama3VisionModel VideoPrismVisionModel ViltModel VisionTextDualEncoderModel
        VisualBertForPreTraining VitDetModel VivitModel VoxtralEncoder VoxtralRealtimeEncoder XCLIPModel YolosModel
    """),
}  # fmt: skip

FAST = _names("""
    BartForConditionalGeneration BertForMaskedLM BloomForCausalLM DeepseekV3ForCausalLM DistilBertForMaskedLM
    GPT2LMHeadModel GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForConditionalGeneration GptOssForCausalLM
    GraniteMoeForCausalLM LlamaForCausalLM LlavaForConditionalGeneration MambaForCausalLM MixtralForCausalLM
    NomicBertForMaskedLM OPTForCausalLM Phi3ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3VLForConditionalGeneration SiglipForImageClassification T5ForConditionalGeneration
    ViTForImageClassification WhisperForCausalLM
""")
"""What CI runs."""

FORWARD_UNKNOWN = _names("""
    ASTForAudioClassification AXK2ForCausalLM Aimv2Model AltCLIPModel AudioFlamingo3Encoder
    Blip2ForConditionalGeneration Blip2QFormerModel BridgeTowerModel BrosModel CLIPSegModel
    CanaryForConditionalGeneration ChineseCLIPModel ClvpModelForConditionalGeneration
    CohereAsrForConditionalGeneration CohereCompassVisionModel ColQwen2ForRetrieval Cosmos3EdgeVisionModel
    DebertaForMaskedLM DecisionTransformerModel DiffusionGemmaForBlockDiffusion Exaone4_5_VisionModel
    FNetForMaskedLM FastSpeech2ConformerModel FocalNetForImageClassification FunAsrNanoEncoder Gemma3nAudioEncoder
    Gemma4VisionModel Glm46VForConditionalGeneration Glm4vMoeForConditionalGeneration Glm4vMoeTextModel
    Glm4vMoeVisionModel Glm4vTextModel Glm4vVisionModel Glm5NextVisionModel GlmImageModel GlmImageTextModel
    GlmImageVisionModel GlmOcrForConditionalGeneration GlmOcrTextModel GlmOcrVisionModel GraniteDoclingVisionModel
    GraniteMoeHybridForCausalLM GraniteSpeech5Encoder GraniteSpeech5ForCTC GroundingDinoModel
    HunYuanVLForConditionalGeneration HunYuanVLTextModel HunYuanVLVisionTransformer Idefics3VisionTransformer
    IdeficsForVisionText2Text Inkling2ForCausalLM Inkling2ForConditionalGeneration Inkling2VisionModel
    InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration Kimi_K25VisionModel
    Kosmos2ForConditionalGeneration LasrEncoder LasrForCTC LayoutLMv3Model Lfm3VlVisionModel
    LightGlueForKeypointMatching LiltModel LxmertForPreTraining MMGroundingDinoModel Mask2FormerModel
    MgpstrForSceneTextRecognition MiniCPMOcrVisionModel MiniCPMV4_7VisionModel Mistral4ForCausalLM MraForMaskedLM
    MuseGlimmerAssistantModel MuseGlimmerVisionModel MuseSparkVisionModel MusicgenForCausalLM
    MusicgenMelodyForCausalLM Nemotron3DiarizationAudioModel Nemotron3_5AsrForRNNT
    Nemotron3_5TranscribeAsrAudioModel NemotronAsrStreamingEncoder NemotronAsrStreamingForRNNT OwlViTModel
    Owlv2Model PI0ForConditionalGeneration PaddleOCRVLForConditionalGeneration ParakeetEncoder ParakeetForCTC
    ParakeetForRNNT ParakeetForTDT PatchTSMixerModel PatchTSTModel Pix2StructForConditionalGeneration
    PocketTTSAudioTokenizerEncoderModel Qwen2VLTextModel Qwen2_5OmniThinkerForConditionalGeneration
    Qwen2_5_VLTextModel Qwen2_5_VisionTransformerPretrainedModel Qwen3ASREncoder Qwen3VLMoeVisionModel
    Qwen3VLVisionModel Qwen3_5MoeVisionModel Qwen3_5VisionModel Qwen4ExpVisionModel RfDetrModel Sam3LiteTextModel
    Sam3Model SegGptModel Siglip2ForImageClassification Siglip2VisionModel SmolVLMVisionTransformer
    Speech2TextForConditionalGeneration SpeechEncoderDecoderModel SplinterForPreTraining
    Step3p7ForConditionalGeneration SwiftFormerForImageClassification SwinForImageClassification TimesFm2_5Model
    TimesFmModel TimesformerModel UdopForConditionalGeneration VideoLlama3VisionModel VideoPrismClipModel
    VideoPrismVisionModel ViltModel VisionTextDualEncoderModel VivitModel VoxtralRealtimeEncoder
    VoxtralRealtimeForConditionalGeneration Wav2Vec2BertForCTC XCLIPModel XLNetLMHeadModel XmodForCausalLM
""")
"""Models that the sweep has no inputs for, or whose random weights give no finite output: bytes are compared only."""

NOTHING_PACKED = _names("""
    FalconForCausalLM GlmImageVQVAE IBertForMaskedLM MobileNetV1ForImageClassification
    MobileNetV2ForImageClassification MobileViTV2ForImageClassification PPLCNetForImageClassification
    PPOCRV5MobileRecModel PPOCRV6SmallDetModel PPOCRV6SmallRecModel PPOCRV6TinyRecModel
    PoolFormerForImageClassification RegNetForImageClassification ResNetForImageClassification Sam3LiteTextTextModel
    UVDocModel
""")
"""Models that have no linear layer that loaders quantize: refused."""
