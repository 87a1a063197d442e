"""A language model for transformers, with any mixer of this library in any layer.

>>> from transformers import AutoModelForCausalLM
>>> config = SMatConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, mixers=["deltanet"])
>>> AutoModelForCausalLM.from_config(config).generate(max_new_tokens=3, bos_token_id=1).shape
torch.Size([1, 4])

Importing this registers "smat" with AutoConfig, AutoModel and AutoModelForCausalLM.
"""

from smat.extras import require

require("transformers", "hf")

from smat.models.hf.cache import SMatCache  # noqa: E402
from smat.models.hf.configuration import SMatConfig  # noqa: E402
from smat.models.hf.convert import convert_gated_deltanet, convert_mamba2  # noqa: E402
from smat.models.hf.modeling import (  # noqa: E402
    SMatForCausalLM,
    SMatModel,
    SMatPreTrainedModel,
    register,
)

register()

__all__ = [
    "SMatCache", "SMatConfig", "SMatForCausalLM", "SMatModel", "SMatPreTrainedModel",
    "convert_gated_deltanet", "convert_mamba2",
]  # fmt: skip
