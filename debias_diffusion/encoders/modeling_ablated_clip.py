"""A CLIPModel that suppresses attention heads of its image tower. It needs transformers alone.

`AutoModel.from_pretrained(folder, trust_remote_code=True)` loads it from a folder with this file. In a suppressed head
every row of attention weights is multiplied by beta in all columns but that of CLS, then normalised again (Attention
Ablation Technique, Lin et al., 2025, section 4.1). That is the same as adding log beta to the logits of these columns.
"""

import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.modeling_clip import CLIPAttention


class AblatedCLIPConfig(CLIPConfig):
    """A CLIPConfig with `beta`, of each head of the image tower, from 0 to 1: [layers][heads]. 1 changes nothing.

    Its type is not "clip", so that transformers asks for `trust_remote_code=True` and does not ignore beta.
    """

    model_type = "ablated_clip"


class SuppressedAttention(CLIPAttention):
    """The attention of a layer of the image tower; `beta` is of each head, [heads]."""

    def __init__(self, config, beta):
        super().__init__(config)
        self.beta = beta

    def forward(self, hidden_states, *_, **__):
        """[batch, tokens, width] -> the same, and None for the weights."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        # [1, heads, 1, tokens]
        logits = hidden_states.new_tensor(self.beta).log()[None, :, None, None].repeat(1, 1, 1, hidden_states.shape[1])
        logits[..., 0] = 0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=logits)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class AblatedCLIPModel(CLIPModel):
    """A CLIPModel whose image tower has this attention."""

    config_class = AblatedCLIPConfig

    def __init__(self, config):
        super().__init__(config)
        for layer, beta in zip(self.vision_model.encoder.layers, config.beta, strict=True):
            layer.self_attn = SuppressedAttention(config.vision_config, beta)
