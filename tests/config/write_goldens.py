"""Writes the golden dump of every recipe: python tests/config/write_goldens.py."""

import dataclasses
import json
from pathlib import Path

from mtjax.recipes import load_recipe

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    for recipe in sorted((ROOT / "configs").glob("*.py")):
        config, _ = load_recipe(str(recipe))
        text = json.dumps(dataclasses.asdict(config), indent=1, sort_keys=True) + "\n"
        path = Path(__file__).parent / "golden" / f"{recipe.stem}.json"
        path.write_text(text, encoding="utf-8")
