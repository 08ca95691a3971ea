"""The largest batch of a time-series transformer that trains within a budget, by the kind of attention.

All is predicted on fake tensors, and no step runs. In a shell `effops memory max-batch` asks the same.
"""

from effops.memory import Workload, max_batch_size
from effops.memory.models import KINDS, Configuration, workload_parts

BUDGET = "2 GiB"
SIZES = {"layers": 2, "seq_len": 1024}


def workload(attention: str) -> Workload:
    return Workload(**workload_parts("encoder_only_tst", Configuration(attention=attention, **SIZES)))


def main() -> None:
    print(f"a transformer with {SIZES}, trained within {BUDGET}")
    for attention in KINDS:
        found = max_batch_size(workload(attention), BUDGET)
        print(f"\n{attention} attention: {found.predicted_peak_bytes:,} bytes at the peak, predicted\n{found}")


if __name__ == "__main__":
    main()
