"""PyTorch's private and undocumented interfaces, a module for each feature that needs them.

A module imports them by the names that PyTorch gives them, and attributes by names of its own. One that the installed
PyTorch lacks raises `MissingInterfaceError` when it is used. So it disables the feature that needs it, and never
`import effops`. What differs by version of PyTorch stands here too. `operators` looks up operators of ATen. This folder
imports nothing of effops outside of it. Start with `missing`.
"""
