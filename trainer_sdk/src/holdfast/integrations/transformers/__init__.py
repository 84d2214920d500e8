"""Saves and restores trainings of Hugging Face's Trainer and its subclasses."""

from __future__ import annotations

from holdfast.integrations.transformers.trainer import HoldfastTrainer, HoldfastTrainerMixin

__all__ = ["HoldfastTrainer", "HoldfastTrainerMixin"]
