"""Architectures of transformers, each as small as its configuration allows, some with labels and so with a
loss.

Attention is what the library chooses by itself; dropout stays on where an architecture has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .network import Batch, Network, normal, tokens

WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
GROUPED = {**WIDTH, "num_key_value_heads": 2}
GPT = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
PAIR: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
T5 = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
PICTURE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
SOUND: dict[str, Any] = {
    **WIDTH,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}

LANGUAGE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **WIDTH,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "attention_dropout": 0.1,
        },
    ),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "openai_gpt": ("OpenAIGPTLMHeadModel", GPT),
    "ctrl": ("CTRLLMHeadModel", {**GPT, "dff": 48}),
    "gpt_neox": ("GPTNeoXForCausalLM", WIDTH),
    "opt": ("OPTForCausalLM", {**WIDTH, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": 97,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            "use_cache": False,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "use_cache": False},
    ),
    "falcon": ("FalconForCausalLM", WIDTH),
    "llama": ("LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "experts_implementation": "eager",
        },
    ),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"}),
    "mixtral_batched": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", WIDTH),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "olmo": ("OlmoForCausalLM", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "olmoe": ("OlmoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("StableLmForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "cohere": ("CohereForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", GROUPED),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 8}),
    "nemotron": ("NemotronForCausalLM", GROUPED),
    "persimmon": ("PersimmonForCausalLM", WIDTH),
    "helium": ("HeliumForCausalLM", {**GROUPED, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **WIDTH,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "use_cache": False,
        },
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "context_length": 32,
            "use_cache": False,
        },
    ),
    "biogpt": ("BioGptForCausalLM", WIDTH),
    "xlnet": (
        "XLNetLMHeadModel",
        {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "use_mems_train": False},
    ),
    "bert": ("BertForMaskedLM", WIDTH),
    "bert_classes": ("BertForSequenceClassification", WIDTH),
    "bert_answers": ("BertForQuestionAnswering", WIDTH),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 97,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "roberta": ("RobertaForMaskedLM", WIDTH),
    "xlm_roberta": ("XLMRobertaForMaskedLM", WIDTH),
    "electra": ("ElectraForMaskedLM", {**WIDTH, "embedding_size": 16}),
    "albert": ("AlbertForMaskedLM", {**WIDTH, "embedding_size": 16}),
    "deberta": ("DebertaForMaskedLM", {**WIDTH, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        {**WIDTH, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "longformer": ("LongformerForMaskedLM", {**WIDTH, "attention_window": 4}),
    "big_bird": ("BigBirdForMaskedLM", {**WIDTH, "attention_type": "original_full"}),
    "funnel": (
        "FunnelForMaskedLM",
        {
            "vocab_size": 97,
            "d_model": 32,
            "block_sizes": [1, 1],
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "num_decoder_layers": 1,
        },
    ),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {**WIDTH, "embedding_size": 32, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    ),
    "squeezebert": ("SqueezeBertForMaskedLM", {**WIDTH, "embedding_size": 32}),
    "mpnet": ("MPNetForMaskedLM", WIDTH),
    "convbert": ("ConvBertForMaskedLM", {**WIDTH, "embedding_size": 16}),
    "fnet": ("FNetForMaskedLM", {**WIDTH, "use_tpu_fourier_optimizations": False}),
    "roformer": ("RoFormerForMaskedLM", {**WIDTH, "embedding_size": 16}),
    "nystromformer": ("NystromformerForMaskedLM", {**WIDTH, "num_landmarks": 4, "segment_means_seq_len": 12}),
    "rembert": ("RemBertForMaskedLM", {**WIDTH, "input_embedding_size": 16, "output_embedding_size": 16}),
    "esm": ("EsmForMaskedLM", {**WIDTH, "mask_token_id": 3}),
    "modernbert": ("ModernBertForMaskedLM", {**WIDTH, "local_attention": 4}),
    "layoutlm": ("LayoutLMForMaskedLM", WIDTH),
    "xlm": (
        "XLMWithLMHeadModel",
        {
            "vocab_size": 97,
            "n_words": 97,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "ibert": ("IBertForMaskedLM", WIDTH),
}
PAIRS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "longt5": ("LongT5ForConditionalGeneration", {**T5, "local_radius": 4}),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "bart": ("BartForConditionalGeneration", PAIR),
    "mbart": ("MBartForConditionalGeneration", PAIR),
    "marian": ("MarianMTModel", PAIR),
    "pegasus": ("PegasusForConditionalGeneration", PAIR),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", PAIR),
    "m2m_100": ("M2M100ForConditionalGeneration", PAIR),
    "led": (
        "LEDForConditionalGeneration",
        {
            **PAIR,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
    ),
}
VISION: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vit": ("ViTForImageClassification", PICTURE),
    "deit": ("DeiTForImageClassificationWithTeacher", PICTURE),
    "beit": ("BeitForImageClassification", {**PICTURE, "use_relative_position_bias": True}),
    "data2vec_vision": ("Data2VecVisionForImageClassification", PICTURE),
    "dinov2": ("Dinov2ForImageClassification", {**PICTURE, "mlp_ratio": 2}),
    "yolos": ("YolosForObjectDetection", {**PICTURE, "image_size": [32, 32], "num_detection_tokens": 5}),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {
            **PICTURE,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 48,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1},
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1},
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    ),
    "regnet": (
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "groups_width": 8},
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    "pvt": (
        "PvtForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
        },
    ),
    "cvt": (
        "CvtForImageClassification",
        {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    ),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48]},
    ),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"image_size": 64, "depth_multiplier": 0.35}),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    ),
    "bit": (
        "BitForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_groups": 4},
    ),
    "clip_vision": ("CLIPVisionModel", PICTURE),
    "siglip_vision": ("SiglipVisionModel", PICTURE),
    "dpt": (
        "DPTForDepthEstimation",
        {
            **PICTURE,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
    ),
}
LABELS = {
    "gpt2",
    "llama",
    "qwen3",
    "bert",
    "roberta",
    "albert",
    "bert_classes",
    "bert_answers",
    "t5",
    "bart",
    "vit",
    "convnext",
    "opt",
    "mixtral",
}


def networks() -> Iterator[Network]:
    """Text, text to text, pictures, sound, and pictures with text."""
    for name, (kind, options) in LANGUAGE.items():
        yield _network(name, kind, options, functools.partial(_sentences, name))
    for name, (kind, options) in PAIRS.items():
        yield _network(name, kind, options, functools.partial(_pairs, name))
    for name, (kind, options) in VISION.items():
        pixels = options.get("image_size", 64)
        pixels = pixels if isinstance(pixels, int) else pixels[0]
        yield _network(name, kind, options, functools.partial(_pictures, name, pixels))
    text = {**WIDTH, "eos_token_id": 2, "bos_token_id": 1}
    yield _network("clip_text", "CLIPTextModel", text, functools.partial(_sentences, "clip_text"))
    yield _network(
        "clip", "CLIPModel", {"text_config": text, "vision_config": PICTURE, "projection_dim": 16}, _both
    )
    yield _network(
        "whisper",
        "WhisperForConditionalGeneration",
        {**PAIR, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.1},
        _heard,
    )
    for name, kind in (("wav2vec2", "Wav2Vec2ForCTC"), ("hubert", "HubertForCTC"), ("wavlm", "WavLMForCTC")):
        yield _network(name, kind, {**SOUND, "mask_time_prob": 0.0}, _sounds)
    spectrogram = {
        **PICTURE,
        "num_mel_bins": 16,
        "max_length": 32,
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
    }
    yield _network("audio_spectrogram_transformer", "ASTForAudioClassification", spectrogram, _spectrograms)


def _network(name: str, kind: str, options: Mapping[str, Any], batch: Callable[[int], Batch]) -> Network:
    return Network(
        name=name, library="transformers", make=functools.partial(_made, kind, options), batch=batch
    )


def _made(kind: str, options: Mapping[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    model = getattr(transformers, kind)
    options = dict(options)
    experts = options.pop("experts_implementation", None)
    config = model.config_class(**options)
    if experts:
        config._experts_implementation = experts
    return model(config).float()


def _sentences(name: str, samples: int) -> Batch:
    batch = {"input_ids": tokens(samples, samples, 12)}
    if name == "bert_answers":
        batch |= {
            "start_positions": tokens(1, samples, most=11),
            "end_positions": tokens(2, samples, most=11),
        }
    elif name == "bert_classes":
        batch["labels"] = torch.arange(samples) % 2
    elif name in LABELS:
        batch["labels"] = batch["input_ids"].clone()
    return batch


def _pairs(name: str, samples: int) -> Batch:
    batch = {"input_ids": tokens(samples, samples, 12)}
    batch["labels" if name in LABELS else "decoder_input_ids"] = tokens(samples + 1, samples, 7)
    return batch


def _pictures(name: str, pixels: int, samples: int) -> Batch:
    batch = {"pixel_values": normal(samples, samples, 3, pixels, pixels)}
    if name in LABELS:
        batch["labels"] = torch.arange(samples) % 2
    return batch


def _both(samples: int) -> Batch:
    return {"input_ids": tokens(samples, samples, 12), "pixel_values": normal(samples, samples, 3, 32, 32)}


def _heard(samples: int) -> Batch:
    return {
        "input_features": normal(samples, samples, 16, 32),
        "decoder_input_ids": tokens(samples, samples, 7),
    }


def _sounds(samples: int) -> Batch:
    return {"input_values": normal(samples, samples, 400)}


def _spectrograms(samples: int) -> Batch:
    return {"input_values": normal(samples, samples, 32, 16)}
