"""The `effops` command. It may import everything. Start with `main.py`, which reads the arguments."""
