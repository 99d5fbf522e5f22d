"""Other trainers' configurations as questions: their needs on a cluster, and changes in their words."""

from pipefit.recipes.answers import RecipeAnswer, Variant, answer, describe
from pipefit.recipes.readers import Recipe, read

__all__ = ["Recipe", "RecipeAnswer", "Variant", "answer", "describe", "read"]
