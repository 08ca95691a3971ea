"""The memory of a training step of BERT-large, taken apart without its weights: all is predicted on fake tensors.

The model is that of the package transformers. Beside the prediction, for CUDA, stands what a closed form says.
"""

from effops.memory import Details, Workload, anatomy, estimate_transformer
from effops.memory.models import bert_large

BATCH, LAYERS, HEADS, HEAD_DIM, LENGTH = 4, 24, 16, 64, 512
KINDS = {"eager": "naive", "sdpa": "fused"}  # attention by the names of transformers, and of the closed form


def main() -> None:
    peaks = {}
    for attention, kind in KINDS.items():
        found = anatomy(Workload(**bert_large(attention=attention)), BATCH, device="cuda")
        details = Details(attention=kind)
        formula = estimate_transformer(LAYERS, HEADS, HEAD_DIM, BATCH, LENGTH, formula="detailed", details=details)
        peaks[attention] = found.peak_bytes
        print(f"attention {attention}, batch size {BATCH}\n\n{found}\n\nby the closed form\n\n{formula}\n")
    for attention, peak in peaks.items():
        print(f"attention {attention}: {peak:,} bytes at the peak, predicted")
    print(f"saved: {peaks['eager'] - peaks['sdpa']:,} bytes")


if __name__ == "__main__":
    main()
