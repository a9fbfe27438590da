"""Shared by all tests: one thread of torch, so that bits and times do not depend on how many cores are free."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
