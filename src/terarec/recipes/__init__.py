"""Recipes for published results: the settings of each run, and the preparation of its data.

``<data>/data.json`` holds a `RecipeDataSpec`, ``<data>/<model>.json`` a `RecipeSpec`. The data themselves are the
user's: their licences do not let a package hold them.
"""

from terarec.recipes.library import find_recipe_files, load_recipe, load_recipe_data, recipe_names

__all__ = ["find_recipe_files", "load_recipe", "load_recipe_data", "recipe_names"]
