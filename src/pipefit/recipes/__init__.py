"""Configurations of other trainers as questions: what they need on a cluster, and what to change in their words."""

from pipefit.recipes.answers import RecipeAnswer, Variant, answer, describe
from pipefit.recipes.readers import Recipe, read

__all__ = ["Recipe", "RecipeAnswer", "Variant", "answer", "describe", "read"]
