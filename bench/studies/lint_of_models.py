"""placeholder"""

from __future__ import annotations
import torch
from collections.abc import Callable
