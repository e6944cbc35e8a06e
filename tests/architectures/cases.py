"""The architectures of the sweep, by the names of their classes in transformers; all are built
small by tiny.py.
"""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CASES = {
    "causal language models": _names("""
        AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM
        AriaTextForCausalLM BailingHybridForCausalLM BambaForCausalLM BartForCausalLM
        BeamForCausalLM BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM
        BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM
        BlenderbotSmallForCausalLM BloomForCausalLM BltForCausalLM CTRLLMHeadModel
        CamembertForCausalLM CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM
        CohereCompassForCausalLM CohereForCausalLM CpmAntForCausalLM CwmForCausalLM
        Data2VecTextForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
        DeepseekV3ForCausalLM DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM
        Dots1ForCausalLM Dots3NoteForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM
        Ernie4_5_MoeForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM
        FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM
        FuyuForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM
        GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
        Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM
        Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM
        Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM
        Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM
        GotOcr2ForConditionalGeneration GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
        GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
        GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM HeliumForCausalLM HrmTextForCausalLM
        HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Inkling2ForCausalLM
        InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM
        LlamaForCausalLM LongcatFlashForCausalLM MBartForCausalLM Mamba2ForCausalLM MambaForCausalLM
        MarianForCausalLM MegatronBertForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM
        MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
        Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM
        MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM
        MossTranscribeDiarizeForConditionalGeneration MptForCausalLM MusicgenForCausalLM
        MusicgenMelodyForCausalLM MvpForCausalLM NanoChatForCausalLM NemotronForCausalLM
        NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
        OlmoHybridForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM
        PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM
        PhiForCausalLM PhimoeForCausalLM ProphetNetForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
        Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM
        Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM RecurrentGemmaForCausalLM ReformerModelWithLMHead
        RemBertForCausalLM RoCBertForCausalLM RoFormerForCausalLM RobertaForCausalLM
        RobertaPreLayerNormForCausalLM RwkvForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM
        VaultGemmaForCausalLM WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
        XLMRobertaXLForCausalLM XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM YoutuForCausalLM
        Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM xLSTMForCausalLM
    """),
    "encoder-decoders": _names("""
        AudioFlamingo3ForConditionalGeneration BigBirdPegasusForConditionalGeneration
        BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration
        EncoderDecoderModel FSMTForConditionalGeneration GlmAsrForConditionalGeneration
        GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
        LEDForConditionalGeneration LongT5ForConditionalGeneration M2M100ForConditionalGeneration
        MT5ForConditionalGeneration MarianMTModel MusicFlamingoForConditionalGeneration
        NllbMoeForConditionalGeneration PLBartForConditionalGeneration
        PegasusForConditionalGeneration PegasusXForConditionalGeneration
        ProphetNetForConditionalGeneration Qwen2AudioForConditionalGeneration
        Qwen3ASRForConditionalGeneration SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
        SwitchTransformersForConditionalGeneration T5ForConditionalGeneration
        T5Gemma2ForConditionalGeneration T5GemmaForConditionalGeneration
        UMT5ForConditionalGeneration VoxtralForConditionalGeneration
        VoxtralRealtimeForConditionalGeneration
    """),
    "encoders": _names("""
        AlbertForMaskedLM BartForConditionalGeneration BertForMaskedLM BigBirdForMaskedLM
        CamembertForMaskedLM ConvBertForMaskedLM Data2VecTextForMaskedLM DebertaForMaskedLM
        DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM
        EsmForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel
        FunnelForMaskedLM GteForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM
        LongformerForMaskedLM LukeForMaskedLM MBartForConditionalGeneration MPNetForMaskedLM
        MegatronBertForMaskedLM MobileBertForMaskedLM ModernBertForMaskedLM ModernVBertForMaskedLM
        MraForMaskedLM MvpForConditionalGeneration NeoMMEForMaskedLM NomicBertForMaskedLM
        NystromformerForMaskedLM PerceiverForMaskedLM ReformerForMaskedLM RemBertForMaskedLM
        RoCBertForMaskedLM RoFormerForMaskedLM RobertaForMaskedLM RobertaPreLayerNormForMaskedLM
        SqueezeBertForMaskedLM TapasForMaskedLM UltraVBertForMaskedLM UltrabertForMaskedLM
        XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM XmodForMaskedLM YosoForMaskedLM
    """),
    "sequence classifiers": _names("""
        AXK1ForSequenceClassification AXK2ForSequenceClassification AlbertForSequenceClassification
        ArceeForSequenceClassification BartForSequenceClassification BertForSequenceClassification
        BigBirdForSequenceClassification BigBirdPegasusForSequenceClassification
        BioGptForSequenceClassification BloomForSequenceClassification CTRLForSequenceClassification
        CamembertForSequenceClassification CanineForSequenceClassification
        ConvBertForSequenceClassification Data2VecTextForSequenceClassification
        DebertaForSequenceClassification DebertaV2ForSequenceClassification
        DeepseekV2ForSequenceClassification DeepseekV3ForSequenceClassification
        DistilBertForSequenceClassification DogeForSequenceClassification
        ElectraForSequenceClassification ErnieForSequenceClassification EsmForSequenceClassification
        EuroBertForSequenceClassification Exaone4ForSequenceClassification
        FNetForSequenceClassification FlaubertForSequenceClassification
        FunnelForSequenceClassification GPT2ForSequenceClassification
        GPTBigCodeForSequenceClassification GPTJForSequenceClassification
        GPTNeoXForSequenceClassification Gemma2ForSequenceClassification
        Gemma3ForSequenceClassification Gemma3TextForSequenceClassification
        GemmaForSequenceClassification Glm4ForSequenceClassification GlmForSequenceClassification
        GptOssForSequenceClassification GteForSequenceClassification HeliumForSequenceClassification
        HunYuanDenseV1ForSequenceClassification HunYuanMoEV1ForSequenceClassification
        JambaForSequenceClassification JetMoeForSequenceClassification
        JinaEmbeddingsV3ForSequenceClassification LayoutLMForSequenceClassification
        LayoutLMv3ForSequenceClassification LiltForSequenceClassification
        LlamaForSequenceClassification LongformerForSequenceClassification
        MBartForSequenceClassification MPNetForSequenceClassification MT5ForSequenceClassification
        MarkupLMForSequenceClassification MegatronBertForSequenceClassification
        MiniCPM3ForSequenceClassification MiniMaxForSequenceClassification
        Ministral3ForSequenceClassification MinistralForSequenceClassification
        Mistral4ForSequenceClassification MistralForSequenceClassification
        MixtralForSequenceClassification MobileBertForSequenceClassification
        ModernBertDecoderForSequenceClassification ModernBertForSequenceClassification
        ModernVBertForSequenceClassification MptForSequenceClassification
        MraForSequenceClassification MvpForSequenceClassification NemotronForSequenceClassification
        NomicBertForSequenceClassification NystromformerForSequenceClassification
        OPTForSequenceClassification Olmo2ForSequenceClassification Olmo3ForSequenceClassification
        OlmoForSequenceClassification OpenAIGPTForSequenceClassification
        PLBartForSequenceClassification PersimmonForSequenceClassification
        Phi3ForSequenceClassification PhiForSequenceClassification PhimoeForSequenceClassification
        Qwen2ForSequenceClassification Qwen2MoeForSequenceClassification
        Qwen3ForSequenceClassification Qwen3MoeForSequenceClassification
        Qwen3NextForSequenceClassification Qwen3_5ForSequenceClassification
        Qwen3_5TextForSequenceClassification RemBertForSequenceClassification
        RoFormerForSequenceClassification RobertaForSequenceClassification
        RobertaPreLayerNormForSequenceClassification SeedOssForSequenceClassification
        SmolLM3ForSequenceClassification SqueezeBertForSequenceClassification
        StableLmForSequenceClassification Starcoder2ForSequenceClassification
        T5ForSequenceClassification T5Gemma2ForSequenceClassification
        T5GemmaForSequenceClassification TapasForSequenceClassification
        UMT5ForSequenceClassification UltraVBertForSequenceClassification
        UltrabertForSequenceClassification XLMForSequenceClassification
        XLMRobertaForSequenceClassification XLMRobertaXLForSequenceClassification
        XLNetForSequenceClassification XmodForSequenceClassification YosoForSequenceClassification
    """),
    "models with another head, or none": _names("""
        BertForQuestionAnswering BertModel LlamaModel MPNetModel Qwen3Model T5EncoderModel
        WhisperForConditionalGeneration XLMRobertaForTokenClassification XLMRobertaModel
    """),
    "multimodal models": _names("""
        AriaForConditionalGeneration AyaVisionForConditionalGeneration Blip2ForConditionalGeneration
        BlipForConditionalGeneration ChameleonForConditionalGeneration
        Cohere2VisionForConditionalGeneration Cosmos3EdgeForConditionalGeneration
        Cosmos3OmniForConditionalGeneration DeepseekOcr2ForConditionalGeneration
        DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration
        DiffusionGemmaForBlockDiffusion Emu3ForConditionalGeneration
        Ernie4_5_VLMoeForConditionalGeneration EvollaForProteinText2Text
        Exaone4_5_ForConditionalGeneration Glm46VForConditionalGeneration
        Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
        Glm5NextForConditionalGeneration GlmOcrForConditionalGeneration
        Granite4VisionForConditionalGeneration GraniteDoclingForConditionalGeneration
        HunYuanVLForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration
        Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration IdeficsForVisionText2Text
        Inkling2ForConditionalGeneration InklingForConditionalGeneration
        InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration
        InternVLForConditionalGeneration JanusForConditionalGeneration
        Kimi_K25ForConditionalGeneration Kosmos2ForConditionalGeneration
        Kosmos2_5ForConditionalGeneration Lfm2VlForConditionalGeneration
        Lfm3VlForConditionalGeneration LightOnOcrForConditionalGeneration
        LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
        MiniCPMOcrForConditionalGeneration MiniCPMV4_6ForConditionalGeneration
        MiniCPMV4_7ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
        Mistral3ForConditionalGeneration Mistral4ForCausalLM MistralLarge4ForConditionalGeneration
        MllamaForConditionalGeneration Molmo2ForConditionalGeneration
        MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration
        NemotronH_Omni_Reasoning_V3 Ovis2ForConditionalGeneration PI0ForConditionalGeneration
        PPFormulaNetForConditionalGeneration PaddleOCRVLForConditionalGeneration
        PaliGemmaForConditionalGeneration Pix2StructForConditionalGeneration
        QianfanOCRForConditionalGeneration Qwen2VLForConditionalGeneration
        Qwen2_5OmniForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
        Qwen2_5_VLForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
        Qwen4ExpForConditionalGeneration SmolVLMForConditionalGeneration
        Step3p7ForConditionalGeneration UdopForConditionalGeneration
        UnlimitedOcrForConditionalGeneration VideoLlama3ForConditionalGeneration
        VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
        VisionEncoderDecoderModel
    """),
    "speech": _names("""
        ASTForAudioClassification BarkModel CanaryForConditionalGeneration
        CohereAsrForConditionalGeneration CsmForConditionalGeneration Data2VecAudioForCTC
        Data2VecAudioForSequenceClassification DiaForConditionalGeneration
        FastSpeech2ConformerWithHifiGan FunAsrNanoForConditionalGeneration GraniteSpeech5ForCTC
        HubertForCTC HubertForSequenceClassification KyutaiSpeechToTextForConditionalGeneration
        LasrForCTC MoonshineForConditionalGeneration MoonshineStreamingForConditionalGeneration
        MusicgenForConditionalGeneration MusicgenMelodyForConditionalGeneration ParakeetForCTC
        PocketTTSForConditionalGeneration Pop2PianoForConditionalGeneration SEWDForCTC
        SEWDForSequenceClassification SEWForCTC SEWForSequenceClassification
        SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText Speech2TextForConditionalGeneration
        SpeechEncoderDecoderModel SpeechT5ForSpeechToText UniSpeechForCTC
        UniSpeechForSequenceClassification UniSpeechSatForCTC UniSpeechSatForSequenceClassification
        VitsModel Wav2Vec2BertForCTC Wav2Vec2BertForSequenceClassification Wav2Vec2ConformerForCTC
        Wav2Vec2ConformerForSequenceClassification Wav2Vec2ForCTC Wav2Vec2ForSequenceClassification
        WavLMForCTC WavLMForSequenceClassification WhisperForAudioClassification
    """),
    "vision": _names("""
        AltCLIPModel BeitForImageClassification Blip2ForImageTextRetrieval BlipModel
        CHMv2ForDepthEstimation CLIPForImageClassification CLIPModel CLIPSegModel ChineseCLIPModel
        ConditionalDetrForObjectDetection ConvNextForImageClassification
        ConvNextV2ForImageClassification DFineForObjectDetection DPTForDepthEstimation
        DPTForSemanticSegmentation DabDetrForObjectDetection Data2VecVisionForImageClassification
        Data2VecVisionForSemanticSegmentation DeformableDetrForObjectDetection
        DeiTForImageClassification DeiTForImageClassificationWithTeacher Deimv2ForObjectDetection
        DepthAnythingForDepthEstimation DetrForObjectDetection Dinov2ForImageClassification
        Dinov2WithRegistersForImageClassification DonutSwinForImageClassification
        EomtDinov3ForUniversalSegmentation EomtForUniversalSegmentation
        FocalNetForImageClassification GLPNForDepthEstimation GroundingDinoForObjectDetection
        HieraForImageClassification IJepaForImageClassification ImageGPTForImageClassification
        LevitForImageClassification LwDetrForObjectDetection MMGroundingDinoForObjectDetection
        Mask2FormerForUniversalSegmentation MaskFormerForInstanceSegmentation
        MetaClip2ForImageClassification MetaClip2Model MobileViTForImageClassification
        MobileViTForSemanticSegmentation OneFormerForUniversalSegmentation OwlViTForObjectDetection
        Owlv2ForObjectDetection PPDocLayoutV2ForObjectDetection PPDocLayoutV3ForObjectDetection
        PPDocLayoutV4ForObjectDetection PromptDepthAnythingForDepthEstimation
        PvtForImageClassification PvtV2ForImageClassification RTDetrForObjectDetection
        RTDetrV2ForObjectDetection RfDetrForInstanceSegmentation RfDetrForObjectDetection Sam2Model
        Sam3TrackerModel SamHQModel SamModel SegformerForImageClassification
        SegformerForSemanticSegmentation ShieldGemma2ForImageClassification
        Siglip2ForImageClassification Siglip2Model SiglipForImageClassification SiglipModel
        SwiftFormerForImageClassification SwinForImageClassification Swinv2ForImageClassification
        TableTransformerForObjectDetection TimesformerForVideoClassification
        Tipsv2DptForDepthEstimation Tipsv2DptForSemanticSegmentation Tipsv2Model
        VJEPA2ForVideoClassification ViTForImageClassification ViTMSNForImageClassification
        VideoMAEForVideoClassification VideoPrismClipModel VideoPrismForVideoClassification
        VideomtForUniversalSegmentation VivitForVideoClassification YolosForObjectDetection
        ZoeDepthForDepthEstimation
    """),
    "other models": _names("""
        Aimv2Model Aimv2VisionModel AlbertModel AudioFlamingo3Encoder BigBirdModel Blip2QFormerModel
        BridgeTowerModel BrosModel CLIPTextModel CLIPVisionModel CanineModel ChineseCLIPVisionModel
        ClvpModelForConditionalGeneration CohereCompassVisionModel ColModernVBertForRetrieval
        ColPaliForRetrieval ColQwen2ForRetrieval Cosmos3EdgeVisionModel DINOv3ConvNextModel
        DINOv3ViTModel DPRQuestionEncoder DPTModel Data2VecTextModel DebertaModel DebertaV2Model
        DecisionTransformerModel DiffusionGemmaModel DistilBertModel ElectraModel
        EmbeddingGemma2Model EmbeddingGemma2TextModel Emu3TextModel Exaone4_5_VisionModel
        FastSpeech2ConformerModel FlaubertModel FlavaForPreTraining FunAsrNanoEncoder
        Gemma3nAudioEncoder Gemma4AudioModel Gemma4VisionModel Glm4vMoeTextModel Glm4vMoeVisionModel
        Glm4vTextModel Glm4vVisionModel Glm5NextVisionModel GlmAsrEncoder GlmImageModel
        GlmImageTextModel GlmImageVisionModel GlmOcrTextModel GlmOcrVisionModel
        GraniteDoclingTextModel GraniteDoclingVisionModel GraniteSpeech5Encoder GroundingDinoModel
        HunYuanVLTextModel HunYuanVLVisionTransformer IBertModel Idefics3VisionTransformer
        Inkling2VisionModel InternVLVisionModel Kimi_K25VisionModel LasrEncoder LayoutLMv3Model
        Lfm3VlVisionModel LightGlueForKeypointMatching LiltModel LongformerModel
        LxmertForPreTraining MLCDVisionModel MMGroundingDinoModel MT5EncoderModel MarkupLMModel
        Mask2FormerModel MgpstrForSceneTextRecognition MiniCPMOcrVisionModel MiniCPMV4_7VisionModel
        MistralLarge4TextModel MllamaTextModel MobileBertModel Molmo2TextModel
        MossTranscribeDiarizeAudioModel MuseGlimmerAssistantModel MuseGlimmerTextModel
        MuseGlimmerVisionModel MuseSparkVisionModel Nemotron3DiarizationAudioModel
        Nemotron3_5AsrForRNNT Nemotron3_5TranscribeAsrAudioModel NemotronAsrStreamingEncoder
        NemotronAsrStreamingForRNNT NystromformerModel OpenAIPrivacyFilterModel OwlViTModel
        Owlv2Model ParakeetEncoder ParakeetForRNNT ParakeetForTDT PatchTSMixerModel PatchTSTModel
        PixioModel PixtralVisionModel PocketTTSAudioTokenizerEncoderModel QianfanOCRVisionModel
        Qwen2AudioEncoder Qwen2VLTextModel Qwen2_5_VLTextModel
        Qwen2_5_VisionTransformerPretrainedModel Qwen3ASREncoder Qwen3VLMoeTextModel
        Qwen3VLMoeVisionModel Qwen3VLTextModel Qwen3VLVisionModel Qwen3_5MoeVisionModel
        Qwen3_5VisionModel Qwen4ExpVisionModel RadioModel RemBertModel RfDetrModel RoCBertModel
        RoFormerModel RobertaModel RobertaPreLayerNormModel Sam3LiteTextModel Sam3Model
        Sam3TrackerVideoModel Sam3ViTModel Sam3VideoModel Sam3VisionModel SamHQVisionModel
        SamVisionModel Sapiens2Model SegGptModel Siglip2VisionModel SiglipVisionModel
        SmolVLMVisionTransformer SplinterForPreTraining SqueezeBertModel T5GemmaEncoderModel
        TimesFm2_5Model TimesFmModel TimesformerModel Tipsv2TextModel Tipsv2VisionModel
        UMT5EncoderModel ViTMAEForPreTraining VideoLlama3VisionModel VideoPrismVisionModel ViltModel
        VisionTextDualEncoderModel VisualBertForPreTraining VitDetModel VivitModel VoxtralEncoder
        VoxtralRealtimeEncoder XCLIPModel XLMModel XLMRobertaXLModel YolosModel
    """),
}  # fmt: skip

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
