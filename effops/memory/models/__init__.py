"""Models whose training memory has been published, to predict it: three time-series transformers, and BERT-large.

    parts = workload_parts("tst", Configuration(seq_len=256, attention="fused"))
    model, batch = parts["model"](), parts["batch"](32)
    parts["loss"](model, batch).backward()

The transformers have the form of The Annotated Transformer (Rush 2018): `x + dropout(sublayer(norm(x)))`, and a
normalisation after each stack. Nothing is copied and no value is looked at. So they also build and train on fake
tensors.
"""

# This folder may import `ops`. Start with `layers.py` (sizes and layers) and `time_series.py` (the models, and the
# parts of their workloads); `bert.py` has the parts of BERT-large.

from typing import TYPE_CHECKING, NoReturn

from effops.memory.models.bert import BERT_KINDS, bert_large
from effops.memory.models.layers import KINDS, Attention, Configuration, Norm, Positions, encoder
from effops.memory.models.time_series import ARCHITECTURES, TST, EncoderOnlyTST, workload_parts
from effops.text import missing_name

__all__ = [
    "ARCHITECTURES",
    "BERT_KINDS",
    "KINDS",
    "TST",
    "Attention",
    "Configuration",
    "EncoderOnlyTST",
    "Norm",
    "Positions",
    "bert_large",
    "encoder",
    "workload_parts",
]


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__)
