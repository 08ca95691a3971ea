"""Triton kernels: one module a family, imported lazily."""
