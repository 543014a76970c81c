"""Fields of config.json that say nothing about what a model computes for text that it is given."""

_ABOUT_FILES = (
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "_name_or_path"),
    *("name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("unsloth_version", "unsloth_fixed", "tokenizer_class", "transformers.js_config", "base_model_name_or_path"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id")
_TRAINING = (
    *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),
    *("attn_pdrop", "dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("router_z_loss_coef", "aux_loss_alpha", "seq_aux", "aux_loss_coef", "pretraining_tp", "z_loss_coefficient"),
    *("gradient_checkpointing", "mlp_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "rope_ntk_alpha"),
    *("enable_moe_fp32_combine", "ep_size", "num_experts_per_tok_aux", "moe_dropout_prob", "use_cut_cross_entropy"),
)
_RUNNING = (
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16"),
    *("pruned_heads", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tie_encoder_decoder"),
    *("cache_implementation", "keys_to_ignore_at_inference", "use_flash_attn", "use_flash_attention", "fuse_ln"),
    *("task_specific_params", "problem_type", "finetuning_task", "id2label", "label2id", "prefix", "bad_words_ids"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "num_return_sequences", "diversity_penalty", "remove_invalid_values"),
    *("return_dict_in_generate", "output_scores", "begin_suppress_tokens", "suppress_tokens"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "add_cross_attention"),
    *("cross_attention_hidden_size", "tf_legacy_loss", "model_max_length", "max_sequence_length", "seq_length"),
    *("is_matryoshka", "matryoshka_dimensions"),
)
HARMLESS = _ABOUT_FILES + _TOKENS + _TRAINING + _RUNNING
