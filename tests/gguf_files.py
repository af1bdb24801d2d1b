"""Small GGUF files, as llama.cpp's converter writes those of a Llama."""

import gguf

PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def write_gguf(model, file, kind="Q4_1", of_embedding="Q8_0", factors=None, more=None):
    """The weights of a Llama: matrices in blocks of `kind`, all others in float32.

    factors: on the rotary frequencies, [head_dim / 2], as Llama 3.1 has them. more: adds fields to the writer.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(name.removesuffix(".weight")) + ".weight"
        values = value.float().numpy()
        wanted = of_embedding if "embed" in name else kind
        for part, heads in PERMUTED.items():
            if part in own:
                values = permuted(values, getattr(config, heads))
        if values.ndim == 1:
            writer.add_tensor(own, values)
        else:
            blocks = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(own, gguf.quants.quantize(values, blocks), raw_dtype=blocks)
    if more:
        more(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def permuted(weight, heads):
    """[out, in] rows in the order in which llama.cpp rotates them."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)
