"""The language model: embedding, layers, read-out, and what `generate` asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from smat.layers import Mixer, sum_balance_losses
from smat.layers.primitives import keep_from_decay_
from smat.models.block import Block, make_norm
from smat.models.hf.cache import SMatCache
from smat.models.hf.configuration import SMatConfig
from smat.models.mixers import make_mixer
from smat.models.token_losses import token_losses

IGNORED = -100  # a label that counts for nothing


class SMatLayer(GradientCheckpointingLayer, Block):
    """A block whose mixer reads and writes its place in the cache."""

    def __init__(self, config: SMatConfig, layer_idx: int) -> None:
        options = dict(config.layer_mixers()[layer_idx])
        mixer = make_mixer(
            options.pop("mixer"), config.hidden_size, config.text_shape, layer_idx=layer_idx,
            **options,
        )  # fmt: skip
        super().__init__(mixer, config.norm, config.norm_eps, config.mlp_ratio)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: SMatCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states, and the balance loss of a learned routing while training."""
        mixed, _, _ = self.mixer(
            self.norm(hidden_states), attention_mask, past_key_values,
            use_cache and past_key_values is not None, cu_seqlens=cu_seqlens,
            **self.extras_of(inputs),
        )  # fmt: skip
        balance = sum_balance_losses(self.mixer) if self.training else None
        return self.finish(hidden_states, mixed), balance


class SMatPreTrainedModel(PreTrainedModel):
    """What the models have in common: their configuration, and how they draw weights."""

    config: SMatConfig
    config_class = SMatConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SMatLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True
    _can_record_outputs = {"hidden_states": SMatLayer}  # noqa: RUF012

    def post_init(self) -> None:
        """Note which weights weight decay leaves alone: those that are loaded have no such mark."""
        named = self.named_parameters()
        self._kept_from_decay = [key for key, x in named if hasattr(x, "_no_weight_decay")]
        super().post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw what was not loaded: whole modules anew, then back to what was loaded of them."""
        for key in self._kept_from_decay:
            keep_from_decay_(self.get_parameter(key))
        for module in _drawn_whole(self):
            tensors = [*module.parameters()]
            if getattr(module, "_is_hf_initialized", False):
                continue
            loaded = [x for x in tensors if getattr(x, "_is_hf_initialized", False)]
            if len(loaded) < len(tensors):
                kept = [x.clone() for x in loaded]
                self._init_weights(module)
                for x, value in zip(loaded, kept, strict=True):
                    x.copy_(value)
            module._is_hf_initialized = True  # type: ignore[assignment]

    def _init_weights(self, module: Any) -> None:
        reads_out = module is getattr(self, "lm_head", None)
        if reads_out or isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        else:
            module.reset_parameters()


def _drawn_whole(module: nn.Module) -> list[nn.Module]:
    """List the modules inside that draw all of their weights together."""
    if isinstance(module, Mixer) or not list(module.children()):
        return [module] if list(module.parameters()) else []
    return [each for child in module.children() for each in _drawn_whole(child)]


@dataclass
class SMatModelOutput(BaseModelOutputWithPast):
    """What a call of the base model returns."""

    balance_loss: Tensor | None = None


class SMatModel(SMatPreTrainedModel):
    """Token embedding, layers, norm.

    >>> config = SMatConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    >>> SMatModel(config)(torch.randint(64, (2, 10))).last_hidden_state.shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, config: SMatConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SMatLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SMatCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> SMatModelOutput:
        """Take tokens (B, T) in, after those of a cache if one is given.

        attention_mask (B, T) or longer: its last T columns count, 0 is padding on either side.
        cu_seqlens: edges of sequences packed along T, B = 1; positions follow from them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if past_key_values is not None and not isinstance(past_key_values, SMatCache):
            given = type(past_key_values).__name__
            raise TypeError(f"past_key_values must be a SMatCache, made by this model; got {given}")
        if kwargs.get("position_ids") is not None:
            raise ValueError("positions follow from attention_mask, cu_seqlens and the cache")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None and not self.training:
            past_key_values = SMatCache(self.config)
        inputs = {} if input_ids is None else {"token_ids": input_ids}
        padding, balance = _padding(attention_mask, x.shape[1]), None
        for layer in self.layers:
            x, more = layer(
                x, attention_mask=padding, past_key_values=past_key_values,
                use_cache=bool(use_cache), cu_seqlens=cu_seqlens, **inputs,
            )  # fmt: skip
            balance = more if balance is None else balance if more is None else balance + more
        cache = past_key_values if use_cache else None
        return SMatModelOutput(self.norm(x), cache, balance_loss=balance)


def _padding(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the mask of these tokens, None if none is padding."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask must be (B, T) with 0 for padding, got {shape}")
    mine = attention_mask[:, -length:]
    return None if bool((mine != 0).all()) else mine


@dataclass
class SMatCausalLMOutput(CausalLMOutputWithPast):
    """What a call returns; `loss` has the balance loss in it while training."""

    balance_loss: Tensor | None = None


class SMatForCausalLM(SMatPreTrainedModel, GenerationMixin):
    """The language model.

    >>> config = SMatConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, mixers=["smat"])
    >>> model, ids = SMatForCausalLM(config), torch.randint(64, (2, 10))
    >>> model(ids, labels=ids).loss.backward()
    >>> model.generate(ids, max_new_tokens=5).shape
    torch.Size([2, 15])

    With labels there are no logits unless `logits_to_keep` asks for some (0 for all): the loss is
    made a few tokens at a time.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SMatConfig) -> None:
        super().__init__(config)
        self.model = SMatModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SMatCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> SMatCausalLMOutput:
        """See `SMatModel.forward`; labels (B, T) are shifted here, -100 counts for nothing."""
        outputs: Any = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip
        hidden: Tensor = outputs.last_hidden_state
        loss: Any = None
        logits: Any = None
        shifted = kwargs.get("shift_labels")
        if labels is not None and shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if shifted is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = self._loss(hidden, shifted, outputs.balance_loss, num_items)
        if shifted is None or logits_to_keep is not None:
            wanted = 0 if logits_to_keep is None else logits_to_keep
            logits = self.lm_head(slice_logits_to_keep(hidden, wanted))
        return SMatCausalLMOutput(
            loss, logits, outputs.past_key_values, outputs.hidden_states,
            balance_loss=outputs.balance_loss,
        )  # fmt: skip

    def _loss(
        self, hidden: Tensor, labels: Tensor, balance: Tensor | None, num_items: Any
    ) -> Tensor:
        """Average over the labels, or over those of all micro-batches if their number is told."""
        labels = labels.to(hidden.device)
        counted = labels != IGNORED
        total = token_losses(hidden[counted], self.lm_head, labels[counted]).sum()
        count = counted.sum()
        if balance is not None:
            total = total + self.config.balance_weight * balance.to(total) * count
        divisor = count.clamp(min=1) if num_items is None else num_items
        return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Say that no cache of keys and values will do, so none that is quantised or offloaded."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any, **more: Any
    ) -> Any:
        wanted, given = generation_config.cache_implementation, model_kwargs.get("past_key_values")
        if wanted not in (None, "dynamic"):
            raise ValueError(f"cache_implementation {wanted!r}: states have a form of their own")
        if given is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = SMatCache(self.config)
        elif given is not None:
            given._is_user_defined = True


def register() -> None:
    """Let the Auto classes know the model."""
    AutoConfig.register("smat", SMatConfig, exist_ok=True)
    AutoModel.register(SMatConfig, SMatModel, exist_ok=True)
    AutoModelForCausalLM.register(SMatConfig, SMatForCausalLM, exist_ok=True)
