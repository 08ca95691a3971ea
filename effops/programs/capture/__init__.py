"""What a program does: its operators, storages and source lines, on fake tensors. Start with `faked.py`."""
